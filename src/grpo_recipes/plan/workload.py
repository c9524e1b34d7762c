"""Compute the memory of a trainer, of the server and of a checkpoint from the sizes of a model and a batch. No torch.

    Workload.of(recipe, plan).trainer()  # {"weights": bytes, "optimizer": bytes, ...}

The formulas follow the source of torch, TRL, accelerate and DeepSpeed (TRL 1.16, DeepSpeed 0.19). The constants are
measured:

* on CPU by ``bench/memory_estimate.py`` (docs/measurements.md, ``bench/results/memory_estimate.json``);
* for a trainer on one GPU by ``bench/gpu_step.py`` (docs/measurements.md, ``bench/results/gpu_step.json``).

A test compares the estimate with every row of both records. NCCL's buffers and vLLM servers on GPUs are not measured.
"""

from __future__ import annotations

from typing import Any

from grpo_recipes.plan.commands import longest_sequence, vllm_memory_fraction
from grpo_recipes.plan.models import UnknownShape, read_model
from grpo_recipes.plan.needs import GIB, Parts
from grpo_recipes.plan.types import Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import mixed_precision
from grpo_recipes.recipe.registry import EXTERNAL
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


class Workload(dict[str, Any]):
    """All values that affect the memory of a run, by recipe keys and a few other names. Properties are bytes.

    Properties named ``*element``, ``computed`` and ``served`` are the bytes of a single value.
    """

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan) -> Workload:
        """Collect the values of a plan, its recipe and its model that affect memory.

        Raise UnknownShape if the sizes of the model, the teacher or a reward model are unknown, if no key limits
        the length of a sequence, or if CONFIG_FILE is set.
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
            "reward_models": [read_model(model, model) for model in plan.reward_models],  # their sizes
            "replicas": plan.replicas,
            "cpu_kv_cache": plan.kv_cache_bytes or GIB,  # bytes of a vLLM on CPU
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
        """Bytes of the teacher's weights on one process, as the forward pass has them; 0 without a teacher.

        They are sharded like ``weights``.
        """
        if not (sizes := self.get("teacher")):
            return 0
        count: int = sizes["parameters"]
        shard: int = count // self["world_size"]
        if self["accelerator"] == "zero3":
            return self.computed * (shard + min(count, _ZERO3_LIVE))
        if self["accelerator"] == "fsdp2":
            gathered: int = 2 * (sizes["layer"] + sizes["embedding"])
            return self.computed * (gathered + (0 if self.offloads else shard))
        return self.computed * count

    @property
    def reward_models(self) -> int:
        """Bytes of the reward models' weights on one process, in the loaded type: copies, or shards with ZeRO-3."""
        counts: list[int] = [sizes["parameters"] for sizes in self.get("reward_models", ())]
        if self["accelerator"] == "zero3":
            processes: int = self["world_size"]
            return self.computed * sum(count // processes + min(count, _ZERO3_LIVE) for count in counts)
        return self.element * sum(counts)

    @property
    def autocast_copies(self) -> int:
        """Bytes of the 16-bit copies of float32 weights that autocast keeps during a forward pass.

        Without gradient checkpointing, the backward pass uses the same copies. With gradient checkpointing, autocast
        keeps no copies of frozen weights. TRL converts the output layer tile by tile.
        """
        frozen = self["use_peft"] and self["gradient_checkpointing"]
        if self["device"] == "cpu" or not self["low"] or self.zero or self.element < 4 or frozen:
            return 0
        return 0 if self["accelerator"] == "fsdp2" else 2 * int(self["layers"] * self["layer"])

    @property
    def states(self) -> int:
        """Bytes of the optimizer states on one process. DeepSpeed in 16 bits adds a float32 copy of the weights."""
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
        """Bytes of the working space of one layer, with its input and output in float32."""
        return 3 * self.pass_tokens * int(self["intermediate"] * self.computed + self["hidden"] * 4)

    @property
    def layer_inputs(self) -> int:
        """Bytes of the inputs of all layers, which gradient checkpointing keeps for the backward pass."""
        return int(self["layers"] * self["hidden"]) * self.pass_tokens * self.element

    @property
    def activations(self) -> int:
        """Bytes of results that the backward pass needs from the forward pass, and of a layer's working space."""
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
        """Bytes for TRL's log-probs: a tile of logits, hidden states, and the layer's gradients in float32."""
        on_cpu = self["device"] == "cpu"
        # The Triton kernel only processes the scored tokens.
        rows = self.pass_tokens if on_cpu else self.pass_tokens * self["completion"] // self["sequence"]
        tile = min(rows, _TILE_TOKENS) * min(self["vocabulary"], _TILE_WORDS)
        tiles = tile * (4 * _TILE_COPIES_ON_CPU if on_cpu else self.computed)
        return int(tiles + rows * self["hidden"] * (4 + self.computed) + self.output_gradient)

    @property
    def output_gradient(self) -> int:
        """Bytes of the output layer's gradient in float32; for 16-bit weights, also in 16 bits. 0 with LoRA."""
        return 0 if self["use_peft"] else self["embedding"] * (4 + (self.element if self.element < 4 else 0))

    @property
    def packed_buffers(self) -> int:
        """Bytes of vLLM's two buffers for NCCL transfers, on rank 0 and each GPU of the server. 0 for other methods."""
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
                    "optimizer": 0 if self.offloads else self.states, "teacher": self.teacher,
                    "reward models": self.reward_models}  # fmt: skip
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
        if sizes := self.get("teacher"):
            teacher = Workload({**self, **sizes})
            output_layer = teacher.output_layer - teacher.output_gradient
            moments.append({"activations": teacher.working, "output layer": output_layer})
        for sizes in self.get("reward_models", ()):  # TRL scores all completions of a rank in one pass
            scored = Workload({**self, **sizes, "per_device_train_batch_size": self["completions"]})
            moments.append({"activations": scored.working})
        if self["mode"] == "transformers":
            moments.append({"KV cache": self["completions"] * self.sequence_cache(self["sequence"])})
        if on_cpu and self["bridge"] in ("file", "restart"):
            moments.append(pass_parts | {"weights in transit": self.element * parameters})
        moments += [{"weights in transit": self.packed_buffers}, {"vLLM awake": awake}]
        peak: Parts = {}
        for moment in moments:
            parts = constant | moment
            if not on_cpu:  # memory that the allocator reserves between blocks
                allocated = sum(size for name, size in parts.items() if name not in ("libraries", "vLLM awake"))
                parts["allocator gaps"] = int(_GAPS * allocated)
            peak = max(peak, parts, key=lambda parts: sum(parts.values()))
        return {name: size for name, size in peak.items() if size}

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
        parts |= {"KV cache": self.get("cpu_kv_cache", GIB)} | transit
        workers = self.get("replicas", 1) * (self["vllm_tensor_parallel_size"] if self["mode"] == "server" else 1)
        return {name: size * (1 if name == "libraries" else workers) for name, size in parts.items()}

    def sequence_cache(self, length: int) -> int:
        """Return the bytes of the KV cache of one sequence of ``length`` tokens on one of the server's GPUs."""
        keys = max(self["keys"] // max(1, self["kv_heads"]), self["keys"] // self["vllm_tensor_parallel_size"])
        return int(length * 2 * self["layers"] * keys * self.served)

    def checkpoint(self) -> int:
        """Return the bytes of a checkpoint: trained weights and optimizer states of all processes."""
        weights = 4 * self.trained if self["use_peft"] else self.element * self["parameters"]
        model = self.trained_element * self["parameters"] if self.zero else 0  # DeepSpeed saves its own copy too
        return int(weights + self.states * self.shards + model)
