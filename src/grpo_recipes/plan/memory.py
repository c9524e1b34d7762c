"""How much memory a run's processes take at their peak, part by part, in bytes. Pure: no torch, nothing is started.

What torch, TRL, accelerate and DeepSpeed allocate was read in their source (TRL 1.16, DeepSpeed 0.19). The two
constants of a CPU run are measured by ``bench/memory_estimate.py``, which also says how near the whole is. Nobody has
measured the constants of a GPU run, so an estimate for GPUs is a guide and no promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.plan.commands import CPU_KV_CACHE_GIB, gpu_share, longest_sequence
from grpo_recipes.recipe.learning import mixed_precision
from grpo_recipes.runs.rundir import json_mapping

if TYPE_CHECKING:
    from grpo_recipes.plan.types import Plan
    from grpo_recipes.recipe import Recipe

GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Parts = dict[str, int]

# Decoders with grouped attention and a gated MLP, which are all counted the same way.
_KNOWN = frozenset({"gemma", "granite", "llama", "mistral", "qwen2", "qwen3"})
_HEAD_NORMS = frozenset({"qwen3"})
_TIED_BY_DEFAULT = frozenset({"gemma"})
_CONFIG_KEYS = {
    "hidden": "hidden_size", "heads": "num_attention_heads", "intermediate": "intermediate_size",
    "layers": "num_hidden_layers", "vocabulary": "vocab_size", "positions": "max_position_embeddings",
}  # fmt: skip
# What the processes hold before the model counts: bench/results/memory_estimate.json, case "constant".
_TRAINER_IMPORTS = 780_000_000
_SERVER_IMPORTS = 1_950_000_000  # of the API server, the engine and one worker, each with torch and vLLM
# Not measured: the context of CUDA with its libraries and NCCL's buffers, and vLLM's captured graphs.
_CUDA_CONTEXT = _CUDA_GRAPHS = GIB
# trl/kernels/chunked_logprob.py: the output layer is computed in tiles of so many tokens and words, never as a whole.
_TILE_TOKENS, _TILE_WORDS = 4096, 32768
_TILE_COPIES_ON_CPU = 8  # of _backward_tile: torch makes every intermediate, where Triton works in place
# DeepSpeed's defaults, in elements, which TRL's accelerate files leave alone.
_ZERO_BUCKET = 500_000_000
_ZERO3_LIVE = 1_000_000_000
# vLLM's defaults of an API server: sequences at a time, and tokens of one batch on a GPU.
_SEQUENCES = {"cpu": 128, "cuda": 1024}
_BATCHED_TOKENS = 8192
# Bytes of an optimizer's states for each trained element, as (states of the weights' dtype, bytes of its own).
_ADAMW = (2, 0)
_OPTIMIZERS: dict[str, tuple[int, float]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_anyprecision", "stable_adamw"), _ADAMW),
    **dict.fromkeys(("adafactor", "sgd"), (0, 0)),
    **dict.fromkeys(("adagrad", "rmsprop"), (1, 0)),
    "paged_adamw_32bit": (0, 8),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), (0, 2)),
    "adamw_torch_4bit": (0, 1),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), (0, 4)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), (0, 1)),
}
_PEFT_TARGETS = ("q_proj", "v_proj")  # of the families that are counted, where the recipe names none


class UnknownShape(Exception):
    """The sizes are not known; the message says why and, after a semicolon, what to do."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    hidden: int  # width of the residual stream
    intermediate: int  # width of the MLP
    layers: int
    heads: int  # of queries
    kv_heads: int
    head: int  # width of one
    vocabulary: int  # rows of the embedding
    tied: bool  # whether the output layer is the embedding
    attention_bias: int  # elements of the biases of a layer's q, k and v
    head_norms: bool  # whether queries and keys are normalised head by head
    positions: int  # longest sequence
    dtype: str | None  # of the saved weights, None where the file does not say

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the sizes from a ``config.json``; UnknownShape for a family not counted here, or without a number."""
        kind = config.get("model_type")
        if kind not in _KNOWN:
            raise UnknownShape(f"models of type '{kind}' are not counted")
        try:
            sizes = {name: int(config[key]) for name, key in _CONFIG_KEYS.items()}
            kv_heads = int(config.get("num_key_value_heads") or sizes["heads"])
            head = int(config.get("head_dim") or sizes["hidden"] // sizes["heads"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UnknownShape(f"its config.json is not understood ({type(error).__name__}: {error})") from None
        biased = kind == "qwen2" or config.get("attention_bias")
        return cls(
            **sizes,
            kv_heads=kv_heads,
            head=head,
            tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
            attention_bias=(sizes["heads"] + 2 * kv_heads) * head if biased else 0,
            head_norms=kind in _HEAD_NORMS,
            dtype=config.get("dtype") or config.get("torch_dtype"),
        )

    @property
    def embedding(self) -> int:
        """The elements of the embedding, and of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """The linear layers of one layer: name -> (inputs, outputs)."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer(self) -> int:
        """The elements of one layer."""
        norms = 2 * self.hidden + (2 * self.head if self.head_norms else 0)
        return sum(inputs * outputs for inputs, outputs in self.linear.values()) + self.attention_bias + norms

    @property
    def parameters(self) -> int:
        """The elements of the model, tied ones once."""
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2) + self.hidden


def read_shape(model: str) -> ModelShape:
    """Return the sizes of the model in a folder; a plan names a hub id instead where it has not been fetched."""
    try:
        config = json_mapping((Path(model) / "config.json").read_bytes())
    except OSError:
        raise UnknownShape("its config.json is not on this machine; grpo fetch RECIPE brings it") from None
    if config is None:
        raise UnknownShape("its config.json is not a JSON mapping")
    return ModelShape.of(config)


@dataclass(frozen=True)
class Workload:
    """Everything but the model that decides how much memory a run takes."""

    device: str  # cpu or cuda
    mode: str  # as in the plan
    accelerator: str  # as in the plan
    world_size: int
    dtype: str  # of the weights, or auto
    mixed: str  # no, bf16 or fp16
    optim: str
    reference: bool  # whether a reference model is kept beside the trained one
    checkpointing: bool  # whether activations are recomputed
    eager: bool  # whether attention keeps its scores
    adapter: int  # LoRA's rank, 0 without
    adapted: tuple[str, ...]  # ends of the names of layers with an adapter; empty for PEFT's choice
    whole: tuple[str, ...]  # ends of the names of layers trained as a whole beside the adapter
    per_device: int  # completions of one forward pass
    accumulation: int  # forward passes of a step
    sequence: int  # tokens of the longest prompt and completion together
    completion: int  # tokens of the longest completion
    longest: int | None  # tokens of the longest sequence the server takes, None for the model's own limit
    bridge: str | None
    parallel: int  # GPUs the server's model is split over
    share: float  # of a GPU's memory that vLLM may take

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan) -> Workload:
        """Return the workload of a plan; UnknownShape where a sequence has no limit, or CONFIG_FILE decides."""
        sequence = longest = longest_sequence(recipe)
        if recipe["max_prompt_length"] and recipe["max_completion_length"]:
            sequence = recipe["max_prompt_length"] + recipe["max_completion_length"]
        if sequence is None:
            raise UnknownShape("no key limits the length of a sequence; write max_prompt_length")
        if plan.accelerator == "custom":
            raise UnknownShape("the file of CONFIG_FILE decides how the model is shared; unset it")
        return cls(
            device=plan.device,
            mode=plan.mode,
            accelerator=plan.accelerator,
            world_size=plan.batch.world_size,
            dtype=recipe["dtype"] or "auto",
            mixed=mixed_precision(recipe),
            optim=recipe["optim"],
            # With an adapter the base model under it is the reference.
            reference=not recipe["use_peft"] and (recipe["beta"] != 0.0 or bool(plan.maxent and plan.maxent.beta)),
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
            share=gpu_share(recipe, plan.mode),
        )

    def element(self, shape: ModelShape) -> int:
        """Return the bytes of a weight as it is loaded."""
        return BYTES.get((shape.dtype or "float32") if self.dtype == "auto" else self.dtype, 4)

    def computed(self, shape: ModelShape) -> int:
        """Return the bytes of a value in the forward pass."""
        return 2 if self.low else self.element(shape)

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds weights, gradients and states."""
        return self.accelerator in ("zero2", "zero3")

    @property
    def low(self) -> bool:
        """Whether the forward pass is computed in 16 bits, whatever the weights."""
        return self.mixed != "no"

    @property
    def shards(self) -> int:
        """The parts that gradients and optimizer states are cut into."""
        return self.world_size if self.zero or self.accelerator == "fsdp2" else 1


def trainer_parts(shape: ModelShape, work: Workload) -> Parts:
    """Return what one training process holds at its peak, part by part.

    The largest of these moments: the start of a backward pass, the optimizer's step, the transfer of the weights, and
    transformers' own generation.
    """
    count, element = trained(shape, work), _trained_element(shape, work)
    held = {
        "libraries": _TRAINER_IMPORTS if work.device == "cpu" else _CUDA_CONTEXT,
        "weights": _weights(shape, work),
        "optimizer": _states(shape, work),
    }
    if work.reference:
        shards = work.world_size if work.accelerator in ("zero3", "fsdp2") else 1
        held["reference"] = (element if work.zero else work.element(shape)) * shape.parameters // shards
    gradients = element * count // work.shards + (_ZERO_BUCKET * element if work.zero else 0)
    if work.accelerator == "ddp":
        gradients = 2 * element * count  # DDP's buckets are a second copy
    # DeepSpeed's step makes its own float32 copy of the gradients.
    flat = 4 * count // work.world_size if work.zero and work.low else 0
    passing = {"activations": _activations(shape, work), "output layer": _output_layer(shape, work)}
    moments = [passing, {"gradients": gradients + flat}]
    # Gradients of the passes before are still there; on CPU the C library's heap keeps most of what a pass has freed.
    if work.accumulation > 1 or work.device == "cpu":
        moments.append(passing | {"gradients": gradients})
    if work.mode == "transformers":
        moments.append({"KV cache": work.per_device * work.accumulation * sequence_cache(shape, work, work.sequence)})
    if work.device == "cpu" and work.bridge == "file":
        moments.append(passing | {"weights in transit": work.element(shape) * shape.parameters})
    worst = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in {**held, **worst}.items() if size}


def trained(shape: ModelShape, work: Workload) -> int:
    """Return the elements that are trained: all, or those of the adapter and of layers trained beside it."""
    if not work.adapter:
        return shape.parameters
    wanted = [name.rpartition(".")[2] for name in work.adapted or _PEFT_TARGETS]
    sides = [sum(sizes) for name, sizes in shape.linear.items() if name in wanted or "all-linear" in wanted]
    layers = {name: shape.layers * inputs * outputs for name, (inputs, outputs) in shape.linear.items()}
    layers |= dict.fromkeys(("embed_tokens", "lm_head"), shape.embedding)
    whole = sum(layers.get(name.rpartition(".")[2], 0) for name in work.whole)
    return shape.layers * work.adapter * sum(sides) + whole


def checkpoint_states(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of the optimizer's part of a checkpoint, all processes together; DeepSpeed adds the weights."""
    alone = replace(work, world_size=1)
    return _states(shape, alone) + (_weights(shape, replace(alone, accelerator="zero2")) if work.zero else 0)


def _weights(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of the weights that one process holds."""
    element, count = work.element(shape), shape.parameters
    if work.zero:
        element = _trained_element(shape, work)  # DeepSpeed casts the model itself
    if work.accelerator == "zero3":
        return element * (count // work.world_size + min(count, _ZERO3_LIVE))
    if work.accelerator == "fsdp2":
        gathered = work.computed(shape) * (2 * shape.layer + 2 * shape.embedding)
        return (4 if work.low else element) * count // work.world_size + gathered  # accelerate casts weights up
    adapter = 4 * trained(shape, work) if work.adapter else 0  # PEFT keeps adapters in float32
    copies = 2 * count if work.low and element == 4 and work.device == "cuda" else 0  # autocast's
    return element * count + adapter + copies


def _trained_element(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of a trained element, as its gradient and the states of a plain optimizer have it."""
    if work.zero:
        return 2 if work.low else 4
    if work.adapter or (work.accelerator == "fsdp2" and work.low):
        return 4
    return work.element(shape)


def _states(shape: ModelShape, work: Workload) -> int:
    """Return the bytes of the optimizer's states, with DeepSpeed also of the float32 weights that it updates."""
    states, own = _OPTIMIZERS.get(work.optim, _ADAMW)
    element = 4 if work.zero else _trained_element(shape, work)
    master = 4 if work.zero and work.low else 0
    return int((states * element + own + master) * trained(shape, work)) // work.shards


def _activations(shape: ModelShape, work: Workload) -> int:
    """Return what the backward pass needs of the forward pass, and the working space of the layer it is in."""
    tokens, compute, residual = work.per_device * work.sequence, work.computed(shape), work.element(shape)
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    # A norm saves its input in float32, the normalised input and its output; in float32 the first two are 4 bytes too.
    norm = 4 + 2 * residual
    norms = 2 * shape.hidden * norm + ((queries + keys) * norm if shape.head_norms else 0)
    attention = 4 * queries * compute  # query, key and value repeated for each head, and the output
    scores = 2 * shape.heads * work.sequence * compute if work.eager else 0
    layer = tokens * (norms + attention + scores + 4 * shape.intermediate * compute)
    working = 3 * tokens * shape.intermediate * compute
    ends = 3 * tokens * shape.hidden * 4  # embedding, last norm
    if work.checkpointing:
        return shape.layers * tokens * shape.hidden * residual + layer + working + ends
    return shape.layers * layer + working + ends


def _output_layer(shape: ModelShape, work: Workload) -> int:
    """Return what TRL's log-probs take: a tile of logits at a time, and the gradients of the layer in float32."""
    on_cpu = work.device == "cpu"
    element, compute = work.element(shape), work.computed(shape)
    rows = work.per_device * (work.sequence if on_cpu else work.completion)  # Triton takes the scored tokens alone
    tile = min(rows, _TILE_TOKENS) * min(shape.vocabulary, _TILE_WORDS)
    tiles = tile * 4 * _TILE_COPIES_ON_CPU if on_cpu else tile * compute
    hidden = rows * shape.hidden * (4 + compute)
    weight = 0 if work.adapter else shape.embedding * (4 + (element if element < 4 else 0))
    return tiles + hidden + weight


def server_parts(shape: ModelShape, work: Workload) -> Parts:
    """Return what the vLLM server holds at its peak: on CPU all its processes together, on a GPU one of its GPUs.

    The KV cache of a GPU is what the rest leaves of vLLM's share of it, and not in this.
    """
    weights = work.element(shape) * shape.parameters // work.parallel
    logits = 3 * _SEQUENCES[work.device] * shape.vocabulary * 4
    if work.device == "cpu":
        cache = CPU_KV_CACHE_GIB * GIB
        parts = {"libraries": _SERVER_IMPORTS, "weights": weights, "KV cache": cache, "output layer": logits}
        return parts | ({"weights in transit": weights} if work.bridge == "file" else {})
    widest = max(2 * shape.intermediate // work.parallel, shape.hidden) + 3 * shape.hidden
    return {
        "libraries": _CUDA_CONTEXT + _CUDA_GRAPHS,
        "weights": weights,
        "activations": _BATCHED_TOKENS * widest * work.element(shape),
        "output layer": logits,
    }


def sequence_cache(shape: ModelShape, work: Workload, length: int) -> int:
    """Return the bytes of KV cache that one sequence of ``length`` tokens takes on one of the server's GPUs."""
    heads = max(1, shape.kv_heads // work.parallel)
    return length * 2 * shape.layers * heads * shape.head * work.element(shape)
