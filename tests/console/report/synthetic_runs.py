"""Run directories generated from formulas, with any length and any defect."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from grpo_recipes.console.sweep.folder import Sweep
from grpo_recipes.runs.rundir import write_json

RECIPE = {
    "model_name_or_path": ("Qwen/Qwen2.5-1.5B-Instruct", "config_math.yaml:3"),
    "dataset_name": ("openai/gsm8k", "config_math.yaml:8"),
    "beta": (0.04, "config_math.yaml:20"),
    "learning_rate": (1e-6, "--learning_rate"),
    "run_root": ("runs", "RUN_ROOT"),
    "seed": (1, "config_math.yaml:24"),
    "system_prompt": ("Think.\n# not an origin\nAnswer in <answer> tags.", "config_math.yaml:9"),
}


def make_run(
    root: Path,
    name: str = "math-20261120-101500",
    *,
    steps: int = 60,
    seed: int = 1,
    lift: float = 0.5,
    samples: list[dict[str, Any]] | None = None,
    summary: dict[str, Any] | None = None,
    recipe: dict[str, tuple[Any, str]] | None = None,
    objective: str | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Create a run directory with the files of launcher and trainer.

    Args:
        root: folder it is made in.
        name: of the run directory.
        steps: rows of metrics.jsonl.
        seed: of the noise, and the recipe's.
        lift: how much the reward rises.
        samples: sampled completions of every step, instead of two harmless ones.
        summary: keys that differ.
        recipe: keys that differ, each with its origin.
        objective: makes it a MaxEnt run.
        without: files left out.
    """
    folder = root / name
    folder.mkdir(parents=True)
    noise = random.Random(seed)
    rows = [_row(step, steps, lift, noise) for step in range(1, steps + 1)]
    if objective:
        rows = [row | _weights(row["step"] / steps) for row in rows]
        recipe = {"maxent_objective": (objective, "config_math.yaml:30"), **(recipe or {})}
    write_json(folder / "run.json", _identity(name))
    write_json(folder / "plan.json", _plan() | ({"task": "maxent"} if objective else {}))
    write_json(folder / "summary.json", {**_summary(rows), **(summary or {})})
    settings = {**RECIPE, "seed": (seed, "config_math.yaml:24"), **(recipe or {})}
    (folder / "recipe.yaml").write_text(_recipe(settings))
    _write_rows(folder / "metrics.jsonl", rows)
    _write_rows(folder / "samples.jsonl", [_scored(row, noise, samples) for row in rows])
    _write_rows(folder / "eval.jsonl", [_evaluation(row) for row in rows if row["step"] % max(1, steps // 6) == 0])
    for file in without:
        (folder / file).unlink()
    return folder


def make_sweep(
    root: Path,
    rates: tuple[str, ...] = ("1e-6", "3e-6"),
    seeds: tuple[int, ...] = (1, 2, 3),
    statuses: dict[str, str] | None = None,
) -> Sweep:
    """Create a sweep directory of synthetic runs. The reward rises with the learning rate."""
    cells = []
    for rate in rates:
        for seed in seeds:
            name = f"learning_rate={rate},seed={seed}"
            status = (statuses or {}).get(name, "completed")
            summary = {"status": status, "cause": None if status == "completed" else "a cause"}
            recipe: dict[str, tuple[Any, str]] = {
                "learning_rate": (float(rate), "--learning_rate"),
                "wandb_run_group": ("x", "grpo sweep"),
            }
            lift = 0.5 * float(rate) / 3e-6
            make_run(root / "cells", name, steps=30, seed=seed, lift=lift, summary=summary, recipe=recipe)
            cells.append({"name": name, "values": {"learning_rate": rate, "seed": str(seed)}})
    record = {"name": "lr", "axes": {"learning_rate": rates, "seed": seeds}, "cells": cells, "jobs": []}
    write_json(
        root / "sweep.json", {**record, "timestamp": "stamp", "fingerprint": "", "command": "grpo sweep", "code": {}}
    )
    return Sweep.read(root)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _recipe(settings: dict[str, tuple[Any, str]]) -> str:
    from grpo_recipes.recipe import Recipe, Value

    return Recipe(Path("x.yaml"), {key: Value(value, origin) for key, (value, origin) in settings.items()}).as_yaml()


def _row(step: int, steps: int, lift: float, noise: random.Random) -> dict[str, Any]:
    done = step / steps
    reward = 0.2 + lift * (1 - math.exp(-3 * done)) + noise.gauss(0, 0.03)
    sample, update = 4 + noise.random(), 3 + noise.random()
    save = 9.0 if step % 100 == 1 and step > 1 else 0.0
    return {
        "step": step,
        "max_steps": steps,
        "loss": noise.gauss(0, 0.01),
        "grad_norm": 40.0 if step == steps // 2 else 0.4 + 0.1 * noise.random(),
        "learning_rate": 1e-6 * (1 - done),
        "num_tokens": 40_000.0 * step,
        "completions/mean_length": 300 - 80 * done + noise.gauss(0, 8),
        "completions/min_length": 20.0 + noise.randrange(30),
        "completions/max_length": 900.0 + noise.randrange(100),
        "completions/clipped_ratio": max(0.0, 0.4 - done + noise.gauss(0, 0.02)),
        "rewards/pure_accuracy_math/mean": reward - 0.1,
        "rewards/pure_accuracy_math/std": 0.4,
        "rewards/format_tags/mean": min(1.0, 0.5 + done),
        "rewards/math_verify/no_verdict": 0.02 * noise.random(),
        "reward": reward,
        "reward_std": 0.3 - 0.1 * done,
        "frac_reward_zero_std": 0.2 + 0.2 * done,
        "sampling/sampling_logp_difference/mean": 0.004 + 0.001 * noise.random(),
        "sampling/sampling_logp_difference/max": 0.1 + 0.1 * noise.random(),
        "kl": 0.02 * done + 0.002 * noise.random(),
        "entropy": 0.5 * math.exp(-done) + noise.gauss(0, 0.01),
        "clip_ratio/low_mean": 0.0,
        "tools/calls": 1 - 0.2 * done,
        "tokens_per_second": 5000 + noise.gauss(0, 300),
        "seconds/sample": sample,
        "seconds/score": 0.4,
        "seconds/sync": 0.6,
        "seconds/save": save,
        "seconds/update": update,
        "seconds/step": sample + update + 1.0 + save,
    }


def _weights(done: float) -> dict[str, Any]:
    """Return metrics of the weights: tau and beta change, and wrong answers have no weight in the last tenth."""
    return {
        "beta": 0.04 + 0.02 * done,
        "maxent/tau": 0.5 - 0.3 * done,
        "maxent/beta": 1.5,
        "maxent/weight_entropy": 1.9 - 0.8 * done,
        "maxent/weight_entropy_min": 1.2 - 0.8 * done,
        "maxent/weight_entropy_max": 2.07,
        "maxent/eff_rollouts": math.exp(1.9 - 0.8 * done),
        "maxent/incorrect_mass": 0.8 - 0.7 * done,
        "maxent/target_ratio": "inf" if done > 0.9 else 2 + 20 * done,
    }


def _scored(row: dict[str, Any], noise: random.Random, samples: list[dict[str, Any]] | None) -> dict[str, Any]:
    rewards = [round(max(0.0, min(1.5, row["reward"] + noise.gauss(0, 0.3))), 4) for _ in range(64)]
    return {"step": row["step"], "rewards": [*rewards, None], "samples": two_samples() if samples is None else samples}


def two_samples() -> list[dict[str, Any]]:
    """Return a right and a wrong completion of one prompt."""
    prompt = "[user]\nA train has 3 cars of 12 seats.  How many seats has it?"
    scores = {"pure_accuracy_math": 1.0, "format_tags": 0.5}
    right = {"completion": "3 times 12 is 36.\n\n<answer>36</answer>", "reward": 1.5, "advantage": 0.9321}
    wrong = {"completion": "\t3 + 12 = 15 \n<answer>15</answer>", "reward": 0.0, "advantage": -1.1}
    return [
        {"prompt": prompt, "answer": "36", "rewards": scores, **right},
        {"prompt": prompt, "answer": "36", "rewards": {"pure_accuracy_math": 0.0, "format_tags": None}, **wrong},
    ]


def token_view(tokens: list[str], advantages: str, logprobs: str = "") -> dict[str, Any]:
    """Return the tokens of a sample as the trainer records them."""
    lengths = " ".join(str(len(token)) for token in tokens)
    view = {"text": "".join(tokens), "lengths": lengths, "advantages": advantages}
    return {"token_view": view | ({"logprobs": logprobs} if logprobs else {})}


def game_samples(turns: int = 10, **ended: str) -> list[dict[str, Any]]:
    """Return a sample of a game that a Doctor wins in ``turns`` turns. ``ended`` gives the reason of an early end."""
    begun = [{"role": "system", "content": "You are Player 2."}, {"role": "user", "content": "[GAME] Night falls."}]
    played: list[dict[str, Any]] = []
    for turn in range(1, turns + 1):
        phase, valid = ("Night-Doctor", "Day-Voting")[turn % 2], turn != 2
        info = {"legal": float(valid), "role": "Doctor", "phase": phase}
        info |= {} if valid else {"illegal": "[7] is no target in Day-Voting; valid: [0], [1]"}
        messages = [{"role": "user", "content": f"[Player 0] I trust round {turn}."}]
        played.append(
            {"action": f"[{turn % 5}] of turn {turn}", "reward": 0.1 * valid, "info": info, "messages": messages}
        )
    if ended.get("failed"):
        played[-1] = {"action": played[-1]["action"]}
    elif not ended:
        last = {"role": "Doctor", "won": 1.0, "end": "The village has eliminated all members of the mafia."}
        played[-1] |= {"reward": 1.1, "info": {"legal": 1.0, **last}, "messages": []}
    info = {"role": "Doctor", "phase": "Night-Doctor"}
    episode = {"environment": "textarena:SecretMafia-v0", "seed": 77, "messages": begun, "info": info, "turns": played}
    scores = {"reward": None if ended.get("failed") else 1.9, "advantage": 0.5, "rewards": {"environment": 1.9}}
    return [{"prompt": "[user]\nNight falls.", "completion": "", "answer": None, **scores, "episode": episode | ended}]


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": row["step"],
        "eval_reward": row["reward"] - 0.05,
        "eval_completions/mean_length": 280.0 - row["step"],
    }


def _identity(name: str) -> dict[str, Any]:
    return {
        "run_name": name.rsplit("-", 2)[0],
        "timestamp": "-".join(name.rsplit("-", 2)[1:]),
        "host": "node1",
        "job": None,
        "flavour": "cuda",
        "python": "3.11.7",
        "code": {"commit": "0123456789abcdef", "dirty": False},
        "versions": {"torch": "2.13.0", "trl": "1.16.0"},
        "cores": 64,
    }


def _plan() -> dict[str, Any]:
    batch = {"completions": 512, "num_generations": 8, "world_size": 7, "per_device": 8, "accumulation": 8}
    process = {"argv": ["python", "-m", "server", "--model", "a b"], "environment": {"API_KEY": "hush", "A": "1"}}
    return {
        "task": "grpo",
        "flavour": "cuda",
        "mode": "server",
        "bridge": "nccl",
        "why_bridge": "GPUs",
        "batch": batch,
        "processes": [
            {"role": "server", "gpus": ["0"], "log": "logs/liv_vllm_math.log", **process},
            {"role": "trainer", "gpus": ["1", "2"], "log": "logs/liv_train_math.log", **process},
        ],
        "notes": ["ports are those of the job"],
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "status": "completed",
        "smoke": False,
        "restarts": 1,
        "steps": len(rows),
        "exit_code": 0,
        "failed_rank": None,
        "cause": None,
        "benchmarks": {
            "math_500": {"pass@1": 0.512, "pass@1_ci": [0.468, 0.556], "pass@4": 0.7, "problems": 500, "samples": 4},
            "gsm8k": {"pass@1": 0.731, "pass@1_ci": [0.706, 0.754], "problems": 1319, "samples": 1},
        },
    }
