"""Run each part of the main job on this machine's GPUs, and print a table to attach to an issue.

    make gpu
    make gpu GPU_ARGS="--only file nccl"
    python bench/gpu_main_job.py --cpu --only file resume

A stage is a short run of the smoke recipe with other keys. It passes if the run completes, every step has a gradient,
and vLLM and the trainer agree on the log-probs. ``STAGES`` lists the stages and the number of GPUs that they need;
the others are skipped with a reason. The record and the outputs of the commands are in one folder, by default
``build/gpu``. The record is written after each stage.

``--cpu`` runs the stages that need no GPU, in a CPU environment. The exit code is 1 if a stage fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from made_by import begin, finished

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import find_resources, run_nvidia_smi
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.runs.rundir import read_json, read_metrics, write_json

ROOT = find_code_root()
GRPO = str(Path(sys.executable).with_name("grpo"))
SMOKE, SMOKE_MAXENT = ROOT / "recipes/smoke/grpo.yaml", ROOT / "recipes/smoke/maxent.yaml"
SAVED = 75  # exit code of a launch that was asked to save and stop
SECONDS = 600  # limit of one command
# Limits of the mean difference between vLLM's and the trainer's log-probs. On GPUs, vLLM's attention of float32 has the
# precision of TF32.
FLOAT32, BFLOAT16 = 2e-2, 5e-2
HALF_BILLION: dict[str, Any] = {  # the sizes of Qwen2.5-0.5B
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
# Random weights have no right answer, and equal rewards give no gradient.
REWARD = (
    "def by_tokens(completions, completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
)
Keys = Mapping[str, str]


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine, and the folder for outputs."""

    gpus: tuple[str, ...]  # IDs; empty with --cpu
    outputs: Path


@dataclass
class Result:
    """The outcome of a stage."""

    status: str  # passed, failed or skipped
    reason: str = ""  # why it failed or was skipped
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)


class StageFailed(Exception):
    """A stage did not pass; the text is the reason, and ``numbers`` is what was measured until then."""

    def __init__(self, reason: str, numbers: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.numbers = numbers or {}


@dataclass(frozen=True)
class Stage:
    """One part of the main job: a launch with ``keys``, or the function ``run``."""

    keys: Keys = field(default_factory=dict)  # recipe keys that differ from the smoke recipe
    gpus: int = 1  # smallest number of GPUs
    ranks: bool = False  # trains with one process on each GPU, and on CPU with two processes
    no_cpu: str = ""  # why it needs a GPU
    difference: float = FLOAT32  # limit of the mean difference of log-probs
    recipe: Path = SMOKE
    run: Callable[[str, Stage, Machine], dict[str, Any]] | None = None

    def reason_to_skip(self, machine: Machine) -> str:
        """Return why this machine can't run the stage, or an empty text."""
        if not machine.gpus:
            return self.no_cpu
        return f"needs {self.gpus} GPUs" if len(machine.gpus) < self.gpus else ""

    def flags(self, machine: Machine) -> list[str]:
        """Return the recipe keys as flags. If there are too few GPUs, the server shares one with the trainer."""
        keys = dict(self.keys)
        if not machine.gpus and self.ranks:
            keys["num_processes"] = "2"
        elif machine.gpus and self.uses_server_gpu() and len(machine.gpus) < (3 if self.ranks else 2):
            keys["vllm_gpu"] = "shared"
        return [word for key, value in keys.items() for word in (f"--{key}", value)]

    def visible_gpus(self, machine: Machine) -> tuple[str, ...]:
        """Return the GPUs that the stage uses: all with ``ranks``, else one for the trainer and those of the server."""
        return machine.gpus if self.ranks else machine.gpus[: max(self.gpus, 1 + self.uses_server_gpu())]

    def uses_server_gpu(self) -> bool:
        """Return whether vLLM has a GPU without a trainer, if there are enough."""
        return self.keys.get("vllm_mode") != "colocate" and self.keys.get("weight_sync") != "shared"


def run_launch(name: str, stage: Stage, machine: Machine) -> dict[str, Any]:
    """Launch a stage and return its numbers. Raise StageFailed if the run does not pass."""
    steps, argv = 4, [GRPO, "launch", str(stage.recipe), *stage.flags(machine)]
    with measure_gpu_memory(machine) as peaks:
        call(name, [*argv, "--max_steps", str(steps), "--save_strategy", "no"], stage, machine)
    numbers = read_numbers(find_run(name, machine), steps, stage)
    planned = read_planned_memory(stage, machine)
    return numbers | ({"gpu_peak_gib": peaks, "planned_gib": planned} if machine.gpus else {})


def call(name: str, argv: Sequence[str], stage: Stage, machine: Machine) -> None:
    """Run a command in the folder of its stage. Raise StageFailed if it fails or takes longer than ``SECONDS``."""
    with start(name, argv, stage, machine) as process:
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise StageFailed(f"did not end within {SECONDS} s: {' '.join(argv)}") from None
    if code:
        output = (stage_folder(name, machine) / "output.txt").read_text(errors="replace")
        lines = output.strip().splitlines() or ["no output"]
        raise StageFailed(next((line for line in reversed(lines) if "Fix: " in line), lines[-1]))


@contextlib.contextmanager
def start(name: str, argv: Sequence[str], stage: Stage, machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command with the stage's GPUs and folder, and end it after the block."""
    folder = stage_folder(name, machine)
    variables = {**os.environ, "RUN_ROOT": str(folder / "runs"), "HF_HUB_OFFLINE": "1"}
    if machine.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(stage.visible_gpus(machine))
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(
            argv, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.poll() is None:  # also if this script is interrupted
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def stage_folder(name: str, machine: Machine) -> Path:
    """Return the folder for the outputs of a stage."""
    folder = machine.outputs / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_run(name: str, machine: Machine, folder: str = "runs") -> Path:
    """Return the only run of a stage. Raise StageFailed if it has none."""
    runs = sorted(path.parent for path in (machine.outputs / name / folder).glob("*/run.json"))
    if not runs:
        raise StageFailed("the launch created no run")
    return runs[-1]


def read_numbers(run: Path, steps: int, stage: Stage) -> dict[str, Any]:
    """Return a run's numbers. Raise StageFailed if steps or gradients are missing, or if log-probs differ."""
    rows = read_metrics(run)
    numbers: dict[str, Any] = {"steps": len(rows)}
    for key in ("seconds/step", "seconds/sync", "seconds/sample", "seconds/update", "memory/peak_gb"):
        values = [row[key] for row in rows[1:] if key in row]  # the first step compiles and warms up
        if values:
            numbers[key] = round(statistics.median(values), 4)
    for key in ("reward", "grad_norm"):
        numbers[key] = [row.get(key) for row in rows]
    differences = [row.get("sampling/sampling_logp_difference/mean", math.nan) for row in rows]
    numbers["logp_difference"] = math.nan if any(map(math.isnan, differences)) else max(differences, default=math.nan)
    if len(rows) != steps:
        raise StageFailed(f"{len(rows)} of {steps} steps were logged", numbers)
    if not all(isinstance(norm, float) and 0 < norm < math.inf for norm in numbers["grad_norm"]):
        raise StageFailed("a step has no finite gradient", numbers)
    if not numbers["logp_difference"] <= stage.difference:
        problem = f"log-probs of vLLM and trainer differ by {numbers['logp_difference']:.2g} on average"
        raise StageFailed(f"{problem}, more than {stage.difference}", numbers)
    return numbers


def read_planned_memory(stage: Stage, machine: Machine) -> dict[str, float]:
    """Return `grpo plan`'s estimate in GiB for one training process and one GPU of the server."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(stage.visible_gpus(machine))}
    argv = [GRPO, "plan", str(stage.recipe), *stage.flags(machine), "--json"]
    answer = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False).stdout
    needs = (json.loads(answer) if answer else {}).get("memory", {})
    return {role: round(sum(need["parts"].values()) / 2**30, 2) for role, need in needs.items()}


@contextlib.contextmanager
def measure_gpu_memory(machine: Machine) -> Iterator[dict[str, float]]:
    """Yield a dictionary that has each GPU's largest used memory in GiB, read every second inside the block."""
    peaks: dict[str, float] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            listing = run_nvidia_smi("--query-gpu=index,memory.used", "--format=csv,noheader,nounits") or ""
            for line in filter(None, listing.splitlines()):
                index, mebibytes = line.split(", ")
                peaks[index] = max(peaks.get(index, 0.0), round(float(mebibytes) / 1024, 2))

    thread = threading.Thread(target=watch, daemon=True)
    if machine.gpus:
        thread.start()
    yield peaks
    ended.set()
    if machine.gpus:
        thread.join(30)


def run_resume(name: str, stage: Stage, machine: Machine) -> dict[str, Any]:
    """Stop a run after its second step, resume it, and compare its final weights with an uninterrupted run."""
    argv = [GRPO, "launch", str(stage.recipe), *stage.flags(machine), "--max_steps", "20", "--save_strategy", "no"]
    uninterrupted, stopped = f"{name}/uninterrupted", f"{name}/stopped"
    call(uninterrupted, argv, stage, machine)
    runs = stage_folder(stopped, machine) / "runs"

    def has_two_steps() -> bool:
        return any(len(read_metrics(path.parent)) >= 2 for path in runs.glob("*/metrics.jsonl"))

    with start(stopped, argv, stage, machine) as process:
        wait_until(has_two_steps, SECONDS, 0.05, lambda: process.poll() is not None)
        process.send_signal(signal.SIGUSR1)
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise StageFailed("did not stop after SIGUSR1") from None
    run = find_run(stopped, machine)
    steps = len(read_metrics(run))
    if code != SAVED:
        raise StageFailed(f"ended with {code} instead of {SAVED} after SIGUSR1 and {steps} steps")
    call(stopped, [GRPO, "launch", "--resume", str(run)], stage, machine)
    numbers = read_numbers(run, 20, stage) | {"stopped_after": steps}
    if hash_model(run) != hash_model(find_run(uninterrupted, machine)):
        raise StageFailed("the final weights differ from an uninterrupted run", numbers)
    return numbers


def hash_model(run: Path) -> str:
    """Return the SHA-256 of the final weights."""
    return hashlib.sha256((run / "model/model.safetensors").read_bytes()).hexdigest()


def run_larger_model(name: str, stage: Stage, machine: Machine) -> dict[str, Any]:
    """Train a random model with the sizes of Qwen2.5-0.5B, with the key of real recipes; on CPU, a tiny one."""
    from speed_trainers import build_model

    folder = stage_folder(name, machine)
    model, reward, recipe = folder / "model", folder / "reward_by_tokens.py", folder / "recipe.yaml"
    if not (model / "config.json").exists():
        build_model(model, **(HALF_BILLION if machine.gpus else {}))
    reward.write_text(REWARD)
    keys = yaml.safe_load(SMOKE.read_text()) | {
        "model_name_or_path": str(model), "reward_funcs": [f"{reward}:by_tokens"], "learning_rate": 1e-6,
        "bf16": bool(machine.gpus), "gradient_checkpointing": True, "prompts_per_step": 8, "num_generations": 8,
        "per_device_train_batch_size": 16, "max_completion_length": 512 if machine.gpus else 16,
        "vllm_max_model_length": 1024,
    }  # fmt: skip
    recipe.write_text(yaml.safe_dump(keys))
    return run_launch(name, replace(stage, recipe=recipe), machine)


def run_engine(name: str, stage: Stage, machine: Machine) -> dict[str, Any]:
    """Compare vLLM's greedy tokens and log-probs with transformers, without our server."""
    folder = stage_folder(name, machine)
    script, out = ROOT / "bench/gpu_engine.py", folder / "engines.json"
    models = sorted((ROOT / ".cache/smoke").glob("sums-*/model"))
    if not models:
        call(name, [sys.executable, "-m", "grpo_recipes.smoke", str(folder / "smoke")], stage, machine)
        models = [folder / "smoke/model"]
    call(name, [sys.executable, str(script), str(models[-1]), str(out), *cpu_flag(machine)], stage, machine)
    engines = read_json(out) or {}
    numbers = {"engines": engines}
    for kind, answer in engines.items():
        limit = FLOAT32 if kind.startswith("float32") else BFLOAT16
        if "failed" in answer:
            raise StageFailed(f"{kind}: {answer['failed']}", numbers)
        if answer["difference_mean"] > limit:
            raise StageFailed(f"{kind}: log-probs differ by {answer['difference_mean']:.2g} on average", numbers)
    return numbers | {"logp_difference": max(answer["difference_mean"] for answer in engines.values())}


def run_update(name: str, stage: Stage, machine: Machine) -> dict[str, Any]:
    """Compare the seconds of an optimizer step with unmodified TRL's, with completions of lognormal lengths."""
    out = stage_folder(name, machine) / "gpu_step.json"
    quick = [] if machine.gpus else ["--quick"]
    argv = [sys.executable, str(ROOT / "bench/gpu_step.py"), "--only", "lognormal", "--steps", "5", "--out", str(out)]
    call(name, [*argv, *quick], stage, machine)
    arms = ((read_json(out) or {}).get("lognormal") or {}).get("found", {})
    if "failed" in arms or not arms:
        raise StageFailed(str(arms.get("failed", "measured nothing")))
    return {"ratio_to_trl": {arm: row["ratio"] for arm, row in arms.items()}}


def run_offline(name: str, stage: Stage, machine: Machine) -> dict[str, Any]:
    """Run the four checks of the offline trainer with its server."""
    call(name, [sys.executable, str(ROOT / "test_gpu_integration.py"), *cpu_flag(machine)], stage, machine)
    return {"checks": (stage_folder(name, machine) / "output.txt").read_text().splitlines()[-1]}


def cpu_flag(machine: Machine) -> list[str]:
    """Return the flag of the other scripts for a machine without GPUs."""
    return [] if machine.gpus else ["--cpu"]


COLOCATE = {"vllm_mode": "colocate"}
STAGES = {
    "engine": Stage(run=run_engine),
    "file": Stage({"weight_sync": "file"}),
    "shared": Stage({"weight_sync": "shared"}),
    "lora": Stage(
        {"weight_sync": "lora", "use_peft": "true", "learning_rate": "1e-3", "bf16": "true"}, difference=BFLOAT16
    ),
    "restart": Stage({"weight_sync": "restart"}, gpus=2),
    "nccl": Stage({"weight_sync": "nccl"}, gpus=2, no_cpu="NCCL needs GPUs"),
    "colocate": Stage(COLOCATE),
    "sleep": Stage(COLOCATE | {"vllm_enable_sleep_mode": "true"}, no_cpu="vLLM's CPU build has no sleep mode"),
    "bf16": Stage({"weight_sync": "file", "bf16": "true"}, difference=BFLOAT16),
    "maxent": Stage({"weight_sync": "file"}, recipe=SMOKE_MAXENT),
    # Its samples are one update old, so the update has to be small.
    "overlap": Stage({"weight_sync": "file", "overlap_generation": "true", "learning_rate": "1e-6"}, gpus=2),
    "resume": Stage({"weight_sync": "file", "seed_server": "true"}, run=run_resume),
    "ddp": Stage({"accelerator": "ddp"}, gpus=2, ranks=True),
    "zero2": Stage({"accelerator": "zero2"}, gpus=2, ranks=True),
    "zero3": Stage({"accelerator": "zero3"}, gpus=2, ranks=True),
    "fsdp2": Stage({"accelerator": "fsdp2"}, gpus=2, ranks=True),
    "replicas": Stage({"vllm_data_parallel_size": "2"}, gpus=3),
    "tensor_parallel": Stage({"vllm_tensor_parallel_size": "2"}, gpus=3, no_cpu="the smoke test has one engine"),
    "model_0.5b": Stage({"weight_sync": "file"}, difference=BFLOAT16, run=run_larger_model),
    # Their weights fill several of vLLM's transfer buffers of 1 GiB.
    "nccl_0.5b": Stage(
        {"weight_sync": "nccl"}, gpus=2, no_cpu="NCCL needs GPUs", difference=BFLOAT16, run=run_larger_model
    ),
    "nccl_fsdp2": Stage(
        {"weight_sync": "nccl", "accelerator": "fsdp2"},
        gpus=3,
        ranks=True,
        no_cpu="NCCL needs GPUs",
        difference=BFLOAT16,
        run=run_larger_model,
    ),
    "update": Stage(run=run_update),
    "offline": Stage(run=run_offline),
}


def run_stage(name: str, machine: Machine) -> Result:
    """Run a stage, unless this machine can't."""
    stage = STAGES[name]
    reason, began = stage.reason_to_skip(machine), time.monotonic()
    if reason:
        return Result("skipped", reason)
    shutil.rmtree(machine.outputs / name, ignore_errors=True)
    try:
        numbers = (stage.run or run_launch)(name, stage, machine)
    except StageFailed as failure:
        return Result("failed", str(failure), time.monotonic() - began, failure.numbers)
    return Result("passed", "", time.monotonic() - began, numbers)


def format_table(results: Mapping[str, Result]) -> str:
    """Return the results as a Markdown table, followed by the reasons of failed stages."""
    lines = [
        "| stage | result | seconds | step (s) | sync (s) | log-prob difference | GPU peak (GiB) | planned (GiB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        numbers = result.numbers
        status = result.status if result.status != "skipped" else f"skipped: {result.reason}"
        memory = [
            ", ".join(f"{key} {value}" for key, value in numbers.get(column, {}).items())
            for column in ("gpu_peak_gib", "planned_gib")
        ]
        difference = f"{numbers['logp_difference']:.1e}" if "logp_difference" in numbers else ""
        seconds = f"{result.seconds:.0f}" if result.seconds else ""
        cells = [numbers.get("seconds/step", ""), numbers.get("seconds/sync", ""), difference, *memory]
        lines.append(f"| {' | '.join(map(str, [name, status, seconds, *cells]))} |")
    failed = [f"{name} failed: {result.reason}" for name, result in results.items() if result.status == "failed"]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def main() -> int:
    """Run the stages, write the record after each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=STAGES, metavar="STAGE", help=f"run only these: {', '.join(STAGES)}"
    )
    parser.add_argument("--cpu", action="store_true", help="run the stages that need no GPU, in a CPU environment")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu/gpu_main_job.json", help="the record")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the stage's command
    origin = begin(options.out, "accelerate", "deepspeed", "peft")
    try:
        resources = find_resources(os.environ)
    except ConfigError as error:
        parser.error(str(error))
    if resources.device == "cuda" and (options.cpu or not resources.gpus):
        parser.error("this environment is for GPUs. Fix: run it on a machine with a GPU, without --cpu")
    if resources.device == "cpu" and not options.cpu:
        parser.error("this environment has no CUDA. Fix: add --cpu, or run DEVICE=cuda make setup on a GPU machine")
    listing = run_nvidia_smi("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    machine = Machine(resources.gpus, ROOT / "build/gpu")
    record: dict[str, Any] = {"what": str(__doc__).splitlines()[0], "gpus": (listing or "").splitlines()}
    results: dict[str, Result] = {}
    for name in options.only or STAGES:
        print(f"{name} ... ", end="", flush=True)
        results[name] = run_stage(name, machine)
        print(f"{results[name].status} {results[name].reason}", flush=True)
        stages = {stage: asdict(result) for stage, result in results.items()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, record | {"stages": stages} | finished(origin))
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    print(f"\n{', '.join(record['gpus']) or 'no GPU'}; {versions}; commit {origin['commit'][:8]}\n")
    print(format_table(results))
    print(f"\nrecord {options.out}, outputs of the stages {machine.outputs}")
    return 1 if any(result.status == "failed" for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
