"""A run of two ranks that Slurm preempts at random moments ends as the uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch, clean_environment, same_rows, weights_hash
from slurm_cluster import SlurmCluster
from soak_record import record
from taken_prompts import FLAGS, taken_by

from grpo_recipes.runs.progress import Phase, read_phases
from grpo_recipes.runs.rundir import read_rows

SAVE_STEPS = 4
RANKS = 2
PROMPTS = 8  # of a step
BATCH = (
    *("--num_processes", str(RANKS), "--prompts_per_step", str(PROMPTS), "--num_generations", "4"),
    *("--save_steps", str(SAVE_STEPS), *FLAGS),
)


@dataclass(frozen=True)
class Moment:
    """When an attempt is interrupted: so long after a phase begins, so many steps into the attempt."""

    phase: str
    steps: int
    delay: float


# Two attempts in a row without a new step are not started again, so moments with and without one take turns.
IDLE = ("server", "start", "sync", "sample")
STEPPED = ("sample", "score", "update", "sync", "save")


def moments(generator: random.Random, count: int) -> list[Moment]:
    """Random moments, the first while the server starts, the second in a save, the last after the last step."""
    drawn = [Moment("server", 0, generator.uniform(0, 8)), Moment("save", 1, 0.0)]
    while len(drawn) < count - 1:
        idle = len(drawn) % 2 == 0
        phase = generator.choice(IDLE if idle else STEPPED)
        drawn.append(Moment(phase, 0 if idle else generator.randint(1, 2), generator.uniform(0, 0.3)))
    return [*drawn, Moment("end", 0, 0.0)]


class Job:
    """A job that runs ``training.sh`` on a real Slurm, and its run directory."""

    def __init__(self, slurm: SlurmCluster, folder: Path, mark: str, nodes: int, steps: int, epoch: int) -> None:
        folder.mkdir(parents=True)
        environment = clean_environment(folder, mark, ENV_DIR=sys.prefix)
        self.slurm = slurm
        lengths = ("--max_steps", str(steps), "--max_train_prompts", str(epoch * PROMPTS))
        script = (f"--nodes={nodes}", "training.sh", *BATCH, *lengths)
        self.id = slurm.sbatch(*script, cwd=REPOSITORY, env=environment)
        self.launch = Launch(None, folder, REPOSITORY, mark)  # type: ignore[arg-type]

    def complete(self) -> None:
        self.slurm.wait(self.id, "COMPLETED", timeout=300)

    def attempt_runs(self, number: int) -> None:
        """Wait until attempt ``number`` (from 0) has made its run directory ready."""

        def ready() -> bool:
            facts = self.launch.summary() if self.launch.has_run_dir() else {}
            return facts.get("status") == "running" and facts.get("restarts") == number

        wait_until(ready, f"attempt {number}")

    def wait_for(self, moment: Moment) -> None:
        """Wait for the moment in the attempt that runs; ``server`` is before any rank has told its phase."""
        first = len(self.launch.rows())

        def there() -> bool:
            phases = read_phases(self.launch.run_dir)
            return moment.phase == "server" or any(_is_at(phase, moment, first) for phase in phases)

        wait_until(there, str(moment), interval=0.005)
        time.sleep(moment.delay)

    def redone(self) -> int:
        return len(read_rows(self.launch.run_dir / "metrics.redone.jsonl"))


def _is_at(phase: Phase, moment: Moment, first: int) -> bool:
    if moment.steps == 0:
        return phase.name == moment.phase
    missed = phase.step > first + moment.steps + SAVE_STEPS  # too short to be seen: any other moment will do
    return missed or (phase.step >= first + moment.steps and phase.name == moment.phase)


def wait_until(condition: Callable[[], object], event: str, timeout: float = 240, interval: float = 0.1) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {event} within {timeout} s"
        time.sleep(interval)


def assert_equal(job: Job, alone: Job) -> None:
    for rank in range(RANKS):
        assert taken_by(job.launch, rank) == taken_by(alone.launch, rank), f"prompts of rank {rank}"
    assert same_rows(job.launch, alone.launch)
    assert weights_hash(job.launch) == weights_hash(alone.launch)
    wait_until(lambda: not job.launch.processes(), "end of every process")


@pytest.mark.parametrize(
    ("count", "nodes", "steps", "epoch"),
    [
        pytest.param(4, 1, 20, 8, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="4-stops"),
        pytest.param(20, 2, 40, 10, marks=[pytest.mark.soak, pytest.mark.timeout(7200)], id="20-stops-two-nodes"),
    ],
)
def test_usr1_at_random_moments_changes_nothing(
    slurm: SlurmCluster, tmp_path: Path, count: int, nodes: int, steps: int, epoch: int
) -> None:
    """A run of more than two epochs, of ``epoch`` steps each; with two nodes, a rank runs on each.

    A step takes 0.3 s, and scancel about as long: the run must not be over when the signal comes.
    """
    seed = int(os.environ.get("GRPO_SEED", time.time()))
    print(f"GRPO_SEED={seed}")
    job = Job(slurm, tmp_path / "stopped", f"stopped-{count}", nodes, steps, epoch)
    planned = moments(random.Random(seed), count)
    for number, moment in enumerate(planned):
        job.attempt_runs(number)
        job.wait_for(moment)
        slurm.scancel(job.id, "--signal=USR1", "--batch")
        if moment.phase == "end":  # nothing is left to stop: the run is done
            break
        slurm.start_requeued(job.id, timeout=60)
    job.complete()

    assert job.launch.summary()["restarts"] == count - 1
    assert job.redone() <= count - 1  # only the step in flight
    alone = Job(slurm, tmp_path / "alone", f"alone-{count}", nodes, steps, epoch)
    alone.complete()
    size = {"ranks": RANKS, "nodes": nodes, "epochs": steps / epoch}
    record("usr1", job.launch, alone.launch, **size, seed=seed, moments=[str(moment) for moment in planned])
    assert_equal(job, alone)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sigkill_of_the_whole_job_costs_at_most_the_steps_since_the_last_save(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    seed = int(os.environ.get("GRPO_SEED", time.time()))
    print(f"GRPO_SEED={seed}")
    generator = random.Random(seed)
    job = Job(slurm, tmp_path / "killed", "killed-job", nodes=1, steps=16, epoch=5)
    for number in range(3):
        job.attempt_runs(number)
        job.wait_for(Moment(generator.choice(STEPPED), generator.randint(1, 4), generator.uniform(0, 0.3)))
        before = job.redone()
        for process in job.launch.processes():
            process.send_signal(signal.SIGKILL)
        slurm.wait(job.id, "FAILED", timeout=60)
        slurm.cli("scontrol", "requeue", str(job.id))
        slurm.start_requeued(job.id, timeout=60)
        job.attempt_runs(number + 1)
        assert job.redone() - before <= SAVE_STEPS
    job.complete()

    alone = Job(slurm, tmp_path / "alone", "alone-killed", nodes=1, steps=16, epoch=5)
    alone.complete()
    size = {"ranks": RANKS, "nodes": 1, "epochs": 16 / 5}
    record("sigkill", job.launch, alone.launch, **size, seed=seed, save_steps=SAVE_STEPS)
    assert_equal(job, alone)
