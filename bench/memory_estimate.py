"""Compare `grpo plan`'s memory estimate with the peak of real runs on CPU: trainer and vLLM server, at several sizes.

    python bench/memory_estimate.py [--out bench/results/memory_estimate.json] [--only NAME ...]
    python bench/memory_estimate.py --recompute

Every case is a `grpo launch` of the smoke recipe with a random Qwen2 model: real server, real trainer, weights sent, a
checkpoint written. The peak of a process is the kernel's (VmHWM). The server's peak is the sum over its processes. The
case `constant` is the smoke model, with weights too small to matter: its peaks are the constants of
``plan.workload``, and it does not count among the sizes. Random models do not stop early, so completions have the
recipe's maximum length. With ``--only``, the other cases of the file keep their records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from made_by import begin, finished
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_recipes import smoke
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.models import compute_model_sizes
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.plan.workload import Workload
from grpo_recipes.recipe import read_recipe
from grpo_recipes.runs.rundir import read_json, write_json

WHAT = "peak bytes of grpo launch's processes on CPU, and the estimates of grpo plan"
RECIPE = "recipes/smoke/grpo.yaml"
VOCABULARY = 8192
LEAST_LOOKS = 10  # a process seen fewer times is a fork about to become a small program: its pages are its parent's
# Sizes: hidden, intermediate, layers, tied embeddings. About 21, 56 and 136 million parameters.
MODELS: dict[str, tuple[int, int, int, bool]] = {
    "21M": (384, 1536, 8, True),
    "56M": (512, 2048, 12, False),
    "136M": (768, 3072, 14, False),
}
BATCH = {"prompts_per_step": "2", "num_generations": "8", "max_prompt_length": "7", "max_completion_length": "56",
         "max_steps": "2", "save_steps": "2"}  # fmt: skip
# Name -> (model, flags besides BATCH). A case with another batch or setting shows that its part of the formula counts.
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "constant": ("smoke", {}),
    "21M": ("21M", {"prompts_per_step": "8", "per_device_train_batch_size": "64"}),
    "56M": ("56M", {}),
    "136M": ("136M", {}),
    "56M gradient checkpointing": ("56M", {"gradient_checkpointing": "true"}),
    "56M reference": ("56M", {"beta": "0.04"}),
    "56M LoRA": ("56M", {"use_peft": "true", "lora_r": "16", "lora_target_modules": "all-linear"}),
}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, help="measure only these cases")
    parser.add_argument("--recompute", action="store_true", help="measure nothing: new estimates of the recorded cases")
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/memory_estimate.json")
    options = parser.parse_args()
    origin = begin(options.out, "accelerate", "peft")
    result = read_json(options.out) or {"what": WHAT, "cases": {}}
    for name in [] if options.recompute else options.only or CASES:
        with tempfile.TemporaryDirectory() as folder:
            result["cases"][name] = measure(name, Path(folder)) | finished(origin)
        write(result, options.out, origin)
    write(result, options.out, origin)


def write(result: dict[str, Any], path: Path, origin: dict[str, Any]) -> None:
    """Estimate every case again, in the order of ``CASES``, write all cases and print their ratios."""
    cases = {name: compared(result["cases"][name]) for name in CASES if name in result["cases"]}
    write_json(path, {**result, "cases": cases, "estimates": finished(origin)})
    for name, case in cases.items():
        print(name, {role: case[role]["ratio"] for role in ("trainer", "server")}, flush=True)


def compared(case: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded case with its estimates."""
    model = compute_model_sizes(case["config"])
    work, result = Workload({**case["workload"], **model}), {"parameters": model["parameters"]}
    for role, parts in (("trainer", work.trainer()), ("server", work.server())):
        total, measured = sum(parts.values()), case[role]["measured"]
        result[role] = {
            "measured": measured,
            "estimated": total,
            "ratio": round(total / measured, 4),
            "parts": parts,
        }
    return {**case, **result}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Launch one case in ``folder``.

    Returns:
        Its peaks, and all that the estimate depends on.
    """
    model, extra = CASES[name]
    flags = {**BATCH, **extra, "run_root": str(folder / "runs"), "run_name": "memory"}
    if model != "smoke":
        make_model(*MODELS[model], folder / "model")
        flags["model_name_or_path"] = str(folder / "model")
    peaks = launch([text for key, value in flags.items() for text in (f"--{key}", value)], folder)
    run = next((folder / "runs").glob("memory-*"))
    recipe = read_recipe(run / "recipe.yaml")
    names = Names(run, "memory", "memory", "now")
    plan = make_plan(recipe, Resources("cpu", (), os.cpu_count() or 1), os.environ, names)
    return {
        "trainer": {"measured": peaks["trainer"]},
        "server": {"measured": peaks["server"]},
        "workload": Workload.of(recipe, plan),
        "config": json.loads((Path(plan.model) / "config.json").read_text()),
    }


def make_model(hidden: int, intermediate: int, layers: int, tied: bool, folder: Path) -> None:
    """Random weights and the smoke task's tokenizer, in a vocabulary larger than that needs."""
    tokenizer = smoke.build_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=smoke.MAX_POSITIONS,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def launch(flags: list[str], folder: Path) -> dict[str, int]:
    """Run `grpo launch` to its end.

    Returns:
        Peak bytes of the trainer's rank, and of the server's processes together.
    """
    command = [sys.executable, "-m", "grpo_recipes", "launch", str(find_code_root() / RECIPE), *flags]
    looks: dict[str, dict[int, list[int]]] = {"trainer": {}, "server": {}}
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        while run.poll() is None:
            look(folder / "runs", looks)
            time.sleep(0.1)
    if run.returncode:
        raise SystemExit((folder / "log").read_text())
    return {
        role: sum(max(sizes) for sizes in processes.values() if len(sizes) >= LEAST_LOOKS)
        for role, processes in looks.items()
    }


def look(runs: Path, looks: dict[str, dict[int, list[int]]]) -> None:
    """Note the highest resident size so far of every process that is there now."""
    for record in runs.glob("memory-*/processes/*.json"):
        pid = read_json(record).get("pid")
        if pid is None:
            continue
        if record.name == "rank_0.json":
            note(pid, looks["trainer"])
        elif record.name == "server.json":
            with contextlib.suppress(psutil.NoSuchProcess):
                for process_id in [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]:
                    note(process_id, looks["server"])


def note(pid: int, looks: dict[int, list[int]]) -> None:
    """Record VmHWM of a process while it exists."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("VmHWM:"):
            looks.setdefault(pid, []).append(int(line.split()[1]) * 1024)


if __name__ == "__main__":
    main()
