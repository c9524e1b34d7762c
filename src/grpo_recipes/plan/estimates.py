"""What a planned run will take: memory, disk and time, and which key to change where that does not fit. No torch.

The formulas follow the source of torch, TRL, accelerate and DeepSpeed (TRL 1.16, DeepSpeed 0.19). The constants are
measured:

* on CPU by ``bench/memory_estimate.py`` (docs/planning.md, ``bench/results/memory_estimate.json``);
* for a trainer on one GPU by ``bench/gpu_step.py`` (docs/gpu.md, ``bench/results/gpu_step.json``).

A test compares the estimate with every row of both records. NCCL's buffers and vLLM's server on GPUs are not measured.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.plan.commands import CPU_KV_CACHE_GIB, gpu_share, longest_sequence
from grpo_recipes.plan.models import Facts, UnknownShape, read_model
from grpo_recipes.plan.needs import GIB, Disk, Need, Parts, in_gib
from grpo_recipes.plan.speed import Speed, find_speed
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import mixed_precision
from grpo_recipes.recipe.registry import EXTERNAL, SYNC_METHODS

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# What the processes hold before the model counts: bench/results/memory_estimate.json, case "constant".
_TRAINER_IMPORTS = 780_000_000
_SERVER_IMPORTS = 1_950_000_000  # of the API server, the engine and one worker, each with torch and vLLM
# CUDA's context with its libraries: the GPU held 0.76 to 0.78 GiB beside torch's allocator. docs/gpu.md,
# bench/results/gpu_step.json, "memory", "beside torch".
_CUDA_CONTEXT = GIB * 4 // 5
# Reserved memory that torch's allocator cannot use between its blocks: 9.0 to 15.2 % of the allocated memory.
# docs/gpu.md, bench/results/gpu_step.json, "memory", "reserved" and "allocated".
_GAPS = 0.16
# Not measured: NCCL's buffers, which together with the context are taken as 1 GiB, and the graphs that vLLM captures.
_NCCL, _CUDA_GRAPHS = GIB - _CUDA_CONTEXT, GIB
# trl/kernels/chunked_logprob.py: the output layer is computed in tiles of so many tokens and words, never as a whole.
_TILE_TOKENS, _TILE_WORDS = 4096, 32768
_TILE_COPIES_ON_CPU = 8  # of _backward_tile: torch makes every intermediate, where Triton works in place
# DeepSpeed's defaults, in elements, which TRL's accelerate files leave alone.
_ZERO_BUCKET, _ZERO3_LIVE = 500_000_000, 1_000_000_000
# vLLM's smallest default of sequences at the same time (L40S and A100 on GPUs), and its tokens per batch on a GPU.
DEFAULT_SEQUENCES, _BATCHED_TOKENS = {"cpu": 128, "cuda": 256}, 8192
# Keys of the recipe that decide how much memory a run takes, beside those that a plan works out.
_KEYS = (
    "attn_implementation", "dtype", "fsdp_cpu_offload", "gradient_checkpointing", "lora_modules_to_save", "lora_r",
    "optim", "use_peft", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size",
)  # fmt: skip
_LENGTH_STEP, _SHARES = 128, 20  # tokens, and parts of a GPU, in which a suggestion moves
_SHARING_MORE = {"ddp": ("zero2", "zero3"), "zero2": ("zero3",)}


class Workload(dict[str, Any]):
    """Everything that decides how much memory a run takes, by the keys of the recipe and a few more; sizes in bytes."""

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan) -> Workload:
        """Return the workload of a plan; UnknownShape where a sequence has no limit, or CONFIG_FILE decides."""
        model = read_model(plan.model, str(recipe["model_name_or_path"]))
        longest, completion = longest_sequence(recipe), recipe["max_completion_length"]
        sequence = recipe["max_prompt_length"] + completion if recipe["max_prompt_length"] and completion else longest
        if sequence is None:
            raise UnknownShape("no key limits the length of a sequence; write max_prompt_length")
        if plan.accelerator == "custom":
            raise UnknownShape("the file of CONFIG_FILE decides how the model is shared; unset it")
        facts = {
            **model,
            "per_device_train_batch_size": plan.batch.per_device,
            "vllm_max_model_length": longest or model["positions"],
            "vllm_max_num_seqs": plan.max_num_seqs,
            "vllm_gpu_memory_utilization": gpu_share(recipe, plan.mode),
            "world_size": plan.batch.world_size,
            "completions": plan.batch.per_device * plan.batch.accumulation,  # of a step, on one process
            "sequence": sequence,  # tokens of the longest prompt and completion together
            "completion": min(sequence, completion or sequence),  # tokens of the longest one
            "low": mixed_precision(recipe) != "no",  # whether a forward pass computes in 16 bits, whatever the weights
            "reference": recipe["beta"] != 0.0 or bool(plan.maxent and plan.maxent.beta),
            **{name: getattr(plan, name) for name in ("device", "mode", "accelerator", "bridge", "gpu_shared")},
            **{key: recipe[key] for key in _KEYS},
        }
        return cls(facts)

    @property
    def element(self) -> int:
        """A weight as it is loaded."""
        return _BYTES.get(self["dtype"], _BYTES.get(self["saved"], 4))

    @property
    def computed(self) -> int:
        """A value in the forward pass."""
        return 2 if self["low"] else self.element

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds weights, gradients and states."""
        return self["accelerator"] in ("zero2", "zero3")

    @property
    def one_gpu(self) -> bool:
        """Whether vLLM has the GPU of a trainer; on CPU, whether it is inside."""
        return self["mode"] == "colocate" or self["gpu_shared"]

    @property
    def shards(self) -> int:
        """The parts that gradients and optimizer states are cut into."""
        return self["world_size"] if self.zero or self["accelerator"] == "fsdp2" else 1

    @property
    def offloads(self) -> bool:
        """Whether sharded weights, gradients and optimizer states are in the memory of the CPU, not of the GPU."""
        return self["accelerator"] == "fsdp2" and self["device"] == "cuda" and bool(self.get("fsdp_cpu_offload"))

    @property
    def served(self) -> int:
        """A weight, and a value of the KV cache, in vLLM: of the trainer's precision, or the trainer's own weight."""
        return self.element if self["bridge"] == "shared" else self.computed

    @property
    def trained(self) -> int:
        """The elements that are trained: all, or an adapter of every linear layer and embeddings beside it."""
        if not self["use_peft"]:
            return self["parameters"]
        sides = 7 * self["hidden"] + 2 * (self["queries"] + self["keys"]) + 3 * self["intermediate"]
        return self["layers"] * self["lora_r"] * sides + self["embedding"] * len(self["lora_modules_to_save"] or ())

    @property
    def trained_element(self) -> int:
        """A trained element, as its gradient and the states of a plain optimizer have it."""
        if self.zero:
            return 2 if self["low"] else 4
        return 4 if self["use_peft"] or (self["accelerator"] == "fsdp2" and self["low"]) else self.element

    @property
    def weights(self) -> int:
        """The weights that one process holds."""
        count, accelerator = self["parameters"], self["accelerator"]
        element = self.trained_element if self.zero else self.element  # DeepSpeed casts the model itself
        if accelerator == "zero3":
            return element * (count // self["world_size"] + min(count, _ZERO3_LIVE))
        if accelerator == "fsdp2":
            gathered = self.computed * 2 * (self["layer"] + self["embedding"])
            return gathered + (0 if self.offloads else self.trained_element * count // self["world_size"])
        adapter = 4 * self.trained if self["use_peft"] else 0  # PEFT keeps adapters in float32
        return element * count + adapter

    @property
    def autocast_copies(self) -> int:
        """The 16-bit copies of float32 weights that autocast keeps during a forward pass.

        Without gradient checkpointing the backward pass uses the same copies. With it, copies of frozen weights are
        not kept. TRL converts the output layer tile by tile.
        """
        frozen = self["use_peft"] and self["gradient_checkpointing"]
        if self["device"] == "cpu" or not self["low"] or self.zero or self.element < 4 or frozen:
            return 0
        return 0 if self["accelerator"] == "fsdp2" else 2 * int(self["layers"] * self["layer"])

    @property
    def states(self) -> int:
        """The optimizer's states, with DeepSpeed also the float32 weights that it updates."""
        name = self["optim"].removeprefix("paged_")
        states = 0 if name in ("adafactor", "sgd") else 1 if name.startswith(("lion", "adagrad", "rmsprop")) else 2
        states += name.startswith("ademamix")  # which has three
        plain = 4 if self.zero else self.trained_element
        size = 0.5 if "4bit" in name else 1 if "8bit" in name else 4 if "32bit" in name else plain
        master = 4 if self.zero and self["low"] else 0
        return int((states * size + master) * self.trained) // self.shards

    @property
    def pass_tokens(self) -> int:
        """The most tokens of a micro-batch."""
        return int(self["per_device_train_batch_size"] * self["sequence"])

    @property
    def working(self) -> int:
        """The working space of one layer, with both ends in float32."""
        return 3 * self.pass_tokens * int(self["intermediate"] * self.computed + self["hidden"] * 4)

    @property
    def layer_inputs(self) -> int:
        """The inputs of all layers, which gradient checkpointing keeps for the backward pass."""
        return int(self["layers"] * self["hidden"]) * self.pass_tokens * self.element

    @property
    def activations(self) -> int:
        """What the backward pass needs of the forward pass, and the working space of the layer it is in."""
        computed, element = self.computed, self.element
        tokens = self.pass_tokens
        # A norm saves its input in float32, the normalised input and its output.
        norms = (2 * self["hidden"] + self["head_norms"]) * (4 + 2 * element)
        attention = 4 * self["queries"] * computed  # query, key and value repeated for each head, and the output
        scores = 2 * self["heads"] * self["sequence"] * computed if self["attn_implementation"] == "eager" else 0
        layer = tokens * (norms + attention + scores + 4 * self["intermediate"] * computed)
        if self["gradient_checkpointing"]:
            return int(self.layer_inputs + layer + self.working)
        return int(self["layers"] * layer + self.working)

    @property
    def output_layer(self) -> int:
        """What TRL's log-probs take: a tile of logits at a time, and the gradients of the layer in float32."""
        on_cpu = self["device"] == "cpu"
        # Triton takes the scored tokens alone.
        rows = self.pass_tokens if on_cpu else self.pass_tokens * self["completion"] // self["sequence"]
        tile = min(rows, _TILE_TOKENS) * min(self["vocabulary"], _TILE_WORDS)
        tiles = tile * (4 * _TILE_COPIES_ON_CPU if on_cpu else self.computed)
        return int(tiles + rows * self["hidden"] * (4 + self.computed) + self.output_gradient)

    @property
    def output_gradient(self) -> int:
        """The gradient of the output layer in float32, with narrower weights also one of their width."""
        return 0 if self["use_peft"] else self["embedding"] * (4 + (self.element if self.element < 4 else 0))

    @property
    def packed_buffers(self) -> int:
        """vLLM's two buffers of a transfer by NCCL, on rank 0 and on each of the server's GPUs."""
        most = 2 * GIB + self.element * self["embedding"]  # a buffer is sent once it has more than 1 GiB
        return min(self.element * self["parameters"], most) if self["bridge"] == "nccl" else 0

    @property
    def sleeps(self) -> bool:
        """Whether vLLM inside the trainers gives its memory back outside of generations."""
        return bool(self["mode"] == "colocate" and self["vllm_enable_sleep_mode"])

    def trainer(self, awake: int = 0) -> Parts:
        """Return what one training process holds at its worst moment, part by part.

        ``awake`` are the bytes of a vLLM inside it that it holds while it generates alone.
        """
        on_cpu, whole, accelerator = self["device"] == "cpu", self["parameters"], self["accelerator"]
        nccl = _NCCL if self["world_size"] > 1 or self["bridge"] == "nccl" else 0
        held = {"libraries": _TRAINER_IMPORTS if on_cpu else _CUDA_CONTEXT + nccl,
                "weights": self.weights, "optimizer": 0 if self.offloads else self.states}  # fmt: skip
        # With an adapter the base model under it is the reference.
        if self["reference"] and not self["use_peft"] and not self.offloads:
            shards = self["world_size"] if accelerator in ("zero3", "fsdp2") else 1
            held["reference"] = (self.trained_element if self.zero else self.element) * whole // shards
        copies = 2 if accelerator == "ddp" else 1  # DDP's buckets are a second copy
        gradients = self.trained_element * (copies * self.trained // self.shards + (_ZERO_BUCKET if self.zero else 0))
        gradients = 0 if self.offloads else gradients
        # DeepSpeed's step makes its own float32 copy of the gradients.
        flat = 4 * self.trained // self["world_size"] if self.zero and self["low"] else 0
        passing = {"activations": self.activations, "output layer": self.output_layer}
        # Gradients of the passes before are still there; on CPU the C library's heap keeps most of what a pass freed.
        more_passes = self["completions"] * self["sequence"] > self.pass_tokens
        beside = {"gradients": gradients} if on_cpu or more_passes else {}
        cast = {"16-bit copies": self.autocast_copies}
        forward = {"activations": self.layer_inputs + self.working,
                   "output layer": self.output_layer - self.output_gradient} | cast  # fmt: skip
        backward = passing if self["gradient_checkpointing"] else passing | cast
        moments = [backward | beside, forward | beside, {"gradients": gradients + flat}]
        if self["mode"] == "transformers":
            moments.append({"KV cache": self["completions"] * self.sequence_cache(self["sequence"])})
        if on_cpu and self["bridge"] in ("file", "restart"):
            moments.append(passing | {"weights in transit": self.element * whole})
        moments += [{"weights in transit": self.packed_buffers}, {"vLLM awake": awake}]
        worst = max((self._with_gaps(held | moment) for moment in moments), key=lambda parts: sum(parts.values()))
        return {name: size for name, size in worst.items() if size}

    def _with_gaps(self, parts: Parts) -> Parts:
        """Return the parts of a moment and, on a GPU, the gaps between the blocks of torch's allocator."""
        allocated = sum(size for name, size in parts.items() if name not in ("libraries", "vLLM awake"))
        return parts if self["device"] == "cpu" else parts | {"allocator gaps": int(_GAPS * allocated)}

    def server(self) -> Parts:
        """Return what the vLLM server holds at its peak: on CPU all its processes together, on a GPU one of its GPUs.

        The KV cache of a GPU is what the rest leaves of vLLM's share of it, and not in this.
        """
        on_cpu = self["device"] == "cpu"
        weights = self.served * self["parameters"] // self["vllm_tensor_parallel_size"]
        imports = 0 if self["mode"] == "colocate" else _SERVER_IMPORTS  # the trainer has them
        sequences = self.get("vllm_max_num_seqs") or DEFAULT_SEQUENCES[self["device"]]
        parts = {"libraries": imports if on_cpu else _CUDA_CONTEXT + _NCCL + _CUDA_GRAPHS, "weights": weights,
                 "output layer": 3 * sequences * self["vocabulary"] * 4}  # fmt: skip
        if not on_cpu:
            mlp = 2 * self["intermediate"] // self["vllm_tensor_parallel_size"]
            widest = max(mlp, self["hidden"]) + 3 * self["hidden"]
            return parts | {"activations": _BATCHED_TOKENS * widest * self.served}
        transit = {"weights in transit": weights} if self["bridge"] == "file" else {}
        return parts | {"KV cache": CPU_KV_CACHE_GIB * GIB} | transit

    def sequence_cache(self, length: int) -> int:
        """Return the KV cache that one sequence of ``length`` tokens takes on one of the server's GPUs."""
        keys = max(self["keys"] // max(1, self["kv_heads"]), self["keys"] // self["vllm_tensor_parallel_size"])
        return length * 2 * self["layers"] * keys * self.served

    def checkpoint(self) -> int:
        """Return the trained weights and the optimizer's part of a checkpoint, of all processes together."""
        weights = 4 * self.trained if self["use_peft"] else self.element * self["parameters"]
        model = self.trained_element * self["parameters"] if self.zero else 0  # DeepSpeed adds the weights it trains
        return weights + self.states * self.shards + model


def estimate_memory(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> dict[str, Need]:
    """Estimate what trainer and server of a plan hold; ``gpu_gib`` is a GPU's memory, if known.

    Raise UnknownShape where the model's sizes are not known.
    """
    work = Workload.of(recipe, plan)
    gpu = int(gpu_gib * GIB) if gpu_gib is not None and plan.device == "cuda" else None
    found = needs(work, gpu).items()
    return {role: one if one.fits else replace(one, fix=suggest(role, recipe, work, gpu)) for role, one in found}


def needs(work: Workload, gpu: int | None) -> dict[str, Need]:
    """Return what a training process needs of its GPU, and the server, if any, of its share of one.

    A vLLM on a trainer's GPU takes its share first, one that sleeps only while it generates. A server takes at least
    the cache of one longest sequence, else all it may.
    """
    share = work["vllm_gpu_memory_utilization"]
    own = 1 - (share if work.one_gpu and not work.sleeps else 0)
    parts = work.trainer(int((gpu or 0) * share) if work.sleeps else 0)
    roles = {"trainer": Need(parts, None if gpu is None else int(gpu * own))}
    if work["mode"] in ("transformers", EXTERNAL):
        return roles
    parts, available = work.server(), None if gpu is None else int(gpu * share)
    if work["device"] == "cuda":
        left = (available or 0) - sum(parts.values())
        parts["KV cache"] = max(left, work.sequence_cache(work["vllm_max_model_length"]))
    if work.packed_buffers:  # outside of vLLM's share
        parts["weights in transit"] = work.packed_buffers
        available = None if gpu is None else min(gpu, int(gpu * share) + work.packed_buffers)
    return roles | {"server": Need(parts, available)}


def suggest(role: str, recipe: Recipe, work: Workload, gpu: int | None) -> str:
    """Return the first change by which that role fits, and a vLLM on its GPU: the one that costs least."""
    for change in _changes(role, recipe, work):
        if _refused(work, change):
            continue
        roles = needs(Workload({**work, **change}), gpu)
        if roles[role].fits and (not work.one_gpu or roles["server"].fits):
            return " and ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
    larger = "no key alone makes it fit; take larger GPUs"
    if role == "server":
        return f"{larger} for the server"
    if work["use_peft"] or _refused(work, {"accelerator": "zero3"}):
        return larger
    return f"{larger}, or more of them{'' if work['accelerator'] == 'zero3' else ' with accelerator: zero3'}"


def _refused(work: Workload, change: Facts) -> bool:
    """Return whether the bridge does not serve what a change brings."""
    setups = {"vllm_tensor_parallel_size": "tensor_parallel", "use_peft": "lora"}
    met = [setups.get(key, str(value)) for key, value in change.items() if key in setups or key == "accelerator"]
    return work["bridge"] is not None and SYNC_METHODS[work["bridge"]].refusal(met) is not None


def _changes(role: str, recipe: Recipe, work: Workload) -> Iterator[Facts]:
    """Yield the changes to try, cheap ones first; they leave a server more room for its cache."""
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
        passes, rest = divmod(work["completions"], size)
        if not rest:
            derived = {} if recipe["prompts_per_step"] else {"gradient_accumulation_steps": passes}
            yield {"per_device_train_batch_size": size, **derived}
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
    """Estimate what a run of this plan writes at most, without a limit two checkpoints of it, and the room for it.

    ``run_dir`` need not exist; what a resumed run has written there counts as room. UnknownShape as for the memory.
    """
    work = Workload.of(recipe, plan)
    whole = work.element * work["parameters"]
    checkpoint = work.checkpoint() + (whole if recipe["sync_ref_model"] else 0)
    model = whole + (4 * work.trained if recipe["use_peft"] else 0)  # model/ and adapter/
    steps, every, limit = recipe["max_steps"], recipe["save_steps"], recipe["save_total_limit"]
    counts = [] if limit is None else [limit + 1]  # an older one is removed after a new one is complete
    if recipe["save_strategy"] == "no":
        counts = [1]  # a stopped run saves all the same
    elif steps > 0 and recipe["save_strategy"] == "steps":
        counts.append(max(1, -(-steps // math.ceil(every if every >= 1 else steps * every))))
    most, free = min(counts, default=None), None
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    with contextlib.suppress(OSError):
        disk = os.statvfs(there)
        written = [path for name in ("checkpoints", "model") for path in (run_dir / name).rglob("*") if path.is_file()]
        free = disk.f_bavail * disk.f_frsize + sum(path.stat().st_size for path in written)
    need = Disk({"checkpoints": checkpoint * (most or 2), "model": model}, free, checkpoints=most)
    room = ((free or 0) - model) // max(1, checkpoint) - 1  # one more is written before one goes
    least = f"run_root: a folder with {in_gib(2 * checkpoint + model)} GiB free, and save_total_limit: 1"
    return need if need.fits else replace(need, fix=f"save_total_limit: {room}" if room >= 1 else least)


@dataclass(frozen=True)
class Estimates:
    """What the processes of a plan hold at their peak, what the run writes, and how fast earlier runs were."""

    memory: Mapping[str, Need]  # trainer: one process; server: one of its GPUs, on CPU all its processes
    disk: Disk | None
    speed: Speed
    unknown: str = ""  # why memory and disk are not estimated

    def lines(self) -> list[str]:
        """Return the estimates for a person, a line a fact, and one for each that does not fit."""
        needs = [("memory", role, need) for role, need in self.memory.items()]
        needs += [("disk", "run", self.disk)] if self.disk else []
        return [
            *(f"{topic:<10} not estimated: {self.unknown}" for topic in ("memory", "disk") if self.unknown),
            *(f"{topic:<10} {who} {need}" for topic, who, need in needs),
            *(
                f"{topic:<10} does not fit: the {who} needs {need.size}. Fix: {need.fix}"
                for topic, who, need in needs
                if not need.fits
            ),
            f"speed      {self.speed}",
        ]


def estimate(plan: Plan, recipe: Recipe, names: Names, gpu_gib: float | None, walltime: float | None) -> Estimates:
    """Estimate what a plan will take, in about a tenth of a second.

    ``gpu_gib`` is the memory of one GPU and ``walltime`` the seconds the job may take, where they are known.
    """
    speed = find_speed(plan, names, walltime)
    try:
        memory, disk = estimate_memory(recipe, plan, gpu_gib), estimate_disk(recipe, plan, names.run_dir)
    except UnknownShape as error:
        return Estimates({}, None, speed, str(error))
    return Estimates(memory, disk, speed)
