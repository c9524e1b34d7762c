"""Run a module of the tests in several ranks, forked from a process that has imported torch, TRL and the trainers.

    run_ranks("trainers.fixed_completions", str(folder))
    process = start_module("weights.nccl_sides", "receive", "1", "1", variables=os.environ, output=log)

The ranks have the variables of torchrun, or of `accelerate launch` for an ``accelerator``. Their own start would take
20 s of processor time for each rank.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import forkserver
from pathlib import Path

import trl

TESTS = Path(__file__).parent
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["rank_imports"])


def run_ranks(
    module: str, *arguments: str, count: int = 2, accelerator: str | None = None, seconds: float = 300
) -> list[str]:
    """Run ``python -m MODULE ARGUMENTS`` in each rank, and return the output of each rank.

    ``accelerator`` names one of TRL's configuration files, such as ``zero2``. Raise AssertionError if a rank fails or
    the ranks take more than ``seconds``; then no rank is left.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = variables_of(accelerator, count) if accelerator else {**os.environ, "ACCELERATE_USE_CPU": "true"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(count)]
        shared["TORCH_EXTENSIONS_DIR"] = str(Path(folder) / "compiled")
        ranks = [
            start_module(
                module, *arguments, variables={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output=output
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            wait_for_ranks(ranks, seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        texts = [output.read_text() if output.exists() else "" for output in outputs]
        assert not any(rank.exitcode for rank in ranks), "\n".join(text[-3000:] for text in texts)
        assert not Path(shared["TORCH_EXTENSIONS_DIR"]).exists(), "DeepSpeed compiled an operator"
        return texts


def start_module(
    module: str, *arguments: str, variables: Mapping[str, str], output: Path
) -> multiprocessing.context.ForkServerProcess:
    """Start ``python -m MODULE ARGUMENTS`` with these environment variables, and its output in a file."""
    start_fork_server()
    process = _FORKS.Process(target=become_module, args=(module, arguments, dict(variables), output))
    process.start()
    return process


def start_fork_server() -> None:
    """Start the process that the ranks are forked from, if it does not run. It imports `rank_imports`."""
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    try:
        forkserver.ensure_running()
    except ChildProcessError:  # a test of the launcher has ended, and waited for, all processes of this one
        server = forkserver._forkserver  # type: ignore[attr-defined]
        os.close(server._forkserver_alive_fd)
        server._forkserver_pid = None
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def become_module(module: str, arguments: tuple[str, ...], variables: dict[str, str], output: Path) -> None:
    """Run the module in this process, with its output in a file."""
    assert "trl" in sys.modules, "rank_imports was not imported: run it alone to see why"
    from grpo_recipes.trainers.rank import skip_shared_memory_operator  # here, because pytest needs no torch for it

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(variables)
    sys.path.insert(0, str(TESTS))
    sys.argv = [module, *arguments]
    skip_shared_memory_operator()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def wait_for_ranks(ranks: list[multiprocessing.context.ForkServerProcess], seconds: float) -> None:
    """Return when all ranks ended, or one of them failed: the others would wait for it."""
    deadline = time.monotonic() + seconds
    while any(rank.exitcode is None for rank in ranks) and not any(rank.exitcode for rank in ranks):
        assert time.monotonic() < deadline, f"the ranks take more than {seconds} s"
        time.sleep(0.05)


def variables_of(accelerator: str, count: int) -> dict[str, str]:
    """Return the environment that `accelerate launch` makes for this configuration file of TRL, on CPU."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    config = Path(trl.__file__).parent / "accelerate_configs" / f"{accelerator}.yaml"
    words = ["--config_file", str(config), "--num_processes", str(count), "--mixed_precision", "no", "script.py"]
    args, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    if not args.use_deepspeed:
        return dict(prepare_multi_gpu_env(args))
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as its command does
    return {**prepare_deepspeed_cmd_env(args)[1], "DS_ACCELERATOR": "cpu"}
