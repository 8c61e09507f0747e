"""Every error the retriever raises on purpose, in one tree.

    RetrieverError
    + FormatError               a file of a corpus version is not what its name and manifest say
    |   + BadMagic              not a file of this format at all
    |   + UnsupportedVersion    written by a release with another format
    |   + Truncated             shorter (or longer) than its header or the manifest says
    |   + ChecksumMismatch      header, manifest or payload were altered
    |   + BadManifest           the manifest is missing, unreadable or contradicts itself
    + TokenizerMismatch         a good corpus, but of another tokenizer
    + VersionExists             a version of that id is published already; versions never change
    + Closed                    the datastore was closed

A message says what is wrong, the value after a colon, then what to do about it. Bad arguments are plain ValueErrors.
"""

from __future__ import annotations

from pathlib import Path


class RetrieverError(Exception):
    """Base of all errors raised on purpose by `retriever`."""


class FormatError(RetrieverError):
    """A file of a corpus version cannot be used; `path` names it."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{fault}: {path}; rebuild the corpus with `draftloom corpus build`")
        self.path = path
        self.fault = fault


class BadMagic(FormatError):
    """The file does not begin as a file of this kind does."""


class UnsupportedVersion(FormatError):
    """The file has a format version this release cannot read."""


class Truncated(FormatError):
    """The file's size is not the one its header and the manifest give."""


class ChecksumMismatch(FormatError):
    """Some bytes are not the ones that were written."""


class BadManifest(FormatError):
    """The manifest is missing, is no JSON object of the known shape, or names files that do not agree with it."""


class TokenizerMismatch(RetrieverError):
    """The corpus was built with another tokenizer than the one asked for; its token ids would mean other text."""


class VersionExists(RetrieverError):
    """A published version is never written again."""


class Closed(RetrieverError):
    """The datastore was used after `close()`."""
