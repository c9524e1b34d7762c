"""A dead or hung server is started again, and the run ends as if nothing had been; a hung rank ends it with stacks."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from real_runs import Launch, same_rows, start_launches, weights_hash
from run_segments import RunSegments

from grpo_recipes.plan.ports import DEFAULT_PORTS
from grpo_recipes.runs.progress import read_phases
from grpo_recipes.runs.rundir import read_json

SHORT = ("--max_steps", "6", "--save_steps", "3", "--prompts_per_step", "4", "--num_generations", "8")
EVALUATED = (
    "--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name", "smoke:sums", "--eval_subsample", "1.0",
    "--eval_max_prompts", "16", "--num_generations_eval", "4",
)  # fmt: skip
HUNG = ("--server_stall_timeout", "20")  # a healthy server on a busy machine makes a token sooner


def engine_of(run: Launch) -> int:
    """Return the pid of vLLM's engine: a child of the server, with a name that the kernel cuts to 15 characters."""

    def engines() -> list[int]:
        children = psutil.Process(run.pid_of("server")).children(recursive=True)
        return [process.pid for process in children if process.name().startswith("VLLM::EngineCor")]

    run.wait_for(engines, "an engine of the server", 60)
    (pid,) = engines()
    return pid


class Places:
    """The shared memory and the ports of a run, to check that it left nothing.

    Attributes:
        keys: flags with ports that no other run uses.
    """

    def __init__(self) -> None:
        self._segments: RunSegments | None = None
        self._folders: set[Path] = set()
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in DEFAULT_PORTS]
            self._ports = [listener.getsockname()[1] for listener in sockets]
        self.keys = [
            text for key, port in zip(DEFAULT_PORTS, self._ports, strict=True) for text in (f"--{key}", str(port))
        ]

    def note(self, run: Launch) -> None:
        """Record its shared memory and the folders of its weights, and assert that its ports are taken."""
        self._segments = RunSegments(run)
        self._folders |= run.sync_folders()
        assert any(folder.exists() for folder in self._folders) and not self._free()

    def assert_left(self) -> None:
        """Assert that the run left nothing there."""
        assert self._segments is not None
        assert self._segments.find_left() == set() and self._segments.inodes
        assert not [folder for folder in self._folders if folder.exists()]
        assert self._free()

    def _free(self) -> bool:
        try:
            for port in self._ports:
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def held(run: Launch, phase: str, step: int) -> Iterator[None]:
    """Stop rank 0 in a phase after so many steps. Phases last milliseconds, so it runs 2 ms at a time until then."""

    def reached(*names: str) -> bool:
        phases = read_phases(run.run_dir) if run.has_run_dir() else []
        return any((phase.name in names or not names) and phase.step >= step for phase in phases)

    run.wait_for(reached, f"step {step}")
    rank = psutil.Process(run.pid_of("rank_0"))
    rank.send_signal(signal.SIGSTOP)
    while not reached(phase):
        rank.send_signal(signal.SIGCONT)
        time.sleep(0.002)
        rank.send_signal(signal.SIGSTOP)  # a rank that is gone is an error: the run ended before the phase
    yield
    rank.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launch]]:
    """``uninterrupted(KEY, ...)``: the completed run with these flags, made once for all tests of this file."""
    runs: dict[tuple[str, ...], Launch] = {}
    with start_launches(tmp_path_factory.mktemp("uninterrupted")) as launch:

        def complete_run(*keys: str) -> Launch:
            if keys not in runs:
                run = launch(*SHORT, *keys, folder=f"run-{len(runs)}", by_exec=True)
                assert run.wait() == 0, run.output
                runs[keys] = run
            return runs[keys]

        yield complete_run


@pytest.mark.slow
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
    launch: Callable[..., Launch], uninterrupted: Callable[..., Launch], victim: str, signum: int, phase: str
) -> None:
    keys = EVALUATED if phase == "evaluate" else ()
    places = Places()
    limits = HUNG if signum == signal.SIGSTOP else ()
    run = launch(*SHORT, *limits, *keys, *places.keys)
    with held(run, phase, 0 if phase == "start" else 1):
        if phase == "start":  # trainers load the model while the server starts
            run.wait_for(lambda: "grpo: server ready after " in run.output, "a ready server")
        engine = engine_of(run)
        server = read_json(run.run_dir / "processes" / "server.json")
        places.note(run)
        pids = {"engine": engine, "server": server["pid"], "guard": server["guard"]}
        psutil.Process(pids[victim]).send_signal(signum)

    assert run.wait() == 0, run.output

    assert "only the server is started again (1 of 2)" in run.output
    assert ("has made no token for" in run.output) == (signum == signal.SIGSTOP)
    summary = run.summary()
    assert (summary["status"], summary["server_restarts"], summary["restarts"]) == ("completed", 1, 0)
    assert run.processes() == []
    places.assert_left()
    expected = uninterrupted(*keys)
    assert same_rows(run, expected)
    assert weights_hash(run) == weights_hash(expected)


@pytest.mark.slow
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
