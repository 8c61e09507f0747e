"""`draftloom corpus ...` as its user sees it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from corpora.catalog import Catalog
from corpora.cli import corpus_app
from engine.text import Tokenizer
from retriever.datastore import Datastore
from tests import tiny_tokenizers
from tests.corpora.trees import git, plant

CODE = "def add(first, second):\n    return first + second\n"


class Shell:
    """A user at a prompt: `shell("list")` runs a command on the test's store."""

    def __init__(self, folder: Path) -> None:
        self.model = tiny_tokenizers.write_model_folder(folder / "model")
        self.store = folder / "store"
        self.tree = plant(
            folder / "tree",
            {"add.py": CODE, "copy.py": CODE, "blob.bin": b"\0", "docs/guide.md": "The quick brown fox.\n", ".git/x": "x"},
        )

    def __call__(self, *arguments: str | Path) -> Result:
        return CliRunner().invoke(corpus_app, [*map(str, arguments), "--store", str(self.store)])

    def build(self, *arguments: str | Path) -> Result:
        return self("build", "code", self.tree, "--model", self.model, *arguments)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("COLUMNS", "100")
    yield Shell(tmp_path)


def table(text: str) -> list[list[str]]:
    """A printed table's cells."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines() if line.strip()]


def test_build_says_what_it_skipped_and_what_it_made(shell: Shell) -> None:
    """A table of reasons with a case of each, then one line of result, on stdout; nothing on stderr."""
    result = shell.build()
    assert result.exit_code == 0 and result.stderr == ""
    *skipped, ready = result.stdout.splitlines()
    assert table("\n".join(skipped)) == [
        ["not stored", "count", "why", "such as"],
        ["binary", "1", "not text", "blob.bin"],
        ["duplicate", "1", "stored once", "copy.py"],
    ]
    assert ready.startswith("code is ready: 3 files, 121 B, ") and " tokens in " in ready


def test_list_and_show(shell: Shell) -> None:
    """What is indexed, in a table; all about one corpus."""
    assert "no corpora in" in shell("list").stderr
    shell.build()
    active = Catalog(shell.store).get("code").active
    rows = table(shell("list").stdout)
    assert rows[0] == ["name", "built", "model", "files", "tokens"]
    assert rows[1][0] == "code" and rows[1][-2:] == ["3", str(active.num_tokens)]
    shown = shell("show", "code").stdout
    assert f"version           {active.id}" in shown and "3 (2 different)" in shown and active.fingerprint in shown


def test_json_is_for_programs(shell: Shell) -> None:
    """Every line is JSON and the last is the result, for every command."""
    lines = [json.loads(line) for line in shell.build("--json").stdout.splitlines()]
    assert [line["progress"]["stage"] for line in lines[:-1]] == ["walk", "tokenize", "sort", "write", "publish"]
    report = lines[-1]
    assert report["files_taken"] == 3 and report["skipped"] == {"binary": 1, "duplicate": 1}
    assert json.loads(shell("list", "--json").stdout)["corpora"][0]["id"] == report["version"]
    assert json.loads(shell("show", "code", "--json").stdout)["active"]["num_tokens"] == report["tokens"]
    assert json.loads(shell("check", "code", "--json").stdout) == {"name": "code", "full": False, "problems": []}
    assert json.loads(shell("gc", "--json").stdout) == {"removed": []}
    assert json.loads(shell("rm", "code", "--json").stdout) == {"removed": "code"}
    error = json.loads(shell("show", "code", "--json").stdout)
    assert error["error"] == "CorpusNotFound" and "no such corpus: code" in error["message"]


def test_dry_run_writes_nothing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be taken, by ending, and what not, and how large it would be; no store comes of it, and no model is needed."""
    monkeypatch.setenv("DRAFTLOOM_CACHE", str(shell.store / "empty"))
    result = shell("build", "code", shell.tree, "--dry-run")
    assert result.exit_code == 0 and not shell.store.exists()
    rows = table(result.stdout)
    assert rows[:3] == [["would take", "files", "size"], [".py", "2", "100 B"], [".md", "1", "21 B"]]
    assert result.stdout.splitlines()[-1] == (
        "would index 3 files, 121 B: about 19 tokens, an index of about 207 B; nothing was written"
    )
    assert json.loads(shell("build", "code", shell.tree, "--dry-run", "--json").stdout.splitlines()[-1])["files_taken"] == 3


def test_a_dry_run_leaves_out_the_store_as_a_build_does(shell: Shell) -> None:
    """A store inside the tree is not counted among what would be indexed."""
    shell.store = shell.tree / "store"
    shell.build()
    (shell.store / "notes.txt").write_text("nothing to index\n")
    assert json.loads(shell.build("--dry-run", "--json").stdout.splitlines()[-1])["files_taken"] == 3


def test_a_dry_run_expects_what_a_build_makes(shell: Shell) -> None:
    """With a tokenizer, tokens are counted on a sample, which here is everything."""
    expected = json.loads(shell.build("--dry-run", "--json").stdout.splitlines()[-1])
    report = json.loads(shell.build("--json").stdout.splitlines()[-1])
    assert expected["expected_tokens"] == report["tokens"] and expected["documents"] == report["documents"]
    assert expected["skipped"] == report["skipped"] and expected["bytes"] == report["bytes"]


def test_explain_answers_for_one_file(shell: Shell) -> None:
    """Taken or skipped, the reason in words, and where it was decided for a whole folder."""
    plant(shell.tree, {".gitignore": "build/\n", "build/x.py": "x"})

    def say(name: str) -> str:
        return shell("build", "code", shell.tree, "--explain", shell.tree / name).stdout.removeprefix(f"{shell.tree}/").strip()

    assert say("add.py") == "add.py: taken"
    assert say("copy.py") == "copy.py: taken - duplicate: stored once (as add.py)"
    assert say("blob.bin") == "blob.bin: skipped - binary: not text (has NUL bytes)"
    assert say("build/x.py") == (
        "build/x.py: skipped - ignored: by git or an ignore file (.gitignore); decided for the folder build/"
    )
    outside = shell("build", "code", shell.tree, "--explain", shell.tree.parent / "x.py")
    assert outside.exit_code == 2 and "not below the paths" in outside.stderr


def test_include_exclude_and_size(shell: Shell) -> None:
    """Patterns and the size limit do what they say."""
    assert shell.build("--include", "*.py", "--exclude", "copy*").exit_code == 0
    assert Catalog(shell.store).get("code").active.num_files == 1
    result = shell.build("--max-file-size", "30")
    assert result.exit_code == 0 and Catalog(shell.store).get("code").active.num_files == 1
    assert ["too_large", "2", "larger than --max-file-size", "add.py"] in table(result.stdout)


def test_inputs_of_all_kinds_go_into_one_corpus(shell: Shell) -> None:
    """A folder at a revision, an archive, and conversations as the chat template writes them, side by side."""
    git(shell.tree, "init")
    git(shell.tree, "add", "add.py")
    git(shell.tree, "commit", "-m", "one")
    with zipfile.ZipFile(shell.tree / "a.zip", "w") as archive:
        archive.writestr("lib/b.py", "x = 1\n")
    chat = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    (shell.tree / "c.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    paths = (f"{shell.tree}@HEAD", shell.tree / "a.zip", shell.tree / "c.jsonl")
    result = shell("build", "mixed", *paths, "--chat", "--model", shell.model)
    assert result.exit_code == 0, result.stderr
    with Datastore.open(Catalog(shell.store).active_path("mixed")) as datastore:
        documents = {datastore.document_name(i): datastore.document_tokens(i) for i in range(datastore.num_documents)}
    tokenizer = Tokenizer.load(shell.model)
    assert list(documents) == ["tree@HEAD/add.py", "a.zip/lib/b.py", "c.jsonl#1"]
    assert documents["c.jsonl#1"].tolist() == tokenizer.encode_chat(chat, False).tolist()
    options = Catalog(shell.store).show("mixed")["manifest"]["options"]
    assert len(options["resolved"][f"{shell.tree}@HEAD"]) == 40 and options["chat"] is True


def test_secrets_are_reported(shell: Shell) -> None:
    """A file without some of its lines is taken; how many such there are, and which, is said."""
    plant(shell.tree, {"config.py": f"a = 1\nTOKEN = 'npm_{'aB3dE6gH9' * 4}'\nb = 2\n"})
    result = shell.build()
    assert ["secret", "1", "looks like a key or password", "config.py"] in table(result.stdout)
    said = shell("build", "code", shell.tree, "--explain", "config.py").stdout
    assert said == "config.py: taken - secret: looks like a key or password (left out: npm token in line 2)\n"


def test_rollback_and_gc(shell: Shell) -> None:
    """Back to the version before; leftovers are named when they go."""
    shell.build()
    first = Catalog(shell.store).get("code").active.id
    assert shell("rollback", "code").exit_code == 1
    shell.build()
    assert f"at version {first}" in shell("rollback", "code").stdout
    (shell.store / "code/versions/x.tmp").mkdir()
    assert "x.tmp" in shell("gc").stdout and shell("gc").stdout == "nothing to remove\n"


def test_remove(shell: Shell) -> None:
    """Gone, and said so; a second time there is nothing."""
    shell.build()
    assert shell("rm", "code", "--yes").stdout == "removed code\n"
    again = shell("rm", "code", "--yes")
    assert again.exit_code == 1 and "no such corpus: code" in again.stderr


def test_check_finds_damage(shell: Shell) -> None:
    """A flipped byte is exit status 5 and names the file; so is a missing manifest."""
    shell.build()
    assert shell("check", "code", "--full").stdout == "code is sound\n"
    path = Catalog(shell.store).active_path("code")
    tokens = next(path.glob("*.tokens"))
    data = bytearray(tokens.read_bytes())
    data[-3] ^= 1
    tokens.write_bytes(data)
    result = shell("check", "code", "--full")
    assert result.exit_code == 5 and "damaged: " in result.stderr and tokens.name in result.stderr.replace("\n", "")
    (path / "manifest.json").unlink()
    assert shell("check", "code").exit_code == 5 and shell("show", "code").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["build", "Code", "TREE"], 2, "corpus name is not valid: 'Code'"),
        (["build", "code", "TREE/nowhere"], 2, "path to index cannot be used"),
        (["build", "code", "TREE", "--exclude", "!"], 2, "exclude pattern is not understood"),
        (["build", "code", "TREE", "--model", "TREE"], 2, "draftloom: tokenizer.json"),
        (["build", "code", "TREE", "--model", "no-such-model"], 2, "draftloom: no such model: no-such-model"),
        (["build", "code", "TREE", "--revision", "v1"], 2, "no such revision here"),
        (["build", "code", "TREE", "--max-file-size", "0"], 2, "max-file-size"),
        (["build", "code", "TREE/blob.bin", "--model", "MODEL"], 1, "nothing to index"),
        (["build", "code"], 2, "Missing argument"),
        (["show", "code"], 1, "no such corpus: code"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes_get_one_message_and_a_status(arguments: list[str], status: int, message: str, shell: Shell) -> None:
    """On stderr, without a traceback, and nothing is made."""
    result = shell(*(a.replace("TREE", str(shell.tree)).replace("MODEL", str(shell.model)) for a in arguments))
    assert result.exit_code == status and message in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr and Catalog(shell.store).list() == []


def test_a_locked_corpus_is_status_4(shell: Shell) -> None:
    """The holder is named."""
    with Catalog(shell.store).lock("code"):
        result = shell.build()
    assert result.exit_code == 4 and "being built or removed: code (by process " in result.stderr


def test_a_damaged_catalog_is_status_5(shell: Shell) -> None:
    """Whatever command meets it."""
    plant(shell.store, {"catalog.sqlite": "this is certainly not a database"})
    for result in (shell("list"), shell.build()):
        assert result.exit_code == 5 and "catalog is damaged" in result.stderr


def test_unreadable_files_are_status_3(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is built from the others, and the exit status says that some are missing."""
    import corpora.filter

    read = corpora.filter._read_bytes

    def failing(path: Path, max_bytes: int) -> object:
        if path.name == "add.py":
            raise PermissionError(13, "Permission denied")
        return read(path, max_bytes)

    monkeypatch.setattr(corpora.filter, "_read_bytes", failing)
    result = shell.build()
    assert result.exit_code == 3 and "code is ready: 2 files" in result.stdout
    assert ["unreadable", "1", "could not be read", "add.py"] in table(result.stdout)


def test_an_archive_that_is_cut_short_is_status_3(shell: Shell) -> None:
    """What else was named is indexed; a dry run says it as well."""
    (shell.tree / "a.zip").write_bytes(b"PK\x03\x04 and no more")
    for flags in ([], ["--dry-run"]):
        result = shell("build", "code", shell.tree, shell.tree / "a.zip", "--model", shell.model, *flags)
        assert result.exit_code == 3 and ["unreadable", "1", "could not be read", "a.zip"] in table(result.stdout)
    assert Catalog(shell.store).get("code").active.num_files == 3


def test_ctrl_c_is_one_line(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 130, and the active version stays."""
    shell.build()
    version = Catalog(shell.store).get("code").active.id

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("retriever.format.write_version", interrupt)
    result = shell.build()
    assert result.exit_code == 130 and result.stderr == "interrupted; what was active before still is\n"
    assert Catalog(shell.store).get("code").active.id == version


def test_file_names_cannot_move_the_cursor(shell: Shell) -> None:
    """Markup, newlines and escapes in a file name are printed as what they are."""
    plant(shell.tree, {"[red]a\n\x1b[2J.bin": b"\0"})
    (shell.tree / "blob.bin").unlink()
    out = shell.build().stdout
    assert "[red]a\\n\\x1b[2J.bin" in out and "\x1b" not in out


def test_what_a_file_says_cannot_move_the_cursor(shell: Shell) -> None:
    """The line by which a file is known to be generated is quoted, and may hold anything."""
    plant(shell.tree, {"g.py": "# \x1b[2J[red]auto-generated, do not edit\n"})
    said = shell("build", "code", shell.tree, "--explain", "g.py").stdout
    assert "\x1b" not in said and "says: # \\x1b[2J[red]auto-generated" in said


def test_help_tells_about_every_option(shell: Shell) -> None:
    """Each command and each option has a line."""
    commands = CliRunner().invoke(corpus_app, ["--help"]).stdout
    assert all(f" {name} " in commands for name in ("build", "list", "show", "check", "rm", "rollback", "gc"))
    options = CliRunner().invoke(corpus_app, ["build", "--help"]).stdout
    for option in (
        "--model",
        "--include",
        "--exclude",
        "--max-file-size",
        "--generated",
        "--near-duplicates",
        "--exclude-licence",
        "--revision",
        "--field",
        "--role",
        "--chat",
        "--dry-run",
        "--explain",
        "--store",
        "--json",
    ):
        assert option in options
