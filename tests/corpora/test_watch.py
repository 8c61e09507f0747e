"""A corpus that is kept current, beside a server that drafts from it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from watchfiles import Change

from corpora import walk
from corpora.build import build
from corpora.catalog import Catalog
from corpora.errors import CorpusError, CorpusNotFound
from corpora.update import UpdateReport
from corpora.watch import _Relevant, watch
from engine.requests import Final
from tests.corpora.test_update import documents, edit
from tests.corpora.trees import plant
from tests.engine.test_app import SPELL, TOKENIZER, Target, ask, engine_of, request_of

SECONDS = 30.0


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test's age are not read again for their youth alone."""
    monkeypatch.setattr(walk, "SETTLED_NS", -(10**12))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path / "tree", {"a.py": TOKENIZER.decode(SPELL), "sub/b.py": "class Index:\n    pass\n"})


@pytest.fixture
def catalog(tmp_path: Path, tree: Path) -> Catalog:
    """The store lies in the tree that is watched, so that what an update writes must not start another one."""
    catalog = Catalog(tree / "store")
    build("code", [tree], TOKENIZER, catalog, model="tiny")
    return catalog


class Watcher:
    """`watch` in a thread, and what it tells."""

    def __init__(self, catalog: Catalog) -> None:
        self.news: list[UpdateReport | CorpusError] = []
        self.error: BaseException | None = None
        self.loads = 0
        self._stop = threading.Event()
        self._told = threading.Condition()
        self.thread = threading.Thread(target=self._run, args=(catalog,))

    def _run(self, catalog: Catalog) -> None:
        def load(_: str) -> object:
            self.loads += 1
            return TOKENIZER

        def tell(news: UpdateReport | CorpusError) -> None:
            with self._told:
                self.news.append(news)
                self._told.notify_all()

        try:
            watch("code", catalog, load, tell, stop=self._stop, quiet_seconds=0.05)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = error

    def wait_until(self, condition: Callable[[list[UpdateReport | CorpusError]], bool]) -> None:
        with self._told:
            assert self._told.wait_for(lambda: condition(self.news), SECONDS), self.news

    def stop(self) -> None:
        self._stop.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@contextmanager
def watching(catalog: Catalog) -> Iterator[Watcher]:
    watcher = Watcher(catalog)
    watcher.thread.start()
    try:
        watcher.wait_until(bool)  # the first look has been taken
        yield watcher
    finally:
        watcher.stop()


def changed(news: list[UpdateReport | CorpusError]) -> int:
    return sum(isinstance(each, UpdateReport) and each.changed for each in news)


def test_edits_become_versions(tree: Path, catalog: Catalog) -> None:
    """What was changed before counts, then every edit, new file and removal; the tokenizer is loaded once."""
    edit(tree / "early.py", "early = True\n")
    with watching(catalog) as watcher:
        watcher.wait_until(lambda news: changed(news) == 1)
        edit(tree / "sub" / "b.py", "class Changed:\n    pass\n")
        watcher.wait_until(lambda news: changed(news) == 2)
        edit(tree / "new.py", "new = True\n")
        (tree / "a.py").unlink()
        watcher.wait_until(lambda _: sorted(documents(catalog.active_path("code"))) == ["early.py", "new.py", "sub/b.py"])
        assert documents(catalog.active_path("code"))["sub/b.py"] == "class Changed:\n    pass\n"
        assert watcher.loads == 1
        time.sleep(0.5)
        assert len(watcher.news) <= 6, "its own writing starts no update"
    assert watcher.error is None and catalog.check("code", full=True) == []


def test_a_failed_update_is_tried_again(tree: Path, catalog: Catalog) -> None:
    """While somebody else is at work the watch says so and goes on; a corpus that is removed ends it."""
    with watching(catalog) as watcher:
        with catalog.lock("code"):
            edit(tree / "new.py", "new = True\n")
            watcher.wait_until(lambda news: isinstance(news[-1], CorpusError))
        edit(tree / "newer.py", "newer = True\n")
        watcher.wait_until(lambda news: changed(news) == 1)
        catalog.remove("code")
        edit(tree / "newest.py", "newest = True\n")
        watcher.thread.join(SECONDS)
        assert isinstance(watcher.error, CorpusNotFound)


def test_what_means_nothing_is_passed_over(tmp_path: Path) -> None:
    """Hidden folders, caches, packages, and the store itself; a source that lies in such a folder is looked at all the same."""
    source = tmp_path / ".venv" / "node_modules" / "package"
    relevant = _Relevant([source, tmp_path / "a.zip"], source / "store")
    for name, is_relevant in {
        "x.py": True, "sub/x.py": True, ".gitignore": True, ".git/index": False, "node_modules/x.js": False,
        "sub/__pycache__/x.pyc": False, "store/catalog.sqlite": False, "sub/.cache/x": False,
    }.items():  # fmt: skip
        assert relevant(Change.modified, str(source / name)) == is_relevant, name
    assert relevant(Change.modified, str(tmp_path / "a.zip"))


def test_a_running_server_takes_the_new_version_without_a_pause(tree: Path, catalog: Catalog) -> None:
    """A request that has begun finishes on the version it pinned, the next one drafts from what was edited meanwhile; both say
    what the model says without drafts."""
    engine = engine_of(Target(), catalog.root)
    plain, _, _ = ask(engine_of(Target(), catalog.root), request_of(corpora=(), sources=()))
    request = request_of(corpora=("code",), sources=("corpus",))
    first = catalog.get("code").active.id

    async def body() -> None:
        async with aclosing(engine.generate(request)) as events:
            parts = [(await anext(events)).text]  # type: ignore[union-attr]
            edit(tree / "a.py", TOKENIZER.decode(SPELL) + "more = True\n")
            await asyncio.to_thread(watcher.wait_until, lambda news: changed(news) == 1)
            await engine._corpora.refresh()
            assert len(engine._corpora._open) == 2, "both versions are open"
            async for event in events:
                if isinstance(event, Final):
                    assert event.statistics.corpora == (("code", first),) and event.statistics.num_accepted > 0
                else:
                    parts.append(event.text)
        assert "".join(parts) == plain.text
        assert [version for _, version in engine._corpora._open] == [catalog.get("code").active.id]

    with watching(catalog) as watcher:
        asyncio.run(body())
        answer, final, _ = ask(engine, request)
    assert answer.text == plain.text
    assert final.statistics.corpora == (("code", catalog.get("code").active.id),) != (("code", first),)
