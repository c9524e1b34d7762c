"""Measure bytes and CPU seconds of rank 0 per sampled token, with our endpoint and with TRL's client, on a real server.

    python bench/wire.py [--rounds 7] [--out bench/results/wire.json]

The client requests 128 completions of exactly 512 tokens from a vLLM server on CPU, one request for each of 16 prompts,
like the trainer: ``arrays`` through our endpoint, ``json`` through TRL's request to ``/v1/completions``. The two take
turns, A B B A ..., with the same seeds. A ratio compares two neighbors.

* ``bytes``: bodies of the answers. The smoke model's vocabulary has fewer than 100 tokens, so its ids are short. A real
  model has more bytes in JSON and equal bytes in arrays.
* ``read``: CPU time to make lists of checked ids and log-probs from the answers. It is measured again from memory,
  because waiting for a server on the same cores costs more.
* ``handed_on``: CPU time of TRL's pickle of these lists for the other ranks.
* ``share``: the sum of both, divided by the wall time of the sampling, which is only a part of a step.

``at_840x1024`` is computed from these values, for the 840 completions of 1,024 tokens of the guide's recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import requests
from made_by import begin, write_record
from trl.generation.vllm_client import VLLMClient

from grpo_recipes import smoke
from grpo_recipes.launch.readiness import wait_until_ready
from grpo_recipes.paths import cache_root, find_code_root
from grpo_recipes.plan.commands import base_environment, run_environment, server_command, server_environment
from grpo_recipes.plan.ports import is_port_free
from grpo_recipes.process.scratch import make_scratch
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.client import Rows
from grpo_recipes.weights.file import FileClient

SERVED = "wire"
PROMPTS, COMPLETIONS, TOKENS = 16, 8, 512
SAMPLED = PROMPTS * COMPLETIONS * TOKENS
GUIDES = 840 * 1024  # tokens of a generation
TARGET = 0.05  # largest share of a step


class JsonClient(FileClient):
    """The client with TRL's request and TRL's parsing of the answer."""

    def _completions(self, prompt: Any, n: int, sampling: dict[str, Any], replica: int | None = None) -> Rows:
        answer = VLLMClient.generate(self, [prompt], n=n, generation_kwargs=sampling)
        return answer["completion_ids"], answer["logprobs"]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/wire.json")
    options = parser.parse_args()
    origin = begin(options.out, "safetensors")
    with served() as (run_dir, url):
        result = measure(run_dir, url, options.rounds)
    write_record(options.out, result, origin)
    print(json.dumps({name: value for name, value in result.items() if name != "raw"}, indent=1))


def measure(run_dir: Path, url: str, rounds: int) -> dict[str, Any]:
    """Generate by both in turn; one generation of each comes before those that count."""
    args = GRPOConfig(output_dir=str(run_dir), use_cpu=True, bf16=False, report_to="none")
    common = {"args": args, "run_dir": run_dir, "seed": None, "stop": StopRequest(run_dir), "base_url": url}
    clients = {"json": JsonClient(**common), "arrays": FileClient(**common)}
    raw: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    for index in range(-1, rounds):
        order = list(clients) if index % 2 else list(reversed(clients))
        rows = {name: generation(clients[name], index) for name in order}
        for name in order:
            rows[name] |= reading(clients[name], rows[name].pop("answers"))
            raw[name] += [rows[name]] if index >= 0 else []
    medians = {name: {key: _median(rows, key) for key in rows[0]} for name, rows in raw.items()}
    return {
        "what": f"{PROMPTS * COMPLETIONS} completions of {TOKENS} tokens, smoke model, CPU",
        "a_token": {
            name: {
                "bytes": round(medians_of_client["bytes"] / SAMPLED, 2),
                "read_microseconds": round(1e6 * medians_of_client["read"] / SAMPLED, 3),
                "handed_on_microseconds": round(1e6 * medians_of_client["handed_on"] / SAMPLED, 3),
            }
            for name, medians_of_client in medians.items()
        },
        "ratio": {key: ratio(raw, key) for key in ("bytes", "read", "handed_on")},
        "share_of_sampling": {
            name: round(statistics.median((row["read"] + row["handed_on"]) / row["wall"] for row in rows), 4)
            for name, rows in raw.items()
        },
        "target_share": TARGET,
        "at_840x1024": {
            name: {
                "megabytes": round(medians_of_client["bytes"] / SAMPLED * GUIDES / 1e6, 1),
                "read_and_handed_on_seconds": round(
                    (medians_of_client["read"] + medians_of_client["handed_on"]) / SAMPLED * GUIDES, 2
                ),
            }
            for name, medians_of_client in medians.items()
        },
        "raw": {name: [{key: round(value, 5) for key, value in row.items()} for row in raw[name]] for name in raw},
    }


def generation(client: FileClient, number: int) -> dict[str, Any]:
    """Generate once; return the answers, their bytes, and wall seconds."""
    noise, answers = random.Random(number), list[requests.Response]()
    prompts = [[noise.randrange(5, 20) for _ in range(20)] for _ in range(PROMPTS)]
    client.session.hooks["response"] = [lambda answer, *_, **__: answers.append(answer)]
    keys = {"max_tokens": TOKENS, "generation_kwargs": {"ignore_eos": True}}
    began = time.perf_counter()
    answer = client.generate_seeded(prompts, [noise.getrandbits(40) for _ in prompts], n=COMPLETIONS, **keys)
    wall = time.perf_counter() - began
    assert sum(map(len, answer["completion_ids"])) == SAMPLED
    return {"answers": answers, "bytes": sum(len(response.content) for response in answers), "wall": wall}


def reading(client: FileClient, answers: list[requests.Response]) -> dict[str, float]:
    """Return the CPU seconds to read the answers again, and to pickle the lists for other ranks."""
    with patch.object(client.session, "post", side_effect=answers):
        spent = time.process_time()
        rows = [client._completions([], COMPLETIONS, {"max_tokens": TOKENS}) for _ in answers]
        read = time.process_time() - spent
    spent = time.process_time()
    pickle.dumps(rows)
    return {"read": read, "handed_on": time.process_time() - spent}


def ratio(raw: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    """The median and the extremes of arrays / json over the rounds."""
    ratios = [arrays[key] / json_row[key] for arrays, json_row in zip(raw["arrays"], raw["json"], strict=True)]
    return {name: round(of(ratios), 4) for name, of in (("median", statistics.median), ("min", min), ("max", max))}


def _median(rows: list[dict[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows)


@contextmanager
def served() -> Iterator[tuple[Path, str]]:
    """A server of the smoke model, and a folder for a run."""
    port = next(port for port in random.sample(range(8000, 9000), 1000) if is_port_free("127.0.0.1", port))
    folder = cache_root(os.environ) / "smoke" / f"sums-{smoke.hash_settings()}"
    smoke.make_smoke_task(folder)
    scratch = make_scratch(os.environ)
    recipe = read_recipe(find_code_root() / "recipes/smoke/grpo.yaml", ("--vllm_max_model_length", str(TOKENS + 64)))
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, scratch.disk, SERVED),
        **server_environment("cpu", None, os.environ),
    }
    os.environ |= {name: environment[name] for name in ("GRPO_TOKEN_FILE", "GRPO_SYNC_DIR", "GRPO_RUN")}
    argv = server_command(recipe, str(folder / "model"), SERVED, "127.0.0.1", port, "cpu")
    argv += ["--hf-overrides", json.dumps({"max_position_embeddings": TOKENS + 64})]  # rotary: no weights depend on it
    server = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        token = scratch.token_file.read_text()
        wait_until_ready(lambda: server.poll() is None, os.getpid(), "127.0.0.1", port, SERVED, token, timeout=600)
        with tempfile.TemporaryDirectory() as run_dir:
            yield Path(run_dir), f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        server.kill()
        scratch.remove()


if __name__ == "__main__":
    main()
