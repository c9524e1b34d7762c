"""A stop request is honoured wherever waiting takes long, and the step in flight is undone before the run is saved."""

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

from grpo_recipes.rewards.wrapper import RewardWrapper
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.stop_request import LOOK_SECONDS, Stopped, StoppedOnRequest, StopRequest
from grpo_recipes.trainers.random_states import random_states, set_random_states

_ABORT_SECONDS = 10.0  # for the server to give back the generations in flight
_SIGNAL_SECONDS = 3.0  # a signal to every process of a job may reach the server first


class Stopping:
    """Mixin before ``MetricsRows``: on request, all ranks stop at the same place, save and exit with code 75.

    Sampling, scoring and evaluation are cut short; an update or a save under way is finished. A sketch of the state is
    kept in memory after each optimizer step, so that the checkpoint is of the last one that was completed: of the step
    in flight nothing is left. After the last step a request changes nothing.

    Args:
        stop: the request to look at; one of the run directory by default.
    """

    def __init__(self, *, run_dir: Path, stop: StopRequest | None = None, **kwargs: Any):
        self.stop = stop or StopRequest(run_dir)
        self._agreed_to_stop = False
        self._last_step: dict[str, Any] | None = None
        super().__init__(run_dir=run_dir, **kwargs)
        client = getattr(getattr(self, "vllm_generation", None), "vllm_client", None)
        if client is not None:
            client.generate = partial(self._sampled_by, client, client.generate)
            client.update_named_params = partial(self._sent_by, client, client.update_named_params)
            client.reset_prefix_cache = partial(self._unless_stopping, client.reset_prefix_cache)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """transformers'.

        Raises:
            StoppedOnRequest: on every rank, with the state of the last completed step saved.
        """
        try:
            return super().train(*args, **kwargs)
        except Stopped:
            pass  # saving needs the memory that its traceback holds
        if self._last_step is None:
            raise StoppedOnRequest(before_a_step(Path(self.args.output_dir)))
        self._restore_unsaved(self._last_step["unsaved"])
        set_random_states(self._last_step["random"])
        self._save_checkpoint(self.model, None)
        raise StoppedOnRequest(f"after step {self.state.global_step}, state saved")

    # --- where ranks agree ---------------------------------------------------------------------------------------

    @property
    def _stoppable(self) -> bool:
        """Whether there is a next step to be kept from; the same on every rank."""
        ends = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        return self.is_in_train and not ends

    def _stop_if_agreed(self) -> None:
        """Stop if any rank knows of a request. Called by every rank.

        Raises:
            Stopped: on every rank.
        """
        if not self._stoppable:
            return
        self._agreed_to_stop = self._agreed_to_stop or agreed(self.stop, self.args.device)
        if self._agreed_to_stop:
            raise Stopped

    def _step_completed(self) -> None:
        """Keep what a checkpoint of now holds beside what the optimizer alone changes, then look at the request."""
        if self._stoppable:
            self._last_step = {"unsaved": self._unsaved_state(), "random": random_states()}
            self._stop_if_agreed()

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.state.epoch != int(self.state.epoch):  # else the end of the epoch may evaluate and save
            self._step_completed()

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        super()._run_epoch(*args, **kwargs)
        self._step_completed()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._cutting_short(), self._model_generates_until_stopped():
            output = super()._generate_single_turn(*args, **kwargs)
        self._stop_if_agreed()
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        for reward in self.reward_funcs:
            if isinstance(reward, RewardWrapper):
                reward.stop = self.stop
        with self._cutting_short():
            rewards = super()._calculate_rewards(*args, **kwargs)
        self._stop_if_agreed()
        return rewards

    def _cutting_short(self) -> contextlib.AbstractContextManager[None]:
        return self.stop.cutting_short() if self._stoppable else contextlib.nullcontext()

    # --- sampling that ends early --------------------------------------------------------------------------------

    @contextmanager
    def _model_generates_until_stopped(self) -> Iterator[None]:
        """Give transformers' generation, to which TRL passes no criteria of ours, one that looks at the request.

        Where every forward pass is collective (ZeRO-3, FSDP) transformers goes on until all ranks are done.
        """
        model = self.accelerator.unwrap_model(self.model_wrapped)
        criteria = StoppingCriteriaList([_UntilStopped(self.stop)])
        own = vars(model).get("generate")  # one that the user set on this instance
        model.generate = partial(model.generate, stopping_criteria=criteria)
        try:
            yield
        finally:
            del model.generate
            if own is not None:
                model.generate = own

    def _sampled_by(
        self, client: Any, generate: Callable[..., Any], prompts: list[Any], n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """The server's completions; any, when the run stops: the other ranks wait for something to be sent to them."""
        if self.stop.cuts():
            return _worthless(prompts, n)
        answer = _in_thread(partial(generate, prompts, n=n, **kwargs))
        while not wait([answer], LOOK_SECONDS).done:
            if self.stop.cuts():
                _in_thread(client.abort)  # which gets no answer where the server hangs
                wait([answer], _ABORT_SECONDS)
                return _worthless(prompts, n)
        if answer.exception() is not None and self._request_comes():
            return _worthless(prompts, n)
        return dict(answer.result())

    def _sent_by(self, client: Any, update: Callable[..., Any], metadata: Any, named_params: Iterator[Any]) -> None:
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
            if self.stop.cuts():
                client.abort()
                return

    def _unless_stopping(self, call: Callable[[], Any]) -> None:
        """Call the server; that it is gone when the run stops, too, is no failure."""
        try:
            call()
        except Exception:
            if not self._request_comes():
                raise

    def _request_comes(self) -> bool:
        """Whether the run is asked to stop, now or within moments of a failure."""
        deadline = time.monotonic() + _SIGNAL_SECONDS
        while not self.stop.cuts():
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
    """Whether any rank knows of a request. Called by every rank."""
    seen = torch.tensor(int(stop.requested()), device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
    return bool(seen)


def before_a_step(checkpoints: Path) -> str:
    """What is left of a run that was stopped before this attempt completed a step."""
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
    """A generation of the right shape: a token a completion."""
    rows = len(prompts) * n
    return {
        "prompt_ids": prompts,
        "completion_ids": [[0]] * rows,
        "logprobs": [[[0.0]]] * rows,
        "logprob_token_ids": [[[0]]] * rows,
    }
