"""Estimate the memory, disk and time of a planned run, and suggest a key to change if it does not fit. No torch.

    estimate(plan, recipe, names, gpu_gib=80.0, walltime=None).lines()

The formulas follow the source of torch, TRL, accelerate and DeepSpeed (TRL 1.16, DeepSpeed 0.19). The constants are
measured:

* on CPU by ``bench/memory_estimate.py`` (docs/measurements.md, ``bench/results/memory_estimate.json``);
* for a trainer on one GPU by ``bench/gpu_step.py`` (docs/measurements.md, ``bench/results/gpu_step.json``).

A test compares the estimate with every row of both records. NCCL's buffers and vLLM servers on GPUs are not measured.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.plan.commands import CPU_KV_CACHE_GIB, longest_sequence, vllm_memory_fraction
from grpo_recipes.plan.models import Facts, UnknownShape, read_model
from grpo_recipes.plan.needs import GIB, Disk, Need, Parts, format_gib
from grpo_recipes.plan.speed import Speed, find_speed
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import mixed_precision
from grpo_recipes.recipe.registry import EXTERNAL, SYNC_METHODS
from grpo_recipes.recipe.tasks import added_task

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Memory of processes without a model: bench/results/memory_estimate.json, case "constant".
_TRAINER_IMPORTS = 780_000_000
_SERVER_IMPORTS = 1_950_000_000  # API server, engine and a worker, each with torch and vLLM
# CUDA's context with its libraries: measured 0.76 to 0.78 GiB in addition to torch's allocator. docs/measurements.md,
# bench/results/gpu_step.json, "memory", "beside torch".
_CUDA_CONTEXT = GIB * 4 // 5
# Reserved memory in gaps between blocks of torch's allocator: 9.0 to 15.2 % of the allocated memory.
# docs/measurements.md, bench/results/gpu_step.json, "memory", "reserved" and "allocated".
_GAPS = 0.16
# Not measured: NCCL's buffers (assumed 1 GiB together with CUDA's context) and the graphs that vLLM captures.
_NCCL, _CUDA_GRAPHS = GIB - _CUDA_CONTEXT, GIB
# trl/kernels/chunked_logprob.py computes the output layer in tiles of this many tokens and words.
_TILE_TOKENS, _TILE_WORDS = 4096, 32768
_TILE_COPIES_ON_CPU = 8  # in _backward_tile, torch stores every intermediate result, unlike Triton
# DeepSpeed's defaults in elements. TRL's accelerate files do not change them.
_ZERO_BUCKET, _ZERO3_LIVE = 500_000_000, 1_000_000_000
# vLLM's default of sequences at the same time (for GPUs, the smallest: L40S and A100) and of tokens per batch on a GPU.
DEFAULT_SEQUENCES, _BATCHED_TOKENS = {"cpu": 128, "cuda": 256}, 8192
# Recipe keys that affect memory, in addition to the values of the plan.
_KEYS = (
    "attn_implementation", "dtype", "fsdp_cpu_offload", "gradient_checkpointing", "lora_modules_to_save", "lora_r",
    "optim", "use_peft", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size",
)  # fmt: skip
_LENGTH_STEP, _SHARES = 128, 20  # suggestions change lengths by 128 tokens and GPU memory by 1/20
_SHARING_MORE = {"ddp": ("zero2", "zero3"), "zero2": ("zero3",)}


class Workload(dict[str, Any]):
    """All values that affect the memory of a run, by recipe keys and a few other names. Properties are bytes.

    Properties named ``*element``, ``computed`` and ``served`` are the bytes of a single value.
    """

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan) -> Workload:
        """Collect the values of a plan, its recipe and its model that affect memory.

        Raise UnknownShape if the model's sizes are unknown, no key limits the length of a sequence, or CONFIG_FILE is
        set.
        """
        model = read_model(plan.model, recipe.model.name)
        longest, completion = longest_sequence(recipe), recipe.sampling.max_completion_length
        prompt = recipe.data.max_prompt_length
        sequence, length_key = prompt + completion if prompt and completion else longest, "max_prompt_length"
        if added := added_task(recipe):
            completion, sequence, length_key = None, recipe[added.length_key], added.length_key
        if sequence is None:
            raise UnknownShape(f"no key limits the length of a sequence; set {length_key}")
        if plan.accelerator == "custom":
            raise UnknownShape("the effect of CONFIG_FILE on memory is unknown; unset it")
        return cls({
            **model,
            "per_device_train_batch_size": plan.batch.per_device,
            "vllm_max_model_length": longest or model["positions"],
            "vllm_max_num_seqs": plan.max_num_seqs,
            "vllm_gpu_memory_utilization": vllm_memory_fraction(recipe, plan.mode),
            "world_size": plan.batch.world_size,
            "completions": plan.batch.per_device * plan.batch.accumulation,  # per step on one process
            "sequence": sequence,  # tokens of the longest prompt and completion together
            "completion": min(sequence, completion or sequence),  # tokens of the longest completion
            "low": mixed_precision(recipe) != "no",  # whether a forward pass computes in 16 bits
            "reference": recipe.loss.beta != 0.0 or bool(plan.maxent and plan.maxent.beta),
            "teacher": read_model(plan.teacher, plan.teacher) if plan.teacher else {},  # its sizes
            "replicas": plan.replicas,
            **{name: getattr(plan, name) for name in ("device", "mode", "accelerator", "bridge", "gpu_shared")},
            **{key: recipe[key] for key in _KEYS},
            **({"mode": EXTERNAL} if added else {}),  # like the trainers of an external server, they sample nothing
        })  # fmt: skip

    @property
    def element(self) -> int:
        """Bytes of a weight in the loaded type."""
        return _BYTES.get(self["dtype"], _BYTES.get(self["saved"], 4))

    @property
    def computed(self) -> int:
        """Bytes of a value in the forward pass."""
        return 2 if self["low"] else self.element

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed (ZeRO 2 or 3) manages weights, gradients and optimizer states."""
        return self["accelerator"] in ("zero2", "zero3")

    @property
    def one_gpu(self) -> bool:
        """Whether vLLM uses the GPU of a trainer; on CPU, whether it runs inside the trainers."""
        return bool(self["mode"] == "colocate" or self["gpu_shared"])

    @property
    def shards(self) -> int:
        """Number of parts into which gradients and optimizer states are divided."""
        return self["world_size"] if self.zero or self["accelerator"] == "fsdp2" else 1

    @property
    def offloads(self) -> bool:
        """Whether FSDP keeps sharded weights, gradients and optimizer states in CPU memory."""
        return self["accelerator"] == "fsdp2" and self["device"] == "cuda" and bool(self.get("fsdp_cpu_offload"))

    @property
    def served(self) -> int:
        """Bytes of a weight and of a KV cache value in vLLM."""
        return self.element if self["bridge"] == "shared" else self.computed

    @property
    def trained(self) -> int:
        """Number of trained elements: all, or with LoRA an adapter of every linear layer and the embeddings to save."""
        if not self["use_peft"]:
            return int(self["parameters"])
        widths = 7 * self["hidden"] + 2 * (self["queries"] + self["keys"]) + 3 * self["intermediate"]
        embeddings = self["embedding"] * len(self["lora_modules_to_save"] or ())
        return int(self["layers"] * self["lora_r"] * widths + embeddings)

    @property
    def trained_element(self) -> int:
        """Bytes of a trained element in its gradient and in the states of a plain optimizer."""
        if self.zero:
            return 2 if self["low"] else 4
        return 4 if self["use_peft"] or (self["accelerator"] == "fsdp2" and self["low"]) else self.element

    @property
    def weights(self) -> int:
        """Bytes of the model's weights on one process, including a LoRA adapter.

        With ZeRO-3 and FSDP2, these are its shards, unless they are offloaded, and the layers that it gathers.
        """
        count: int = self["parameters"]
        processes: int = self["world_size"]
        accelerator = self["accelerator"]
        element = self.trained_element if self.zero else self.element  # DeepSpeed casts the model itself
        if accelerator == "zero3":
            return element * (count // processes + min(count, _ZERO3_LIVE))
        if accelerator == "fsdp2":
            gathered: int = self.computed * 2 * (self["layer"] + self["embedding"])
            return gathered + (0 if self.offloads else self.trained_element * count // processes)
        adapter = 4 * self.trained if self["use_peft"] else 0  # PEFT keeps adapters in float32
        return element * count + adapter

    @property
    def teacher(self) -> int:
        """Bytes of the teacher's weights on one process, in the type of the forward pass; shards as in ``weights``."""
        sizes: Any = self.get("teacher") or dict.fromkeys(("parameters", "layer", "embedding"), 0)
        count, sharding = int(sizes["parameters"]), self["accelerator"]
        if sharding not in ("zero3", "fsdp2"):
            return self.computed * count
        shard = 0 if sharding == "fsdp2" and self.offloads else count // self["world_size"]
        gathered = min(count, _ZERO3_LIVE) if sharding == "zero3" else 2 * (sizes["layer"] + sizes["embedding"])
        return self.computed * int(shard + gathered)

    @property
    def autocast_copies(self) -> int:
        """16-bit copies of float32 weights that autocast keeps during a forward pass.

        Without gradient checkpointing, the backward pass uses the same copies. With gradient checkpointing, autocast
        keeps no copies of frozen weights. TRL converts the output layer tile by tile.
        """
        frozen = self["use_peft"] and self["gradient_checkpointing"]
        if self["device"] == "cpu" or not self["low"] or self.zero or self.element < 4 or frozen:
            return 0
        return 0 if self["accelerator"] == "fsdp2" else 2 * int(self["layers"] * self["layer"])

    @property
    def states(self) -> int:
        """Optimizer states on one process; with DeepSpeed, also its float32 copy of the weights."""
        name = self["optim"].removeprefix("paged_")
        states = 0 if name in ("adafactor", "sgd") else 1 if name.startswith(("lion", "adagrad", "rmsprop")) else 2
        states += name.startswith("ademamix")  # AdEMAMix has three states
        default_size = 4 if self.zero else self.trained_element
        size = 0.5 if "4bit" in name else 1 if "8bit" in name else 4 if "32bit" in name else default_size
        master = 4 if self.zero and self["low"] else 0
        return int((states * size + master) * self.trained) // self.shards

    @property
    def pass_tokens(self) -> int:
        """Most tokens of a micro-batch."""
        return int(self["per_device_train_batch_size"] * self["sequence"])

    @property
    def working(self) -> int:
        """Working space of one layer, with its input and output in float32."""
        return 3 * self.pass_tokens * int(self["intermediate"] * self.computed + self["hidden"] * 4)

    @property
    def layer_inputs(self) -> int:
        """Inputs of all layers, which gradient checkpointing keeps for the backward pass."""
        return int(self["layers"] * self["hidden"]) * self.pass_tokens * self.element

    @property
    def activations(self) -> int:
        """Results of the forward pass that the backward pass needs, and the working space of its current layer."""
        computed, element = self.computed, self.element
        tokens = self.pass_tokens
        # A norm saves its input in float32, the normalized input and its output.
        norms = (2 * self["hidden"] + self["head_norms"]) * (4 + 2 * element)
        attention = 4 * self["queries"] * computed  # query, output, and key and value repeated for each query head
        scores = 2 * self["heads"] * self["sequence"] * computed if self["attn_implementation"] == "eager" else 0
        layer = tokens * (norms + attention + scores + 4 * self["intermediate"] * computed)
        if self["gradient_checkpointing"]:
            return int(self.layer_inputs + layer + self.working)
        return int(self["layers"] * layer + self.working)

    @property
    def output_layer(self) -> int:
        """Memory of TRL's log-probs: a tile of logits, hidden states, and the layer's gradients in float32."""
        on_cpu = self["device"] == "cpu"
        # The Triton kernel only processes the scored tokens.
        rows = self.pass_tokens if on_cpu else self.pass_tokens * self["completion"] // self["sequence"]
        tile = min(rows, _TILE_TOKENS) * min(self["vocabulary"], _TILE_WORDS)
        tiles = tile * (4 * _TILE_COPIES_ON_CPU if on_cpu else self.computed)
        return int(tiles + rows * self["hidden"] * (4 + self.computed) + self.output_gradient)

    @property
    def output_gradient(self) -> int:
        """Gradient of the output layer in float32; for 16-bit weights, also a 16-bit gradient."""
        return 0 if self["use_peft"] else self["embedding"] * (4 + (self.element if self.element < 4 else 0))

    @property
    def packed_buffers(self) -> int:
        """vLLM's two buffers for weight transfers by NCCL, on rank 0 and on each of the server's GPUs."""
        most = 2 * GIB + self.element * self["embedding"]  # a buffer is sent as soon as it exceeds 1 GiB
        return min(self.element * self["parameters"], most) if self["bridge"] == "nccl" else 0

    @property
    def sleeps(self) -> bool:
        """Whether vLLM inside the trainers releases its memory between generations."""
        return bool(self["mode"] == "colocate" and self["vllm_enable_sleep_mode"])

    def trainer(self, awake: int = 0) -> Parts:
        """Return the memory of one training process at its peak: name of a part -> bytes.

        ``awake`` is the memory of a co-located vLLM that sleeps outside of generations. The peak is the largest of
        several moments of a step, so parts that only other moments need are missing.
        """
        on_cpu, parameters, accelerator = self["device"] == "cpu", self["parameters"], self["accelerator"]
        nccl = _NCCL if self["world_size"] > 1 or self["bridge"] == "nccl" else 0
        constant = {"libraries": _TRAINER_IMPORTS if on_cpu else _CUDA_CONTEXT + nccl, "weights": self.weights,
                    "optimizer": 0 if self.offloads else self.states, "teacher": self.teacher}  # fmt: skip
        # With an adapter, the base model under it is the reference.
        if self["reference"] and not self["use_peft"] and not self.offloads:
            shards = self["world_size"] if accelerator in ("zero3", "fsdp2") else 1
            constant["reference"] = (self.trained_element if self.zero else self.element) * parameters // shards
        copies = 2 if accelerator == "ddp" else 1  # DDP's buckets are a second copy
        gradients = self.trained_element * (copies * self.trained // self.shards + (_ZERO_BUCKET if self.zero else 0))
        gradients = 0 if self.offloads else gradients
        # DeepSpeed's step makes its own float32 copy of the gradients.
        flat_gradients = 4 * self.trained // self["world_size"] if self.zero and self["low"] else 0
        pass_parts = {"activations": self.activations, "output layer": self.output_layer}
        # Gradients of earlier passes stay allocated. On CPU, the C library's heap keeps most of the freed memory.
        several_passes = self["completions"] * self["sequence"] > self.pass_tokens
        earlier = {"gradients": gradients} if on_cpu or several_passes else {}
        cast = {"16-bit copies": self.autocast_copies}
        forward = {"activations": self.layer_inputs + self.working,
                   "output layer": self.output_layer - self.output_gradient} | cast  # fmt: skip
        backward = pass_parts if self["gradient_checkpointing"] else pass_parts | cast
        moments = [backward | earlier, forward | earlier, {"gradients": gradients + flat_gradients}]
        teacher = Workload({**self, **(self.get("teacher") or {})})  # or the model again, which changes nothing
        moments.append({"activations": teacher.working, "output layer": teacher.output_layer - teacher.output_gradient})
        if self["mode"] == "transformers":
            moments.append({"KV cache": self["completions"] * self.sequence_cache(self["sequence"])})
        if on_cpu and self["bridge"] in ("file", "restart"):
            moments.append(pass_parts | {"weights in transit": self.element * parameters})
        moments += [{"weights in transit": self.packed_buffers}, {"vLLM awake": awake}]
        peak = max((self._with_gaps(constant | moment) for moment in moments), key=lambda parts: sum(parts.values()))
        return {name: size for name, size in peak.items() if size}

    def _with_gaps(self, parts: Parts) -> Parts:
        """Return the parts with ``allocator gaps`` added, the reserved memory between blocks; unchanged on CPU."""
        allocated = sum(size for name, size in parts.items() if name not in ("libraries", "vLLM awake"))
        return parts if self["device"] == "cpu" else parts | {"allocator gaps": int(_GAPS * allocated)}

    def server(self) -> Parts:
        """Return the memory of the vLLM server at its peak: of all its processes on CPU, or of one of its GPUs.

        The result for a GPU has no KV cache, which gets the rest of vLLM's share of the GPU.
        """
        on_cpu = self["device"] == "cpu"
        weights = self.served * self["parameters"] // self["vllm_tensor_parallel_size"]
        imports = 0 if self["mode"] == "colocate" else _SERVER_IMPORTS  # counted in the trainer
        sequences = self.get("vllm_max_num_seqs") or DEFAULT_SEQUENCES[self["device"]]
        parts = {"libraries": imports if on_cpu else _CUDA_CONTEXT + _NCCL + _CUDA_GRAPHS, "weights": weights,
                 "output layer": 3 * sequences * self["vocabulary"] * 4}  # fmt: skip
        if not on_cpu:
            mlp = 2 * self["intermediate"] // self["vllm_tensor_parallel_size"]
            widest = max(mlp, self["hidden"]) + 3 * self["hidden"]
            return parts | {"activations": _BATCHED_TOKENS * widest * self.served}
        transit = {"weights in transit": weights} if self["bridge"] == "file" else {}
        parts |= {"KV cache": CPU_KV_CACHE_GIB * GIB} | transit
        return {name: size * (1 if name == "libraries" else self.get("replicas", 1)) for name, size in parts.items()}

    def sequence_cache(self, length: int) -> int:
        """Return the KV cache of one sequence of ``length`` tokens on one of the server's GPUs."""
        keys = max(self["keys"] // max(1, self["kv_heads"]), self["keys"] // self["vllm_tensor_parallel_size"])
        return int(length * 2 * self["layers"] * keys * self.served)

    def checkpoint(self) -> int:
        """Return the bytes of a checkpoint: trained weights and optimizer states of all processes."""
        weights = 4 * self.trained if self["use_peft"] else self.element * self["parameters"]
        model = self.trained_element * self["parameters"] if self.zero else 0  # DeepSpeed saves its own copy too
        return int(weights + self.states * self.shards + model)


def estimate_memory(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> dict[str, Need]:
    """Estimate the memory of a trainer and of the server: role -> need. A need that does not fit has a fix.

    ``gpu_gib`` is the memory of one GPU, or None if it is unknown. Raise UnknownShape if the model's sizes are unknown.
    """
    work = Workload.of(recipe, plan)
    gpu = int(gpu_gib * GIB) if gpu_gib is not None and plan.device == "cuda" else None
    needs = find_needs(work, gpu)
    return {
        role: need if need.fits else replace(need, fix=suggest_fix(role, recipe, work, gpu))
        for role, need in needs.items()
    }


def find_needs(work: Workload, gpu: int | None) -> dict[str, Need]:
    """Return the need of a training process and of the server, if any, compared with their parts of a GPU.

    ``gpu`` is the memory of one GPU. On a GPU with a trainer, vLLM takes its share first, or with sleep mode only
    during generations. A server needs at least the KV cache of a sequence of maximal length.
    """
    share = work["vllm_gpu_memory_utilization"]
    trainer_share = 1 - (share if work.one_gpu and not work.sleeps else 0)
    parts = work.trainer(int((gpu or 0) * share) if work.sleeps else 0)
    needs = {"trainer": Need(parts, None if gpu is None else int(gpu * trainer_share))}
    if work["mode"] in ("transformers", EXTERNAL):
        return needs
    parts, available = work.server(), None if gpu is None else int(gpu * share)
    if work["device"] == "cuda":
        remaining = (available or 0) - sum(parts.values())
        parts["KV cache"] = max(remaining, work.sequence_cache(work["vllm_max_model_length"]))
    if work.packed_buffers:  # allocated outside of vLLM's share
        parts["weights in transit"] = work.packed_buffers
        available = None if gpu is None else min(gpu, int(gpu * share) + work.packed_buffers)
    return needs | {"server": Need(parts, available)}


def suggest_fix(role: str, recipe: Recipe, work: Workload, gpu: int | None) -> str:
    """Return the first change of recipe keys with which a role fits into memory, as text, e.g. "use_peft: true".

    The changes are tried in the order of ``_list_changes``: changes that cost little speed come first. If no change is
    enough, the text asks for larger GPUs. ``gpu`` is the memory of one GPU in bytes.
    """
    for change in _list_changes(role, recipe, work):
        if _is_rejected(work, change):
            continue
        needs = find_needs(Workload({**work, **change}), gpu)
        if needs[role].fits and (not work.one_gpu or needs["server"].fits):
            return " and ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
    larger = "no single key makes it fit; use larger GPUs"
    if role == "server":
        return f"{larger} for the server"
    if work["use_peft"] or _is_rejected(work, {"accelerator": "zero3"}):
        return larger
    return f"{larger}, or more GPUs{'' if work['accelerator'] == 'zero3' else ' with accelerator: zero3'}"


def _is_rejected(work: Workload, change: Facts) -> bool:
    """Return whether the run's weight sync method does not support the recipe keys in ``change``."""
    setups = {"vllm_tensor_parallel_size": "tensor_parallel", "use_peft": "lora"}
    changed = [setups.get(key, str(value)) for key, value in change.items() if key in setups or key == "accelerator"]
    return work["bridge"] is not None and SYNC_METHODS[work["bridge"]].refusal(changed) is not None


def _list_changes(role: str, recipe: Recipe, work: Workload) -> Iterator[Facts]:
    """Yield changes of recipe keys (key -> value) that reduce the memory of a role, cheapest in speed first.

    For the server these are the length, the memory fraction and tensor parallelism. For a trainer these are the
    micro-batch, gradient checkpointing, vLLM's fraction and sleep mode, DeepSpeed and LoRA.
    """
    share, heads = int(work["vllm_gpu_memory_utilization"] * _SHARES), work["heads"]
    if role == "server":
        longest = work["vllm_max_model_length"] // _LENGTH_STEP * _LENGTH_STEP
        yield from ({"vllm_max_model_length": most} for most in range(longest, work["sequence"] - 1, -_LENGTH_STEP))
        steps = (*range(share + 1, _SHARES), *range(share, 0, -1)) if not work.one_gpu else ()
        yield from ({"vllm_gpu_memory_utilization": step / _SHARES} for step in steps)
        sizes = range(work["vllm_tensor_parallel_size"] + 1, heads + 1)
        yield from ({"vllm_tensor_parallel_size": size} for size in sizes if heads % size == 0)
        return
    for size in range(work["per_device_train_batch_size"] - 1, 0, -1):
        passes, remainder = divmod(work["completions"], size)
        if not remainder:
            accumulation = {} if recipe.batch.prompts_per_step else {"gradient_accumulation_steps": passes}
            yield {"per_device_train_batch_size": size, **accumulation}
    yield {"gradient_checkpointing": True}
    if work.one_gpu:
        yield from ({"vllm_gpu_memory_utilization": step / _SHARES} for step in range(share - 1, 0, -1))
    if work["mode"] == "colocate":
        yield {"vllm_enable_sleep_mode": True}
    for name in _SHARING_MORE.get(work["accelerator"], ()):
        if work["world_size"] > 1 and not (work["use_peft"] and name == "zero3"):
            yield {"accelerator": name}
    yield {"use_peft": True, **({"accelerator": "zero2"} if work["accelerator"] in ("zero3", "fsdp2") else {})}


def estimate_disk(recipe: Recipe, plan: Plan, run_dir: Path) -> Disk:
    """Estimate the bytes that a run of this plan writes, and the free bytes on its disk.

    Without a limit of checkpoints, two are counted. ``run_dir`` need not exist. Files that a resumed run has already
    written there count as free. If the disk is too small, ``fix`` of the result has settings that help. Raise
    UnknownShape if the model's sizes are unknown.
    """
    work = Workload.of(recipe, plan)
    model_size = work.element * work["parameters"]
    checkpoint = work.checkpoint() + (model_size if recipe.loss.sync_ref_model else 0)
    final_model = model_size + (4 * work.trained if recipe.lora.use_peft else 0)  # model/ and adapter/
    steps, every, limit = recipe.batch.max_steps, recipe.run.save_steps, recipe.run.save_total_limit
    if recipe.evaluation.load_best_model_at_end:
        every, limit = min(every, recipe.evaluation.steps or every), limit and max(limit, 2)
    counts = [] if limit is None else [limit + 1]  # an old checkpoint is removed after a new checkpoint is complete
    if recipe.run.save_strategy == "no":
        counts = [1]  # a stopped run saves in any case
    elif steps > 0 and recipe.run.save_strategy == "steps":
        counts.append(max(1, -(-steps // math.ceil(every if every >= 1 else steps * every))))
    most, free = min(counts, default=None), None
    existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    with contextlib.suppress(OSError):
        disk = os.statvfs(existing)
        written = [path for name in ("checkpoints", "model") for path in (run_dir / name).rglob("*") if path.is_file()]
        free = disk.f_bavail * disk.f_frsize + sum(path.stat().st_size for path in written)
    need = Disk({"checkpoints": checkpoint * (most or 2), "model": final_model}, free, checkpoints=most)
    if need.fits:
        return need
    fitting = ((free or 0) - final_model) // max(
        1, checkpoint
    ) - 1  # a new checkpoint is written before an old checkpoint goes
    larger_disk = (
        f"run_root: a folder with {format_gib(2 * checkpoint + final_model)} GiB free, and save_total_limit: 1"
    )
    return replace(need, fix=f"save_total_limit: {fitting}" if fitting >= 1 else larger_disk)


@dataclass(frozen=True)
class Estimates:
    """Peak memory of a plan's processes, bytes on disk, and the speed of earlier runs."""

    memory: Mapping[str, Need]  # by role: one training process, one of the server's GPUs or, on CPU, the whole server
    disk: Disk | None  # None if unknown
    speed: Speed  # from earlier runs
    unknown: str = ""  # reason without estimates of memory and disk

    def lines(self) -> list[str]:
        """Format the estimates as lines for a person: a verdict, memory of each role, disk space of the run, and speed.

        A need that does not fit gets another line with a fix. If memory and disk space are unknown, lines
        have the reason.
        """
        needs = [("memory", role, need) for role, need in self.memory.items()]
        needs += [("disk", "run", self.disk)] if self.disk else []
        return [
            f"verdict    {self.verdict()}",
            *(f"{topic:<10} not estimated: {self.unknown}" for topic in ("memory", "disk") if self.unknown),
            *(f"{topic:<10} {role} {need}" for topic, role, need in needs),
            *(
                f"{topic:<10} does not fit: the {role} needs {need.size}. Fix: {need.fix}"
                for topic, role, need in needs
                if not need.fits
            ),
            f"speed      {self.speed}",
        ]

    def verdict(self) -> str:
        """Return whether memory and disk space suffice, as one text: "memory of the trainer does not fit"."""
        needs = {f"memory of the {role}": need for role, need in self.memory.items()}
        needs |= {"disk space of the run": self.disk} if self.disk else {}
        missing = [name for name, need in needs.items() if not need.fits]
        if missing:
            return f"does not fit: {', '.join(missing)}"
        unknown = [name for name, need in needs.items() if need.available is None]
        if not needs or unknown:
            return f"unknown: {', '.join(unknown) or 'memory and disk space'}"
        return "memory and disk space are sufficient"


def estimate(plan: Plan, recipe: Recipe, names: Names, gpu_gib: float | None, walltime: float | None) -> Estimates:
    """Estimate memory, disk and speed of a plan in about 0.1 seconds.

    ``gpu_gib`` is the memory of one GPU and ``walltime`` the job's time limit in seconds; None if unknown. If the sizes
    of the model are unknown, the result has no memory and no disk, and gives the reason.
    """
    speed = find_speed(plan, names, walltime)
    try:
        memory, disk = estimate_memory(recipe, plan, gpu_gib), estimate_disk(recipe, plan, names.run_dir)
    except UnknownShape as error:
        return Estimates({}, None, speed, str(error))
    return Estimates(memory, disk, speed)
