"""Compare vLLM's greedy tokens and log-probs with those of transformers, for each dtype and with CUDA graphs.

    python bench/gpu_engine.py MODEL OUT.json [--cpu]

Writes for each kind of engine, such as "bfloat16 eager", how many of the prompts got the same tokens, and the largest
and the mean difference of the log-probs of vLLM's tokens. An engine that fails has its error instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if "--cpu" in sys.argv:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

PROMPTS = [[3 + (7 * index + position) % 20 for position in range(6 + index)] for index in range(8)]  # token IDs
NEW_TOKENS = 8
MEMORY = 0.3  # fraction of the GPU, or of the memory of a machine without a GPU, for each engine


def score(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """Return transformers' log-prob of each token of a completion."""
    ids = torch.tensor([prompt + completion], device=model.device)
    log_probs = model(ids).logits[0].float().log_softmax(-1)
    return [float(log_probs[len(prompt) + index - 1, token]) for index, token in enumerate(completion)]


def generate_greedy(model: Any, prompt: list[int]) -> list[int]:
    """Return transformers' most likely next ``NEW_TOKENS`` tokens."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([ids], device=model.device)).logits[0, -1]
        ids.append(int(logits.float().argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def compare(folder: str, dtype: str, eager: bool, cpu: bool) -> dict[str, Any]:
    """Start an engine in this process, sample from it, and score its tokens with transformers."""
    began = time.perf_counter()
    llm = LLM(
        model=folder, dtype=dtype, enforce_eager=eager, max_model_len=256, logprobs_mode="processed_logprobs", seed=0,
        gpu_memory_utilization=MEMORY,
    )  # fmt: skip
    start_seconds = time.perf_counter() - began
    options = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, options, use_tqdm=False)]
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to("cpu" if cpu else "cuda").eval()
    )
    differences, same_tokens = [], 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.token_ids)
        same_tokens += tokens == generate_greedy(model, prompt)
        log_probs = [choices[token].logprob for token, choices in zip(tokens, output.logprobs, strict=True)]
        differences += [abs(a - b) for a, b in zip(log_probs, score(model, prompt, tokens), strict=True)]
    del llm, model
    gc.collect()
    if not cpu:
        torch.cuda.empty_cache()
    return {
        "same_tokens": same_tokens, "prompts": len(PROMPTS), "difference_mean": statistics.mean(differences),
        "difference_max": max(differences), "start_seconds": round(start_seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Compare each kind of engine, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true", help="vLLM's CPU build, without CUDA graphs")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for eager in (True,) if options.cpu else (True, False):
            name = f"{dtype} {'eager' if eager else 'with CUDA graphs'}"
            try:
                results[name] = compare(options.model, dtype, eager, options.cpu)
            except Exception as error:
                results[name] = {"failed": f"{type(error).__name__}: {error}"[:1000]}
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
