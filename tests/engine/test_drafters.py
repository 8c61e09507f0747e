"""The sources that look tokens up: corpora, the request's own text, and both where the context ends inside a word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.drafters import Drafting, DraftRequest, Feedback
from engine.drafters.corpus import CorpusDrafter
from engine.drafters.prompt import PromptDrafter
from engine.drafters.words import WholeWords, back_off, complete, cuts, spell, whole_words
from engine.text import Tokenizer
from engine.tree import Draft
from retriever.datastore import Datastore
from retriever.format import write_version
from tests.speculation import chain, random_draft
from tests.tiny_tokenizers import byte_level, sentencepiece

TOKENIZER = Tokenizer(byte_level())
CODE = [
    "class Index:\n    def __init__(self, items):\n        self.items = list(items)\n        self.total = 0\n",
    "def total(items):\n    return sum(item.size for item in items)\n",
    "def first(items):\n    for item in items:\n        return item\n",
]


def tokens(text: str) -> NDArray[np.int32]:
    """Its ids."""
    return TOKENIZER.encode(text)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """CODE as a corpus."""
    documents = [(f"{i}.py", tokens(text)) for i, text in enumerate(CODE)]
    folder = write_version(
        tmp_path_factory.mktemp("store"), "code", "v1", documents, fingerprint="f", vocab_size=TOKENIZER.vocab_size
    )
    return Datastore.open(folder)


def request_of(context: str, *, store: Datastore | None = None, prediction: str = "", words: bool = True) -> DraftRequest:
    """A request for what follows `context`."""
    corpora = {} if store is None else {"code": store}
    return DraftRequest("default", "m", tokens(context), corpora, tokens(prediction), TOKENIZER if words else None)


def begin(request: DraftRequest) -> Drafting:
    """The drafting of its corpus; of its own text, if it has none."""
    drafter = CorpusDrafter() if request.corpora else PromptDrafter()
    [(_, drafting)] = drafter.begin(request)
    return drafting


def best(draft: Draft) -> str:
    """The text of the likeliest path: from child to likeliest child."""
    draft.validate(TOKENIZER.vocab_size)
    path, node = list[int](), -1
    while len(children := np.flatnonzero(draft.parents == node)):
        node = int(children[np.argmax(draft.probs[children])])
        path.append(int(draft.tokens[node]))
    return TOKENIZER.decode(path, continuing=True)


def follow(drafting: Drafting, context: NDArray[np.int32], emitted: Sequence[int]) -> NDArray[np.int32]:
    """The context after a step."""
    drafting.accept(list(emitted), Feedback())
    return np.concatenate([context, np.asarray(emitted, np.int32)])


# ---- whole words


def test_a_corpus_is_one_drafting_each(store: Datastore) -> None:
    """Labels say which; without corpora there is nothing to begin."""
    request = DraftRequest("default", "m", tokens("x"), {"a": store, "b": store})
    assert [label for label, _ in CorpusDrafter().begin(request)] == ["corpus:a", "corpus:b"]
    assert CorpusDrafter().begin(request_of("x")) == []


def test_a_corpus_goes_on_as_its_documents_do(store: Datastore) -> None:
    """The context's end is found and what followed it drafted; asking twice gives the same; unknown contexts give nothing."""
    drafting = begin(request_of("def total(items", store=store))
    context = tokens("def total(items")
    draft = drafting.propose(context, 16)
    assert best(draft).startswith("):\n    return sum(")
    assert np.array_equal(draft.probs, drafting.propose(context, 16).probs)
    assert len(drafting.propose(tokens("§"), 16)) == 0
    assert len(drafting.propose(context, 3)) == 3


def test_a_prompt_quotes_itself_and_its_answer() -> None:
    """What stood in the prompt is found, and so is what was emitted since: the latest text only the answer has."""
    text = "first item second\nfirst item"
    drafting = begin(request_of(text))
    assert best(drafting.propose(tokens(text), 16)).startswith(" second")
    context = follow(drafting, tokens(text), tokens(" self return quick brown\nself return").tolist())
    assert best(drafting.propose(context, 16)).startswith(" quick brown")


def test_a_prediction_leads_from_the_first_token_on() -> None:
    """The caller's guess is drafted though nothing like it was seen, and again after an answer departs from it."""
    guess = "def area(width, height):\n    return width * height\n"
    drafting = begin(request_of("Rename w to width:\n", prediction=guess))
    context = tokens("Rename w to width:\n")
    assert guess.startswith(best(drafting.propose(context, 16))) and len(drafting.propose(context, 16)) >= 8
    context = follow(drafting, context, tokens("async def area(width").tolist())
    assert best(drafting.propose(context, 16)).startswith(", hei")


# ---- inside a word


@pytest.mark.parametrize(
    ("context", "rest"),
    [
        ("def first(items):\n    for item in items:\n        retur", "n item\n"),
        ("        self.items = li", "st(items)\n"),
        ("class Index:\n    def __ini", "t__(self, items):\n"),
        ("def total(items):\n    return sum(it", "em.size for item"),
        ("class Index:\n    def __init__(self, items):\n    ", "    self.items"),
        ("class Index:\n    def __init__(self, items):\n", "        self.items"),
    ],
    ids=["return", "list", "__init__", "item", "indentation", "line"],
)
def test_a_cut_word_is_completed(store: Datastore, context: str, rest: str) -> None:
    """The corpus completes the word, in tokens that may follow the prompt, and goes on; without a tokenizer it cannot."""
    draft = begin(request_of(context, store=store)).propose(tokens(context), 24)
    found = best(draft)
    assert found.startswith(rest) or (rest.startswith(found) and len(draft) >= 8)
    without = begin(request_of(context, store=store, words=False)).propose(tokens(context), 24)
    assert not best(without).startswith(rest[:4])


def test_the_prompts_own_words_are_completed_too() -> None:
    """An identifier of the prompt, begun again."""
    text = "first_number = second_number\nsecond_num"
    draft = begin(request_of(text)).propose(tokens(text), 16)
    assert best(draft).startswith("ber")


def test_a_completed_word_is_read_in_its_usual_tokens(store: Datastore) -> None:
    """After the word is out as drafted, the match reaches over it; where the target said something else, nothing is touched."""
    text = "def first(items):\n    for item in items:\n        retur"
    request = request_of(text, store=store)
    for said, usual in [("n item", tokens(text + "n item")), ("ned item", None)]:
        drafting = begin(request)
        drafting.propose(request.context, 16)
        context = follow(drafting, request.context, spell(said.encode(), TOKENIZER).tolist())
        plain = store.lookup(context[-32:], 16)
        expected = plain if usual is None else store.lookup(usual[-32:], 16)
        draft = drafting.propose(context, 16)
        assert (draft.tokens.tolist(), draft.lengths.tolist()) == (expected.tokens.tolist(), expected.lengths.tolist())
        assert usual is None or draft.lengths[0] > 12 > plain.lengths[0]


def test_a_word_may_be_completed_over_several_steps(store: Datastore) -> None:
    """The rest of a word that takes several tokens counts once all of them are out."""
    request = request_of("class Index:\n    def __init__(se", store=store)
    drafting, context = begin(request), request.context
    drafting.propose(context, 16)
    rest = spell(b"lf, items):\n        self", TOKENIZER).tolist()
    for token in rest:
        context = follow(drafting, context, [token])
    assert drafting.propose(context, 16).lengths[0] > len(rest)


def test_whole_words_far_back_are_left_alone(store: Datastore) -> None:
    """Beyond the reach of a lookup the context is looked up as it is."""
    request = request_of("        retur", store=store)
    drafting = begin(request)
    drafting.propose(request.context, 16)
    context = follow(drafting, request.context, tokens("n item\n").tolist())
    for _ in range(20):
        context = follow(drafting, context, tokens(" first total").tolist())
    plain = begin(request_of("x", store=store, words=False)).propose(context, 16)
    assert np.array_equal(drafting.propose(context, 16).tokens, plain.tokens)


@pytest.mark.parametrize(
    ("text", "taken_off"),
    [
        ("return fir", ["r", "fir", " fir"]),
        ("self.ite", ["e", "ite", ".ite"]),
        ("def add(", ["("]),
        ("quick brown fo", [" fo"]),
        ("for item in self.items:\n    ", ["  ", "\n    "]),
        ("self.items\n", ["\n"]),
        ("self", []),
        ("", []),
    ],
)
def test_cuts_go_back_to_where_the_word_begins(text: str, taken_off: list[str]) -> None:
    """Token by token, up to the one that begins with a space or a sign; white space, up to the end of the line; never all."""
    found = [cut.decode() for _, cut in cuts(tokens(text), TOKENIZER)]
    assert found == taken_off


def test_control_tokens_are_no_words() -> None:
    """A chat's prompt ends in one: nothing is cut, and nothing is wrapped."""
    context = TOKENIZER.encode("<|im_start|>assistant<|im_end|>", special=True)
    assert list(cuts(context, TOKENIZER)) == []
    drafting = begin(request_of("return "))
    assert whole_words(drafting, DraftRequest("default", "m", context, tokenizer=TOKENIZER)) is drafting
    assert isinstance(whole_words(drafting, request_of("return fir")), WholeWords)


@pytest.mark.parametrize("definition", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", ["n", "ms = list", " item", "ü", "_x9", "):\n    return"])
def test_spelled_text_is_the_text(definition: object, text: str) -> None:
    """Whatever the tokenizer puts in front of a text, the tokens of the rest of a word say exactly that."""
    tokenizer = Tokenizer(definition())  # type: ignore[operator]
    ids = spell(text.encode(), tokenizer)
    assert len(ids) and tokenizer.decode(ids, continuing=True) == text


def test_half_a_character_is_not_spelled() -> None:
    """Bytes that are no text by themselves have no tokens of their own."""
    assert len(spell("ü".encode()[1:], TOKENIZER)) == 0


def completed_by_hand(draft: Draft, text: bytes) -> dict[tuple[int, ...], float]:
    """`complete` over all paths: path -> probability of the whole path, given that it spells `text` and more."""
    masses: dict[tuple[int, ...], float] = {}
    for i in range(len(draft)):
        path, node, mass = list[int](), i, 1.0
        while node >= 0:
            path.insert(0, int(draft.tokens[node]))
            mass *= float(draft.probs[node])
            node = int(draft.parents[node])
        for n in range(1, len(path) + 1):
            before, whole = (b"".join(map(TOKENIZER.text_bytes, path[:k])) for k in (n - 1, n))
            if len(before) < len(text) < len(whole) and whole.startswith(text):
                rest = spell(whole[len(text) :], TOKENIZER).tolist()
                ends = range(1, len(rest) + 1) if n == len(path) else [len(rest)]
                for end in ends if rest else []:
                    key = (*rest[:end], *path[n:])
                    masses[key] = masses.get(key, 0.0) + mass
    total = sum(mass for path, mass in masses.items() if len(path) == 1)
    total += max(0.0, 1.0 - float(draft.probs[draft.parents < 0].sum()))
    return {path: mass / total for path, mass in masses.items()}


def paths_of(draft: Draft) -> dict[tuple[int, ...], float]:
    """Path -> probability of the whole path."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for i, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        paths[i] = (*paths[parent], token)
        found[paths[i]] = found[paths[parent]] * float(draft.probs[i])
    del found[()]
    return found


PIECES = [i for i in range(TOKENIZER.vocab_size) if TOKENIZER.text_bytes(i) in (b"r", b"re", b"ret", b"urn", b"u", b"s", b" x")]


@given(st.integers(0, 2**32), st.sampled_from([b"r", b"re", b"retur", b"u", b" x", b"x"]))
def test_completion_equals_its_definition(seed: int, text: bytes) -> None:
    """Over any draft: the paths, their texts and probabilities are those one finds path by path; and it is a valid draft."""
    draft = random_draft(np.random.default_rng(seed), len(PIECES), 14)
    draft = Draft(np.array(PIECES, np.int32)[draft.tokens], draft.parents, draft.probs, draft.lengths, draft.counts)
    completed, endings = complete(draft, 2, text, TOKENIZER)
    completed.validate(TOKENIZER.vocab_size)
    expected = completed_by_hand(draft, text)
    found = paths_of(completed)
    assert found.keys() == expected.keys()
    assert all(found[path] == pytest.approx(expected[path], abs=1e-5) for path in found)
    assert not completed.counts[completed.parents < 0].any(), "what is spelled anew was counted nowhere"
    for ending in endings:
        said = b"".join(map(TOKENIZER.text_bytes, ending.spelled.tolist()))
        assert text + said == b"".join(map(TOKENIZER.text_bytes, ending.whole.tolist()))


@given(st.integers(0, 2**32), st.integers(0, 24))
def test_backing_off_keeps_the_first_and_fills_what_it_leaves(seed: int, budget: int) -> None:
    """A valid draft within the budget; the first draft is its beginning; a first token has the subtree of the first that had
    it, and nothing of the others."""
    rng = np.random.default_rng(seed)
    drafts = [random_draft(rng, 6, 10) for _ in range(3)]
    whole, cut = back_off(drafts, 100), back_off(drafts, budget)
    whole.validate(6)
    cut.validate(6)
    assert np.array_equal(cut.tokens, whole.tokens[: len(cut)]) and len(cut) <= budget
    assert np.array_equal(whole.probs[: len(drafts[0])], drafts[0].probs)
    expected: set[tuple[int, ...]] = set()
    for draft in drafts:
        taken = {path[0] for path in expected}
        expected |= {path for path in paths_of(draft) if path[0] not in taken}
    assert paths_of(whole).keys() == expected


def test_backing_off_gives_shorter_evidence_the_rest() -> None:
    """Half is left by the first: the second's first token gets half of what it said, and below it nothing changes."""
    draft = back_off([chain([1, 2], 0.5), chain([3, 4], 0.8), chain([1, 9], 0.9)], 10)
    assert draft.tokens.tolist() == [1, 2, 3, 4] and draft.parents.tolist() == [-1, 0, -1, 2]
    assert draft.probs.tolist() == pytest.approx([0.5, 0.5, 0.4, 0.8])


def test_no_drafts_back_off_to_none() -> None:
    """Nothing found anywhere is an empty draft."""
    assert len(back_off([Draft.empty(), Draft.empty()], 8)) == 0


def test_the_first_draft_is_pure_and_closing_reaches_the_source(store: Datastore, tmp_path: Path) -> None:
    """Asked twice before anything is emitted, it says the same; close() is passed on, once."""

    class Counting:
        """A drafting that counts how often it is closed."""

        num_closed = 0

        def propose(self, context: NDArray[np.int32], budget: int) -> Draft:
            return chain([int(context[-1])])

        def accept(self, tokens: Sequence[int], feedback: Feedback) -> None:
            pass

        def close(self) -> None:
            self.num_closed += 1

    context = tokens("def first(items):\n    for item in items:\n        retur")
    drafting = begin(request_of("def first(items):\n    for item in items:\n        retur", store=store))
    assert drafting.propose(context, 9).tokens.tolist() == drafting.propose(context, 9).tokens.tolist()
    inner = Counting()
    WholeWords(inner, context, TOKENIZER).close()
    assert inner.num_closed == 1
