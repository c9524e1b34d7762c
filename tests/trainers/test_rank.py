"""Reports of a training process about itself, in a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_ranks, start_module
from torch.distributed.fsdp import MixedPrecisionPolicy
from waiting import wait_for

from grpo_recipes.errors import ConfigError
from grpo_recipes.process.tree import is_alive
from grpo_recipes.trainers.rank import (
    check_sharing,
    check_updates,
    check_world,
    keep_outputs_as_computed,
    wait_for_all_ranks,
)

# Runs its second argument inside the record of a rank.
SCRIPT = """
import json, os, sys
from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.process.reports import run_folder
from grpo_recipes.trainers.rank import recording_rank
run = run_folder()
with recording_rank(run):
    path = run / "processes" / f"rank_{os.environ['RANK']}.json"
    assert json.loads(path.read_text())["pid"] == os.getpid() and "exit" not in json.loads(path.read_text())
    exec(sys.argv[2])
"""


@pytest.fixture
def rank(tmp_path):
    """``rank(code, RANK=...)`` runs code inside a rank record and returns exit code, record and output."""
    (tmp_path / "processes").mkdir()

    def run(code: str, number: str = "0") -> tuple[int, dict, str]:
        variables = {**os.environ, "GRPO_RUN_DIR": str(tmp_path), "RANK": number}
        output = tmp_path / "output.txt"
        process = start_module("python_text", SCRIPT, code, variables=variables, output=output)
        process.join(60)
        record = json.loads((tmp_path / f"processes/rank_{number}.json").read_text())
        return process.exitcode, record, output.read_text()

    return run


@pytest.mark.parametrize(
    ("code", "exit_code", "cause"),
    [
        ("pass", 0, ""),
        ("raise ValueError('first line\\nsecond line')", 1, "ValueError: first line"),
        ("raise ValueError", 1, "ValueError: "),
        (r"raise ValueError('\x1b[31mred\x07')", 1, r"ValueError: \x1b[31mred\x07"),
        ("sys.exit(7)", 7, "7"),
        ("raise SystemExit('said why')", 1, "said why"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt: "),
        ("raise ConfigError(Problem('recipe.yaml:3', 'wrong', 'mend it'))", 1, "recipe.yaml:3: wrong. Fix: mend it"),
    ],
)
def test_a_rank_records_how_it_ended(rank, code, exit_code, cause):
    returned, record, output = rank(code, "3")
    assert (returned, record["exit"], record["rank"]) == (exit_code, exit_code, 3)
    assert record["cause"] == cause
    assert record["time"] > 0
    assert ("Traceback" in output) == code.startswith(("raise V", "raise K", "raise C"))


@pytest.mark.parametrize("code", ["sys.exit(0)", "sys.exit()", "raise SystemExit"])
def test_a_rank_that_exits_with_0_has_not_failed(rank, code):
    returned, record, _ = rank(code)
    assert (returned, record["exit"]) == (0, 0)


def test_a_rank_ends_though_a_thread_of_it_hangs(rank):
    code = "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start(); raise ValueError('x')"
    assert rank(code)[0] == 1


def test_a_group_that_never_ends_holds_no_finished_run(rank, tmp_path):
    code = (
        "import time, torch.distributed\nfrom grpo_recipes.trainers import rank\nrank._COLLECTIVES_SECONDS = 0.5\n"
        "torch.distributed.init_process_group('gloo', 'file://' + str(run / 'store'), rank=0, world_size=1)\n"
        "torch.distributed.destroy_process_group = lambda: time.sleep(300)"
    )
    returned, record, _ = rank(code)
    assert (returned, record["exit"], record["cause"]) == (0, 0, "")


@pytest.mark.slow
def test_the_stacks_of_all_threads_are_shown_on_sigusr2(rank, tmp_path):
    code = (
        "import signal, threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
        "assert json.loads((run / 'processes/phase_2.json').read_text())['phase'] == 'start'\n"
        "os.kill(os.getpid(), signal.SIGUSR2)"
    )
    assert rank(code, "2")[0] == 0
    shown = (tmp_path / "stacks/rank_2.txt").read_text()
    assert shown.count("most recent call first") == 2 and "in recording_rank" not in shown


def write_plan(folder, **changes):
    plan = {"batch": {"world_size": 2}, "flavour": "cpu", "dtype": "float32", "accelerator": "ddp", **changes}
    (folder / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(("became", "fits"), [((2, "cpu"), True), ((1, "cpu"), False), ((2, "cuda"), False)])
def test_a_world_other_than_the_planned_one_is_refused(tmp_path, became, fits):
    write_plan(tmp_path)
    if fits:
        check_world(tmp_path, *became)
    else:
        with pytest.raises(RuntimeError, match="planned 2 processes on cpu"):
            check_world(tmp_path, *became)


@pytest.mark.parametrize(
    ("accelerator", "became", "refused"),
    [
        ("ddp", ("MULTI_CPU", "float32"), None),
        ("ddp", ("MULTI_GPU", "bfloat16"), "planned weights in float32"),
        ("zero3", ("MULTI_CPU", "float32"), "planned accelerator: zero3"),
        ("zero3", ("DEEPSPEED", "bfloat16"), None),
        ("fsdp2", ("MULTI_CPU", "float32"), "planned accelerator: fsdp2"),
        ("fsdp2", ("FSDP", "float32"), None),
        ("custom", ("MULTI_CPU", "bfloat16"), None),
        ("unknown", ("MULTI_CPU", "float32"), "planned accelerator: unknown"),
    ],
)
def test_sharing_that_accelerate_dropped_is_told(tmp_path, accelerator, became, refused):
    write_plan(tmp_path, accelerator=accelerator)
    if refused is None:
        check_sharing(tmp_path, *became)
    else:
        with pytest.raises(RuntimeError, match=refused):
            check_sharing(tmp_path, *became)


@pytest.mark.parametrize(
    ("distributed_type", "mixed", "dtypes", "keys", "refused"),
    [
        ("NO", "bf16", {"bfloat16"}, {}, "accelerator: single keeps no float32 copy. Fix: write accelerator: zero2"),
        ("MULTI_GPU", "no", {"bfloat16", "float32"}, {}, "steps of about learning_rate 1e-06 are rounded away"),
        ("MULTI_CPU", "bf16", {"float32"}, {}, None),  # an adapter on a bfloat16 model
        ("NO", "no", {"bfloat16"}, {"learning_rate": 1e-3}, None),
        ("NO", "bf16", {"float16"}, {"learning_rate": 1e-3}, "squares of small gradients"),
        ("FSDP", "no", {"bfloat16"}, {}, "accelerator: fsdp2 keeps no float32 copy"),
        ("FSDP", "bf16", {"bfloat16"}, {}, None),
        ("DEEPSPEED", "no", {"bfloat16"}, {}, None),
    ],
)
def test_weights_whose_updates_would_be_lost_are_not_trained(distributed_type, mixed, dtypes, keys, refused):
    args = SimpleNamespace(**{"learning_rate": 1e-6, "optim": "adamw_torch", "optim_args": None, **keys})
    if refused is None:
        check_updates(distributed_type, mixed, dtypes, args)
    else:
        with pytest.raises(ConfigError) as told:
            check_updates(distributed_type, mixed, dtypes, args)
        assert refused in str(told.value.problems[0])


# A collective still under way when the script ends: its tensors are let go of by a thread of gloo.
UNFINISHED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from grpo_recipes.trainers.rank import recording_rank

def reduce():
    works = [dist.all_reduce(torch.zeros(1000), async_op=True) for _ in range(20)]
    if dist.get_rank() == 1:
        [work.wait() for work in works]

with recording_rank(Path(sys.argv[1])):
    dist.init_process_group("gloo")
    reduce()
"""


@pytest.mark.slow
def test_a_finished_rank_is_not_aborted_by_a_collective_it_did_not_wait_for(tmp_path):
    (tmp_path / "processes").mkdir()
    script = tmp_path / "unfinished.py"
    script.write_text(UNFINISHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"processes/rank_{rank}.json").read_text())["exit"] for rank in (0, 1)] == [0, 0]


# --- the first barrier ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seconds", "message"),
    [
        ("in time", "60", "met"),
        ("late", "1", "the ranks do not meet over gloo within 1 s: rank 1 on node 7; see its log"),
    ],
)
def test_ranks_meet_or_the_missing_one_is_named(tmp_path, how, seconds, message):
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes/rank_1.json").write_text(json.dumps({"rank": 1, "node": 7, "pid": 1}))
    write_plan(tmp_path, meeting_timeout=float(seconds))
    told = run_ranks("trainers.meeting_ranks", str(tmp_path), seconds, how)
    assert told[0].splitlines()[-1].startswith(message), told


def test_ranks_that_nccl_cannot_connect_do_not_wait_for_each_other_forever(tmp_path, monkeypatch):
    """NCCL connects all ranks in the first collective operation, without a limit: behind a firewall, for an hour."""
    write_plan(tmp_path, meeting_timeout=0.2)
    released = threading.Event()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: released.wait(20))
    started_at = time.monotonic()
    with pytest.raises(
        RuntimeError, match="do not meet over nccl within 0 s: a rank that does not answer; see its log"
    ):
        wait_for_all_ranks(tmp_path, torch.device("cpu"))
    released.set()
    assert time.monotonic() - started_at < 10


def test_the_cause_names_the_line_of_the_users_own_code(rank, tmp_path):
    (tmp_path / "mine.py").write_text("import json\n\ndef callback():\n    json.loads('{')\n")
    code = f"sys.path.insert(0, {str(tmp_path)!r}); import mine; mine.callback()"
    _, record, _ = rank(code)
    assert record["cause"].startswith("JSONDecodeError: Expecting property name")
    assert record["cause"].endswith("mine.py:4)"), record


@pytest.mark.slow
def test_a_rank_ends_with_what_started_it(tmp_path):
    """Start a rank like accelerate does. If launcher, guard and accelerate are killed, nothing else ends the rank."""
    (tmp_path / "processes").mkdir()
    rank = (
        "import sys, time; from pathlib import Path; from grpo_recipes.trainers.rank import recording_rank\n"
        "with recording_rank(Path(sys.argv[1])): time.sleep(300)"
    )
    parent = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"
    started = subprocess.Popen([sys.executable, "-c", parent, rank, str(tmp_path)])
    record = tmp_path / "processes" / "phase_0.json"
    wait_for(record.exists, "the rank", 60)
    pid = json.loads((tmp_path / "processes" / "rank_0.json").read_text())["pid"]
    started.kill()
    started.wait()
    wait_for(lambda: not is_alive(pid), "the rank's end")


def test_a_model_that_fsdp2_shards_returns_what_it_computed() -> None:
    """R15: accelerate's policy rounds log-probs to bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    plugin = SimpleNamespace(mixed_precision_policy=policy)
    keep_outputs_as_computed(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, None)
    keep_outputs_as_computed(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None)))
    keep_outputs_as_computed(SimpleNamespace(state=SimpleNamespace()))
