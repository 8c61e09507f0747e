"""Other people's drafters on the token streams of `replay.py`, by their own code, in environments of their own.

    PEERS/bin/python benchmarks/replay_peers.py STREAMS.npz 16
    PEERS/bin/python benchmarks/replay_peers.py versions

`replay.py --peers` calls it. What is not installed there is left out. Python 3.9 will do, for which REST has its wheel. Rows:

    lookup          transformers' prompt lookup with its defaults: n-grams of up to 2 tokens, 10 drafted (no more than the
                    budget)
    lookup_best     the same with n-grams of up to 3 tokens and as many drafted as the budget has
    suffix          arctic-inference's suffix decoding as vLLM calls it: chains, from the request's own tree or that of all
                    answers before, depth 24, 1.0 tokens drafted for a token matched, nothing below .1
    suffix_tree     the same with its tree mode
    suffix_best     its tree mode with depth 64, 4.0 tokens for a token matched, and nothing too unlikely
    rest            REST's own draftretriever (0.1.0, a wheel in its repository) over the corpus, as REST calls it: spans of 16
                    down to 2 tokens, at most 5,000 places, the budget as the size of its draft buffer, 10 tokens deep (no
                    deeper than the budget, where it would end the process)
    aded            the draftretriever of the package index (0.1.1), which is ADED's (arXiv 2407.12021), called in the same way:
                    a table of trigrams, which learns from what it is asked, and a search over it

A peer is given the request's text up to the last token and answers with a draft; all that agrees with what was recorded is
accepted, and one token more is emitted. Both kinds of draftretriever drop tokens above 65,535, so they are given ids in the
order in which they come up. Which of equally frequent paths REST takes is left to a hash map, so its figures differ by a
percent from run to run. The last line is JSON: row -> tokens per step.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import numpy as np


def chain_reach(draft, ahead):
    """How many of the coming tokens a chain holds."""
    n = 0
    while n < min(len(draft), len(ahead)) and draft[n] == ahead[n]:
        n += 1
    return n


def tree_reach(tokens, parents, ahead):
    """The same for a tree: parents[i] < i, -1 the root."""
    depth, best = {-1: 0}, 0
    for i, (token, parent) in enumerate(zip(tokens, parents)):  # noqa: B905 (Python 3.9)
        at = depth.get(parent)
        if at is not None and at < len(ahead) and ahead[at] == token:
            depth[i] = at + 1
            best = max(best, at + 1)
    return best


def tokens_per_step(turns, begin):
    """Mean over all steps. `begin(number, prompt)` gives three functions: reach(text, ahead), accept(tokens), end()."""
    num_tokens = num_steps = 0
    for number, (prompt, answer) in enumerate(turns):
        reach, accept, end = begin(number, prompt)
        text, start, at = np.concatenate([prompt, answer]), len(prompt), len(prompt)
        while at < len(text):
            taken = min(reach(text[:at], text[at:]), len(text) - at - 1)
            accept(text[at : at + taken + 1])
            at += taken + 1
            num_steps += 1
        end()
        num_tokens += len(text) - start
    return round(num_tokens / num_steps, 4)


def lookup(size, ngram, drafted):
    """transformers' prompt lookup."""
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = PromptLookupCandidateGenerator(
        num_output_tokens=min(drafted, size), max_matching_ngram_size=ngram, max_length=1 << 30, eos_token_id=None
    )

    def begin(number, prompt):
        def reach(text, ahead):
            ids = torch.from_numpy(text.astype(np.int64))[None]
            candidates, _ = generator.get_candidates(ids)
            return chain_reach(candidates[0, len(text) :].tolist(), ahead)

        return reach, lambda tokens: None, lambda: None

    return begin


def suffix(size, depth, factor, least, tree):
    """arctic-inference's suffix decoding."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=100_000)

    def begin(number, prompt):
        cache.start_request(number, prompt.tolist())

        def reach(text, ahead):
            draft = cache.speculate(
                number,
                text[-depth:].tolist(),
                max_spec_tokens=size,
                max_spec_factor=factor,
                min_token_prob=least,
                use_tree_spec=tree,
            )
            return tree_reach(draft.token_ids, draft.parents, ahead)

        return reach, lambda tokens: cache.add_active_response(number, tokens.tolist()), lambda: cache.stop_request(number)

    return begin


def retriever(size, reader):
    """REST's lookup, as `rest/model/utils.py` calls it."""

    def begin(number, prompt):
        def reach(text, ahead):
            for span in range(16, 1, -1):
                if len(text) < span:
                    continue
                try:
                    paths = reader.search(text[-span:].tolist(), choices=size, long=min(size, 10))[0]
                except ValueError:  # its tree has more nodes than it was allowed
                    return 0
                if paths:
                    return max(chain_reach(path, ahead) for path in paths)
            return 0

        return reach, lambda tokens: None, lambda: None

    return begin


def renumbered(*arrays):
    """The arrays with ids in the order in which they come up; -1 (a document's end) becomes an id of its own."""
    _, first, inverse = np.unique(np.concatenate(arrays), return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    dense = place[inverse].astype(np.int32)
    return np.split(dense, np.cumsum([len(a) for a in arrays])[:-1])


def pairs(prompts, answers, data):
    """The turns: (prompt, answer)."""
    prompts = np.split(prompts, np.cumsum(data["prompt_lengths"])[:-1])
    answers = np.split(answers, np.cumsum(data["answer_lengths"])[:-1])
    return list(zip(prompts, answers))  # noqa: B905 (Python 3.9)


def main(path, size):
    data = np.load(path)
    turns = pairs(data["prompts"], data["answers"], data)
    rows = {}
    if importlib.util.find_spec("transformers"):
        rows["lookup"] = lookup(size, 2, 10)
        rows["lookup_best"] = lookup(size, 3, size)
    if importlib.util.find_spec("arctic_inference"):
        rows["suffix"] = suffix(size, 24, 1.0, 0.1, False)
        rows["suffix_tree"] = suffix(size, 24, 1.0, 0.1, True)
        rows["suffix_best"] = suffix(size, 64, 4.0, 0.0, True)
    found = {name: tokens_per_step(turns, row) for name, row in rows.items()}
    if len(data["corpus"]) and importlib.util.find_spec("draftretriever"):
        import draftretriever

        corpus, prompts, answers = renumbered(data["corpus"], data["prompts"], data["answers"])
        with tempfile.TemporaryDirectory() as folder:
            index = str(Path(folder) / "corpus.idx")
            writer = draftretriever.Writer(index, vocab_size=int(corpus.max()) + 1)
            writer.add_entry(corpus.tolist())
            writer.finalize()
            del writer  # it writes once more when it goes, so it must go before the folder does
            reader = draftretriever.Reader(index_file_path=index)
            name = "rest" if metadata.version("draftretriever") == "0.1.0" else "aded"
            found[name] = tokens_per_step(pairs(prompts, answers, data), retriever(size, reader))
    print(json.dumps(found))


def versions():
    """Which peers there are."""
    for name in ("transformers", "arctic-inference", "draftretriever"):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} none"


if __name__ == "__main__":
    if sys.argv[1] == "versions":
        print("\n".join(versions()))
    else:
        main(sys.argv[1], int(sys.argv[2]))
