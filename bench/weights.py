"""Measure a weight sync on CPU: seconds and bytes of each method compared with a plain copy, and memory of both sides.

    python bench/weights.py [--sizes 1M 100M ...] [--bridges file shared lora] [--rounds 5]

Each case has a real vLLM server and, in a separate process, rank 0's client with a random Qwen2 model in bfloat16,
without an optimizer. After a first sync, every round writes the weights to a new file in shared memory (the plain
copy), syncs with the guard, copies again, then syncs without the guard. The order is reversed from round to round. A
ratio compares a sync with the mean of its round's copies. The figure is the median ratio. Memory is the proportional
set size (PSS) after the last round, and the kernel's peak (VmHWM), of the client plus the server's processes. The
memory of a pair of processes without weights is taken from the smallest size, with weights of 2 MB. Cases that are not
requested keep their records.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from made_by import begin, finished
from memory_estimate import make_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import SYNC_METHODS
from grpo_recipes.runs.rundir import read_json, write_json
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.bridges import CLIENTS
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.lora import LoraClient
from grpo_recipes.weights.shared import SharedClient

sys.path.insert(0, str(find_code_root() / "tests/e2e"))
from one_by_one import Bench

WHAT = "a sync on CPU: seconds against a plain copy of the weights, bytes sent, PSS and peak of both processes"
IDLE = "1M"
AFTER = "copy after"
SYNCS = ("sync", "sync without guard")
# Hidden, intermediate, layers, tied embeddings.
SIZES: dict[str, tuple[int, int, int, bool]] = {
    IDLE: (128, 16, 1, True),
    "100M": (768, 3072, 10, True),
    "1B": (2048, 8192, 15, True),
}
MEASURED = tuple(name for name in ("file", "shared", "lora") if name in SYNC_METHODS)
FLAGS = {"lora": ("--use_peft", "--lora_target_modules", "all-linear", "--lora_r", "16")}
_COMMON = ("--dtype", "bfloat16", "--bf16", "false", "--num_processes", "1", "--accelerator", "ddp")


def main() -> None:
    """Measure the cases and write them after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--bridges", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/weights.json")
    parser.add_argument("--case", nargs=2, metavar=("BRIDGE", "MODEL"), help="measure in this process, print JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(*options.case, options.rounds)))
        return
    origin = begin(options.out)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_model(*SIZES[size], Path(folder))
            for bridge in options.bridges:
                case = measured_apart(bridge, folder, options.rounds)
                cases = (read_json(options.out) or {"cases": {}})["cases"]
                cases.setdefault(size, {})[bridge] = case | finished(origin)
                write_json(options.out, {"what": WHAT, "figures": figures(cases), "cases": cases})
                print(size, bridge, figures(cases)[size][bridge], flush=True)


def measured_apart(bridge: str, model: str, rounds: int) -> dict[str, Any]:
    """Measure a case in a new process, so that its memory is clean."""
    command = [sys.executable, __file__, "--case", bridge, model, "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(bridge: str, model: str, rounds: int) -> dict[str, Any]:
    """Start a server of ``model`` and sync with it, as the trainer does."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--model_name_or_path", model, "--weight_sync", bridge, *_COMMON, *FLAGS.get(bridge, ()))
        bench = Bench(Path(folder), *flags)
        os.environ.update({name: value for name, value in bench.environment.items() if name.startswith("GRPO_")})
        before = psutil.Process().children()
        with bench.server() as url:
            (server,) = (child for child in psutil.Process().children() if child not in before)
            args = GRPOConfig(output_dir=f"{folder}/out", use_cpu=True, bf16=False, report_to="none")
            client = CLIENTS[bridge](
                args=args, run_dir=bench.run_dir, seed=None, stop=StopRequest(bench.run_dir), base_url=url,
                connection_timeout=60,
            )  # fmt: skip
            trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
            weights = {
                name: parameter.numel() * parameter.element_size() for name, parameter in trained.named_parameters()
            }
            parameters = sum(parameter.numel() for parameter in trained.parameters())
            sync = syncing(client, trained)
            first = _seconds(sync)
            if client.checksum_error:
                raise SystemExit(client.checksum_error)
            sync_folder = Path(os.environ["GRPO_SYNC_DIR"])
            rows = [timed_round(args, client, sync, trained, sync_folder / "copy", turn) for turn in range(rounds)]
            files = [file for file in sync_folder.rglob("*") if file.is_file() and not file.is_symlink()]
            return {
                "parameters": parameters,
                "weight_bytes": sum(weights.values()),
                "moved_bytes": sum(file.stat().st_size for file in files if file.suffix == ".safetensors"),
                "first_sync_seconds": first,
                "rounds": rows,
                "pss_bytes": {"trainer": pss([os.getpid()]), "server": pss(_tree(server))},
                "peak_bytes": {"trainer": peak([os.getpid()]), "server": peak(_tree(server))},
            }


def syncing(client: BridgeClient, trained: PreTrainedModel) -> Callable[[], None]:
    """Return the trainer's work at a sync. For ``shared``, it includes the work around the optimizer step."""
    if isinstance(client, SharedClient):

        def share() -> None:
            client.drain()
            client.release()
            client.sync_model(trained)

        return share
    if isinstance(client, LoraClient):
        adapted = get_peft_model(trained, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        return lambda: client.sync_model(adapted)

    def send() -> None:
        named = dict(trained.named_parameters())
        shapes = [
            (name, str(parameter.dtype).removeprefix("torch."), list(parameter.shape))
            for name, parameter in named.items()
        ]
        client.update_named_params(shapes, iter(named.items()))

    return send


def timed_round(
    args: GRPOConfig, client: BridgeClient, sync: Callable[[], None], trained: PreTrainedModel, file: Path, turn: int
) -> dict[str, float]:
    """Return the seconds of two plain copies, a sync between them, and a sync without guard. Odd turns are reversed."""

    def guarded(on: bool) -> Callable[[], None]:
        def run() -> None:
            args.weight_guard = on
            sync()

        return run

    copy = partial(plain_copy, trained, file)
    work = {"copy": copy, "sync": guarded(True), AFTER: copy, "sync without guard": guarded(False)}
    seconds = {name: _seconds(work[name]) for name in (work if turn % 2 == 0 else reversed(work))}
    file.unlink()
    if client.checksum_error:
        raise SystemExit(client.checksum_error)
    return seconds


def plain_copy(trained: PreTrainedModel, file: Path) -> None:
    """Write all weights to a new file, one after another."""
    file.unlink(missing_ok=True)
    with file.open("wb") as target:
        for parameter in trained.parameters():
            target.write(memoryview(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy()))


def figures(cases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return per size and bridge the medians of the rounds' ratios, and memory beyond the idle pair in weights."""
    figures_by_size: dict[str, dict[str, dict[str, float]]] = {}
    for size in (name for name in SIZES if name in cases):
        for bridge, case in cases[size].items():
            rounds, weights = case["rounds"], case["weight_bytes"]
            ratios = {
                **{f"{name} to copy": statistics.median(row[name] / _copy(row) for row in rounds) for name in SYNCS},
                "moved to weights": case["moved_bytes"] / weights,
            }
            idle = cases.get(IDLE, {}).get(bridge)
            if idle and size != IDLE:
                for kind in ("pss_bytes", "peak_bytes"):
                    beyond = sum(case[kind].values()) - sum(idle[kind].values())
                    ratios[f"{kind.removesuffix('_bytes')} to weights"] = beyond / (weights - idle["weight_bytes"])
            figures_by_size.setdefault(size, {})[bridge] = {name: round(value, 3) for name, value in ratios.items()}
    return figures_by_size


def _copy(row: Mapping[str, float]) -> float:
    """Return the mean of a round's copies; older records have one."""
    return statistics.mean(row[name] for name in ("copy", AFTER) if name in row)


def pss(pids: Iterable[int]) -> int:
    """Return the proportional set size of processes together, in bytes."""
    return sum(_kilobytes(f"/proc/{pid}/smaps_rollup", "Pss:") * 1024 for pid in pids)


def peak(pids: Iterable[int]) -> int:
    """Return the sum of the largest resident sizes that processes ever had, in bytes."""
    return sum(_kilobytes(f"/proc/{pid}/status", "VmHWM:") * 1024 for pid in pids)


def _kilobytes(file: str, field: str) -> int:
    return next((int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.startswith(field)), 0)


def _tree(process: psutil.Process) -> list[int]:
    return [process.pid, *(child.pid for child in process.children(recursive=True))]


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
