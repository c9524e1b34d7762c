"""How much memory a run's processes will take at their peak, part by part. Pure: no torch, nothing is started.

Bytes everywhere. What torch, TRL, accelerate and DeepSpeed allocate was read in their source (TRL 1.16, DeepSpeed
0.19); the two constants of a CPU run are measured, by ``bench/memory_estimate.py``, which also says how near the whole
is. The constants of a GPU run are not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpo_recipes.plan.model_shape import ModelShape, UnknownShape
from grpo_recipes.plan.server import CPU_KV_CACHE_GIB, longest_sequence

if TYPE_CHECKING:
    from grpo_recipes.plan.types import Plan
    from grpo_recipes.recipe import Recipe

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Parts = dict[str, int]

# What the processes hold before the model counts: bench/results/memory_estimate.json, case "constant".
_TRAINER_IMPORTS = 780_000_000
_SERVER_IMPORTS = 1_950_000_000  # of the API server, the engine and one worker, each with torch and vLLM
# The context of CUDA with its libraries, and NCCL's buffers. Not measured.
_CUDA_CONTEXT = GIB
_CUDA_GRAPHS = GIB  # vLLM's captured graphs
# trl/kernels/chunked_logprob.py: the output layer is computed in tiles of so many tokens and words, never as a whole.
_TILE_TOKENS, _TILE_WORDS = 4096, 32768
_TILE_COPIES_ON_CPU = 8  # of _backward_tile: torch makes every intermediate, where Triton works in place
# DeepSpeed's defaults, in elements, which TRL's accelerate files leave alone.
_ZERO_BUCKET = 500_000_000
_ZERO3_LIVE = 1_000_000_000
# vLLM's defaults of an API server: sequences at a time, and tokens of one batch.
_SEQUENCES = {"cpu": 128, "cuda": 1024}
_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}

# Bytes of an optimizer's states for each trained element, as (states of the weights' dtype, bytes of its own).
_OPTIMIZERS: dict[str, tuple[int, float]] = {
    "adamw_torch": (2, 0),
    "adamw_torch_fused": (2, 0),
    "adamw_anyprecision": (2, 0),
    "stable_adamw": (2, 0),
    "adafactor": (0, 0),
    "sgd": (0, 0),
    "adagrad": (1, 0),
    "rmsprop": (1, 0),
    "paged_adamw_32bit": (0, 8),
    "adamw_8bit": (0, 2),
    "adamw_bnb_8bit": (0, 2),
    "paged_adamw_8bit": (0, 2),
    "adamw_torch_8bit": (0, 2),
    "adamw_torch_4bit": (0, 1),
    "lion_32bit": (0, 4),
    "paged_lion_32bit": (0, 4),
    "lion_8bit": (0, 1),
    "paged_lion_8bit": (0, 1),
}
_ADAMW = _OPTIMIZERS["adamw_torch"]
_PEFT_TARGETS = ("q_proj", "v_proj")  # of the families that are counted, where the recipe names none


def in_gib(size: int) -> str:
    """Bytes as a number of GiB, small ones to the MiB."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 or not size else f"{size / GIB:.3f}"


@dataclass(frozen=True)
class Workload:
    """Everything but the model that decides how much memory a run takes.

    Attributes:
        flavour: ``cpu`` or ``cuda``.
        mode: ``server``, ``colocate`` or ``transformers``.
        accelerator: as in the plan.
        world_size: training processes.
        dtype: dtype of the weights, or ``auto``.
        mixed: ``no``, ``bf16`` or ``fp16``.
        optim: name of the optimizer.
        reference: whether a reference model is kept beside the trained one.
        checkpointing: whether activations are recomputed.
        eager: whether attention keeps its scores.
        adapter: LoRA's rank, 0 without.
        adapted: layers with an adapter, by the ends of their names; empty for PEFT's choice.
        whole: layers that are trained as a whole beside the adapter, by the ends of their names.
        per_device: completions of one forward pass.
        accumulation: forward passes of a step.
        sequence: longest prompt and completion together, in tokens.
        completion: longest completion, in tokens.
        longest: longest sequence the server takes, None for the model's own limit.
        bridge: how weights reach the server, None without one.
        parallel: GPUs the server's model is split over.
        share: of a GPU's memory that vLLM may take.
    """

    flavour: str
    mode: str
    accelerator: str
    world_size: int
    dtype: str
    mixed: str
    optim: str
    reference: bool
    checkpointing: bool
    eager: bool
    adapter: int
    adapted: tuple[str, ...]
    whole: tuple[str, ...]
    per_device: int
    accumulation: int
    sequence: int
    completion: int
    longest: int | None
    bridge: str | None
    parallel: int
    share: float

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan) -> Workload:
        """The workload of a plan.

        Raises:
            UnknownShape: nothing in the recipe limits a sequence, or CONFIG_FILE decides how the model is shared.
        """
        sequence = longest = longest_sequence(recipe)
        if recipe["max_prompt_length"] and recipe["max_completion_length"]:
            sequence = recipe["max_prompt_length"] + recipe["max_completion_length"]
        if sequence is None:
            raise UnknownShape("no key limits the length of a sequence; write max_prompt_length")
        if plan.accelerator == "custom":
            raise UnknownShape("the file of CONFIG_FILE decides how the model is shared; unset it")
        return cls(
            flavour=plan.flavour,
            mode=plan.mode,
            accelerator=plan.accelerator,
            world_size=plan.batch.world_size,
            dtype=recipe["dtype"] or "auto",
            mixed="fp16" if recipe["fp16"] else "no" if recipe["bf16"] is False else "bf16",
            optim=recipe["optim"],
            reference=_has_reference(recipe, plan),
            checkpointing=recipe["gradient_checkpointing"],
            eager=recipe["attn_implementation"] == "eager",
            adapter=recipe["lora_r"] if recipe["use_peft"] else 0,
            adapted=tuple(recipe["lora_target_modules"] or ()),
            whole=tuple(recipe["lora_modules_to_save"] or ()),
            per_device=plan.batch.per_device,
            accumulation=plan.batch.accumulation,
            sequence=sequence,
            completion=min(sequence, recipe["max_completion_length"] or sequence),
            longest=longest,
            bridge=plan.bridge,
            parallel=recipe["vllm_tensor_parallel_size"],
            share=_share(recipe, plan),
        )

    def element(self, shape: ModelShape) -> int:
        """Bytes of a weight as it is loaded."""
        dtype = (shape.dtype or "float32") if self.dtype == "auto" else self.dtype
        return BYTES.get(dtype, 4)

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds weights, gradients and states."""
        return self.accelerator in ("zero2", "zero3")

    @property
    def low(self) -> bool:
        """Whether the forward pass is computed in 16 bits, whatever the weights."""
        return self.mixed != "no"


def _has_reference(recipe: Recipe, plan: Plan) -> bool:
    if recipe["use_peft"]:
        return False  # the base model under the adapter is the reference
    return recipe["beta"] != 0.0 or bool(plan.maxent and plan.maxent.beta)


def _share(recipe: Recipe, plan: Plan) -> float:
    if plan.mode == "colocate" and not recipe.given("vllm_gpu_memory_utilization"):
        return 0.3
    return float(recipe["vllm_gpu_memory_utilization"])


def trainer_parts(shape: ModelShape, work: Workload) -> Parts:
    """What one training process holds at its peak, part by part.

    The largest of these moments: the start of a backward pass, the optimizer's step, the transfer of the weights, and
    transformers' own generation.
    """
    passing = {"activations": _activations(shape, work), "output layer": _output_layer(shape, work)}
    gradients = {"gradients": _gradients(shape, work)}
    moments = [passing, {"gradients": gradients["gradients"] + _flat_gradients(shape, work)}]
    if work.accumulation > 1:
        moments.append(passing | gradients)  # those of the passes before are still there
    if work.mode == "transformers":
        moments.append({"KV cache": work.per_device * work.accumulation * work.sequence * _kv_token(shape, work)})
    if work.flavour == "cpu":  # the C library's heap keeps most of what a pass has freed
        moments.append(passing | gradients)
        if work.bridge == "file":
            moments.append(passing | {"weights in transit": _whole(shape, work)})
    worst = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in {**_held(shape, work), **worst}.items() if size}


def trained(shape: ModelShape, work: Workload) -> int:
    """Elements that are trained: all, or those of the adapter and of layers trained beside it."""
    if not work.adapter:
        return shape.parameters
    wanted = [name.rpartition(".")[2] for name in work.adapted or _PEFT_TARGETS]
    sides = [sum(sizes) for name, sizes in shape.linear.items() if name in wanted or "all-linear" in wanted]
    layers = {name: shape.layers * inputs * outputs for name, (inputs, outputs) in shape.linear.items()}
    layers |= dict.fromkeys(("embed_tokens", "lm_head"), shape.embedding)
    whole = sum(layers.get(name.rpartition(".")[2], 0) for name in work.whole)
    return shape.layers * work.adapter * sum(sides) + whole


def _held(shape: ModelShape, work: Workload) -> Parts:
    """Weights, states and reference, which stay for the whole run."""
    imports = _TRAINER_IMPORTS if work.flavour == "cpu" else _CUDA_CONTEXT
    weights, element = _weights(shape, work)
    parts = {"libraries": imports, "weights": weights, "optimizer": _states(shape, work)}
    if work.reference:
        shards = work.world_size if work.accelerator in ("zero3", "fsdp2") else 1
        parts["reference"] = element * shape.parameters // shards
    return parts


def _weights(shape: ModelShape, work: Workload) -> tuple[int, int]:
    """Bytes of the weights one process holds, and of one element of them."""
    element, count = work.element(shape), shape.parameters
    if work.zero:
        element = 2 if work.low else 4  # DeepSpeed casts the model itself
    if work.accelerator == "zero3":
        return element * (count // work.world_size + min(count, _ZERO3_LIVE)), element
    if work.accelerator == "fsdp2":
        held = 4 if work.low else element  # accelerate casts trained weights up
        gathered = (2 if work.low else element) * (2 * shape.layer + 2 * shape.embedding)
        return held * count // work.world_size + gathered, element
    adapter = 4 * trained(shape, work) if work.adapter else 0  # PEFT keeps adapters in float32
    copies = 2 * count if work.low and element == 4 and work.flavour == "cuda" else 0  # autocast's
    return element * count + adapter + copies, element


def _trained_element(shape: ModelShape, work: Workload) -> int:
    """Bytes of a trained element, as its gradient and the states of a plain optimizer have it."""
    if work.zero:
        return 2 if work.low else 4
    if work.adapter or (work.accelerator == "fsdp2" and work.low):
        return 4
    return work.element(shape)


def _shards(work: Workload) -> int:
    return work.world_size if work.accelerator in ("zero2", "zero3", "fsdp2") else 1


def _states(shape: ModelShape, work: Workload) -> int:
    """The optimizer's states; with DeepSpeed also the weights in float32 that it updates."""
    states, own = _OPTIMIZERS.get(work.optim, _ADAMW)
    element = 4 if work.zero else _trained_element(shape, work)
    master = 4 if work.zero and work.low else 0
    return int((states * element + own + master) * trained(shape, work)) // _shards(work)


def checkpoint_states(shape: ModelShape, work: Workload) -> int:
    """Bytes of the optimizer's part of a checkpoint, all processes together; DeepSpeed writes the weights there too."""
    alone = replace(work, world_size=1)
    return _states(shape, alone) + (_weights(shape, replace(alone, accelerator="zero2"))[0] if work.zero else 0)


def _gradients(shape: ModelShape, work: Workload) -> int:
    count, element = trained(shape, work), _trained_element(shape, work)
    if work.accelerator == "ddp":
        return 2 * element * count  # DDP's buckets are a second copy
    bucket = _ZERO_BUCKET * element if work.zero else 0
    return element * count // _shards(work) + bucket


def _flat_gradients(shape: ModelShape, work: Workload) -> int:
    """DeepSpeed's step makes its own float32 copy."""
    return 4 * trained(shape, work) // work.world_size if work.zero and work.low else 0


def _activations(shape: ModelShape, work: Workload) -> int:
    """What the backward pass needs of the forward pass, and the working space of the layer it is in."""
    tokens = work.per_device * work.sequence
    compute = 2 if work.low else work.element(shape)
    residual = work.element(shape)
    layer = tokens * _saved_by_layer(shape, work, compute, residual)
    working = 3 * tokens * shape.intermediate * compute
    ends = 3 * tokens * shape.hidden * 4  # embedding, last norm
    if work.checkpointing:
        return shape.layers * tokens * shape.hidden * residual + layer + working + ends
    return shape.layers * layer + working + ends


def _saved_by_layer(shape: ModelShape, work: Workload, compute: int, residual: int) -> int:
    """Bytes of one token that a layer saves for its backward pass."""
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    # A norm saves its input in float32, the normalised input and its output; in float32 the first two are 4 bytes too.
    norm = 4 + 2 * residual
    norms = 2 * shape.hidden * norm + ((queries + keys) * norm if shape.head_norms else 0)
    attention = 4 * queries * compute  # query, key and value repeated for each head, and the output
    scores = 2 * shape.heads * work.sequence * compute if work.eager else 0
    return norms + attention + scores + 4 * shape.intermediate * compute


def _output_layer(shape: ModelShape, work: Workload) -> int:
    """TRL's log-probs: a tile of logits at a time, and the gradients of the layer in float32."""
    on_cpu = work.flavour == "cpu"
    compute = 2 if work.low else work.element(shape)
    rows = work.per_device * (work.sequence if on_cpu else work.completion)  # Triton takes the scored tokens alone
    tile = min(rows, _TILE_TOKENS) * min(shape.vocabulary, _TILE_WORDS)
    tiles = tile * 4 * _TILE_COPIES_ON_CPU if on_cpu else tile * compute
    hidden = rows * shape.hidden * (4 + compute)
    element = work.element(shape)
    weight = 0 if work.adapter else shape.embedding * (4 + (element if element < 4 else 0))
    return tiles + hidden + weight


def _whole(shape: ModelShape, work: Workload) -> int:
    return work.element(shape) * shape.parameters


def _kv_token(shape: ModelShape, work: Workload) -> int:
    """Bytes that one token takes in one process' KV cache."""
    heads = max(1, shape.kv_heads // work.parallel)
    return 2 * shape.layers * heads * shape.head * work.element(shape)


def server_parts(shape: ModelShape, work: Workload) -> Parts:
    """What the vLLM server holds at its peak: on CPU all its processes together, on a GPU one of its GPUs.

    The KV cache of a GPU is what the rest leaves of vLLM's share of it, and not in this.
    """
    weights = _whole(shape, work) // work.parallel
    logits = 3 * _SEQUENCES[work.flavour] * shape.vocabulary * 4
    if work.flavour == "cpu":
        cache = int(CPU_KV_CACHE_GIB) * GIB
        parts = {"libraries": _SERVER_IMPORTS, "weights": weights, "KV cache": cache, "output layer": logits}
        return parts | ({"weights in transit": weights} if work.bridge == "file" else {})
    widest = max(2 * shape.intermediate // work.parallel, shape.hidden) + 3 * shape.hidden
    activations = _BATCHED_TOKENS["cuda"] * widest * work.element(shape)
    return {
        "libraries": _CUDA_CONTEXT + _CUDA_GRAPHS,
        "weights": weights,
        "activations": activations,
        "output layer": logits,
    }


def sequence_cache(shape: ModelShape, work: Workload, length: int) -> int:
    """Bytes of KV cache that one sequence of ``length`` tokens takes on one of the server's GPUs."""
    return length * _kv_token(shape, work)
