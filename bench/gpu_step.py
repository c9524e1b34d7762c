"""Measure time and memory of an optimizer step on one GPU, against unmodified TRL and against `grpo plan`'s estimate.

    python bench/gpu_step.py [--only PART...] [--steps 8] [--out bench/results/gpu_step.json]
    python bench/gpu_step.py --recompute

No vLLM is needed: completions are given, as in ``speed.py``. The model is random, with Qwen2.5-0.5B's sizes, in float32
with bfloat16 autocast and gradient checkpointing. If a part fails, its error is recorded and the other parts run.

* ``gradients``: the difference to bare TRL's gradients on equal completions, also for TRL with smaller micro-batches;
* ``memory``: the peak of torch's allocator, its reserved memory, the GPU's used memory, and the estimate;
* ``updates``: the fraction of weights that one AdamW step of 1e-6 changes, in bfloat16 and in float32;
* ``lognormal``, ``equal``: seconds of a step with such lengths, with trainers in turn.

A part that is not measured keeps its record. ``--recompute`` replaces the estimates of a record and needs no GPU.
``--quick`` runs every part with a tiny model, on CPU without a GPU, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from interleave import interleave
from made_by import begin, finished
from speed import AGAIN, BARE, OURS, SKIPPED, ratio
from speed_trainers import Keys, Shape, build_model, trainer_of
from transformers import TrainerCallback

from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.models import compute_model_sizes
from grpo_recipes.plan.workload import Workload
from grpo_recipes.runs.rundir import read_json, write_json

GPU = torch.cuda.is_available()
REAL: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
FEWER_LAYERS = 6  # sizes of the model for the comparison of gradients
SHAPE = Shape(longest=960, prompts=8, group=8, micro_batch=8)
COMMON: dict[str, Any] = {"use_cpu": not GPU, "bf16": GPU, "gradient_checkpointing": True}
PROMPT = 64  # tokens of the longest prompt, about
HALF, FREE = "bare TRL, half of the micro-batch", "ours, padding_free (sdpa)"
OURS_HALF = "ours, half of the micro-batch"
PADDING_FREE = {"padding_free": True, "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}}
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo"}, "grpo": {"loss_type": "grpo"}, "dr_grpo": {"loss_type": "dr_grpo"},
}  # fmt: skip


class Gradient(TrainerCallback):
    """Keep the gradient of the first step, on the CPU."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Copy it before it is used."""
        for name, weight in model.named_parameters():
            if weight.grad is not None and name not in self.found:
                self.found[name] = weight.grad.detach().float().cpu().clone()


class Bench:
    """A folder, and models of both sizes in it."""

    def __init__(self, scratch: Path, steps: int, sizes: dict[str, Any], shape: Shape):
        self.scratch, self.steps, self.shape, self._count = scratch, steps, shape, 0
        self.model = build_model(scratch / "model", **sizes)
        layers = min(FEWER_LAYERS, int(sizes.get("num_hidden_layers", FEWER_LAYERS)))
        self.small = build_model(scratch / "small", **sizes | {"num_hidden_layers": layers})

    def trainer(
        self, keys: Keys, callback: TrainerCallback, *, steps: int = 1, model: Path | None = None,
        shape: Shape | None = None, **common: Any,
    ) -> Any:  # fmt: skip
        """Return a trainer with its own folder."""
        self._count += 1
        folder, shape = self.scratch / str(self._count), shape or self.shape
        return trainer_of(folder, model or self.model, shape, steps, keys, callback, common=COMMON | common)


def release() -> None:
    """Free unused memory."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def gradients(bench: Bench) -> dict[str, Any]:
    """Norm of the difference to bare TRL's gradient, over its norm."""
    differences: dict[str, Any] = {}
    half = bench.shape._replace(micro_batch=bench.shape.micro_batch // 2)
    arms: dict[str, tuple[Keys, Shape]] = {
        BARE: (None, bench.shape), HALF: (None, half), OURS: ({}, bench.shape), FREE: (PADDING_FREE, bench.shape)
    }  # fmt: skip
    for bf16 in (False, True) if GPU else (False,):
        for name, loss in LOSSES.items():
            gradients_by_arm = {}
            for arm, (keys, shape) in arms.items():
                callback = Gradient()
                trainer = bench.trainer(keys, callback, model=bench.small, shape=shape, bf16=bf16, **loss)
                trainer.train()
                gradients_by_arm[arm] = callback.found
                del trainer
                release()
            precision = "bfloat16 autocast" if bf16 else "float32"
            differences.setdefault(precision, {})[name] = {
                arm: distance(gradient, gradients_by_arm[BARE])
                for arm, gradient in gradients_by_arm.items()
                if arm != BARE
            }
    return differences


def distance(gradient: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference divided by the norm of the reference."""
    assert gradient.keys() == reference.keys() and reference
    apart = sum(float((gradient[name] - reference[name]).double().square().sum()) for name in reference)
    whole = sum(float(weight.double().square().sum()) for weight in reference.values())
    return float(f"{(apart / whole) ** 0.5:.3g}")


def memory(bench: Bench) -> dict[str, Any]:
    """Measure the bytes at the worst moment of two steps."""
    peaks: dict[str, Any] = {}
    for lengths in ("lognormal", "equal"):
        for arm, (keys, rows) in micro_batches(bench.shape).items():
            release()
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            shape = bench.shape._replace(lengths=lengths, micro_batch=rows)
            trainer = bench.trainer(keys, TrainerCallback(), steps=2, shape=shape)
            trainer.train()
            tokens = rows * (shape.longest + PROMPT)  # the most of a micro-batch
            peaks.setdefault(lengths, {})[arm] = {**held(), "tokens_per_micro_batch": tokens}
            del trainer
    release()
    return peaks


def micro_batches(shape: Shape) -> dict[str, tuple[Keys, int]]:
    """Return the trainers of the memory measurement: their keys, and the rows of their micro-batches."""
    return {BARE: (None, shape.micro_batch), OURS: ({}, shape.micro_batch), OURS_HALF: ({}, shape.micro_batch // 2)}


def held() -> dict[str, int]:
    """Return torch's peaks, and the GPU memory in use outside torch."""
    if not GPU:
        return {}
    free, whole = torch.cuda.mem_get_info()
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return peaks | {"beside torch": whole - free - torch.cuda.memory_reserved()}


def with_estimates(measured: dict[str, Any], sizes: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Add the workload of the measured runs and the estimates of `grpo plan` to the part ``memory`` of a record."""
    workload = {
        **compute_model_sizes({"model_type": "qwen2", **sizes}), "per_device_train_batch_size": shape.micro_batch,
        "world_size": 1, "mode": "server", "completions": shape.prompts * shape.group,
        "sequence": shape.longest + PROMPT, "completion": shape.longest, "low": "nvidia-smi" in measured["gpu"],
        "reference": False, "device": "cuda", "accelerator": "single", "bridge": None,
        "attn_implementation": "sdpa", "dtype": "float32", "gradient_checkpointing": True,
        "lora_modules_to_save": None, "lora_r": 0, "optim": "adamw_torch", "use_peft": False,
        "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1,
    }  # fmt: skip
    rows: dict[str, Any] = {}
    for lengths, arms in measured["found"].items():
        for arm, row in arms.items():
            size = {"per_device_train_batch_size": row["tokens_per_micro_batch"] // workload["sequence"]}
            parts = Workload({**workload, **size}).trainer()
            estimated = {"estimated": parts | {"total": sum(parts.values())}}
            rows.setdefault(lengths, {})[arm] = row | estimated
    return measured | {"found": rows, "workload": workload}


def updates(bench: Bench) -> dict[str, Any]:
    """Share of the weights that another value has after one step of AdamW."""
    changed_fractions = {}
    for dtype in ("bfloat16", "float32"):
        keys = {"learning_rate": 1e-6, "model_init_kwargs": {"dtype": dtype}, "lr_scheduler_type": "constant"}
        trainer = bench.trainer(None, TrainerCallback(), model=bench.small, **keys)
        before = {name: weight.detach().cpu().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        after = {name: weight.detach().cpu() for name, weight in trainer.model.named_parameters()}
        changed = sum(int((after[name] != weight).sum()) for name, weight in before.items())
        changed_fractions[dtype] = round(changed / sum(weight.numel() for weight in before.values()), 4)
        del trainer
        release()
    return changed_fractions


def update(lengths: str, bench: Bench) -> dict[str, Any]:
    """Measure the seconds of a step and their ratio to bare TRL's in the same run."""
    arms: dict[str, Keys] = {BARE: None, AGAIN: None, OURS: {}} | ({FREE: PADDING_FREE} if lengths != "equal" else {})
    common = {"shape": bench.shape._replace(lengths=lengths), "steps": bench.steps + SKIPPED + 1}
    seconds_by_arm = interleave({arm: partial(bench.trainer, keys, **common) for arm, keys in arms.items()})
    seconds = {arm: values[SKIPPED:] for arm, values in seconds_by_arm.items()}
    return {
        arm: {
            "ratio": ratio(values, seconds[BARE]), "seconds_median": round(statistics.median(values), 4),
            "seconds": [round(value, 4) for value in values],
        }
        for arm, values in seconds.items()
    }  # fmt: skip


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "gradients": gradients, "memory": memory, "updates": updates,
    "lognormal": partial(update, "lognormal"), "equal": partial(update, "equal"),
}  # fmt: skip


def main() -> None:
    """Measure, and write the record after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure only these parts")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each trainer")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that all of it runs")
    parser.add_argument("--recompute", action="store_true", help="replace the estimates of the record only")
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/gpu_step.json")
    options = parser.parse_args()
    origin = begin(options.out, "accelerate", "triton")
    torch.backends.cuda.matmul.allow_tf32 = False
    before = read_json(options.out) or {}
    if options.recompute:
        memory_part = with_estimates(before["memory"], before["sizes"], Shape(**before["shape"]))
        # The estimates are the same on every machine.
        made_by = {name: value for name, value in finished(origin).items() if name not in ("machine", "load_before")}
        write_json(options.out, before | {"memory": memory_part | {"estimates": made_by}})
        return
    shape = Shape(longest=24, prompts=2, group=4, micro_batch=4) if options.quick else SHAPE
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), 2 if options.quick else options.steps, {} if options.quick else REAL, shape)
        config = json.loads((bench.model / "config.json").read_text())
        result = {"what": str(__doc__).splitlines()[0], "shape": shape._asdict()}
        result |= {"sizes": {name: config[name] for name in REAL}}
        result |= {name: before[name] for name in PARTS if name in before}
        for name in options.only or PARTS:
            began = time.perf_counter()
            try:
                findings = PARTS[name](bench)
            except Exception as error:
                findings = {"failed": f"{type(error).__name__}: {error}"}
                traceback.print_exc()
            result[name] = {"found": findings, "gpu": gpu()} | finished(origin)
            if name == "memory" and "failed" not in findings:
                result[name] = with_estimates(result[name], result["sizes"], shape)
            release()
            print(f"{name}: {time.perf_counter() - began:.0f} s\n{json.dumps(result[name], indent=1)}", flush=True)
            write_json(options.out, result)


def gpu() -> dict[str, Any]:
    """Return the GPU's name, driver and versions."""
    if not GPU:
        return {"name": None}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    return {
        "nvidia-smi": answer, "torch's CUDA": torch.version.cuda, "capability": capability, "cudnn_sdp_enabled": cudnn
    }  # fmt: skip


if __name__ == "__main__":
    main()
