"""A dead or hung server is started again, and the run ends as if nothing had been; a hung rank ends it with stacks."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from real_runs import Launch, same_rows, weights_hash

from grpo_recipes.runs.progress import read_phases
from grpo_recipes.runs.rundir import read_json

SHORT = ("--max_steps", "6", "--save_steps", "3", "--prompts_per_step", "4", "--num_generations", "8")
EVALUATED = (
    "--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name", "smoke:sums", "--eval_subsample", "1.0",
    "--eval_max_prompts", "16", "--num_generations_eval", "4",
)  # fmt: skip
HUNG = ("--server_stall_timeout", "6")


def engine_of(run: Launch) -> int:
    (pid,) = [process.pid for process in run.processes() if "EngineCore" in process.name()]
    return pid


@contextlib.contextmanager
def held(run: Launch, phase: str, step: int) -> Iterator[None]:
    """Stop rank 0 in a phase after so many steps. Phases last milliseconds, so it runs 2 ms at a time until then."""

    def there(*names: str) -> bool:
        found = read_phases(run.run_dir) if run.has_run_dir() else []
        return any((one.name in names or not names) and one.step >= step for one in found)

    run.wait_for(there, f"step {step}")
    rank = psutil.Process(run.pid_of("rank_0"))
    rank.send_signal(signal.SIGSTOP)
    while not there(phase):
        rank.send_signal(signal.SIGCONT)
        time.sleep(0.002)
        rank.send_signal(signal.SIGSTOP)  # a rank that is gone is an error: the run ended before the phase
    yield
    rank.send_signal(signal.SIGCONT)


@pytest.fixture
def undisturbed(launch: Callable[..., Launch]) -> Iterator[Callable[..., Launch]]:
    """The same run left alone, made when it is asked for."""

    def run(*keys: str) -> Launch:
        alone = launch(*SHORT, *keys, folder="alone")
        assert alone.wait() == 0, alone.output
        return alone

    yield run


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.fault
@pytest.mark.parametrize(
    ("victim", "signum", "phase"),
    [
        pytest.param("engine", signal.SIGKILL, "sample", id="kill-engine-mid-generation"),
        pytest.param("server", signal.SIGKILL, "sync", id="kill-server-mid-sync"),
        pytest.param("server", signal.SIGSTOP, "sample", id="stop-server-mid-generation"),
        pytest.param("engine", signal.SIGSTOP, "sync", id="stop-engine-mid-sync"),
        pytest.param("engine", signal.SIGSTOP, "start", id="stop-engine-before-the-first-step"),
        pytest.param("server", signal.SIGTERM, "sample", id="end-server-mid-generation"),
        pytest.param("guard", signal.SIGKILL, "sample", id="kill-the-servers-guard-mid-generation"),
        pytest.param("engine", signal.SIGKILL, "save", id="kill-engine-mid-save"),
        pytest.param("server", signal.SIGKILL, "evaluate", id="kill-server-mid-evaluation"),
        pytest.param("engine", signal.SIGSTOP, "evaluate", id="stop-engine-mid-evaluation"),
    ],
)
def test_a_lost_server_is_replaced_and_nothing_is_lost(
    launch: Callable[..., Launch], undisturbed: Callable[..., Launch], victim: str, signum: int, phase: str
) -> None:
    keys = EVALUATED if phase == "evaluate" else ()
    run = launch(*SHORT, *HUNG, *keys)
    with held(run, phase, 0 if phase == "start" else 1):
        server = read_json(run.run_dir / "processes" / "server.json")
        pids = {"engine": engine_of(run), "server": server["pid"], "guard": server["guard"]}
        psutil.Process(pids[victim]).send_signal(signum)

    assert run.wait() == 0, run.output

    assert "the server alone is started again (1 of 2)" in run.output
    assert ("has made no token for" in run.output) == (signum == signal.SIGSTOP)
    summary = run.summary()
    assert (summary["status"], summary["server_restarts"], summary["restarts"]) == ("completed", 1, 0)
    alone = undisturbed(*keys)
    assert same_rows(run, alone)
    assert weights_hash(run) == weights_hash(alone)
    assert run.processes() == []


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.fault
def test_a_rank_that_stands_still_is_named_with_its_phase_and_the_stacks_of_the_others(
    launch: Callable[..., Launch],
) -> None:
    run = launch("--max_steps", "100000", "--num_processes", "2", "--stall_timeout", "40")
    run.wait_for_step(1)
    psutil.Process(run.pid_of("rank_1")).send_signal(signal.SIGSTOP)

    assert run.wait(100) == 1, run.output

    cause = run.summary()["cause"]
    assert cause.startswith("rank 1 has been in phase ") and "(stall_timeout 40)" in cause
    assert f"stopped by a signal (SIGSTOP): pid {run.pid_of('rank_1')}" in cause
    assert run.summary()["failed_rank"] == 1
    assert "most recent call first" in (run.run_dir / "stacks" / "rank_0.txt").read_text()
    run.wait_for_nothing_left()
