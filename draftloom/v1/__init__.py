"""Stubs of the package draftloom.v1, generated from proto/draftloom/v1 by `make proto` and never edited by hand."""
