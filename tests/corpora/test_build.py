"""From files to an active corpus, and what is left when that fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from corpora import build as build_module
from corpora.build import BuildOptions, BuildReport, Progress, build
from corpora.catalog import Catalog
from corpora.decisions import Reason
from corpora.errors import (
    CorpusLocked,
    CorpusNotFound,
    InvalidName,
    InvalidOptions,
    NothingToIndex,
    SourceNotFound,
    StoreNotWritable,
)
from engine.text import Tokenizer
from retriever.datastore import Datastore
from tests import tiny_tokenizers
from tests.corpora.trees import plant

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
FILES: dict[str, str | bytes] = {
    "add.py": "def add(first, second):\n    return first + second\n",
    "copy.py": "def add(first, second):\r\n    return first + second\r\n",
    "docs/guide.md": "The quick brown fox jumps over the lazy dog.\n",
    "docs/blob.bin": b"\0\1\2",
    "empty.py": "",
    "naïve.py": "for item in self.items:\n    total += item.size\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return plant(tmp_path / "tree", FILES)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(tmp_path / "store")


def run(tree: Path, catalog: Catalog, **arguments: object) -> BuildReport:
    return build("code", [tree], TOKENIZER, catalog, **arguments)  # type: ignore[arg-type]


def documents(catalog: Catalog) -> dict[str, str]:
    """name -> text of everything in the active version."""
    with Datastore.open(catalog.active_path("code"), TOKENIZER.fingerprint, TOKENIZER.vocab_size) as datastore:
        indices = range(datastore.num_documents)
        return {datastore.document_name(i): TOKENIZER.decode(datastore.document_tokens(i)) for i in indices}


def folders(catalog: Catalog) -> list[str]:
    """What lies in the store, down to versions."""
    return sorted(str(p.relative_to(catalog.root)) for p in catalog.root.glob("[!.]*/versions/*"))


def test_a_build_holds_the_text_of_every_file(tree: Path, catalog: Catalog) -> None:
    """Each distinct text is there once, under its first name, with "\\n" line ends; nothing else is."""
    report = run(tree, catalog, model="tiny")
    assert documents(catalog) == {name: FILES[name] for name in ("add.py", "docs/guide.md", "naïve.py")}
    assert (report.files_taken, report.documents) == (4, 3)
    assert report.skipped == {Reason.DUPLICATE: 1, Reason.BINARY: 1, Reason.EMPTY: 1}
    assert report.bytes == sum(len(FILES[n].encode()) for n in ("add.py", "copy.py", "docs/guide.md", "naïve.py"))  # type: ignore[union-attr]
    assert report.tokens == sum(len(TOKENIZER.encode(text)) for text in documents(catalog).values())
    assert report.seconds >= report.tokenizer_seconds > 0


def test_the_catalog_knows_what_was_built(tree: Path, catalog: Catalog) -> None:
    """Counts, tokenizer and sources of report, catalog and manifest agree, and the files are sound."""
    report = run(tree, catalog, model="tiny", options=BuildOptions(exclude=("*.md",)))
    version = catalog.get("code").active
    assert (version.id, version.model, version.fingerprint) == (report.version, "tiny", TOKENIZER.fingerprint)
    assert (version.num_files, version.num_documents, version.num_tokens) == (3, 2, report.tokens)
    manifest = catalog.show("code")["manifest"]
    assert manifest["num_tokens"] == report.tokens and manifest["num_text_bytes"] == report.bytes == version.num_bytes
    assert manifest["sources"] == [str(tree)] == list(version.sources) and manifest["options"]["exclude"] == ["*.md"]
    assert catalog.check("code", full=True) == [] and report.path == catalog.active_path("code")


def test_what_was_indexed_is_found(tree: Path, catalog: Catalog) -> None:
    """The end of a line of the corpus is what the datastore says follows its beginning."""
    run(tree, catalog)
    line = TOKENIZER.encode("    return first + second\n")
    with Datastore.open(catalog.active_path("code")) as datastore:
        found = datastore.lookup(line[:2], 8)
    assert found.tokens.tolist()[: len(line) - 2] == line[2:].tolist()


def test_control_tokens_in_files_are_text(tmp_path: Path, catalog: Catalog) -> None:
    """A file that mentions an end-of-text token has none in its ids."""
    run(plant(tmp_path / "t", {"a.md": "Say <|endoftext|> and <|im_end|>.\n"}), catalog)
    with Datastore.open(catalog.active_path("code")) as datastore:
        assert not np.isin(datastore.document_tokens(0), list(TOKENIZER.special_ids)).any()


def test_the_same_files_give_the_same_bytes(tree: Path, catalog: Catalog, tmp_path: Path) -> None:
    """Two builds differ in their ids and dates, not in what they hold."""
    first = run(tree, catalog).path
    second = build("code", [tree], TOKENIZER, Catalog(tmp_path / "other")).path
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir()) and {"manifest.json", "metadata"} < set(names)
    assert all((first / n).read_bytes() == (second / n).read_bytes() for n in names if n != "manifest.json")


def test_batches_and_segments_do_not_show(tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few texts are tokenized at a time and however small segments are, the documents are the same."""
    monkeypatch.setattr(build_module, "BATCH_CHARS", 1)
    report = run(tree, catalog, options=BuildOptions(segment_tokens=1))
    assert documents(catalog) == {name: FILES[name] for name in ("add.py", "docs/guide.md", "naïve.py")}
    assert len(list(report.path.glob("*.tokens"))) == 3


def test_a_rebuild_replaces_and_keeps_one_to_return_to(tree: Path, catalog: Catalog) -> None:
    """The new version is active, the one before can be returned to, older ones are gone."""
    first = run(tree, catalog)
    (tree / "add.py").write_text("changed = True\n")
    second = run(tree, catalog)
    assert documents(catalog)["add.py"] == "changed = True\n"
    third = run(tree, catalog)
    assert folders(catalog) == sorted(f"code/versions/{r.version}" for r in (second, third)) and not first.path.exists()
    assert catalog.rollback("code").id == second.version


def test_progress_reaches_the_end(tree: Path, catalog: Catalog) -> None:
    """Stages come in their order, counts only grow and end at the totals."""
    seen: list[Progress] = []
    report = run(tree, catalog, progress=seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["walk", "tokenize", "sort", "write", "publish"]
    assert [p.num_bytes for p in seen] == sorted(p.num_bytes for p in seen)
    last = seen[-1]
    assert (
        last.num_bytes == last.total_bytes > 0 and last.num_files == last.total_files == 6 and last.num_tokens == report.tokens
    )


# what fails


def test_nothing_to_index_says_why(tmp_path: Path, catalog: Catalog) -> None:
    """An empty folder, and one with nothing fit, are refused with the reasons counted; no corpus comes of it."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingToIndex, match=r"/empty is empty") as error:
        run(tmp_path / "empty", catalog)
    assert error.value.skipped == {}
    with pytest.raises(NothingToIndex, match=r"2 binary \(not text\); 1 empty") as error:
        run(plant(tmp_path / "blobs", {"a.bin": b"\0", "b.py": b"\0\0", "c.py": b"\n"}), catalog)
    assert error.value.skipped == {Reason.BINARY: 2, Reason.EMPTY: 1}
    assert catalog.list() == [] and folders(catalog) == [] and not (catalog.root / "code").exists()


def test_bad_arguments_are_refused_before_anything_is_touched(tree: Path, catalog: Catalog) -> None:
    """Name, options and tenant."""
    with pytest.raises(InvalidName):
        build("No Name", [tree], TOKENIZER, catalog)
    with pytest.raises(InvalidOptions, match="max_file_size must be at least 1: 0"):
        run(tree, catalog, options=BuildOptions(max_file_size=0))
    assert not catalog.root.exists()
    with pytest.raises(SourceNotFound):
        run(tree / "nowhere", catalog)
    run(tree, catalog, tenant="anna")
    with pytest.raises(InvalidName, match="not available"):
        run(tree, catalog, tenant="ben")
    with pytest.raises(CorpusNotFound):
        catalog.get("code")


def test_two_builders_of_one_corpus(tree: Path, catalog: Catalog) -> None:
    """While one builds, another fails at once and names it; a third may build another corpus."""
    failures = list[str]()

    def second(progress: Progress) -> None:
        if progress.stage == "sort":
            with pytest.raises(CorpusLocked) as error:
                run(tree, catalog)
            failures.append(str(error.value))
            build("other", [tree], TOKENIZER, catalog)

    run(tree, catalog, progress=second)
    assert len(failures) == 1 and f"process {os.getpid()}" in failures[0]
    assert [corpus.name for corpus in catalog.list()] == ["code", "other"]


class Fault(Exception):
    """What the tests below throw."""


def assert_unharmed(catalog: Catalog, version: str, attempt: Callable[[], object]) -> None:
    """`attempt` raises, and afterwards the store is as if it had never been made."""
    before, texts = folders(catalog), documents(catalog)
    with pytest.raises((Fault, KeyboardInterrupt, StoreNotWritable)):
        attempt()
    assert catalog.get("code").active.id == version and folders(catalog) == before and documents(catalog) == texts
    with catalog.lock("code"):
        pass


@pytest.mark.parametrize("kind", [Fault, KeyboardInterrupt])
def test_an_interruption_anywhere_leaves_what_was_there(kind: type[BaseException], tree: Path, catalog: Catalog) -> None:
    """Stopped at any of its progress reports, a build changes nothing; left alone, it succeeds."""
    seen: list[Progress] = []
    version = run(tree, catalog, progress=seen.append).version
    for n in range(len(seen)):
        countdown = iter(range(n, -1, -1))

        def stop(_: Progress, countdown: object = countdown) -> None:
            if next(countdown) == 0:  # type: ignore[call-overload]
                raise kind("stop")

        assert_unharmed(catalog, version, lambda stop=stop: run(tree, catalog, progress=stop))  # type: ignore[misc]
    assert run(tree, catalog).version == catalog.get("code").active.id != version


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell which file is forced to disk")
@pytest.mark.parametrize("function", ["fsync", "rename", "mkdir"])
def test_a_failing_disk_leaves_what_was_there(
    function: str, tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever system call says "no space left", the message is one, and the old version stays; then a build succeeds."""
    version = run(tree, catalog).version
    disk = FailingDisk(getattr(os, function))
    monkeypatch.setattr(os, function, disk)
    num_failures = 0
    while disk.fail_at(num_failures):
        try:
            run(tree, catalog)
            break
        except StoreNotWritable as error:
            assert "No space left" in str(error)
            num_failures += 1
        assert catalog.get("code").active.id == version and folders(catalog) == [f"code/versions/{version}"]
    assert num_failures >= 1 and catalog.get("code").active.id != version


class FailingDisk:
    """A system call about files of a version that fails at its n-th use."""

    def __init__(self, original: Callable[..., object]) -> None:
        self.original = original
        self.left = -1

    def fail_at(self, n: int) -> bool:
        self.left = n
        return n < 30

    def __call__(self, target: object, *arguments: object, **options: object) -> object:
        where = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if "versions" in where:
            self.left -= 1
            if self.left == -1:
                raise OSError(28, "No space left on device")
        return self.original(target, *arguments, **options)


def test_a_failure_to_activate_leaves_what_was_there(tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is complete on disk, but the catalog cannot be changed: it is removed again."""
    version = run(tree, catalog).version

    def refuse(*_: object) -> None:
        raise Fault

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "publish", refuse)
        assert_unharmed(catalog, version, lambda: run(tree, catalog))


def test_an_interruption_right_after_activation_keeps_the_new_version(
    tree: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the transaction is through, cleaning up must not remove what is active."""
    old, publish = run(tree, catalog).version, catalog.publish

    def then_stop(*arguments: object) -> None:
        publish(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "publish", then_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tree, catalog)
    assert catalog.get("code").active.id != old and documents(catalog) and catalog.check("code") == []


def test_a_killed_build_is_cleaned_up_by_the_next(tree: Path, catalog: Catalog) -> None:
    """A process that dies while sorting leaves a folder and a lock file; the old version stays active, and a build works."""
    version = run(tree, catalog).version
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from corpora.build import build\n"
        "from corpora.catalog import Catalog\n"
        "from engine.text import Tokenizer\n"
        "tree, store, definition = sys.argv[1:]\n"
        "die = lambda progress: os._exit(9) if progress.stage == 'sort' else None\n"
        "build('code', [Path(tree)], Tokenizer(Path(definition).read_text()), Catalog(store), progress=die)\n"
    )
    definition = tree.parent / "tokenizer.json"
    definition.write_text(tiny_tokenizers.byte_level())
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script, tree, catalog.root, definition], cwd=root, check=False)
    assert done.returncode == 9
    assert any(name.endswith(".tmp") for name in folders(catalog)) and catalog.get("code").active.id == version
    new = run(tree, catalog).version
    assert folders(catalog) == sorted(f"code/versions/{v}" for v in (version, new))


def test_the_store_is_not_indexed(tree: Path) -> None:
    """Where it lies in the tree, its files are left out: an index of itself would change with every build."""
    catalog = Catalog(tree / "store")
    first = run(tree, catalog)
    report = run(tree, catalog)
    assert sorted(documents(catalog)) == ["add.py", "docs/guide.md", "naïve.py"] and report.tokens == first.tokens
    assert Reason.IGNORED in report.skipped and report.examples[Reason.IGNORED][0].detail == "the store of corpora"


def test_memory_sets_the_size_of_segments() -> None:
    """More memory allows larger segments, up to the default; too little is refused, with the least that will do."""
    sizes = [build_module.segment_tokens_within(megabytes * 10**6, 150_000) for megabytes in (510, 1_000, 2_000, 10**6)]
    assert sizes == sorted(sizes) and 10**6 < sizes[0] < sizes[1] and sizes[-1] == BuildOptions().segment_tokens
    with pytest.raises(InvalidOptions, match="too little to build with: 100 MB; give at least 502"):
        build_module.segment_tokens_within(10**8, 150_000)
