"""Measure the conversion of Atropos's scored groups to arrays and back, in sequences of 256 tokens per second and core.

    python bench/atropos_conversion.py [--rounds 9] [--out bench/results/atropos_conversion.json]

Each group has 8 sequences in run-api's format: a prompt of 64 tokens and completions of 192 tokens. Every fifth group
has a turn of the environment in its completions, and per-token advantages. Log-probs are float32, like vLLM's.

* ``to arrays``: the trainer's work on each parsed group: read it, check it, make arrays;
* ``from arrays``: the reverse; ``there and back`` is the sum. In every round the groups must come back unchanged;
* ``parse``: only the JSON parsing of run-api's answer, which comes first.

Target: 20,000 per second in each direction.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_by import begin, write_record

from grpo_recipes.extensions.atropos.group import (
    UNTRAINED,
    Group,
    find_group_problem,
    from_trajectories,
    to_trajectories,
)
from grpo_recipes.paths import find_code_root

GROUP, PROMPT, COMPLETION, VOCABULARY = 8, 64, 192, 150_000


def main() -> None:
    """Measure and write the result."""
    options = _options()
    origin = begin(options.out, "numpy")
    rates: dict[str, list[float]] = {}
    for seed in range(options.rounds + 1):
        for name, seconds in measure(wire_groups(options.groups, seed)).items():
            if seed:  # the first round warms up
                rates.setdefault(name, []).append(options.groups * GROUP / seconds)
    result = {
        "what": f"sequences of {PROMPT + COMPLETION} tokens a second, by CPU time, median of the rounds",
        **{
            name: {"median": round(statistics.median(raw)), "raw": list(map(round, raw))} for name, raw in rates.items()
        },
        "sequences": options.groups * GROUP,
        "group": GROUP,
    }
    write_record(options.out, result, origin)
    print(json.dumps(result, indent=1))


def measure(texts: list[str]) -> dict[str, float]:
    """Return the CPU seconds of each conversion; raise an AssertionError if a group comes back changed."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        start = time.process_time()
        results = [work(item) for item in items]
        seconds[name] = time.process_time() - start
        return results

    plain = timed("parse", json.loads, texts)
    rows = timed("to arrays", to_arrays, plain)
    back = timed("from arrays", from_arrays, rows)
    seconds["there and back"] = seconds["to arrays"] + seconds["from arrays"]
    assert back == plain, "a group came back changed"
    return seconds


def to_arrays(plain: Any) -> list[Any]:
    """Return the trajectories of a group of the wire, looked through as the trainer does."""
    group = Group.from_json(plain)
    assert find_group_problem(group, size=GROUP, longest=PROMPT + COMPLETION, vocabulary=VOCABULARY) is None
    return to_trajectories(group)


def from_arrays(rows: list[Any]) -> dict[str, Any]:
    """Return a group of the wire from its trajectories."""
    return from_trajectories(rows).to_json()


def wire_groups(count: int, seed: int) -> list[str]:
    """Return groups as JSON, each on its own."""
    draw = random.Random(seed)
    return [json.dumps(_group(draw, several_turns=index % 5 == 0).to_json()) for index in range(count)]


def _group(draw: random.Random, several_turns: bool) -> Group:
    prompt = draw.choices(range(VOCABULARY), k=PROMPT)
    tokens = [prompt + draw.choices(range(VOCABULARY), k=COMPLETION) for _ in range(GROUP)]
    trained = [at >= PROMPT and not (several_turns and 120 <= at < 150) for at in range(PROMPT + COMPLETION)]
    return Group(
        tokens=tokens,
        masks=[
            [token if is_trained else UNTRAINED for token, is_trained in zip(row, trained, strict=True)]
            for row in tokens
        ],
        scores=[float(draw.random() < 0.5) for _ in tokens],
        inference_logprobs=[
            [_float32(-draw.expovariate(2)) if is_trained else 1.0 for is_trained in trained] for _ in tokens
        ],
        advantages=[[float(is_trained) for is_trained in trained] for _ in tokens] if several_turns else None,
        generation_params={"policy_version": 3, "temperature": 1.0},
        overrides=[{} for _ in tokens],
        env_id=0,
    )


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--groups", type=int, default=500, help="of each round")
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/atropos_conversion.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
