"""Start, check and record one training process: its record for the launcher, a first barrier, and the plan's world.

accelerate silently starts fewer processes, or shares the model differently, for some configurations. So each process
compares its world with ``plan.json`` before it trains.
"""

import datetime
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator

from grpo_recipes.errors import ConfigError, config_error, mask_and_escape, translate_errors
from grpo_recipes.paths import display_path, find_code_root
from grpo_recipes.plan.types import MEETING_SECONDS
from grpo_recipes.process.reports import PhaseFile, dump_stacks_on_signal
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.learning import float32_fix, lost_updates, updates_float32
from grpo_recipes.runs.rundir import SERVER_STATE, read_json, write_json, write_last_json
from grpo_recipes.runs.server_state import read_server_state
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.trainers.trackers import close_trackers
from grpo_recipes.weights.transport import ServerError, run_in_thread

_COLLECTIVES_SECONDS = 60.0
_LATE_SECONDS = 60.0  # for the launcher to end a server that was not ready in time
_TICK_SECONDS = 0.2  # between two reads of the server's state


@contextmanager
def recording_rank(folder: Path) -> Iterator[None]:
    """Write ``processes/rank_<n>.json`` for the launcher: the pid before the block, exit code and cause after it.

    An exception in the block ends the process at once, by ``os._exit`` with the code of a SystemExit, else 1.
    SIGUSR2 writes the stacks of all threads. The process dies with its parent.
    """
    die_with_parent(os.getppid(), signal.SIGKILL)  # if the launcher and its guard are killed, nothing else ends it
    rank = int(os.environ.get("RANK", "0"))
    path = folder / "processes" / f"rank_{rank}.json"
    record: dict[str, Any] = {"pid": os.getpid(), "rank": rank, "node": int(os.environ.get("GRPO_NODE", "0"))}
    write_json(path, record)
    PhaseFile(folder, rank)
    dump_stacks_on_signal(folder, f"rank_{rank}")
    try:
        yield
    except BaseException as error:
        code, cause = 1, f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            cause = str(error) if code else ""
        elif isinstance(error, ConfigError):  # exits with 1: code 2 means that no training started
            cause = str(error.problems[0])
        else:
            cause += _find_user_line(error)
        write_last_json(path, {**record, "exit": code, "cause": mask_and_escape(cause), "time": time.time()})
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        close_trackers(code)
        # sys.exit would wait for threads and collectives of the broken run.
        os._exit(code)
    has_ended = _end_collectives()
    write_json(path, {**record, "exit": 0, "cause": "", "time": time.time()})
    if not has_ended:
        print(f"grpo: torch.distributed did not end within {_COLLECTIVES_SECONDS:g} s; exiting without it", flush=True)
        os._exit(0)  # a normal exit would wait for the threads


def _end_collectives() -> bool:
    """Destroy torch.distributed's process group, if there is one. Return False if that takes more than 60 seconds.

    A gloo thread that frees a tensor during the interpreter's exit aborts the process, and a finished run would count
    as failed. NCCL may wait for a rank that has gone. Everything is saved by now.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    ending = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
    ending.start()
    ending.join(_COLLECTIVES_SECONDS)
    return not ending.is_alive()


def _find_user_line(error: BaseException) -> str:
    """Return `` (file:line)`` of the innermost line of the user's code in the traceback, or an empty string."""
    foreign = (sys.prefix, sys.base_prefix, str(find_code_root() / "src"), str(Path(__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not frame.filename.startswith(foreign):
            return f" ({display_path(frame.filename)}:{frame.lineno})"
    return ""


def wait_for_all_ranks(run_dir: Path, device: torch.device) -> None:
    """Wait until all ranks have arrived here. Raise RuntimeError if one is missing, for example on a broken network.

    With gloo, the error names the missing ranks and their nodes. The time limit is the plan's, also with NCCL.
    Without torch.distributed, return at once. Ranks may import torch and TRL from a cold file system.
    """
    if not torch.distributed.is_initialized():
        return
    seconds: float = read_json(run_dir / "plan.json").get("meeting_timeout", MEETING_SECONDS)
    limit, backend = datetime.timedelta(seconds=seconds), torch.distributed.get_backend()

    def name_missing_ranks(error: Exception) -> RuntimeError:
        """Return a RuntimeError with the missing ranks in ``error``, and their nodes, in its message."""
        match = re.search(r"Ranks ([\d, ]+) failed to pass monitoredBarrier", str(error))
        missing = [int(rank) for rank in match[1].split(",")] if match else []
        nodes = [read_json(run_dir / "processes" / f"rank_{rank}.json").get("node", "?") for rank in missing]
        ranks = ", ".join(f"rank {rank} on node {node}" for rank, node in zip(missing, nodes, strict=True))
        fix = "see its log; if it waits too, name the network interface with NETWORK_INTERFACE"
        cause = f"{ranks or 'a rank that does not answer'}; {fix}"
        return RuntimeError(f"the ranks do not meet over {backend} within {seconds:.0f} s: {cause}")

    def count_ranks() -> int:
        """Return how many ranks take part in an all-reduce. The first one makes NCCL connect all ranks."""
        present = torch.ones(1, device=device)
        torch.distributed.all_reduce(present)
        return int(present)

    with translate_errors((RuntimeError, TimeoutError), name_missing_ranks):
        if backend == "gloo":
            torch.distributed.monitored_barrier(timeout=limit, wait_all_ranks=True)
        # NCCL connects without a time limit. If a rank fails here, its process ends without this thread.
        count = run_in_thread(count_ranks).result(seconds)
    if count != torch.distributed.get_world_size():
        raise RuntimeError(f"{count} of {torch.distributed.get_world_size()} ranks took part in an all-reduce")


def wait_for_first_server(run_dir: Path, timeout: float, stop: StopRequest) -> None:
    """Wait until the run's server is ready or a stop is requested, at most ``timeout`` seconds and a margin.

    Raise ServerError if the server is gone or the time is over. The launcher starts the trainers at the same time and
    ends the run if the server takes too long.
    """
    deadline = time.monotonic() + timeout + _LATE_SECONDS
    while (state := read_server_state(run_dir / SERVER_STATE)[1]) != "ready" and not stop.requested():
        if state == "gone" or time.monotonic() > deadline:
            problem = "is gone" if state == "gone" else f"was not ready after {timeout:g} s (vllm_server_timeout)"
            raise ServerError(f"the vLLM server {problem}; see its log")
        time.sleep(_TICK_SECONDS)


# The recipe's `accelerator` -> accelerate's names for how processes share the model.
_SHARING = {"single": "NO", "ddp": "MULTI_GPU MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


def check_world(folder: Path, world_size: int, device_type: str) -> None:
    """Raise RuntimeError unless number and device type of the processes are as in ``plan.json``.

    accelerate may start fewer without an error.
    """
    plan = json.loads((folder / "plan.json").read_text())
    planned = (plan["batch"]["world_size"], "cpu" if plan["flavour"] == "cpu" else "cuda")
    if (world_size, device_type) != planned:
        problem = f"planned {planned[0]} processes on {planned[1]}, this is one of {world_size} on {device_type}"
        raise RuntimeError(f"{problem}; check CONFIG_FILE and the accelerator key")


def check_model(folder: Path, accelerator: Accelerator, model: torch.nn.Module, args: GRPOConfig) -> None:
    """Raise RuntimeError unless the model is shared as planned, and ConfigError if rounding would lose its updates."""
    distributed_type, dtype = accelerator.distributed_type.name, next(model.parameters()).dtype
    check_sharing(folder, distributed_type, str(dtype).removeprefix("torch."))
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    names = {str(dtype).removeprefix("torch.") for dtype in trained}
    check_updates(distributed_type, accelerator.mixed_precision, names, args)


def check_sharing(folder: Path, distributed_type: str, dtype: str) -> None:
    """Raise RuntimeError unless the sharing of the model and the weights' dtype are as in ``plan.json``.

    accelerate may drop DeepSpeed or FSDP without an error. With a CONFIG_FILE, check nothing.
    """
    plan = json.loads((folder / "plan.json").read_text())
    planned = plan["accelerator"]
    if planned == "custom":
        return  # the user's CONFIG_FILE decides
    if distributed_type not in _SHARING.get(planned, "").split():
        raise RuntimeError(f"planned accelerator: {planned}, accelerate made it {distributed_type}")
    # ZeRO and FSDP choose their own dtype.
    if planned in ("single", "ddp") and plan["dtype"] not in (None, "auto", dtype):
        raise RuntimeError(f"planned weights in {plan['dtype']}, the model has them in {dtype}")


def check_updates(distributed_type: str, mixed: str, dtypes: Iterable[str], args: GRPOConfig) -> None:
    """Raise ConfigError if rounding would lose the updates of weights in one of these ``dtypes``.

    ``mixed`` is accelerate's mixed precision. ``grpo check`` can't know the dtypes for ``dtype: auto`` and a
    CONFIG_FILE.
    """
    # accelerate reports DeepSpeed without the ZeRO stage. Stages 2 and 3 behave alike here.
    accelerator = next((key for key, types in _SHARING.items() if distributed_type in types.split()), "zero2")
    if updates_float32(accelerator, mixed):
        return
    for dtype in sorted(dtypes):
        if lost := lost_updates(dtype, args.learning_rate, args.optim, args.optim_args):
            problem = f"{lost}, and accelerator: {accelerator} keeps no float32 copy"
            raise config_error("dtype", problem, float32_fix(mixed))


def shards_weights(accelerator: Accelerator) -> bool:
    """Return whether each process holds only a shard of the weights, as under ZeRO-3 and FSDP."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.distributed_type.name == "FSDP" or (plugin is not None and plugin.zero_stage == 3)


def keep_outputs_as_computed(accelerator: Accelerator) -> None:
    """Let models sharded by FSDP2 return their outputs without rounding them to the mixed precision.

    TRL's model computes log-probs in float32. Rounding to bfloat16 changes them by up to 0.4 %.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if isinstance(policy := getattr(plugin, "mixed_precision_policy", None), MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def skip_shared_memory_operator() -> None:
    """Let DeepSpeed start on CPU without its operator for shared memory, which takes two minutes to compile.

    DeepSpeed uses the operator only for inference and tensor parallelism.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and os.environ.get("DS_ACCELERATOR") == "cpu":
        # An import statement would return torch itself, which `deepspeed.comm` has under that name.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None


def allow_fsdp_on_cpu() -> None:
    """Let FSDP shard over CPU processes. accelerate reads FSDP's settings only on GPUs and uses DDP elsewhere."""
    from accelerate import DistributedType, PartialState

    state = PartialState()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and state.distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
