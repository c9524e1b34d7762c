"""One row of ``metrics.jsonl`` per optimizer step, with the seconds of each phase."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_recipes.process.reports import PhaseFile

PHASES = ("sample", "score", "sync", "save", "evaluate")


class MetricsRows:
    """Mixin before TRL's trainer: times its phases, tells the launcher of them, and writes what it logs.

    A row holds TRL's metrics of the step under TRL's names, ``step``, ``max_steps``, ``tokens_per_second`` and
    ``seconds/<phase>``: sample, score, sync, save and evaluate (after the step before), update (all the rest), step
    (their sum).
    """

    def __init__(self, *, run_dir: Path, **kwargs: Any):
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._row_began: float | None = None
        self._tokens_before = 0
        self._rows = run_dir / "metrics.jsonl"
        super().__init__(**kwargs)
        self._phase_file = PhaseFile(run_dir, self.args.process_index)
        if getattr(self, "vllm_generation", None) is not None:
            self.vllm_generation.sync_weights = self._timed("sync", self.vllm_generation.sync_weights)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._told(name):
                yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def enter_last_phase(self) -> None:
        """Tell the launcher that training is over."""
        self._phase_file.enter("end", self.state.global_step)

    @contextmanager
    def _told(self, phase: str) -> Iterator[None]:
        """Tell the launcher of a phase inside another."""
        before = self._phase_file.enter(phase, self.state.global_step)
        try:
            yield
        finally:
            self._phase_file.enter(before, self.state.global_step)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._phase(name):
                return call(*args, **kwargs)

        return timed

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, noting when the first row begins."""
        self._phase_file.enter("update", self.state.global_step)
        if self._row_began is None:
            self._row_began = time.perf_counter()
            self._tokens_before = self.state.num_input_tokens_seen
        return super().training_step(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        synced = self._seconds["sync"]
        with self._phase("sample"):
            output = super()._generate_single_turn(*args, **kwargs)
        self._seconds["sample"] -= self._seconds["sync"] - synced
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("score"):
            return super()._calculate_rewards(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._phase("save"):
            super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, then a row for every optimizer step."""
        super().log(logs, start_time)
        # It becomes trainer_state.json.
        self.state.log_history[-1] = {key: json_number(value) for key, value in self.state.log_history[-1].items()}
        if "loss" in logs and self.accelerator.is_main_process:
            self._write_row(logs)

    def _write_row(self, logs: dict[str, float]) -> None:
        now = time.perf_counter()
        step_seconds = now - (self._row_began or now)
        tokens = self.state.num_input_tokens_seen - self._tokens_before
        row = {
            "step": self.state.global_step,
            "max_steps": self.state.max_steps,
            **{key: json_number(value) for key, value in logs.items()},
            "tokens_per_second": tokens / trained if (trained := step_seconds - self._seconds["evaluate"]) > 0 else 0.0,
            **{f"seconds/{name}": seconds for name, seconds in self._seconds.items()},
            "seconds/update": step_seconds - sum(self._seconds.values()),
            "seconds/step": step_seconds,
        }
        with self._rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._row_began, self._tokens_before = now, self.state.num_input_tokens_seen
        self._seconds = dict.fromkeys(PHASES, 0.0)


def json_number(value: Any) -> Any:
    """JSON has no infinity and no NaN: the texts inf, -inf and nan."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
