"""What the launcher looks at while an attempt runs: progress, requests to stop, the time limit, who stands still."""

from __future__ import annotations

import time
from pathlib import Path

from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.signals import StopSignals
from grpo_recipes.launch.stall_detector import (
    Phase,
    StandingRank,
    StandingServer,
    dump_stacks,
    is_stopped,
    rank_pids,
    read_phases,
    server_pids,
    stale_compile_lock,
)
from grpo_recipes.launch.supervisor import Child, Ending, Trainer
from grpo_recipes.plan.server import generated_tokens
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.runs.health import Health
from grpo_recipes.runs.progress import Progress
from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.slurm.walltime import Walltime, job_end_time

_PHASE_SECONDS = 1.0  # between two looks at what the ranks do
_SERVER_SECONDS = 5.0  # between two questions to the server, at most


class Watch:
    """Everything that is looked at again and again, for one attempt.

    Attributes:
        server: the server that runs, None while there is none.
        trainer: the trainers that run, None while there are none.
        stepped: whether a step was completed since this was last set to False.
    """

    def __init__(self, attempt: Attempt, stop: StopSignals) -> None:
        self._attempt = attempt
        self._stop = stop
        self._folder = attempt.run.folder
        self._progress = Progress(self._folder)
        self._walltime = Walltime(job_end_time)
        for row in read_metrics(self._folder):
            self._walltime.observe(row)
        self._began = time.time()
        self._next_phases = self._next_server = 0.0
        self.server: Child | None = None
        self.trainer: Trainer | None = None
        self.stepped = False
        stop.can_save = lambda: any(phase.name != "start" for phase in self._phases())
        self.starts_again()

    def starts_again(self) -> None:
        """Forget what was seen of processes that are gone, and of rows that were moved aside."""
        self._progress = Progress(self._folder)
        self._health = Health(self._attempt.recipe.__getitem__)
        for row in read_metrics(self._folder):
            self._health.add(row)
        self._ranks = StandingRank(self._attempt.recipe["stall_timeout"])
        self._engine = StandingServer(self._attempt.recipe["server_stall_timeout"])

    def stopping(self) -> bool:
        """Whether the trainers are asked to save and end."""
        return self._stop.requested

    def tick(self) -> Ending | None:
        """Look at everything that is due.

        Returns:
            How the run ends, or the server is lost, because somebody stands still.

        Raises:
            StoppedAtOnce: a request to stop that ends the attempt.
        """
        self.show_progress()
        if self._attempt.publisher:
            self._attempt.publisher.tick()
        now = time.monotonic()
        ending = None
        if now >= self._next_phases:
            self._next_phases = now + _PHASE_SECONDS
            phases = self._phases()
            self._look_at_the_clock()
            ending = self._standing(phases, now)
        self._stop.look()
        return ending

    def _phases(self) -> list[Phase]:
        return read_phases(self._folder) if self.trainer else []

    def show_progress(self) -> None:
        """Print a line for each step that was completed, and one for what its metrics give reason to."""
        for row in self._progress.new_rows():
            self.stepped = True
            print_line(self._progress.line(row))
            self._walltime.observe(row)
            for notice in self._health.add(row):
                say(f"note: {notice}")

    def _look_at_the_clock(self) -> None:
        if note := self._walltime.note():
            say(note)
        if not self._stop.requested and (why := self._walltime.due()):
            self._stop.out_of_time(why)

    def _standing(self, phases: list[Phase], now: float) -> Ending | None:
        if self.trainer is None:
            return None
        return self._standing_server(phases, now) or self._standing_rank(phases, now)

    def _standing_server(self, phases: list[Phase], now: float) -> Ending | None:
        limit = self._attempt.recipe["server_stall_timeout"]
        if self.server is None or self._stop.requested or now < self._next_server:
            return None
        self._next_server = now + min(_SERVER_SECONDS, limit / 5)
        seconds = self._engine.look(generated_tokens(*self._attempt.server_address()), phases, time.monotonic())
        if seconds is None:
            return None
        stacks = dump_stacks(self._folder, server_pids(self.server.command_pid()))
        cause = f"the vLLM server has made no token for {seconds:.0f} s (server_stall_timeout {limit:g}){stacks}"
        return Ending(1, cause, log=self.server.log, of_server=True)

    def _standing_rank(self, phases: list[Phase], now: float) -> Ending | None:
        ranks = rank_pids(self._folder)
        late = self._ranks.look(phases, now, [rank for rank, pid in ranks.items() if is_stopped(pid)])
        if late is None or self.trainer is None:
            return None
        phase, seconds = late
        server = server_pids(self.server.command_pid()) if self.server else []
        limit = f"stall_timeout {self._attempt.recipe['stall_timeout']:g}"
        cause = f"rank {phase.rank} has been in {phase} for {seconds:.0f} s ({limit})"
        extensions = Path(self._attempt.environment.get("TORCH_EXTENSIONS_DIR", ""))
        lock = stale_compile_lock(extensions, self._began) if phase.name == "start" else None
        cause += dump_stacks(self._folder, [*ranks.values(), *server]) + (f"; {lock}" if lock else "")
        return Ending(1, cause, phase.rank, self.trainer.log)
