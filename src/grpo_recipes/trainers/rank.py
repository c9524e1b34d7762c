"""A training process: its record for the launcher, its first barrier, and whether the world is the planned one."""

import datetime
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

from grpo_recipes.errors import ConfigError, config_error, printable, translate
from grpo_recipes.paths import display_path, home
from grpo_recipes.plan.types import MEETING_SECONDS
from grpo_recipes.process.reports import PhaseFile, dump_stacks_on_signal
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe.learning import float32_fix, lost_updates, updates_float32
from grpo_recipes.runs.rundir import SERVER_STATE, read_json, write_json, write_last_json
from grpo_recipes.runs.server_state import server_state
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.client import ServerError

_COLLECTIVES_SECONDS = 60.0
# A server that starts: how long the launcher may take to end it after its time, and between two looks at its state.
_LATE_SECONDS, _TICK_SECONDS = 60.0, 0.2


@contextmanager
def rank_record(folder: Path) -> Iterator[None]:
    """Write ``processes/rank_<n>.json``: pid now, exit code and cause at the end; SIGUSR2 writes stacks from now on."""
    die_with_parent(os.getppid(), signal.SIGKILL)  # where its launcher and guard are killed too, nobody else ends it
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
        elif isinstance(error, ConfigError):  # 2 says that nothing was started; by now a server runs
            cause = str(error.problems[0])
        else:
            cause += _own_line(error)
        write_last_json(path, {**record, "exit": code, "cause": printable(cause), "time": time.time()})
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
            wandb.finish()  # flush the run, as W&B itself does in an ordinary exit
        # Not sys.exit: threads and collectives of a broken run can keep an interpreter from ending.
        os._exit(code)
    ended = _end_collectives()
    write_json(path, {**record, "exit": 0, "cause": "", "time": time.time()})
    if not ended:
        print(f"grpo: torch.distributed did not end within {_COLLECTIVES_SECONDS:g} s; left behind", flush=True)
        os._exit(0)  # an interpreter that ends would wait for its threads


def _end_collectives() -> bool:
    """Join the threads of torch.distributed while there is an interpreter; return False where they do not end.

    One of gloo that lets go of a tensor after Python has begun to end takes the process down with SIGABRT, and a
    finished run would count as a failed one. NCCL may wait for a rank that is gone: all is saved by now.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    ending = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
    ending.start()
    ending.join(_COLLECTIVES_SECONDS)
    return not ending.is_alive()


def _own_line(error: BaseException) -> str:
    """Return the innermost line of an error that is the user's code, ours and that of libraries aside, or nothing."""
    others = (sys.prefix, sys.base_prefix, str(home() / "src"), str(Path(__file__).parents[1]))
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [
        f" ({display_path(name)}:{line})"
        for name, line in frames
        if os.path.isfile(name) and not name.startswith(others)
    ]
    return own[-1] if own else ""


def first_barrier(run_dir: Path, device: torch.device, seconds: float | None = None) -> None:
    """Sum an element over all ranks to find a network that carries nothing; over gloo the error names missing ranks.

    The ranks have ``seconds`` to come, by default the plan's: each reads torch and TRL, maybe from a cold file system.
    """
    if not torch.distributed.is_initialized():
        return
    seconds = seconds or read_json(run_dir / "plan.json").get("meeting_timeout", MEETING_SECONDS)
    limit, backend = datetime.timedelta(seconds=seconds), torch.distributed.get_backend()

    def apart(error: RuntimeError) -> RuntimeError:
        named = re.search(r"Ranks ([\d, ]+) failed to pass monitoredBarrier", str(error))
        missing = [int(rank) for rank in named[1].split(",")] if named else []
        nodes = [read_json(run_dir / "processes" / f"rank_{rank}.json").get("node", "?") for rank in missing]
        who = ", ".join(f"rank {rank} on node {node}" for rank, node in zip(missing, nodes, strict=True))
        advice = "see its log; if it waits too, name the network interface with NETWORK_INTERFACE"
        found = f"{who or 'a rank that does not answer'}; {advice}"
        return RuntimeError(f"the ranks do not meet over {backend} within {seconds:.0f} s: {found}")

    with translate(RuntimeError, apart):
        if backend == "gloo":
            torch.distributed.monitored_barrier(timeout=limit, wait_all_ranks=True)
        present = torch.ones(1, device=device)
        torch.distributed.all_reduce(present, async_op=True).wait(limit)
    if int(present) != torch.distributed.get_world_size():
        raise RuntimeError(f"{int(present)} of {torch.distributed.get_world_size()} ranks took part in an all-reduce")


def wait_for_first_server(run_dir: Path, timeout: float, stop: StopRequest) -> None:
    """Wait until the run's server is ready, at most ``timeout`` seconds and a margin, or the run is to stop.

    The launcher starts trainers beside it, and ends the run where the server takes too long.
    """
    deadline = time.monotonic() + timeout + _LATE_SECONDS
    while (state := server_state(run_dir / SERVER_STATE)[1]) != "ready" and not stop.requested():
        if state == "gone" or time.monotonic() > deadline:
            why = "is gone" if state == "gone" else f"was not ready after {timeout:g} s (vllm_server_timeout)"
            raise ServerError(f"the vLLM server {why}; its log says why")
        time.sleep(_TICK_SECONDS)


# accelerate's names for how processes share a model, by our `accelerator` key.
_SHARING = {"single": "NO", "ddp": "MULTI_GPU MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}


def check_world(folder: Path, world_size: int, device_type: str) -> None:
    """Compare the world with the plan: for some configurations accelerate starts one process of two, and exits 0."""
    plan = json.loads((folder / "plan.json").read_text())
    planned = (plan["batch"]["world_size"], "cpu" if plan["flavour"] == "cpu" else "cuda")
    if (world_size, device_type) != planned:
        what = f"planned {planned[0]} processes on {planned[1]}, this is one of {world_size} on {device_type}"
        raise RuntimeError(f"{what}; check CONFIG_FILE and the accelerator key")


def check_sharing(folder: Path, distributed_type: str, dtype: str) -> None:
    """Compare with the plan how the model is shared: accelerate drops DeepSpeed or FSDP without a word."""
    plan = json.loads((folder / "plan.json").read_text())
    planned = plan["accelerator"]
    if planned == "custom":
        return  # CONFIG_FILE: its content is the user's
    if distributed_type not in _SHARING.get(planned, "").split():
        raise RuntimeError(f"planned accelerator: {planned}, accelerate made it {distributed_type}")
    # ZeRO and FSDP keep a dtype of their own.
    if planned in ("single", "ddp") and plan["dtype"] not in (None, "auto", dtype):
        raise RuntimeError(f"planned weights in {plan['dtype']}, the model has them in {dtype}")


def check_updates(distributed_type: str, mixed: str, dtypes: Iterable[str], args: Any) -> None:
    """Refuse trained ``dtypes`` whose updates would be rounded away: ``auto`` and a CONFIG_FILE are known only now."""
    # By DeepSpeed's name alone ZeRO-2 and 3 are the same, and so they are here.
    accelerator = next((key for key, types in _SHARING.items() if distributed_type in types.split()), "zero2")
    if updates_float32(accelerator, mixed):
        return
    for dtype in sorted(dtypes):
        if lost := lost_updates(dtype, args.learning_rate, args.optim, args.optim_args):
            what = f"{lost}, and accelerator: {accelerator} keeps no float32 copy"
            raise config_error("dtype", what, float32_fix(mixed))


def shards_weights(accelerator: Any) -> bool:
    """Return whether no process holds whole weights: ZeRO-3, FSDP."""
    plugin = accelerator.state.deepspeed_plugin
    return accelerator.distributed_type.name == "FSDP" or (plugin is not None and plugin.zero_stage == 3)


def keep_outputs_as_computed(accelerator: Any) -> None:
    """Let models that FSDP2 shards return what they compute: accelerate's policy rounds it to the mixed precision.

    TRL's model computes log-probs in float32. Rounded to bfloat16, they are wrong by up to 0.4 %.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if isinstance(policy := getattr(plugin, "mixed_precision_policy", None), MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def allow_fsdp_on_cpu() -> None:
    """Let FSDP shard over CPU processes: accelerate reads its settings only on GPUs, and trains under DDP elsewhere."""
    from accelerate import DistributedType, PartialState

    state = PartialState()
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and state.distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
