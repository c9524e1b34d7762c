"""What vLLM loads: our plug-in, in every process (``vllm.general_plugins``), and ``--worker-extension-cls``.

The extension loads weights in the server's workers and fingerprints them, as the trainer does what it sends.
"""

import inspect
import logging
import math
import mmap
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from grpo_recipes.process.reports import dump_stacks_on_signal
from grpo_recipes.process.tree import die_with_parent

_INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8  # bytes that are mixed at once, several times as fast as element by element
_ALIGNMENT = 64  # bytes: where a parameter begins in shared memory
# Elements at a time, each 8 bytes while they are mixed: for a GPU that vLLM has filled, or for a CPU core's own cache.
_GPU_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 15
SYNC = "grpo_sync"  # in the metadata of a file of weights: the number of the sync that wrote it
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's name for an adapter's
_HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")  # bytes among torch's names for a GPU's memory
_LOGGER = logging.getLogger("vllm.grpo_recipes")  # a child of vLLM's own: only those reach the server's log


def register() -> None:
    """Let every process of the server write its stacks on request, end with its parent and, on CPU, renew its weights.

    vLLM's engine does not notice that its API server was killed, and would hold the GPU.
    """
    if os.environ.get("GRPO_SERVER") == "1":  # ranks, too, may have vLLM inside
        _follow_server()
        os.register_at_fork(after_in_child=_follow_server)
    _keep_linear_weights()


def _follow_server() -> None:
    dump_stacks_on_signal(Path(os.environ["GRPO_RUN_DIR"]), f"server_{os.getpid()}")
    die_with_parent(os.getppid(), signal.SIGKILL)


def _keep_linear_weights() -> None:
    """On CPU keep linear weights as they are, so that a reload reaches the matrix product, and the guard can read them.

    vLLM's CPU build packs each weight into a private copy when the model is loaded and multiplies with that copy. With
    tied embeddings a reload does not renew it: the server answers 200 and computes with old weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as layer_utils

    if not hasattr(layer_utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError("this vLLM has no dispatch_cpu_unquantized_gemm: the CPU plug-in does not fit it")
    layer_utils.dispatch_cpu_unquantized_gemm = _multiply_unpacked


def _multiply_unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def fingerprint(tensor: torch.Tensor, unit: int | None = None) -> torch.Tensor:
    """Return the sum of the bit patterns, ``unit`` bytes at a time, each mixed by a multiplicative hash, as an int64.

    It does not depend on the order of the units, by default single elements, so that the parts of a fused tensor (q, k
    and v in ``qkv_proj``), or its shards, add up to the whole; zero padding adds nothing. Sums wrap around at 64 bits.
    """
    flat, unit = tensor.detach().contiguous().view(-1), unit or tensor.element_size()
    if flat.storage_offset() * flat.element_size() % unit:
        flat = flat.clone()  # torch views memory as larger numbers only where one begins
    bits = flat.view(_INTEGER_VIEWS[unit])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    sums: Any = total.numpy() if tensor.is_cpu else total
    for chunk in bits.split(_CPU_CHUNK if tensor.is_cpu else _GPU_CHUNK):
        words = chunk.to(torch.int64)
        # Without mixing, one step of the last bit up in one element and down in another would cancel. On CPU NumPy
        # multiplies whole numbers two to three times as fast as torch.
        mixed = (words.numpy() if tensor.is_cpu else words) * 0x9E3779B97F4A7C1
        mixed ^= mixed >> 29
        sums += mixed.sum()
    return total * 0x3C79AC492BA7B653


def unit_of(tensor: torch.Tensor) -> int:
    """Return the bytes to take at a time: a word of several elements, where rows and shards of rows are whole words."""
    row = tensor.shape[-1] * tensor.element_size() if tensor.ndim > 1 else 1
    return _WORD if row % _WORD == 0 else tensor.element_size()


def _plain(name: str) -> str:
    """Return a parameter's name without the part that vLLM adds to layers that can have a LoRA adapter."""
    return name.replace(".base_layer.", ".")


def mapped_memory(file: str, size: int = 0) -> mmap.mmap:
    """Map a file into memory: an existing one whole, with ``size`` a new one of so many bytes, all of them reserved.

    The memory lives as long as a tensor in it, also after the file is removed. Raise OSError where there is no room.
    """
    descriptor = os.open(file, os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0), 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)  # else a page too many would end the process, not the call
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def tensor_in(memory: mmap.mmap, place: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of ``memory`` at a place: ``offset`` in bytes, ``shape`` and ``dtype``."""
    count, dtype = math.prod(place["shape"]), getattr(torch, place["dtype"])
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=place["offset"]).view(place["shape"])


def gpu_of(tensor: torch.Tensor) -> str | None:
    """Return the UUID of a tensor's GPU, which all processes know it by; None on CPU."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else None


def exported(tensor: torch.Tensor) -> dict[str, Any]:
    """Return where a tensor's GPU memory is, for ``imported`` in another process, as JSON can carry it.

    It is no pickle: by one, whoever takes the port of a dead server could run code in the trainer. vLLM's workers do
    not free parameters, so that the memory stays while their process lives.
    """
    place = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, reduce_tensor(tensor)[1], strict=True))
    own = {"tensor_cls": "", "storage_cls": "", "storage_device": 0, "requires_grad": False}  # the other process's
    plain = {"dtype": _name_of(tensor.dtype), "tensor_size": list(tensor.shape), "tensor_stride": list(tensor.stride())}
    return {**place, **own, **plain, **{name: place[name].hex() for name in _HANDLES}}


def imported(place: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return the tensor that another process ``exported``, on ``device``: the same GPU by this process's number."""
    own = {"tensor_cls": torch.Tensor, "storage_cls": torch.TypedStorage, "storage_device": device.index}
    handles = {name: bytes.fromhex(place[name]) for name in _HANDLES}
    return rebuild_cuda_tensor(**{**place, **own, **handles, "dtype": getattr(torch, place["dtype"])})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def held_name(name: str, held: Mapping[str, Any], packed: Mapping[str, Sequence[str]]) -> str | None:
    """Return the server's parameter that holds the trainer's ``name``, fused ones included; None if not found."""
    fused_names = [name.replace(f".{part}.", f".{fused}.") for fused, parts in packed.items() for part in parts]
    return next((one for one in (name, *fused_names) if one in held), None)


def own_rows(
    tensors: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor], packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str | None, torch.Tensor | None]]:
    """Yield for each of the trainer's tensors its name, the server's for its place, and the rows there that are its.

    Those of a fused parameter follow each other in the order of its parts; below them a vocabulary may be padded. The
    rows are None where dtype or shape are others: the server then keeps the tensor in another form.
    """
    order = {part: index for parts in packed.values() for index, part in enumerate(parts)}
    used = dict.fromkeys(held, 0)
    for name in sorted(tensors, key=lambda name: max((order.get(part, 0) for part in name.split(".")), default=0)):
        tensor, place = tensors[name], held_name(name, held, packed)
        if place is None or not tensor.ndim:
            yield name, place, None
            continue
        begins = used[place]
        used[place] += tensor.shape[0]
        rows = held[place][begins : used[place]]
        yield name, place, rows if (rows.shape, rows.dtype) == (tensor.shape, tensor.dtype) else None


def _sync_of(file: Path) -> int:
    """Return the number of the sync that wrote a file of weights, 0 where none did."""
    if not file.is_file():
        return 0
    with safe_open(file, framework="pt") as weights:
        return int((weights.metadata() or {}).get(SYNC, 0))


def _moved(parameters: Mapping[str, torch.nn.Parameter], file: str) -> dict[str, dict[str, Any]]:
    """Move parameters into the new ``file``, mapped into memory; return offset in bytes, shape and dtype of each."""
    places, size = {}, 0
    for name, parameter in parameters.items():
        places[name] = {"offset": size, "shape": list(parameter.shape), "dtype": _name_of(parameter.dtype)}
        size += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mapped_memory(file, size)
    for name, parameter in parameters.items():
        parameter.data = tensor_in(memory, places[name]).copy_(parameter.data)
    return places


class WeightReport:
    """Mixed into vLLM's worker, and called through ``/collective_rpc``: report and load the weights of its model."""

    _grpo_loads = 0
    _grpo_sync: int | None = None  # the sync of what it has; None: what it was started with

    def grpo_load(self, folder: str) -> int:
        """Load the safetensors of ``folder`` into the model in place; return the count of loads so far."""
        if not self._copied(folder):
            self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        self._grpo_loads, self._grpo_sync = self._grpo_loads + 1, _sync_of(Path(folder) / "model.safetensors")
        _LOGGER.info("grpo: weights loaded, load %d", self._grpo_loads)
        return self._grpo_loads

    def _copied(self, folder: str) -> bool:
        """Copy a file's tensors over the model's own, where each has its rows; on CPU, else change nothing.

        There nothing that is computed with is derived from unquantized weights when they are loaded, but for MLA.
        vLLM's reload makes every layer anew, which takes several times as long.
        """
        config, model = self.vllm_config, self.get_model()  # type: ignore[attr-defined]
        held = {_plain(name): parameter.data for name, parameter in model.named_parameters()}
        on_cpu = all(one.device.type == "cpu" for one in held.values())
        if not on_cpu or config.parallel_config.tensor_parallel_size > 1 or config.model_config.use_mla:
            return False
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            rows = list(own_rows(tensors, held, getattr(model, "packed_modules_mapping", {})))
            if any(own is None for *_, own in rows) or {place for _, place, _ in rows} != held.keys():
                return False
            for name, _, own in rows:
                assert own is not None
                own.copy_(tensors[name])
        return True

    def grpo_count(self, sync: int) -> int:
        """Note the number of the sync whose weights vLLM's own transfer has brought."""
        self._grpo_sync = sync
        return sync

    def _held_sync(self) -> int:
        """Return the number of the sync of what it has; a model that it was started with may be of one, too."""
        if self._grpo_sync is None:
            model = Path(self.vllm_config.model_config.model)  # type: ignore[attr-defined]
            self._grpo_sync = _sync_of(model / "model.safetensors")
        return self._grpo_sync

    def grpo_share(self, file: str, sync: int) -> dict[str, Any]:
        """Let another process have the parameters' memory: on CPU they move into the new ``file``, mapped into memory.

        On a GPU they stay where they are, which captured CUDA graphs have the addresses of. Return ``gpu``, its UUID or
        None; ``parameters``: name -> its place, for ``imported`` or ``tensor_in``; ``packed`` as ``grpo_weights`` does.
        """
        model = self.get_model()  # type: ignore[attr-defined]
        parameters = dict(model.named_parameters())
        gpu = gpu_of(next(iter(parameters.values())))
        places = {name: exported(one.data) for name, one in parameters.items()} if gpu else _moved(parameters, file)
        size = sum(one.nbytes for one in parameters.values())
        self._grpo_sync = sync
        _LOGGER.info("grpo: %d bytes of weights are shared with the trainer", size)
        return {"gpu": gpu, "parameters": places, "packed": dict(getattr(model, "packed_modules_mapping", {}))}

    def grpo_weights(self) -> dict[str, Any]:
        """Return what the model holds, tied parameters once.

        ``parameters``: name -> [fingerprint, dtype, bytes taken at a time]; ``packed``: fused name -> its parts;
        ``sync``: the number of the sync that brought it, 0 for none.
        """
        model = self.get_model()  # type: ignore[attr-defined]
        parameters = {}
        for name, parameter in model.named_parameters():
            unit, dtype = unit_of(parameter), _name_of(parameter.dtype)
            parameters[_plain(name)] = [int(fingerprint(parameter.data, unit)), dtype, unit]
        for prefix, module in model.named_modules():
            replicas = getattr(module, "num_kv_head_replicas", 1)
            if replicas > 1 and module.tp_rank % replicas:  # key and value heads that another worker holds, and counts
                for name, parameter in module.named_parameters(recurse=False):
                    if name in ("weight", "bias"):
                        owned = parameter.data[: module.num_heads * module.head_size]  # q's rows
                        parameters[_plain(f"{prefix}.{name}")][0] = int(fingerprint(owned, unit_of(owned)))
        packed = dict(getattr(model, "packed_modules_mapping", {}))
        return {"parameters": parameters, "packed": packed, "sync": self._held_sync()}

    def grpo_adapters(self) -> list[int]:
        """Return the ids of the LoRA adapters that are loaded."""
        return sorted(self.list_loras())  # type: ignore[attr-defined]

    def grpo_load_adapter(self, folder: str, lora_id: int) -> bool:
        """Load the adapter of ``folder`` in the place of the one with that id."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=folder, lora_int_id=lora_id, lora_path=folder, load_inplace=True)
        loaded = bool(self.add_lora(request))  # type: ignore[attr-defined]
        self._grpo_sync = _sync_of(Path(folder) / ADAPTER_WEIGHTS)
        return loaded

    def grpo_adapter_weights(self, lora_id: int) -> dict[str, Any]:
        """Report an adapter as ``grpo_weights`` does the model: ``<layer>.lora_a`` and ``.lora_b``, which is scaled.

        These are the tensors that are computed with. A layer that the adapter leaves alone, or the whole model without
        that adapter, has zeros, whose fingerprint is 0.
        """
        manager = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        slots = [slot for slot, loaded in enumerate(manager.lora_index_to_id) if loaded == lora_id]
        parameters = {}
        for name, module in manager.modules.items():
            parts = manager.packed_modules.get(name, [name])
            for side in ("lora_a", "lora_b"):
                for part, stacked in zip(parts, getattr(module, f"{side}_stacked", ()), strict=False):
                    value = int(fingerprint(stacked[slots[0], 0])) if slots else 0
                    parameters[f"{part}.{side}"] = [value, _name_of(stacked.dtype)]
        return {"parameters": parameters, "packed": {}, "sync": self._held_sync()}

    def grpo_config(self) -> dict[str, Any]:
        """Return what TRL asks vLLM's ``/server_info`` for, which runs pip too: seconds, and an error without it."""
        config = self.vllm_config  # type: ignore[attr-defined]
        transfer = config.weight_transfer_config
        return {
            "model_config": {"logprobs_mode": str(config.model_config.logprobs_mode)},
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
        }
