"""Sampling while training: the server samples the next generation while the trainers learn from this one.

``overlap_generation``: a generation is sampled with the weights of the generation before, one generation off-policy,
which TRL's importance-sampling ratio corrects for. The server takes new weights only while it samples nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from datasets import IterableDataset
from trl.trainer.utils import RepeatSampler

from grpo_recipes.attributes import replaced
from grpo_recipes.rollouts.backends import ServerRollouts, Tokens
from grpo_recipes.runs.stop_request import POLL_SECONDS, StopRequest
from grpo_recipes.trainers.checkpoints import begin_epoch
from grpo_recipes.weights.client import run_in_thread
from grpo_recipes.weights.sampling import sampling_seed

_PROBED_TOKENS = 32  # of the completion that the guard looks at
_LOST_SECONDS = 10.0  # without an answer of the server, after which a run that stops waits no longer for a generation


class Flight:
    """A generation that is sampled ahead: its name, its prompts, and the step whose weights sample it."""

    def __init__(
        self, name: str, prompts: list[Tokens], step: int, answer: Future[dict[str, Any]], client: Any = None
    ) -> None:
        self.name, self.prompts, self.step, self.answer = name, prompts, step, answer
        self.client = client  # that asks for it; None after a resume, when the answer is there

    @classmethod
    def of_checkpoint(cls, saved: dict[str, Any]) -> Flight:
        """Return the generation that ``saved`` returned."""
        answer: Future[dict[str, Any]] = Future()
        answer.set_result(saved["answer"])
        return cls(saved["name"], saved["prompts"], saved["step"], answer)

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, once it is there."""
        return {"name": self.name, "prompts": self.prompts, "step": self.step, "answer": self.answer.result()}


class OverlappedRollouts(ServerRollouts):
    """The run's vLLM server, which samples the next generation as soon as it has the weights of this one.

    Everything else that needs the server waits until it has sampled that.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        if isinstance(trainer.train_dataset, IterableDataset):
            what = "overlap_generation: a stream does not tell the prompts of the next generation in advance"
            raise ValueError(f"{what}. Fix: pass a Dataset, or remove overlap_generation")
        self._flight: Flight | None = None  # rank 0's
        self._epoch = self._chunk = 0  # of the next generation: its epoch, and its place in that
        self._orders: dict[int, list[int]] = {}  # rows of the training set in the order of an epoch
        self._probed: tuple[Tokens, list[float]] | None = None  # what the guard drew after the last sync

    # --- a generation ----------------------------------------------------------------------------------------------

    @property
    def probes(self) -> bool:  # type: ignore[override]
        """Whether the guard looks at a completion of the probe: those trained on are of older weights."""
        return bool(self._trainer.model.training)

    def begin_epoch(self, epoch: int, micro_steps: int) -> None:
        """Note the epoch that begins, of which so many micro-steps have been taken before a resume."""
        self._epoch, self._chunk = epoch, -(-micro_steps // self._window)

    def generate(self, draw: Callable[[], tuple[list[Tokens], Any]]) -> tuple[list[Tokens], Any]:
        """Return completions for training: those sampled ahead where there are any; then sample the next ones ahead.

        New weights are sent in between, when the server samples nothing.
        """
        self._landing()
        if not self._trainer.model.training:
            return draw()
        asked: list[dict[str, Any]] = []
        if self._client is None:
            drawn = draw()
        else:
            sample, sent = self._client.generate, self.transfers
            with replaced(self._client, generate=partial(self._taken_or_sampled, sample, asked)):
                drawn = draw()
            if asked and not self._client.is_stopping():
                if self.guarded and self.transfers != sent:
                    self._draw_probe(asked[0]["prompts"][0], asked[0]["max_tokens"])
                self._launch(asked[0])
        self._chunk += 1
        return drawn

    def _taken_or_sampled(
        self, sample: Callable[..., dict[str, Any]], asked: list[dict[str, Any]], prompts: list[Tokens], **how: Any
    ) -> dict[str, Any]:
        """Return the generation sampled ahead, where it is the one asked for, or sample it now; note what was asked."""
        asked.append({"prompts": prompts, **how})
        flight, self._flight = self._flight, None
        step = self._trainer.state.global_step
        known = flight is not None and (flight.name, flight.prompts) == (self._client.generation_name, prompts)
        answer = flight.answer.result() if flight and known else sample(prompts, **how)
        behind = step - flight.step if flight and known else 0
        self._trainer._metrics["train"]["rollouts/steps_off_policy"].append(float(behind))
        return dict(answer)

    def _draw_probe(self, prompt: Tokens, max_tokens: int) -> None:
        """Draw a completion from the plain distribution with the weights that were just sent, for the guard."""
        seed = sampling_seed(self._trainer.args.seed, f"probe/{self._client.generation_name}", 0)
        tokens = min(_PROBED_TOKENS, max_tokens)
        found = self._client.generate_seeded([prompt], [seed], max_tokens=tokens, logprobs=0)
        self._probed = found["completion_ids"][0], [scores[0] for scores in found["logprobs"][0]]

    def probe(self, prompt: Tokens) -> tuple[Tokens, list[float]]:
        """Return the completion that was drawn of this prompt after the last sync, before the server went on."""
        found: tuple[Tokens, list[float]] = self._from_main(lambda: self._probed)
        return found

    # --- the next one ----------------------------------------------------------------------------------------------

    @property
    def _window(self) -> int:
        """Micro-steps that a generation is trained on."""
        return int(self._trainer.sampler.repeat_count)

    def _launch(self, asked: dict[str, Any]) -> None:
        """Have the server begin with the next generation, unless the training ends before it would be used."""
        trainer, sampler = self._trainer, self._trainer.sampler
        step, chunks = trainer.state.global_step, sampler.num_samples // sampler.batch_size
        used_at = step + self._steps_until(self._chunk + 1, chunks) - self._steps_until(self._chunk, chunks)
        if used_at >= trainer.state.max_steps:
            return
        epoch, chunk = (self._epoch, self._chunk + 1) if self._chunk + 1 < chunks else (self._epoch + 1, 0)
        name = f"{used_at}/{trainer._step + self._window}"
        prompts = self._prompts(epoch, chunk)
        client = copy.copy(self._client)
        # A stop request is not for it: the checkpoint then made holds its completions.
        client.generation_name, client.stop = name, StopRequest(client._run_dir)
        how = {key: value for key, value in asked.items() if key != "prompts"}
        work = partial(client.generate, prompts, **how)
        self._flight = Flight(name, prompts, step, run_in_thread(work), client)

    def _steps_until(self, chunk: int, chunks: int) -> int:
        """Return how many optimizer steps of an epoch are taken before the generation at this place in it."""
        micro_steps, each = chunk * self._window, self._trainer.args.gradient_accumulation_steps
        return -(-micro_steps // each) if chunk == chunks else micro_steps // each

    def _prompts(self, epoch: int, chunk: int) -> list[Tokens]:
        """Return the prompts of a generation, which TRL's own sampler of the training chooses, as TRL renders them."""
        trainer, own = self._trainer, self._trainer.sampler
        if epoch not in self._orders:
            once = RepeatSampler(own.data_source, 1, own.batch_size, shuffle=own.shuffle, seed=own.seed)
            begin_epoch(once, epoch)
            self._orders = {epoch: list(once)}
        rows = self._orders[epoch][chunk * own.batch_size : (chunk + 1) * own.batch_size]
        ids: list[Tokens] = trainer._tokenize_prompts([trainer.train_dataset[row]["prompt"] for row in rows])[0]
        return ids

    # --- what waits for it -----------------------------------------------------------------------------------------

    def serve_weights(self) -> bool:
        """Send the weights of now as soon as the server samples nothing."""
        self._landing()
        return super().serve_weights()

    def _landing(self) -> None:
        """Wait on rank 0 for the generation sampled ahead; a run that stops leaves one that its lost server owes."""
        flight, stop = self._flight, self._trainer.preemption.stop
        if flight is None:
            return
        lost_at = time.monotonic() + _LOST_SECONDS
        while not (done := wait([flight.answer], POLL_SECONDS).done) and time.monotonic() < lost_at:
            if not stop.requested() or self._client._served_names() is not None:
                lost_at = time.monotonic() + _LOST_SECONDS
        if not done or (flight.answer.exception() is not None and stop.requested()):
            print("grpo: the generation sampled ahead was lost with the server, and is sampled again", flush=True)
            self._flight = None

    @property
    def pending_generation(self) -> Flight | None:
        """Return the generation sampled ahead, for a checkpoint of now, or None."""
        return self._flight

    def finish_pending_generation(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds of the generation sampled ahead, once it is there; None without any."""
        self._landing()
        return None if self._flight is None else self._flight.saved()

    def restore_pending_generation(self, flight: Flight | dict[str, Any] | None) -> None:
        """Use a generation of ``pending_generation`` or of a checkpoint next; cancel one that was sampled since."""
        now = self._flight
        if now is not None and now is not flight and now.client is not None:
            now.client._stops = True  # its thread ends its requests
            wait([now.answer], _LOST_SECONDS)
        self._flight = Flight.of_checkpoint(flight) if isinstance(flight, dict) else flight
