"""Our code inside vLLM: a plug-in for every process (``vllm.general_plugins``), and ``--worker-extension-cls``.

The worker extension, ``WeightReport``, loads weights and reports a fingerprint of each parameter. The trainer computes
the same fingerprints of the weights it sends, and compares them. The plug-in ends orphaned processes and adapts vLLM to
CPU.
"""

import inspect
import logging
import math
import mmap
import os
import re
import signal
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from grpo_recipes.process.reports import dump_stacks_on_signal
from grpo_recipes.process.startup import freeze_imports
from grpo_recipes.process.tree import die_with_parent

_INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD = 8  # bytes hashed at once, several times as fast as single elements
_ALIGNMENT = 64  # bytes; parameters in shared memory start at a multiple
# Elements hashed at once, 8 bytes each. They must fit into the free memory of a GPU that vLLM has filled, or into a CPU
# cache.
_GPU_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 15
SYNC = "grpo_sync"  # metadata key in a file of weights: the number of the sync that wrote it
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's name for the file of an adapter
_HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")  # arguments of rebuild_cuda_tensor that are bytes
# The variables in which vLLM lists the cores of a CPU worker, depending on the OpenMP library.
_OPENMP_CORES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
# Seconds for which the engine and its workers poll for the next message. vLLM polls for 1 s.
_POLLING_SECONDS = 0.01
_LOGGER = logging.getLogger("vllm.grpo_recipes")  # only children of vLLM's logger reach the server's log


def register() -> None:
    """Let every process of the server dump its stacks on request and end with its parent; adapt vLLM to CPU.

    vLLM's engine does not notice that its API server was killed, and would keep the GPU. On CPU, vLLM would also answer
    with old weights after a reload, and import itself again in the engine and in each worker. A trainer with co-located
    vLLM calls this too: there it only adapts vLLM to CPU.
    """
    in_server = os.environ.get("GRPO_SERVER") == "1"  # ranks with co-located vLLM load this plug-in too
    if in_server:
        # vLLM is imported by now, and its classes and functions are never garbage. Before it serves, vLLM collects
        # garbage in the API server and in the engine. Without the objects of the imports, this is faster.
        freeze_imports()
        _prepare_server_process()
        os.register_at_fork(after_in_child=_prepare_server_process)
    _adapt_to_cpu(in_server)


def _adapt_to_cpu(in_server: bool) -> None:
    """On CPU, keep linear weights as they are loaded; in a server, let vLLM fork its engine and sleep when idle.

    vLLM's CPU build packs each weight into a private copy at load time and multiplies with that copy. With tied
    embeddings, a reload does not update the copy: the server answers 200 and computes with old weights. Without
    packing, a reload changes the matrix product, and the guard can read the weights. Raise RuntimeError if this vLLM
    has no function that packs weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as layer_utils

    if not hasattr(layer_utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError("this vLLM has no dispatch_cpu_unquantized_gemm: the CPU plug-in does not fit it")
    layer_utils.dispatch_cpu_unquantized_gemm = _use_plain_linear
    if in_server:
        _fork_engine(type(current_platform))
        _sleep_between_messages()


def _fork_engine(platform: Any) -> None:
    """Let vLLM fork its engine and workers, as it does on GPUs: then they need not import vLLM again.

    On CPU, vLLM starts new Python processes instead, since OpenMP reads a worker's cores from the environment only at
    its start. Here a forked worker gets these cores as its affinity.
    """
    choose_settings = platform.check_and_update_config.__func__
    variables = {name: os.environ.get(name) for name in _OPENMP_CORES}

    def choose_forking(cls: Any, config: Any) -> None:
        """Choose vLLM's settings for CPU, except that processes are forked."""
        choose_settings(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    def use_cores() -> None:
        """Limit a forked CPU worker to the cores that vLLM put into its environment, with a torch thread for each."""
        for name in _OPENMP_CORES:
            value = os.environ.get(name)
            if value and value != variables[name]:  # vLLM has set it for this worker
                cores = {int(core) for core in re.findall(r"\d+", value)}
                os.sched_setaffinity(0, cores)
                torch.set_num_threads(len(cores))

    platform.check_and_update_config = classmethod(choose_forking)
    os.register_at_fork(after_in_child=use_cores)


def _sleep_between_messages() -> None:
    """Let the engine and its workers wait for a message without a busy loop after ``_POLLING_SECONDS``.

    The trainer updates on the same cores while the server waits for the next step, and each loop takes a core from it.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (_POLLING_SECONDS,)  # busy_loop_s, the only default


def _prepare_server_process() -> None:
    """Let this process dump its stacks on SIGUSR2 and die with its parent."""
    dump_stacks_on_signal(Path(os.environ["GRPO_RUN_DIR"]), f"server_{os.getpid()}")
    die_with_parent(os.getppid(), signal.SIGKILL)


def _use_plain_linear(layer: Any, remove_weight: bool) -> None:
    """Let a linear layer multiply with its weight as it is loaded. It replaces vLLM's function that packs weights."""
    layer.cpu_linear = torch.nn.functional.linear


def fingerprint(tensor: torch.Tensor, unit: int | None = None) -> torch.Tensor:
    """Return a hash of a tensor as an int64 tensor: the sum of the hashes of its units.

    A unit is ``unit`` bytes, by default a single element. The order of the units does not matter. The fingerprints of
    parts add up to the fingerprint of the whole: of shards, or of q, k and v in ``qkv_proj``. Zero padding adds
    nothing. Sums wrap around at 64 bits. Only fingerprints with the same unit are comparable.
    """
    flat, unit = tensor.detach().contiguous().view(-1), unit or tensor.element_size()
    if flat.storage_offset() * flat.element_size() % unit:
        flat = flat.clone()  # torch views memory as larger integers only at aligned offsets
    bits = flat.view(_INTEGER_VIEWS[unit])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    sums: Any = total.numpy() if tensor.is_cpu else total
    for chunk in bits.split(_CPU_CHUNK if tensor.is_cpu else _GPU_CHUNK):
        words = chunk.to(torch.int64)
        # Without the hash, the last bit up in one element and down in another would cancel. On CPU, NumPy multiplies
        # integers two to three times as fast as torch.
        hashes = (words.numpy() if tensor.is_cpu else words) * 0x9E3779B97F4A7C1
        hashes ^= hashes >> 29
        sums += hashes.sum()
    return total * 0x3C79AC492BA7B653


def choose_unit(tensor: torch.Tensor) -> int:
    """Return the unit of a tensor's fingerprint in bytes: 8 if rows consist of whole 8-byte words, else an element."""
    row_bytes = tensor.shape[-1] * tensor.element_size() if tensor.ndim > 1 else 1
    return _WORD if row_bytes % _WORD == 0 else tensor.element_size()


def _strip_base_layer(name: str) -> str:
    """Return a parameter's name without ``.base_layer``, which vLLM adds to layers that can have a LoRA adapter."""
    return name.replace(".base_layer.", ".")


def map_memory(file: str, size: int = 0) -> mmap.mmap:
    """Map an existing file into memory, or with ``size`` create a file of so many bytes and reserve all of them.

    The memory lives as long as a tensor in it, even after the file is removed. Raise OSError if space is missing,
    and if a file to create exists already.
    """
    descriptor = os.open(file, os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0), 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)  # without it, a missing page would kill the process
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def view_tensor(memory: mmap.mmap, location: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor at a location in ``memory``, without a copy: ``offset`` in bytes, ``shape`` and ``dtype``."""
    count, dtype = math.prod(location["shape"]), getattr(torch, location["dtype"])
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=location["offset"]).view(location["shape"])


def get_gpu_uuid(tensor: torch.Tensor) -> str | None:
    """Return the UUID of a tensor's GPU, which is the same in all processes; None on CPU."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid) if tensor.is_cuda else None


def export_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the location of a tensor's GPU memory as JSON values, for ``import_tensor`` in another process.

    A pickle would let any program that takes the port of a dead server run code in the trainer. vLLM's workers do not
    free parameters, so the memory stays while their process lives.
    """
    location = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, reduce_tensor(tensor)[1], strict=True))
    replaced_by_importer = {"tensor_cls": "", "storage_cls": "", "storage_device": 0, "requires_grad": False}
    layout = {
        "dtype": _get_dtype_name(tensor.dtype),
        "tensor_size": list(tensor.shape), "tensor_stride": list(tensor.stride()),
    }  # fmt: skip
    return {**location, **replaced_by_importer, **layout, **{name: location[name].hex() for name in _HANDLES}}


def import_tensor(location: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """Return a tensor on the GPU memory that another process described with ``export_tensor``.

    ``device`` is that GPU as this process numbers it.
    """
    local = {"tensor_cls": torch.Tensor, "storage_cls": torch.TypedStorage, "storage_device": device.index}
    handles = {name: bytes.fromhex(location[name]) for name in _HANDLES}
    arguments: dict[str, Any] = {**location, **local, **handles, "dtype": getattr(torch, location["dtype"])}
    tensor: torch.Tensor = rebuild_cuda_tensor(**arguments)
    return tensor


def _get_dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def find_server_name(name: str, server_names: Container[str], packed: Mapping[str, Sequence[str]]) -> str | None:
    """Return the name of the server's parameter that contains the trainer's parameter ``name``; None without one.

    ``packed`` maps fused parameters, which may also be the result, to the names of their parts.
    """
    fused_names = [name.replace(f".{part}.", f".{fused}.") for fused, parts in packed.items() for part in parts]
    return next((candidate for candidate in (name, *fused_names) if candidate in server_names), None)


def match_rows(
    tensors: Mapping[str, torch.Tensor], server_tensors: Mapping[str, torch.Tensor], packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str | None, torch.Tensor | None]]:
    """Yield for each of the trainer's tensors its name, the server's parameter, and its rows in that parameter.

    ``packed`` maps fused parameters to the names of their parts. Rows of a fused parameter follow each other in the
    order of its parts. A vocabulary may be padded at the end. The rows are None if dtype or shape differ: the
    server then stores the tensor in another form. Both are None if the server has no such parameter.
    """
    order = {part: index for parts in packed.values() for index, part in enumerate(parts)}
    used_rows = dict.fromkeys(server_tensors, 0)
    for name in sorted(tensors, key=lambda name: max((order.get(part, 0) for part in name.split(".")), default=0)):
        tensor, server_name = tensors[name], find_server_name(name, server_tensors, packed)
        if server_name is None or not tensor.ndim:
            yield name, server_name, None
            continue
        start = used_rows[server_name]
        used_rows[server_name] += tensor.shape[0]
        rows = server_tensors[server_name][start : used_rows[server_name]]
        yield name, server_name, rows if (rows.shape, rows.dtype) == (tensor.shape, tensor.dtype) else None


def _read_sync_number(file: Path) -> int:
    """Return the number of the sync in the metadata of a weights file; 0 if the file does not exist or has none."""
    if not file.is_file():
        return 0
    with safe_open(file, framework="pt") as weights:
        return int((weights.metadata() or {}).get(SYNC, 0))


class WeightReport:
    """A mixin of vLLM's worker that loads and reports weights; the trainer calls it through ``WORKERS_PATH``."""

    # Attributes and methods of the worker.
    vllm_config: Any
    model_runner: Any
    get_model: Callable[[], Any]
    reload_weights: Callable[..., None]
    add_lora: Callable[[Any], bool]
    list_loras: Callable[[], set[int]]

    _grpo_loads = 0
    _grpo_sync: int | None = None  # number of the sync that brought the weights; None: the weights of the start

    def grpo_load(self, folder: str) -> int:
        """Load the safetensors in ``folder`` into the model in place; return the number of loads so far."""
        if not self._copy_weights(folder):
            self.reload_weights(weights_path=folder)
        self._grpo_loads, self._grpo_sync = self._grpo_loads + 1, _read_sync_number(Path(folder) / "model.safetensors")
        _LOGGER.info("grpo: weights loaded, load %d", self._grpo_loads)
        return self._grpo_loads

    def _copy_weights(self, folder: str) -> bool:
        """Copy the tensors in ``folder`` over the model's on CPU; return False if that is not possible, and do nothing.

        On CPU, vLLM computes with unquantized weights directly, except for MLA. vLLM's own reload builds every layer
        again, which takes several times as long.
        """
        config, model = self.vllm_config, self.get_model()
        parameters = {_strip_base_layer(name): parameter.data for name, parameter in model.named_parameters()}
        on_cpu = all(tensor.device.type == "cpu" for tensor in parameters.values())
        if not on_cpu or config.parallel_config.tensor_parallel_size > 1 or config.model_config.use_mla:
            return False
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
            matches = list(match_rows(tensors, parameters, getattr(model, "packed_modules_mapping", {})))
            if any(rows is None for *_, rows in matches) or {name for _, name, _ in matches} != parameters.keys():
                return False
            for name, _, rows in matches:
                assert rows is not None
                rows.copy_(tensors[name])
        return True

    def grpo_seed(self) -> None:
        """Seed sampling with vLLM's seed plus the replica's number: equal in its workers, distinct between replicas."""
        from vllm.utils.torch_utils import set_random_seed

        config = self.vllm_config
        set_random_seed(config.model_config.seed + config.parallel_config.data_parallel_index)

    def grpo_count(self, sync: int) -> int:
        """Store and return the number of the sync that vLLM's own transfer (NCCL) has finished."""
        self._grpo_sync = sync
        return sync

    def _find_held_sync(self) -> int:
        """Return the number of the sync that the current weights came from.

        Without a sync since the start, it is the number in the metadata of ``model.safetensors``, or 0.
        """
        if self._grpo_sync is None:
            model = Path(self.vllm_config.model_config.model)
            self._grpo_sync = _read_sync_number(model / "model.safetensors")
        return self._grpo_sync

    def grpo_share(self, file: str, sync: int) -> dict[str, Any]:
        """Share the parameters' memory with another process; on CPU, move them into a new memory-mapped ``file``.

        On a GPU they keep their addresses, which captured CUDA graphs contain. Return ``gpu``, its UUID or None;
        ``parameters``, the location of each for ``import_tensor`` or ``view_tensor``; and ``packed`` as in
        ``grpo_weights``. Later reports contain ``sync`` as the number of the sync that the weights came from.
        """
        model = self.get_model()
        parameters = dict(model.named_parameters())
        gpu = get_gpu_uuid(next(iter(parameters.values())))
        if gpu:
            locations = {name: export_tensor(parameter.data) for name, parameter in parameters.items()}
        else:
            locations, end = {}, 0
            for name, parameter in parameters.items():
                dtype = _get_dtype_name(parameter.dtype)
                locations[name] = {"offset": end, "shape": list(parameter.shape), "dtype": dtype}
                end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
            memory = map_memory(file, end)
            for name, parameter in parameters.items():
                parameter.data = view_tensor(memory, locations[name]).copy_(parameter.data)
        size = sum(parameter.nbytes for parameter in parameters.values())
        self._grpo_sync = sync
        _LOGGER.info("grpo: %d bytes of weights are shared with the trainer", size)
        return {"gpu": gpu, "parameters": locations, "packed": dict(getattr(model, "packed_modules_mapping", {}))}

    def grpo_weights(self) -> dict[str, Any]:
        """Return a report of this worker's parameters, tied ones once, for comparison with the trainer's weights.

        ``parameters``: name -> [fingerprint, dtype, bytes that it hashes at once]; ``packed``: fused name -> its parts;
        ``sync``: the number of the sync that the weights came from, 0 for none.
        """
        model = self.get_model()
        parameters: dict[str, list[Any]] = {}
        for name, parameter in model.named_parameters():
            unit, dtype = choose_unit(parameter), _get_dtype_name(parameter.dtype)
            parameters[_strip_base_layer(name)] = [int(fingerprint(parameter.data, unit)), dtype, unit]
        for prefix, module in model.named_modules():
            replicas = getattr(module, "num_kv_head_replicas", 1)
            if replicas > 1 and module.tp_rank % replicas:  # another worker counts these key and value heads
                for name, parameter in module.named_parameters(recurse=False):
                    if name in ("weight", "bias"):
                        owned = parameter.data[: module.num_heads * module.head_size]  # rows of q
                        parameters[_strip_base_layer(f"{prefix}.{name}")][0] = int(
                            fingerprint(owned, choose_unit(owned))
                        )
        packed = dict(getattr(model, "packed_modules_mapping", {}))
        return {"parameters": parameters, "packed": packed, "sync": self._find_held_sync()}

    def grpo_adapters(self) -> list[int]:
        """Return the ids of the LoRA adapters that are loaded."""
        return sorted(self.list_loras())

    def grpo_load_adapter(self, folder: str, lora_id: int) -> bool:
        """Load the adapter in ``folder``, which replaces the adapter with the id ``lora_id``.

        Return whether vLLM loaded the adapter.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=folder, lora_int_id=lora_id, lora_path=folder, load_inplace=True)
        loaded = bool(self.add_lora(request))
        self._grpo_sync = _read_sync_number(Path(folder) / ADAPTER_WEIGHTS)
        return loaded

    def grpo_adapter_weights(self, lora_id: int) -> dict[str, Any]:
        """Return a report of an adapter like ``grpo_weights``: ``<layer>.lora_a``, and the scaled ``<layer>.lora_b``.

        Each entry is [fingerprint, dtype]. vLLM computes with these tensors. They are zero, with fingerprint 0, in
        layers that the adapter does not change, and everywhere if the adapter is not loaded.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        slots = [slot for slot, loaded in enumerate(manager.lora_index_to_id) if loaded == lora_id]
        parameters = {}
        for name, module in manager.modules.items():
            parts = manager.packed_modules.get(name, [name])
            for side in ("lora_a", "lora_b"):
                for part, stacked in zip(parts, getattr(module, f"{side}_stacked", ()), strict=False):
                    value = int(fingerprint(stacked[slots[0], 0])) if slots else 0
                    parameters[f"{part}.{side}"] = [value, _get_dtype_name(stacked.dtype)]
        return {"parameters": parameters, "packed": {}, "sync": self._find_held_sync()}

    def grpo_config(self) -> dict[str, Any]:
        """Return the two settings that TRL usually reads from vLLM's ``/server_info``, which is slow and needs pip."""
        config = self.vllm_config
        transfer = config.weight_transfer_config
        return {
            "model_config": {"logprobs_mode": str(config.model_config.logprobs_mode)},
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
        }
