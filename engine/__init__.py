"""Drafts in, the target's own text out: the online half of Draftloom.

The words, as the field uses them. A *draft* is a proposal by one *source*; a *drafter* is its code. A *node* is a proposed
token in the one candidate *tree*; the *root*, node 0, is the last committed token. To *verify* is one target pass over a tree;
to *accept* is to keep a node the target chose; the *bonus token* is the one token a step that the target itself adds. *Tokens
per step* is accepted + bonus, the field's mean acceptance length. The *budget* is the most nodes a tree may have; the *cost
curve* says what N rows cost.

Useful for serving. `loop.py` is the step one can recite; tree, acceptance, session, calibration and kernels are the pure core.
"""
