"""End a run on request wherever waiting takes long; the step in flight is undone before the run is saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import StoppingCriteriaList

from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.stop_request import Stopped, StoppedOnRequest, StopRequest
from grpo_recipes.trainers.checkpoints import keep_random_states


class Preemption:
    """Stop all ranks at the same place on request; the run is saved and exits with code 75.

    Sampling, scoring and evaluation are cut short; an update or a save under way is finished. A sketch of the state is
    kept in memory after each optimizer step, so that the checkpoint is of the last completed one: nothing is left of
    the step in flight. After the last step a request changes nothing.
    """

    def __init__(self, trainer: Any, stop: StopRequest):
        self._trainer = trainer
        self.stop = stop
        self._agreed = False
        self._last_step: tuple[dict[str, Any], Callable[[], None]] | None = None

    @property
    def _stoppable(self) -> bool:
        """Whether there is a next step to be kept from; the same on every rank."""
        trainer = self._trainer
        ends = trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps
        return trainer.is_in_train and not ends

    def stop_if_agreed(self) -> None:
        """Raise ``Stopped`` on every rank if any knows of a request. Called by every rank."""
        if self._stoppable:
            self._agreed = self._agreed or agreed(self.stop, self._trainer.args.device)
            if self._agreed:
                raise Stopped

    def step_completed(self) -> None:
        """Keep what a checkpoint of now holds beside what the optimizer alone changes, then check for a request."""
        if self._stoppable:
            self._last_step = self._trainer.checkpoints.state(), keep_random_states()
            self.stop_if_agreed()

    def save_last_step(self) -> StoppedOnRequest:
        """Save the state of the last completed step, if there is one; return how the run ended."""
        trainer = self._trainer
        if self._last_step is None:
            return StoppedOnRequest(before_a_step(Path(trainer.args.output_dir)))
        state, put_back_random_states = self._last_step
        trainer.checkpoints.restore(state)
        put_back_random_states()
        trainer._save_checkpoint(trainer.model, None)
        return StoppedOnRequest(f"after step {trainer.state.global_step}, state saved")

    def cutting_short(self) -> contextlib.AbstractContextManager[None]:
        """End the work inside early when a request comes."""
        return self.stop.cutting_short() if self._stoppable else contextlib.nullcontext()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Cut sampling short; give transformers' generation, to which TRL passes none, criteria to stop by.

        Where every forward pass is collective (ZeRO-3, FSDP) transformers continues until all ranks are done.
        """
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

        def stopped(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(ids),), self.stop.cuts(), device=ids.device)

        own = vars(model).get("generate")  # one that the user set on this instance
        model.generate = partial(model.generate, stopping_criteria=StoppingCriteriaList([stopped]))
        try:
            with self.cutting_short():
                yield
        finally:
            del model.generate
            if own is not None:
                model.generate = own


def agreed(stop: StopRequest, device: torch.device) -> bool:
    """Return whether any rank knows of a request. Called by every rank."""
    seen = torch.tensor(int(stop.requested()), device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen)


def before_a_step(checkpoints: Path) -> str:
    """Return what is left of a run that was stopped before this attempt completed a step."""
    newest = newest_complete(checkpoints)
    if newest is None:
        return "before the first step was completed; there is nothing to save"
    return f"before a step was completed; the newest checkpoint is {newest.name}"
