"""The `recycle` source: its kernels against their twins, what it learns, whom it tells, and what becomes of it on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.drafters import Drafting, DraftRequest, Feedback, kernels
from engine.drafters.recycle import RecycleDrafter, RecycleDrafting, Successors, warmup, without_old
from engine.memory import Memory, Tenant
from engine.tree import Draft
from retriever.datastore import Datastore
from retriever.format import write_version
from retriever.update import write_update
from tests.engine.oracles_recycle import K, Rows

VOCAB = 7
NOTHING = Feedback()


def chain_feedback(tokens: Sequence[int], top_ids: Sequence[Sequence[int]], num_lookahead: int = 0) -> Feedback:
    """The rows of a chain."""
    n = len(tokens)
    parents = np.arange(-1, n - 1, dtype=np.int32)
    return Feedback(np.array(top_ids, np.int32), np.array(tokens, np.int32), parents, num_lookahead)


def random_feedback(rng: np.random.Generator, lookahead: bool = True) -> Feedback:
    """Rows of a random tree over a small vocabulary."""
    n, k = int(rng.integers(1, 8)), int(rng.integers(1, VOCAB))
    parents = [-1, *(int(rng.integers(0, i)) for i in range(1, n))]
    top_ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(n)])
    guesses = int(rng.integers(0, n)) if lookahead else 0
    nodes = rng.integers(0, VOCAB, n)
    return Feedback(top_ids.astype(np.int32), nodes.astype(np.int32), np.array(parents, np.int32), guesses)


def key_of(before: int, token: int) -> np.uint64:
    """The key of a context, as the kernels pass it on."""
    return np.uint64(kernels.key_of(before, token))


def begin(memory: Tenant, context: Sequence[int] = (1, 2), **options: Any) -> Drafting:
    """A request's drafting."""
    request = DraftRequest("t", "m", np.array(context, np.int32), memory=memory, **options)
    ((label, drafting),) = RecycleDrafter().begin(request)
    assert label == "recycle"
    return drafting


def roots(draft: Draft) -> list[int]:
    """The tokens right below the root, likeliest first."""
    top = np.flatnonzero(draft.parents < 0)
    return draft.tokens[top[np.argsort(-draft.probs[top], kind="stable")]].tolist()


def paths(draft: Draft) -> dict[tuple[int, ...], float]:
    """Every node's path and its probability."""
    found: list[tuple[tuple[int, ...], float]] = []
    for token, parent, prob in zip(draft.tokens.tolist(), draft.parents.tolist(), draft.probs.tolist(), strict=True):
        above, before = found[parent] if parent >= 0 else ((), 1.0)
        found.append(((*above, token), before * prob))
    return dict(found)


# ---- kernels and twins


def as_dict(known: Successors, contexts: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
    """The rows of those contexts that have one."""
    rows = {}
    for before, token in contexts:
        place = kernels.find(known.keys, key_of(before, token))
        if place >= 0:
            rows[before, token] = [each for each in known.rows[place].tolist() if each >= 0]
    return rows


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_candidates_and_counts_are_the_twins(seed: int) -> None:
    """Random feedback, learned and scored in turns: rows, signs and rates are those of dictionaries."""
    rng = np.random.default_rng(seed)
    known, twin = Successors(), Rows()
    contexts = [(before, token) for before in range(-1, VOCAB) for token in range(VOCAB)]
    tokens, signs = np.empty(4 * K, np.int32), np.empty(4 * K, np.int32)
    for _ in range(4):
        feedback, before = random_feedback(rng), int(rng.integers(-1, VOCAB))
        known.learn(feedback, before, now=60.0)
        twin.learn(feedback, before)
        assert as_dict(known, contexts) == twin.rows
        assert len(known) == len(twin.rows)
        missed = np.full((2, K), -1, np.int32)
        missed[0, :3], missed[1, :2] = rng.permutation(VOCAB)[:3], rng.permutation(VOCAB)[:2]
        common = np.full(K, -1, np.int32)
        common[:5] = rng.permutation(VOCAB)[:5]
        hinted = np.full(K, -1, np.int32)
        hinted[:4] = rng.permutation(VOCAB)[:4]
        emitted = rng.integers(0, VOCAB, int(rng.integers(1, 5))).astype(np.int32)
        root = int(rng.integers(0, VOCAB))
        for depth in range(4):
            num = kernels.candidates(known.keys, known.rows, before, root, depth, missed, common, hinted, tokens, signs)
            expected = twin.candidates(before, root, depth, missed.tolist(), common.tolist(), hinted.tolist())
            assert dict(zip(tokens[:num].tolist(), signs[:num].tolist(), strict=True)) == expected
        kernels.score(known.keys, known.rows, known.hits, known.trials, before, root, missed, common, hinted, emitted, 0.9)
        twin.score(before, root, missed.tolist(), common.tolist(), hinted.tolist(), emitted.tolist(), 0.9)
        for counts, expected_counts in ((known.hits, twin.hits), (known.trials, twin.trials)):
            assert {int(sign): counts[sign] for sign in np.flatnonzero(counts)} == pytest.approx(
                {sign: count for sign, count in expected_counts.items() if count}
            )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_draft_is_the_likeliest_paths_of_all(seed: int, budget: int) -> None:
    """It holds as many paths as it may, each with the twin's probability, and none that it left out is likelier."""
    rng = np.random.default_rng(seed)
    known, twin = Successors(), Rows()
    for _ in range(3):
        feedback = random_feedback(rng)
        known.learn(feedback, 3, now=60.0)
        twin.learn(feedback, 3)
    known.trials[:] = rng.integers(0, 30, kernels.NUM_SIGNS)
    known.hits[:] = known.trials * rng.random(kernels.NUM_SIGNS)
    twin.hits, twin.trials = dict(enumerate(known.hits)), dict(enumerate(known.trials))
    drafting = RecycleDrafting(np.array([3, 1], np.int32), known)
    missed, common = np.full((2, K), -1).tolist(), drafting._common.tolist()
    draft = drafting.propose(np.array([3, 1], np.int32), budget)
    draft.validate(VOCAB)
    found = paths(draft)
    everything = twin.paths(3, 1, missed, common, depth=4)
    assert all(found[path] == pytest.approx(everything[path], rel=1e-4) for path in found if len(path) <= 4)
    assert len(found) == budget or len(found) == len(twin.paths(3, 1, missed, common, depth=budget))
    least = min(found.values(), default=0.0)
    assert all(prob <= least * 1.0001 for path, prob in everything.items() if path not in found) or len(found) < budget


def test_a_full_set_gives_up_the_row_used_longest_ago() -> None:
    """Contexts of one set of places: the newest stay."""
    keys, stamps = np.zeros(8, np.uint64), np.zeros(8, np.int32)
    rows = np.full((8, K), -1, np.int32)
    same_set = [each for each in range(1000) if (int(key_of(-1, each)) >> 8) & 1 == 0][: kernels.WAYS + 2]
    for stamp, token in enumerate(same_set):
        kernels.put(keys, stamps, rows, key_of(-1, token), np.array([token], np.int32), K, stamp)
    held = [kernels.find(keys, key_of(-1, token)) >= 0 for token in same_set]
    assert held == [False, False, *[True] * kernels.WAYS]


def test_what_is_common_is_counted_and_fades() -> None:
    """The tokens said most of late, most frequent first; a token said long ago gives way."""
    tokens, weights = np.full(3, -1, np.int32), np.zeros(3)
    out = np.empty(K, np.int32)
    kernels.count_common(tokens, weights, np.array([5, 6, 6, 7], np.int32), 0.9, out)
    assert out[:4].tolist() == [6, 7, 5, -1]
    kernels.count_common(tokens, weights, np.array([8, 8, 8], np.int32), 0.9, out)
    assert out[0] == 8 and 5 not in out.tolist()


def test_a_table_grows_with_what_it_holds_and_no_further() -> None:
    """A hundred thousand contexts: memory stays below 3 MB, and the newest are there."""
    known = Successors()
    small = known.num_bytes
    rng = np.random.default_rng(1)
    for step in range(400):
        nodes = rng.integers(0, 150_000, 128).astype(np.int32)
        known.learn(chain_feedback(nodes.tolist(), np.tile(np.arange(K), (128, 1)).tolist()), -1, now=60.0 * step)
    assert small < 100_000 < known.num_bytes < 3_000_000
    assert sum(kernels.find(known.keys, key_of(-1, int(node))) >= 0 for node in nodes) > 120
    assert len(known) == np.count_nonzero(known.keys) <= len(known.keys)


def test_warmup_leaves_nothing_to_compile() -> None:
    """After warmup() a request compiles no further signature."""
    warmup()
    compiled = [kernels.learn, kernels.draft, kernels.score, kernels.count_common, kernels.rehash, kernels.miss, kernels.follow]
    before = [len(kernel.signatures) for kernel in compiled]
    memory = Tenant()
    taught(memory)
    Successors(memory.states["recycle"].arrays())
    known = memory.state("recycle", Successors)
    known.learn(chain_feedback(list(range(600)), [[1]] * 600), 3, now=60.0)
    begin(memory).propose(np.array([1, 2], np.int32), 16)
    assert [len(kernel.signatures) for kernel in compiled] == before


def test_rows_that_name_a_token_twice_do_no_harm() -> None:
    """No such row is learned; out of a bent file it is read as if the token stood where it comes first."""
    known = Successors()
    known.learn(chain_feedback([1, 2], [[3, 4], [5, 6]]), -1, now=60.0)
    saved = known.arrays()
    bent, plain = Successors(saved | {"rows": np.full((3, K), 5, np.int32)}), saved["rows"].copy()
    plain[:], plain[:, 0] = -1, 5
    context = np.array([1, 2], np.int32)
    drafts = [RecycleDrafting(context, each).propose(context, 8) for each in (bent, Successors(saved | {"rows": plain}))]
    assert paths(drafts[0]) == paths(drafts[1])


def test_feedback_with_a_stray_parent_is_read_as_if_it_had_none() -> None:
    """A worker's numbers never lead a kernel outside its arrays."""
    known = Successors()
    stray = Feedback(np.array([[3], [4]], np.int32), np.array([1, 2], np.int32), np.array([-1, 1 << 30], np.int32))
    known.learn(stray, 7, now=60.0)
    assert as_dict(known, [(7, 2), (-1, 2)]) == {(7, 2): [4], (-1, 2): [4]}


# ---- the source


def test_the_first_draft_is_what_the_prompt_taught() -> None:
    """What the target said after a token of the prompt is drafted when that token is the root."""
    drafting = begin(Tenant(), [4, 9, 4])
    assert not {7, 8} & set(drafting.propose(np.array([4, 9, 4], np.int32), 8).tokens.tolist())
    drafting.accept([], chain_feedback([4, 9], [[7, 8], [4, 5]]))
    draft = drafting.propose(np.array([4, 9, 4], np.int32), 8)
    draft.validate(10)
    assert roots(draft)[0] == 7 and 8 in roots(draft)


def test_rejected_nodes_teach_too() -> None:
    """The likeliest tokens after a node that was not accepted are drafted when its token comes."""
    drafting = begin(Tenant(), [1, 2])
    tree = Feedback(np.array([[3, 6], [9, 9], [5, 4]], np.int32), np.array([2, 3, 6], np.int32), np.array([-1, 0, 0], np.int32))
    drafting.accept([3, 6], tree)
    assert roots(drafting.propose(np.array([1, 2, 3, 6], np.int32), 8))[0] == 5


def test_two_tokens_lead_and_one_fills_up() -> None:
    """After "1 2" what was said there is likeliest; what was said after "5 2" follows."""
    memory = Tenant()
    drafting = begin(memory, [1, 2])
    drafting.accept([], chain_feedback([1, 2, 5, 2], [[2, 0], [6, 0], [2, 0], [7, 0]]))
    found = roots(drafting.propose(np.array([1, 2], np.int32), 8))
    assert found[0] == 6 and 7 in found


def test_what_was_likely_and_not_said_comes_next() -> None:
    """A token the target weighed at the last position is drafted after another was said."""
    drafting = begin(Tenant(), [1, 2])
    drafting.accept([3], chain_feedback([2], [[3, 8, 6]]))
    found = drafting.propose(np.array([1, 2, 3], np.int32), 8)
    assert {8, 6} <= set(roots(found)) and roots(found).index(8) < roots(found).index(6)


def test_probabilities_come_to_be_what_is_observed() -> None:
    """A first-rank successor that is right one time in four comes to be drafted with a quarter."""
    drafting = begin(Tenant(), [0, 1])
    rng = np.random.default_rng(3)
    for _ in range(800):
        drafting.accept([2], chain_feedback([1], [[2, 3]]))
        drafting.accept([1], chain_feedback([2], [[1 if rng.random() < 0.25 else 4, 5]]))
    context = np.array([1, 2], np.int32)
    drafting.accept([2], chain_feedback([1], [[2, 3]]))
    draft = drafting.propose(context, 8)
    draft.validate(8)
    assert draft.probs[draft.parents < 0].sum() <= 1.001


def test_propose_changes_nothing() -> None:
    """Asked twice it says the same."""
    drafting = begin(Tenant(), [4, 9, 4])
    drafting.accept([], chain_feedback([4, 9], [[7, 8], [4, 5]]))
    first, second = (drafting.propose(np.array([4, 9, 4], np.int32), 12) for _ in range(2))
    assert paths(first) == paths(second) and len(first) == 12


def test_feedback_that_was_not_asked_for_teaches_nothing() -> None:
    """A worker that returns no rows leaves the source with what is common."""
    memory = Tenant()
    drafting = begin(memory, [1, 2])
    drafting.accept([3, 4], NOTHING)
    drafting.propose(np.array([1, 2, 3, 4], np.int32), 4).validate(8)
    assert not len(memory.state("recycle", Successors))


def taught(memory: Tenant, **options: Any) -> Drafting:
    """A drafting of a request in which 6 followed "1 2"."""
    drafting = begin(memory, [1, 2], **options)
    drafting.accept([6], chain_feedback([2], [[6, 0]]))
    drafting.close()
    return drafting


def test_requests_of_a_tenant_share_and_those_of_others_do_not() -> None:
    """The next request drafts what one taught; another tenant's does not."""
    memory, other = Tenant(), Tenant()
    taught(memory)
    assert roots(begin(memory).propose(np.array([1, 2], np.int32), 8))[0] == 6
    assert 6 not in begin(other).propose(np.array([1, 2], np.int32), 8).tokens


def test_a_request_that_is_not_learned_from_leaves_nothing() -> None:
    """It draws on what there is and may use its own, but the next does not see it."""
    memory = Tenant()
    context = np.array([1, 2], np.int32)
    private = taught(memory, learn=False)
    private.accept([1, 2], chain_feedback([6, 1], [[1, 0], [2, 0]]))
    assert roots(private.propose(context, 8))[0] == 6
    assert 6 not in begin(memory).propose(context, 8).tokens
    taught(memory)
    assert roots(begin(memory, learn=False).propose(context, 8))[0] == 6


def test_a_request_without_history_draws_on_nothing_and_teaches_all_the_same() -> None:
    """`use_history` switches what it may use, `learn` what it leaves."""
    memory = Tenant()
    context = np.array([1, 2], np.int32)
    taught(memory, use_history=False)
    assert 6 not in begin(memory, use_history=False).propose(context, 8).tokens
    assert roots(begin(memory).propose(context, 8))[0] == 6


def test_rows_survive_a_restart_until_their_time_is_over(tmp_path: Path) -> None:
    """Saved and loaded they draft the same; those heard before the oldest time are gone, on disk and in memory."""
    now = time.time()
    memory = Tenant(clock=lambda: now)
    taught(memory)
    disk = Memory(tmp_path)
    assert disk.save("m", "t", "recycle", memory.states["recycle"].arrays())
    loaded = disk.load("m", "t", "recycle")
    assert loaded is not None
    again = Tenant({"recycle": loaded}, clock=lambda: now)
    context = np.array([1, 2], np.int32)
    assert paths(begin(again).propose(context, 8)) == paths(begin(memory).propose(context, 8))
    assert len(without_old(loaded, now - 120)["keys"]) == 2
    assert not len(without_old(loaded, now + 120)["keys"])
    late = Tenant({"recycle": loaded}, clock=lambda: now + 1000, retention=500)
    assert 6 not in begin(late).propose(context, 8).tokens


@pytest.mark.parametrize(
    "change",
    [
        {"keys": np.zeros(3, np.uint64)},
        {"rows": np.zeros((2, 3), np.int32)},
        {"rows": np.full((2, K), -7, np.int32)},
        {"stamps": np.zeros(2, np.float64)},
        {"hits": np.zeros(5), "trials": np.zeros(5)},
        {"hits": np.full(kernels.NUM_SIGNS, np.nan)},
        {"hits": np.full(kernels.NUM_SIGNS, 2.0)},
    ],
    ids=["count", "width", "ids", "type", "signs", "nan", "more hits than trials"],
)
def test_what_makes_no_sense_is_not_loaded(change: Mapping[str, NDArray[Any]]) -> None:
    """Arrays that cannot have been saved so are refused, so a tenant begins anew."""
    memory = Tenant()
    taught(memory)
    saved = {**memory.states["recycle"].arrays(), **change}
    with pytest.raises((ValueError, KeyError)):
        Successors(saved)
    assert without_old(saved, 0.0) == {}
    begin(Tenant({"recycle": saved})).propose(np.array([1, 2], np.int32), 4)


# ---- what corpora say of a token that the target was not heard after


def corpus(root: Path, version: str, documents: Sequence[Sequence[int]]) -> Path:
    """A version of a corpus of small ids."""
    named = [(f"doc{i}", np.array(tokens, np.int32)) for i, tokens in enumerate(documents)]
    return write_version(root, "code", version, named, fingerprint="ids", vocab_size=100)


def test_an_unheard_token_goes_on_as_it_does_in_the_corpora(tmp_path: Path) -> None:
    """What follows it most often there is drafted below the root, until the target has been heard after it; then no more."""
    context = np.array([1, 2], np.int32)
    with Datastore.open(corpus(tmp_path, "v1", [[2, 50] * 1500, [2, 60] * 1000, [2, 70]])) as store:
        drafting = begin(Tenant(), [1, 2], corpora={"code": store})
        draft = drafting.propose(context, 12)
        draft.validate(100)
        assert roots(draft)[:2] == [50, 60] and 70 not in draft.tokens
        drafting.accept([50], NOTHING)
        assert roots(drafting.propose(np.array([1, 2, 50], np.int32), 12))[0] == 2
        drafting.accept([1, 2], chain_feedback([50, 1, 2], [[1, 0], [2, 0], [7, 0]]))
        assert not {50, 60} & set(roots(drafting.propose(np.array([1, 2, 50, 1, 2], np.int32), 12))[:1])
        drafting.accept([1, 2], chain_feedback([2, 1], [[7, 0], [2, 0]]))
        assert roots(drafting.propose(np.array([2, 1, 2], np.int32), 12))[0] == 7
        assert 60 not in roots(drafting.propose(np.array([2, 1, 2], np.int32), 12))


def test_corpora_count_alike(tmp_path: Path) -> None:
    """Of two corpora, shares are added: the larger one does not drown the smaller."""
    large = Datastore.open(corpus(tmp_path / "a", "v1", [[2, 50] * 9000, [2, 60] * 3000]))
    small = Datastore.open(corpus(tmp_path / "b", "v1", [[2, 60] * 1500, [2, 61] * 300]))
    drafting = begin(Tenant(), [1, 2], corpora={"large": large, "small": small})
    assert roots(drafting.propose(np.array([1, 2], np.int32), 12))[:3] == [60, 50, 61]


def test_nothing_of_a_corpus_is_remembered(tmp_path: Path) -> None:
    """After a document was deleted, or without the corpus, what only it said is not drafted, nor for the same tenant; and
    nothing of it is in what would be saved.
    """
    memory = Tenant()
    context = np.array([1, 2], np.int32)
    base = corpus(tmp_path, "v1", [[2, 50] * 3000, [2, 60] * 2000])
    with Datastore.open(base) as store:
        first = begin(memory, [1, 2], corpora={"code": store})
        assert 50 in first.propose(context, 12).tokens
        first.accept([9], NOTHING)
        first.close()
    assert not len(memory.states["recycle"].arrays()["keys"])
    for most_deleted in (0.0, 1.0):
        path = write_update(tmp_path, "code", f"v{most_deleted}", base, [], removed=["doc0"], most_deleted=most_deleted)
        with Datastore.open(path) as store:
            assert 50 not in begin(memory, [1, 2], corpora={"code": store}).propose(context, 12).tokens
    assert not {50, 60} & set(begin(memory, [1, 2]).propose(context, 12).tokens.tolist())


def test_counts_from_before_corpora_were_asked_are_kept() -> None:
    """Saved counts of candidates that no corpus named are the first part of all counts there are."""
    memory = Tenant()
    taught(memory)
    saved = memory.states["recycle"].arrays()
    old = {**saved, "hits": saved["hits"][: kernels.NOT_HINTED], "trials": saved["trials"][: kernels.NOT_HINTED]}
    assert saved["trials"].sum() > 0
    assert Successors(old).trials.tolist() == saved["trials"].tolist()
