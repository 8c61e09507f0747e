"""Every error that `corpora` raises on purpose, in one tree.

    CorpusError
    + InvalidName         a corpus name that cannot be a folder name everywhere
    + InvalidOptions      a build option that makes no sense
    + SourceNotFound      a path to index that is not there
    + OtherTokenizer      an update with another tokenizer than the corpus was built with
    + TokenizerLost       the process that tokenizes has ended before its work
    + BadExport           a file to import is damaged, or no exported corpus
    + NothingToIndex      no file was fit to index; `skipped` counts the reasons
    + CorpusNotFound      no such corpus, or another tenant's (which looks the same)
    |   + VersionNotFound the corpus is there, that version of it is not
    + CorpusLocked        somebody else builds or removes this corpus right now; `holder` says who
    + CatalogError        the store itself
        + StoreNotWritable    no permission, read-only or full
        + CatalogCorrupt      catalog.sqlite is damaged or something else
        + CatalogTooNew       written by a later release

A message says what is wrong, the value after a colon, then what to do about it. What is wrong with a version's files is
`retriever.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping

from corpora.decisions import Reason


class CorpusError(Exception):
    """Base of all errors raised on purpose by `corpora`."""


class InvalidName(CorpusError):
    """Not a corpus name."""


class InvalidOptions(CorpusError):
    """A build option that makes no sense."""


class SourceNotFound(CorpusError):
    """A path given to index does not exist or cannot be listed."""


class OtherTokenizer(CorpusError):
    """The model of a corpus has another tokenizer than when it was built; ids of both would not mix."""


class TokenizerLost(CorpusError):
    """The process that tokenizes for an update has ended: killed, or out of memory."""


class BadExport(CorpusError):
    """A file that was to be imported is damaged, unsafe, or no exported corpus."""


class NothingToIndex(CorpusError):
    """No file was fit to index; `skipped` maps each reason to its count."""

    def __init__(self, message: str, skipped: Mapping[Reason, int]) -> None:
        super().__init__(message)
        self.skipped = dict(skipped)


class CorpusNotFound(CorpusError):
    """No corpus of that name for this tenant."""


class VersionNotFound(CorpusNotFound):
    """The corpus has no such version."""


class CorpusLocked(CorpusError):
    """Another process builds or removes the corpus; `holder` describes it ("" if it did not say)."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class CatalogError(CorpusError):
    """The store cannot be used."""


class StoreNotWritable(CatalogError):
    """The store cannot be written: permission, a read-only file system, or no space left."""


class CatalogCorrupt(CatalogError):
    """catalog.sqlite is not a sound database."""


class CatalogTooNew(CatalogError):
    """catalog.sqlite was written by a later release."""
