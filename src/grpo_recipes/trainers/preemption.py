"""End a run on request wherever waiting takes long; the step in flight is undone before the run is saved."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import StoppingCriteria, StoppingCriteriaList

from grpo_recipes.rewards.load import RewardWrapper
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.stop_request import LOOK_SECONDS, Stopped, StoppedOnRequest, StopRequest
from grpo_recipes.trainers.checkpoints import random_states, set_random_states

_ABORT_SECONDS = 10.0  # for the server to give back the generations in flight
_SIGNAL_SECONDS = 3.0  # a signal to every process of a job may reach the server first


class Preemption:
    """Stop all ranks at the same place on request; the run is saved and exits with code 75.

    Sampling, scoring and evaluation are cut short; an update or a save under way is finished. A sketch of the state is
    kept in memory after each optimizer step, so that the checkpoint is of the last completed one: nothing is left of
    the step in flight. After the last step a request changes nothing.
    """

    def __init__(self, trainer: Any, stop: StopRequest):
        self._trainer = trainer
        self._stop = stop
        self._agreed = False
        self._last_step: dict[str, Any] | None = None

    # --- where ranks agree ---------------------------------------------------------------------------------------

    @property
    def _stoppable(self) -> bool:
        """Whether there is a next step to be kept from; the same on every rank."""
        trainer = self._trainer
        ends = trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps
        return trainer.is_in_train and not ends

    def stop_if_agreed(self) -> None:
        """Raise ``Stopped`` on every rank if any knows of a request. Called by every rank."""
        if not self._stoppable:
            return
        self._agreed = self._agreed or agreed(self._stop, self._trainer.args.device)
        if self._agreed:
            raise Stopped

    def step_completed(self) -> None:
        """Keep what a checkpoint of now holds beside what the optimizer alone changes, then look at the request."""
        if self._stoppable:
            self._last_step = {"unsaved": self._trainer.unsaved_state(), "random": random_states()}
            self.stop_if_agreed()

    def save_last_step(self) -> StoppedOnRequest:
        """Save the state of the last completed step, if there is one; return how the run ended."""
        trainer = self._trainer
        if self._last_step is None:
            return StoppedOnRequest(before_a_step(Path(trainer.args.output_dir)))
        trainer.restore_unsaved(self._last_step["unsaved"])
        set_random_states(self._last_step["random"])
        trainer._save_checkpoint(trainer.model, None)
        return StoppedOnRequest(f"after step {trainer.state.global_step}, state saved")

    # --- work that ends early ------------------------------------------------------------------------------------

    def cutting_short(self) -> contextlib.AbstractContextManager[None]:
        """End the work inside early when a request comes."""
        return self._stop.cutting_short() if self._stoppable else contextlib.nullcontext()

    @contextmanager
    def scoring(self, rewards: list[Any]) -> Iterator[None]:
        """Cut short the rewards that run in processes of their own."""
        for reward in rewards:
            if isinstance(reward, RewardWrapper):
                reward.stop = self._stop
        with self.cutting_short():
            yield

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Cut sampling short; give transformers' generation, to which TRL passes none, criteria to stop by.

        Where every forward pass is collective (ZeRO-3, FSDP) transformers goes on until all ranks are done.
        """
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        criteria = StoppingCriteriaList([_UntilStopped(self._stop)])
        own = vars(model).get("generate")  # one that the user set on this instance
        with self.cutting_short():
            model.generate = partial(model.generate, stopping_criteria=criteria)
            try:
                yield
            finally:
                del model.generate
                if own is not None:
                    model.generate = own

    def interrupt(self, client: Any) -> None:
        """Let requests to the server through ``client`` end when the run stops."""
        client.generate = partial(self._generate, client, client.generate)
        client.update_named_params = partial(self._send, client, client.update_named_params)
        client.reset_prefix_cache = partial(self._unless_stopping, client.reset_prefix_cache)

    def _generate(
        self, client: Any, generate: Callable[..., Any], prompts: list[Any], n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Return the server's completions; any, when the run stops: the other ranks wait for something to be sent."""
        if self._stop.cuts():
            return _worthless(prompts, n)
        answer = _in_thread(partial(generate, prompts, n=n, **kwargs))
        while not wait([answer], LOOK_SECONDS).done:
            if self._stop.cuts():
                _in_thread(client.abort)  # which gets no answer where the server hangs
                wait([answer], _ABORT_SECONDS)
                return _worthless(prompts, n)
        if answer.exception() is not None and self._request_comes():
            return _worthless(prompts, n)
        return dict(answer.result())

    def _send(self, client: Any, update: Callable[..., Any], metadata: Any, named_params: Iterator[Any]) -> None:
        """Send the weights. When the run stops, and the server with it, the rest is gathered in vain by all ranks."""
        sent = threading.Event()
        _in_thread(partial(self._abort_when_stopping, client, sent))
        try:
            self._unless_stopping(partial(update, metadata, named_params))
        finally:
            sent.set()
        for _ in named_params:
            pass

    def _abort_when_stopping(self, client: Any, done: threading.Event) -> None:
        """End the client's wait for another server."""
        while not done.wait(LOOK_SECONDS):
            if self._stop.cuts():
                client.abort()
                return

    def _unless_stopping(self, call: Callable[[], Any]) -> None:
        """Call the server; when the run stops, too, it is no failure that the server is gone."""
        try:
            call()
        except Exception:
            if not self._request_comes():
                raise

    def _request_comes(self) -> bool:
        """Return whether the run is asked to stop, now or within moments of a failure."""
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while not self._stop.cuts():
            if not self._stoppable or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return True


class _UntilStopped(StoppingCriteria):
    def __init__(self, stop: StopRequest):
        self._stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._stop.cuts(), device=input_ids.device)


def agreed(stop: StopRequest, device: torch.device) -> bool:
    """Return whether any rank knows of a request. Called by every rank."""
    seen = torch.tensor(int(stop.requested()), device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen)


def before_a_step(checkpoints: Path) -> str:
    """Say what is left of a run that was stopped before this attempt completed a step."""
    newest = newest_complete(checkpoints)
    if newest is None:
        return "before the first step was completed; there is nothing to save"
    return f"before a step was completed; {newest.name} stands"


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Call something that may never return, in a thread that does not outlive the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _worthless(prompts: list[Any], n: int) -> dict[str, list[Any]]:
    """Return a generation of the right shape: one token per completion."""
    rows = len(prompts) * n
    return {
        "prompt_ids": prompts,
        "completion_ids": [[0]] * rows,
        "logprobs": [[[0.0]]] * rows,
        "logprob_token_ids": [[[0]]] * rows,
    }
