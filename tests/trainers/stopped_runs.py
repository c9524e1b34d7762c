"""A training with a stop request at a chosen moment, from a test or from each of two processes that a test starts."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grpo_recipes.runs import stop_request as stop_module
from grpo_recipes.runs.checkpoints import find_newest_complete, parse_step
from grpo_recipes.runs.rundir import move_rows_after, stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest, StopRequest
from grpo_recipes.trainers.grpo import GRPOTrainer

from .tiny_training import different_characters, train

# Two generations an optimizer step, three steps an epoch, an evaluation every other step.
KEYS = {
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 4,
    "max_completion_length": 8,
    "max_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    "log_completions": True,
}
TIMED = ("seconds", "tokens_per_second", "step_time", "memory/", "syncs")


class Moment(TrainerCallback):
    """Request a stop in a phase of a step, for example while sampling or scoring its first or second generation.

    Attributes:
        forwards: of the model while it samples, since the request.
    """

    __name__ = "different_characters"

    def __init__(self, ask: Callable[[], None], phase: str, step: int, generation: int = 1):
        self._ask, self._phase, self._step, self._generation = ask, phase, step, generation
        self._done = 0
        self._calls = 0
        self._asked = False
        self.forwards = 0

    def _now(self, phase: str) -> None:
        if phase == self._phase and self._done + 1 == self._step and not self._asked:
            self._asked = True
            self._ask()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self._done = state.global_step
        model.register_forward_pre_hook(self._samples)

    def _samples(self, model: Any, _: Any) -> None:
        if torch.is_grad_enabled() or not model.training or self._calls + 1 != self._generation:
            return
        self.forwards += self._asked
        self._now("sample")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._now("begin")

    def __call__(self, completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        if int(answer[0]) >= 7:
            self._now("evaluate")
        else:
            self._calls += 1
            if self._calls == self._generation:
                self._now("score")
        return different_characters(completions)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._now("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._done = state.global_step - (self._phase in ("evaluate", "save"))  # these phases come after the step
        self._calls = 0

    def on_save(self, *_: Any, **__: Any) -> None:
        self._now("save")


def run(
    folder: Path, moment: Moment | None = None, stop: StopRequest | None = None, **keys: Any
) -> tuple[GRPOTrainer, StoppedOnRequest | None]:
    """Train, or resume as the launcher does."""
    newest = find_newest_complete(folder / "checkpoints")
    main = os.environ.get("RANK", "0") == "0"
    if main:
        folder.mkdir(exist_ok=True)
        stop_file(folder).unlink(missing_ok=True)
        move_rows_after(folder, parse_step(newest) if newest else 0)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    callbacks = (moment,) if moment else ()
    return train(folder, moment or different_characters, callbacks, stop, **KEYS | keys)


def outcome(folder: Path, trainer: GRPOTrainer) -> dict[str, Any]:
    """Return everything that a stopped and resumed run must share with an uninterrupted run."""
    weights = [parameter.detach().flatten() for parameter in trainer.model.parameters()]
    rows = {name: rows_of(folder / f"{name}.jsonl") for name in ("metrics", "eval", "samples")}
    return {**rows, "weights": torch.cat(weights).tolist(), "shown": list(trainer._logs["completion"])}


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


def main(folder: Path) -> None:
    """Run one of two processes. Each request reaches only the second process (SIGTERM) or both (file)."""
    rank = os.environ["RANK"]
    stop_module.POLL_SECONDS = 0.0
    whole, _ = run(folder / "whole")
    outcomes = {"whole": outcome(folder / "whole", whole)}
    moments = [("sample", 3, 1, False), ("sample", 3, 2, True), ("score", 3, 2, False), ("evaluate", 2, 1, False)]
    for phase, step, generation, by_file in moments:
        name = f"{phase}-{generation}"
        stop = StopRequest(folder / name)
        stop.listen()

        def ask(name: str = name, by_file: bool = by_file) -> None:
            if by_file:
                stop_file(folder / name).touch()
            elif rank == "1":
                os.kill(os.getpid(), signal.SIGTERM)

        _, stopped = run(folder / name, Moment(ask, phase, step, generation), stop)
        trainer, _ = run(folder / name)
        outcomes[name] = {"stopped": str(stopped), **outcome(folder / name, trainer)}
    (folder / f"rank_{rank}.json").write_text(json.dumps(outcomes))
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
