"""Sample ahead: the server samples while the trainers learn from completions, or score them.

``overlap_generation``: the server samples the next generation while the trainers learn. The weights are one generation
old, and TRL's importance-sampling ratio corrects for it. The server gets new weights only while it is idle.

``dynamic_sampling``: the server samples the next round of a generation while rewards score the current round. Both
rounds use the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import IterableDataset
from trl.trainer.utils import RepeatSampler

from grpo_recipes.attributes import replace_attributes
from grpo_recipes.rollouts.backends import Rollouts, ServerRollouts, Tokens, make_rollouts
from grpo_recipes.runs.stop_request import POLL_SECONDS
from grpo_recipes.trainers.checkpoints import begin_epoch
from grpo_recipes.trainers.protocol import InnerTrainer
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.sampling import sampling_seed
from grpo_recipes.weights.transport import run_in_thread

_PROBE_TOKENS = 32  # length of the completion that the check of the server's weights compares
_LOST_SECONDS = 10.0  # a stopping run drops the generation if the server does not answer for so long


@dataclass(frozen=True)
class PendingGeneration:
    """A generation that the server samples before the trainers request it."""

    name: str
    prompts: list[Tokens]
    step: int  # the optimizer step of the weights that sample it
    answer: Future[dict[str, Any]]
    client: BridgeClient | None = None  # the client of the request; None after a resume, when the answer is known


def make_inner_rollouts(trainer: InnerTrainer) -> Rollouts:
    """Return the sampler for the trainer's config as ``make_rollouts`` does, or one that samples ahead.

    ``overlap_generation`` samples ahead, and so does ``dynamic_sampling`` with the run's own vLLM server.
    """
    if trainer.args.overlap_generation:
        return OverlappedRollouts(trainer)
    rollouts = make_rollouts(trainer)
    return RoundsAhead(trainer) if trainer.args.dynamic_sampling and type(rollouts) is ServerRollouts else rollouts


class AheadRollouts(ServerRollouts):
    """The run's vLLM server, which can sample one generation before the trainers request it."""

    pending_generation: PendingGeneration | None  # None on ranks other than 0
    _logs_age = False  # whether the age of the weights of each generation is a metric

    def __init__(self, trainer: InnerTrainer):
        super().__init__(trainer)
        self._inner = trainer
        self.pending_generation = None
        self._request: dict[str, Any] = {}  # prompts and options of the last request

    def _answer_request(
        self, sample: Callable[..., dict[str, Any]], prompts: list[Tokens], **options: Any
    ) -> dict[str, Any]:
        """Return the pending generation if it has the client's generation name and these prompts; otherwise sample now.

        TRL calls it through the client. A pending generation that does not match is dropped.
        """
        self._request = {"prompts": prompts, **options}
        pending, self.pending_generation = self.pending_generation, None
        if pending is not None and (pending.name, pending.prompts) != (self._client.generation_name, prompts):
            pending = None
        if self._logs_age:
            age = 0 if pending is None else self._trainer.state.global_step - pending.step  # in optimizer steps
            self._trainer.add_metric("rollouts/steps_off_policy", float(age))
        return sample(prompts, **options) if pending is None else dict(pending.answer.result())

    def _start(self, name: str, prompts: list[Tokens], client: BridgeClient) -> None:
        """Start sampling these prompts in a thread, with the options of the last request, as the pending generation."""
        trace, began = self._inner.rows.trace, time.perf_counter()
        options = {key: value for key, value in self._request.items() if key != "prompts"}
        answer = run_in_thread(partial(client.generate, prompts, **options))
        answer.add_done_callback(lambda _: trace.add("sample", began, time.perf_counter(), "sampling ahead"))
        self.pending_generation = PendingGeneration(name, prompts, self._trainer.state.global_step, answer, client)

    def restore_pending_generation(self, pending: PendingGeneration | dict[str, Any] | None) -> None:
        """Use this generation next, and cancel one that was started since.

        It is a value of ``pending_generation``, a dict from a checkpoint, or None for no generation.
        """
        current = self.pending_generation
        if current is not None and current is not pending and current.client is not None:
            current.client.abort_generation()
            wait([current.answer], _LOST_SECONDS)
        if isinstance(pending, dict):  # a result of ``finish_pending_generation``
            answer: Future[dict[str, Any]] = Future()
            answer.set_result(pending["answer"])
            pending = PendingGeneration(pending["name"], pending["prompts"], pending["step"], answer)
        self.pending_generation = pending


class RoundsAhead(AheadRollouts):
    """The run's vLLM server, which samples the next round of dynamic sampling while the trainers score a round."""

    samples_rounds = True

    def generate(self, draw: Callable[[], tuple[list[Tokens], Any]]) -> tuple[list[Tokens], Any]:
        """Return the result of ``draw``, TRL's sampler, whose request a round that was sampled ahead may answer."""
        if self._client is None:
            return draw()
        with replace_attributes(self._client, generate=partial(self._answer_request, self._client.generate)):
            return draw()

    def start_round(self, name: str, prompts: list[Any]) -> None:
        """Let the server start to sample the round with this name, and don't wait for it. A stop request also ends it.

        Do nothing on ranks other than 0.
        """
        if self._client is not None:
            client = self._client.copy_for_generation(name, self._client.stop)
            self._request["n"] = self._inner.num_generations  # the last request may continue a tool call
            self._start(name, self._inner._tokenize_prompts(prompts)[0], client)


class OverlappedRollouts(AheadRollouts):
    """The run's vLLM server, which samples the next generation as soon as it has the weights of this generation.

    Other requests to the server wait until it has finished. Raise ValueError if the training set is a stream.
    """

    _logs_age = True

    def __init__(self, trainer: InnerTrainer):
        super().__init__(trainer)
        if isinstance(trainer.train_dataset, IterableDataset):
            problem = "overlap_generation: the prompts of the next generation of a stream are unknown"
            raise ValueError(f"{problem}. Fix: pass a Dataset, or remove overlap_generation")
        self._epoch = self._index = 0  # the epoch of the next generation, and its index in the epoch
        self._order: tuple[int, list[int]] | None = None  # an epoch, and the rows of the training set in its order
        self._probe_result: tuple[Tokens, list[float]] | None = None  # the guard's completion after the last sync

    # --- a generation ----------------------------------------------------------------------------------------------

    @property
    def probes(self) -> bool:
        """Whether the model is training. The server check then samples a completion: others have older weights."""
        return bool(self._trainer.model.training)

    def begin_epoch(self, epoch: int, micro_steps: int) -> None:
        """Store the number of a new epoch, and the index of its next generation.

        ``micro_steps`` micro-steps of the epoch were taken before a resume.
        """
        self._epoch, self._index = epoch, -(-micro_steps // self._sampler.repeat_count)

    def generate(self, draw: Callable[[], tuple[list[Tokens], Any]]) -> tuple[list[Tokens], Any]:
        """Return the completions of this generation, and let the server start to sample the next generation.

        ``draw`` is TRL's sampler, with new weights sent first. Its request is answered by the generation that was
        sampled ahead, if the prompts are the same, or else by the server, which samples now. ``draw`` is called only
        after the pending generation is complete, so the server is idle while it receives weights. In an evaluation,
        ``draw`` is called and nothing is sampled ahead.
        """
        self._wait_for_pending()
        if not self._trainer.model.training:
            return draw()
        if self._client is None:
            completions = draw()
        else:
            sample, transfers = self._client.generate, self.transfers
            self._request = {}
            with replace_attributes(self._client, generate=partial(self._answer_request, sample)):
                completions = draw()
            if self._request and not self._client.is_stopping():
                if self.guarded and self.transfers != transfers:
                    self._sample_probe(self._request["prompts"][0], self._request["max_tokens"])
                self._start_next()
        self._index += 1
        return completions

    def _sample_probe(self, prompt: Tokens, max_tokens: int) -> None:
        """Sample a completion at temperature 1 with the weights just sent, and store it for ``probe``."""
        seed = sampling_seed(self._trainer.args.seed, f"probe/{self._client.generation_name}", 0)
        tokens = min(_PROBE_TOKENS, max_tokens)
        answer = self._client.generate_seeded([prompt], [seed], max_tokens=tokens, logprobs=0)
        self._probe_result = answer["completion_ids"][0], [scores[0] for scores in answer["logprobs"][0]]

    def probe(self, prompt: Tokens) -> tuple[Tokens, list[float]]:
        """Return ids and log-probs of the completion that rank 0 sampled after the last sync. ``prompt`` is unused."""
        result = self._broadcast_from_main(lambda: self._probe_result)
        assert result is not None  # _sample_probe runs after each sync
        return result

    # --- the next generation ---------------------------------------------------------------------------------------

    @property
    def _sampler(self) -> RepeatSampler:
        """TRL's sampler, which decides the order of the prompts."""
        sampler = self._inner.sampler
        assert sampler is not None  # only a stream has none, and __init__ rejects streams
        return sampler

    def _start_next(self) -> None:
        """Start sampling the next generation as the pending generation, unless the training ends before it."""
        trainer, sampler = self._inner, self._sampler
        step, generations = trainer.state.global_step, sampler.num_samples // sampler.batch_size
        steps = self._count_steps(self._index + 1, generations) - self._count_steps(self._index, generations)
        if step + steps >= trainer.state.max_steps:
            return
        is_last = self._index + 1 >= generations
        epoch, index = (self._epoch + 1, 0) if is_last else (self._epoch, self._index + 1)
        name = f"{step + steps}/{trainer._step + sampler.repeat_count}"
        self._start(name, self._tokenize_generation(epoch, index), self._client.copy_for_generation(name))

    def _count_steps(self, index: int, generations: int) -> int:
        """Return how many optimizer steps of an epoch are taken before the generation with this index.

        An epoch has ``generations`` generations. With this index, the incomplete last step of the epoch counts too.
        """
        micro_steps = index * self._sampler.repeat_count  # a generation is used for ``repeat_count`` micro-steps
        accumulation = self._trainer.args.gradient_accumulation_steps
        return -(-micro_steps // accumulation) if index == generations else micro_steps // accumulation

    def _tokenize_generation(self, epoch: int, index: int) -> list[Tokens]:
        """Return the tokenized prompts of an epoch's generation, in the order of TRL's sampler."""
        trainer, sampler = self._inner, self._sampler
        if self._order is None or self._order[0] != epoch:
            once = RepeatSampler(sampler.data_source, 1, sampler.batch_size, shuffle=sampler.shuffle, seed=sampler.seed)
            begin_epoch(once, epoch)
            self._order = epoch, list(once)
        rows = self._order[1][index * sampler.batch_size : (index + 1) * sampler.batch_size]
        return trainer._tokenize_prompts([trainer.train_dataset[row]["prompt"] for row in rows])[0]

    # --- waiting for the pending generation ------------------------------------------------------------------------

    def serve_weights(self) -> bool:
        """Wait until the server is idle, and send it the weights if it lacks them. Return whether they were sent."""
        self._wait_for_pending()
        return super().serve_weights()

    def _wait_for_pending(self) -> None:
        """Wait on rank 0 until the pending generation is complete; without one, return at once.

        The wait has no limit while the server answers or no stop is requested. After a stop request, drop the
        generation if it failed or the server has not answered for 10 seconds.
        """
        pending, stop = self.pending_generation, self._trainer.preemption.stop
        if pending is None:
            return
        lost_at = time.monotonic() + _LOST_SECONDS
        while not (is_done := bool(wait([pending.answer], POLL_SECONDS).done)) and time.monotonic() < lost_at:
            if not stop.requested() or self._client.served_names() is not None:
                lost_at = time.monotonic() + _LOST_SECONDS
        if not is_done or (pending.answer.exception() is not None and stop.requested()):
            print("grpo: the generation sampled ahead was lost with the server; sampling it again", flush=True)
            self.pending_generation = None

    def finish_pending_generation(self) -> dict[str, Any] | None:
        """Wait for the generation sampled ahead, and return it as a dict for a checkpoint. None if there is none.

        If sampling failed, raise its exception.
        """
        self._wait_for_pending()
        if (pending := self.pending_generation) is None:
            return None
        answer = pending.answer.result()
        return {"name": pending.name, "prompts": pending.prompts, "step": pending.step, "answer": answer}
