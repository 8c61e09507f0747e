"""Whatever operation fails, at whatever point: the active corpus is the whole old or the whole new one, and it is sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corpora import walk
from corpora.build import build
from corpora.catalog import Catalog
from corpora.errors import CorpusError
from corpora.update import update
from tests.corpora.faults import Faults, failing
from tests.corpora.test_update import TOKENIZER, documents, edit
from tests.corpora.trees import plant

OLD = {"a.py": "alpha = 1\n", "b.py": "beta = 2\nbeta = 3\n", "docs/c.md": "The quick brown fox.\n" * 20}
NEW = {"a.py": "alpha = 1\n", "d.py": "delta = 4\n", "docs/c.md": "The lazy dog.\n" * 20}


def do_build(tree: Path, catalog: Catalog) -> None:
    build("code", [tree], TOKENIZER, catalog, model="tiny")


def do_update(tree: Path, catalog: Catalog) -> None:
    update("code", catalog, lambda _: TOKENIZER)


def do_collect(tree: Path, catalog: Catalog) -> None:
    catalog.gc()


WORK: dict[str, Callable[[Path, Catalog], None]] = {"build": do_build, "update": do_update, "gc": do_collect}


@pytest.fixture(autouse=True, scope="module")
def settled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "SETTLED_NS", -(10**12))
        yield


class Scene:
    """A store with a corpus whose files have changed since, made once and copied for every attempt."""

    def __init__(self, folder: Path, work: str) -> None:
        self.folder, self.work = folder, WORK[work]
        self.tree = plant(folder / "tree", dict(OLD))
        pristine = Catalog(folder / "pristine")
        do_build(self.tree, pristine)
        if work == "gc":  # an older version, a leftover of a crash, a removed corpus that was not quite removed
            do_build(self.tree, pristine)
            do_build(self.tree, pristine)
            (pristine.root / "code" / "versions" / "20260101T000000Z-aaaaaa.tmp").mkdir()
            (pristine.root / "code" / "versions" / "20260101T000000Z-aaaaaa.tmp" / "seg-0000.tokens").write_bytes(b"x")
            (pristine.root / ".trash-other-1234").mkdir()
        for name in OLD:
            if name not in NEW:
                (self.tree / name).unlink()
        for name, text in NEW.items():
            edit(self.tree / name, text)
        self.outcomes = {0: OLD, 1: OLD if work == "gc" else NEW}
        self.num_attempts = 0

    def attempt(self, fail_at: int | None, *, sticky: bool = False) -> Faults:
        """Do the work on a copy of the store with one operation failing, look at what is left, and do it again without."""
        self.num_attempts += 1
        root = self.folder / f"store-{self.num_attempts}"
        shutil.copytree(self.folder / "pristine", root)
        catalog, old = Catalog(root), Catalog(root).get("code").active.id
        with failing(Faults(root, fail_at, sticky=sticky)) as faults:
            try:
                self.work(self.tree, catalog)
            except (CorpusError, OSError) as error:
                assert fail_at is not None, error
        now = catalog.get("code").active.id
        where = f"operation {fail_at} ({faults.log[fail_at] if fail_at is not None and fail_at < len(faults.log) else 'none'})"
        assert documents(catalog.active_path("code")) == self.outcomes[now != old], where
        assert catalog.check("code", full=True) == [], where
        self.work(self.tree, catalog)
        assert documents(catalog.active_path("code")) == self.outcomes[1], f"again, after {where}"
        assert catalog.check("code", full=True) == [] and not list(root.glob(".trash-*")), where
        assert not list(root.glob("*/versions/*.tmp")), where
        shutil.rmtree(root)
        return faults


@pytest.mark.parametrize("work", WORK)
def test_some_operations_fail(work: str, tmp_path: Path) -> None:
    """Of every kind of operation the first, one in the middle and the last; then the same with all later ones failing, too."""
    scene = Scene(tmp_path, work)
    log = scene.attempt(None).log
    kinds = {kind: [i for i, each in enumerate(log) if each == kind] for kind in log}
    expected = {"gc": {"sql", "commit", "connect"}}.get(work, {"write", "fsync", "rename", "sql", "commit", "connect", "mkdir"})
    assert expected <= set(kinds), kinds
    chosen = sorted({places[at] for places in kinds.values() for at in (0, len(places) // 2, -1)})
    for number, place in enumerate(chosen):
        scene.attempt(place, sticky=number % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("work", WORK)
def test_every_operation_fails(work: str, sticky: bool, tmp_path: Path) -> None:
    """Each in its turn, whatever it is."""
    scene = Scene(tmp_path, work)
    for place in range(len(scene.attempt(None).log)):
        scene.attempt(place, sticky=sticky)
