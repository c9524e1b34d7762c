"""Write ``metrics.jsonl`` of a run: time the phases of a step, and add a row for each optimizer step.

rows = MetricsRows(trainer, run_dir, rank)
with rows.phase("sample"):
    completions = generate()
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.recipe.generated import recorded_values
from grpo_recipes.runs.rundir import TRACKED, write_json
from grpo_recipes.runs.trace import TimedBlock, Trace, measure_process_age
from grpo_recipes.trainers.protocol import InnerTrainer
from grpo_recipes.trainers.trackers import find_tracked_runs

PHASES = ("sample", "score", "sync", "save", "evaluate")


class MetricsRows:
    """Time the phases of a step, report them to the launcher, and write a row of ``metrics.jsonl`` for each step.

    A row has ``seconds/<phase>`` for ``PHASES``, ``update`` (the remaining time) and ``step`` (the sum). ``evaluate``
    counts the evaluation after the previous step. ``syncs`` counts the transfers in ``seconds/sync``.

    The trace of each rank gets the same times as spans: a step, its phases inside it, and ``update`` between them.
    """

    def __init__(self, trainer: InnerTrainer, run_dir: Path, rank: int):
        """Create the rank's phase file and trace; no row is begun yet."""
        self._trainer = trainer
        self._file = run_dir / "metrics.jsonl"
        self._seconds, self._syncs = dict.fromkeys(PHASES, 0.0), 0
        self._prompt_values: dict[str, list[Any]] = {}  # by name: values of the prompts sampled since the last row
        self._row_began: float | None = None
        self._tokens_before = 0
        self._tracked: dict[str, str] = {}
        self._phase_file = PhaseFile(run_dir, rank)
        self.trace = Trace(f"rank_{rank}", run_dir)
        self._open_spans = 0
        self._row_step = 1  # the step of the row under way
        self._update_began: float | None = None  # the end of the row's last phase; None before the first row

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report this phase to the launcher in the block, and add the block's time to ``seconds/NAME`` of the row.

        A sync inside a sample counts only as sync. A block that raises an exception adds no time.
        """
        sync_seconds = self._seconds["sync"]
        with self.reported(name), self.span(name) as timed:
            yield
        self._seconds[name] += timed.seconds
        self._syncs += name == "sync"
        if name == "sample":
            self._seconds["sample"] -= self._seconds["sync"] - sync_seconds

    @contextmanager
    def span(self, name: str) -> Iterator[TimedBlock]:
        """Add the block to this rank's trace, and yield an object that has the block's seconds after it.

        A span that is not inside another ends the ``update`` under way.
        """
        timed = TimedBlock(time.perf_counter())
        if self._open_spans == 0:
            self._end_update(timed.start)
        self._open_spans += 1
        try:
            yield timed
        finally:
            timed.end = time.perf_counter()
            self.trace.add(name, timed.start, timed.end, step=self._row_step)
            self._open_spans -= 1
            if self._open_spans == 0 and self._row_began is not None:
                self._update_began = timed.end

    def _end_update(self, now: float) -> None:
        """Add the time since the last phase to the trace, as ``update``. Before the first step, do nothing."""
        if self._update_began is not None:
            self.trace.add("update", self._update_began, now, step=self._row_step)

    @contextmanager
    def reported(self, phase: str) -> Iterator[None]:
        """Report this phase to the launcher in the block, and the outer phase again afterwards."""
        outer_phase = self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer_phase)

    def enter(self, phase: str) -> str:
        """Report to the launcher that a phase begins. Return the previous phase."""
        return self._phase_file.enter(phase, self._trainer.state.global_step)

    def begin_update(self) -> None:
        """Report the phase ``update``. The first call of the process starts the clock of the first row."""
        self.enter("update")
        if self._row_began is None:
            self._row_began = self._update_began = time.perf_counter()
            self._row_step = self._trainer.state.global_step + 1
            self.trace.add("start", self._row_began - measure_process_age(), self._row_began)
            self._tokens_before = self._trainer.state.num_input_tokens_seen

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the whole time of the block as ``evaluate``, also its sampling, scoring and syncs.

        Before the first step, count nothing.
        """
        seconds, syncs = self._seconds, self._syncs
        self._seconds = dict(seconds)
        try:
            with self.span("evaluate") as timed:
                yield
        finally:
            if self._row_began is not None:  # the row of the first step does not cover the time before it
                seconds["evaluate"] += timed.seconds
            self._seconds, self._syncs = seconds, syncs

    def record_prompt_values(self, rows: list[dict[str, Any]]) -> None:
        """Gather recorded values of a generation's prompts, such as seeds, for the next row. Called by every rank.

        ``rows`` are this rank's rows, one for each completion. A prompt has one value.
        """
        for name, values in recorded_values(rows).items():
            values_of_ranks = gather_object(values)
            if self._trainer.accelerator.is_main_process:
                self._prompt_values.setdefault(name, []).extend(values_of_ranks[:: self._trainer.num_generations])

    def write(self, logs: dict[str, float]) -> None:
        """End the row of a step and begin the next one. Every rank adds the step to its trace; nothing is gathered.

        The main process appends a row to ``metrics.jsonl``: TRL's ``logs``, tokens, and its own times and memory. If an
        address in a tracker has changed, it also writes ``tracked.json``.
        """
        now, state = time.perf_counter(), self._trainer.state
        self._end_update(now)
        began = self._row_began or now
        self.trace.add("step", began, now, step=state.global_step)
        if self._trainer.accelerator.is_main_process:
            step_seconds = now - began
            tokens = state.num_input_tokens_seen - self._tokens_before
            trained = step_seconds - self._seconds["evaluate"]
            seconds = {**self._seconds, "update": step_seconds - sum(self._seconds.values()), "step": step_seconds}
            row = {
                "step": state.global_step,
                "max_steps": state.max_steps,
                **logs,
                "tokens_per_second": tokens / trained if trained > 0 else 0.0,
                **{f"seconds/{name}": value for name, value in seconds.items()},
                "syncs": self._syncs,
                **self._prompt_values,
                **measure_memory(self._trainer.accelerator.device),
            }
            append_json(self._file, row)
            if (tracked := find_tracked_runs()) != self._tracked:
                write_json(self._file.with_name(TRACKED), tracked)
                self._tracked = tracked
        # Begin the next row.
        self._row_began = self._update_began = now
        self._row_step, self._tokens_before = state.global_step + 1, state.num_input_tokens_seen
        self._seconds, self._syncs = dict.fromkeys(PHASES, 0.0), 0
        self._prompt_values = {}


def measure_memory(device: torch.device) -> dict[str, float]:
    """Return the current and the peak memory of this process in GB: of the GPU, or resident memory on CPU."""
    if device.type == "cuda":
        current, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        current, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return {"memory/gb": current / 1e9, "memory/peak_gb": peak / 1e9}


def to_json_number(value: Any) -> Any:
    """Convert a value for JSON: infinite and undefined numbers become text, and -0.0 becomes 0.0."""
    if not isinstance(value, float):
        return value
    return value + 0.0 if math.isfinite(value) else str(value)


def append_json(file: Path, *rows: dict[str, Any]) -> None:
    """Append rows to a JSONL file; first end an incomplete last line, which a kill can leave, with a line break.

    Infinite and undefined numbers become text, except inside lists and mappings.
    """
    texts = [json.dumps({key: to_json_number(value) for key, value in row.items()}) + "\n" for row in rows]
    with file.open("ab+") as lines:
        if lines.tell() and os.pread(lines.fileno(), 1, lines.tell() - 1) != b"\n":
            lines.write(b"\n")
        lines.write("".join(texts).encode())
