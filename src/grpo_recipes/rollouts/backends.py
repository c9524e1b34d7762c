"""Sample completions from the run's vLLM server, an external server, vLLM inside the trainers, or transformers.

The trainer only knows ``Rollouts``: prompts in, token ids and log-probs out. Each benchmark prompt has its own seed, so
the random numbers of a problem do not depend on its batch. With transformers, a batch shares one random generator.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list, gather_object

from grpo_recipes.recipe.registry import EXTERNAL
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.colocated import BRIDGE
from grpo_recipes.weights.sampling import SamplingSeeds

Tokens = list[int]
Sampled = tuple[list[Tokens], list[list[float]] | None]  # ids and log-probs of completions
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prompt:
    """A benchmark problem as token ids, with its seed."""

    ids: Tokens
    seed: int
    """Sampling seed of its completions."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a benchmark."""

    samples: int
    """Completions per prompt."""
    temperature: float
    """0 is greedy."""
    max_tokens: int


def make_rollouts(trainer: Trainer) -> Rollouts:
    """Return the sampler for the trainer's config: transformers, colocated vLLM, the run's or an external server."""
    if not trainer.use_vllm:
        return Rollouts(trainer)
    if trainer.vllm_generation.mode != "server":
        return ColocatedRollouts(trainer)
    return ExternalRollouts(trainer) if trainer.args.vllm_server_base_url else ServerRollouts(trainer)


def problem_seed(run_seed: int, benchmark: str, index: int) -> int:
    """Return the sampling seed, 31 bits, of a benchmark problem. It depends only on these three values.

    vLLM adds the completion's number to it, so seeds of neighbors must be far apart.
    """
    text = f"{run_seed}/benchmark/{benchmark}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def collect_sampling_keys(trainer: Trainer) -> dict[str, Any]:
    """Return the trainer's top_p, top_k, min_p and repetition_penalty, which change the sampling distribution."""
    keys = {"top_p": trainer.top_p, "top_k": trainer.top_k, "min_p": trainer.min_p or 0.0}
    return {**keys, "repetition_penalty": trainer.repetition_penalty}


class Rollouts:
    """A source of completions that has the trainer's weights. This class samples with transformers."""

    guarded: bool
    """Whether the weights in vLLM are verified after each transfer (``weight_guard``)."""
    pending_generation: Any = None
    """The generation that is being sampled ahead, for ``restore_pending_generation``. None if there is none."""
    seeds: SamplingSeeds
    """The values that sampling seeds derive from. Changing them has no effect on samplers without seeds."""
    only_main_rank_samples = False
    """Whether only rank 0 calls ``sample``. Otherwise all ranks call it with the same arguments."""
    samples_rounds = False
    """Whether ``start_round`` is supported."""
    bridge = ""
    """The weight sync method, for messages about wrong weights."""
    failed: Sequence[bool] = ()
    """For each completion of the last generation, over all ranks, whether it is missing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.guarded = trainer.use_vllm and bool(trainer.args.weight_guard)
        self.seeds = SamplingSeeds()
        self._sampling_groups = trainer.args.world_size  # groups of ranks that sample a part of a benchmark each

    @property
    def probes(self) -> bool:
        """Whether the check of the weights samples its own completion (``probe``) instead of using the training's."""
        return False

    @property
    def transfers(self) -> int:
        """A number that changes with each transfer of weights to the sampler. Always 0 if no weights are sent."""
        return 0

    def named_generation(self, name: str, numbers: list[int]) -> AbstractContextManager[None]:
        """Derive the sampling seeds in the block from this name and a number for each of this rank's prompts.

        Called by every rank with the same count of numbers.
        """
        return self.seeds.named_generation(name, gather_object(numbers))

    def begin_epoch(self, epoch: int, micro_steps: int) -> None:
        """Receive the number of a new epoch and, in a resumed run, how many of its micro-steps are done.

        Called by every rank. Only sampling ahead uses it.
        """

    def using_base_model(self) -> AbstractContextManager[None]:
        """Sample from the untrained model in the block.

        Only the run's server with a LoRA adapter supports it. Others raise an error.
        """
        raise NotImplementedError

    def generate(self, draw: Callable[[], Sampled]) -> Sampled:
        """Call ``draw`` and return its token ids and log-probs of completions for training.

        ``draw`` is TRL's own sampling, which sends the weights of a new step first. Subclasses may do more.
        """
        return draw()

    def start_round(self, name: str, prompts: list[Any]) -> None:
        """Let the server sample the next round of dynamic sampling now.

        Its sampling seeds derive from ``name``. ``prompts`` has a prompt for each group of all ranks. The trainers
        request the round later, or drop it with ``restore_pending_generation(None)``. Called by every rank.
        """
        raise NotImplementedError

    def mask_failed(self, output: dict[str, Any]) -> None:
        """Set ``tool_mask`` in the loss inputs ``output`` to 0 for completions that failed, so the loss ignores them.

        TRL requires a completion in every row. ``completion_mask`` stays as it is.
        """
        rows = len(output["completion_ids"])
        start = self._trainer.args.process_index * rows
        if any(failed := self.failed[start : start + rows]):
            present_B = ~torch.tensor(failed, device=output["completion_ids"].device)
            mask_BT = output.get("tool_mask", output["completion_mask"])
            output["tool_mask"] = mask_BT * present_B.unsqueeze(1)

    def probe(self, prompt: Tokens) -> tuple[Tokens, list[float]]:
        """Return a new completion of this prompt, from the unmodified distribution, and its log-probs.

        Called by every rank. Only supported if ``probes`` can be True.
        """
        raise NotImplementedError

    def serve_weights(self) -> bool:
        """Send the current weights to the sampler unless it has them, and return whether they were sent.

        Called by every rank.
        """
        return False

    def checksum_error(self) -> str | None:
        """Return the error message of the last sync's checksum on every rank; None if the checksum was correct."""
        return None

    def resending_weights(self) -> AbstractContextManager[None]:
        """Return a context manager that lets the next generation after its block send and verify the weights again.

        If no weights are sent, it does nothing.
        """
        return nullcontext()

    def finish_pending_generation(self) -> dict[str, Any] | None:
        """Wait for the generation sampled ahead, and return it as a dict for a checkpoint. None if there is none."""
        return None

    def restore_pending_generation(self, flight: Any) -> None:
        """Use a value of ``pending_generation``, or a checkpoint's dict, as the next generation.

        A generation that was started since is canceled.
        """

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Tokens]]:
        """Sample completions of benchmark prompts, (prompts, samples), with the weights that were sent last.

        Each rank, or each group of ranks with a common engine, samples an equal part of the prompts. Every rank returns
        the completions of all prompts.
        """
        # The last prompt fills up the parts: sharded models need the same number of passes on each rank.
        rank, world = self._trainer.args.process_index, self._trainer.args.world_size
        groups = self._sampling_groups
        part = -(-len(prompts) // groups)
        filled = [*prompts, *[prompts[-1]] * (part * groups - len(prompts))]
        group, group_size = rank * groups // world, world // groups
        drawn = self._sample_part(filled[group * part : (group + 1) * part], sampling)
        gathered = gather_object(drawn if rank % group_size == 0 else [])
        return list(gathered[: len(prompts)])

    def _sample_part(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Tokens]]:
        """Sample this rank's prompts with transformers, a few at a time. Return completions, (prompts, samples)."""
        trainer = self._trainer
        config = copy.deepcopy(trainer.generation_config)
        config.max_new_tokens, config.do_sample = sampling.max_tokens, sampling.temperature > 0
        config.temperature = sampling.temperature or None
        if not config.do_sample:
            config.top_p = config.top_k = config.min_p = None
        step = max(1, trainer.args.per_device_train_batch_size // sampling.samples)
        drawn: list[Tokens] = []
        with trainer.with_settings(generation_config=config):
            for start in range(0, len(prompts), step):
                batch = prompts[start : start + step]
                torch.manual_seed(batch[0].seed)
                repeated = [prompt.ids for prompt in batch for _ in range(sampling.samples)]
                drawn += trainer._generate_single_turn(repeated, None, {}, sampling.samples)[0]
        return _group_by_prompt(drawn, sampling.samples)


class VllmRollouts(Rollouts):
    """Completions from vLLM, which TRL updates with the weights of a new step before it samples."""

    @property
    def transfers(self) -> int:
        """The optimizer step of the weights in vLLM."""
        return self._trainer._last_loaded_step

    @property
    def _sleeps(self) -> bool:
        """Whether colocated vLLM frees its memory and its weights between generations (sleep mode)."""
        generation = self._trainer.vllm_generation
        return bool(generation.mode == "colocate" and generation.enable_sleep_mode)

    def serve_weights(self) -> bool:
        """Send the current weights if vLLM has another step's or was asleep, and wake it up.

        Return whether weights were sent.
        """
        step = self._trainer.state.global_step
        is_needed = self._sleeps or self._trainer._last_loaded_step != step
        if is_needed:
            self._trainer.vllm_generation.sync_weights()
            self._trainer.note_loaded_step(step)
        if self._sleeps:
            self._trainer.vllm_generation.llm.wake_up(tags=["kv_cache"])
        return is_needed

    @contextmanager
    def resending_weights(self) -> Iterator[None]:
        """After the block, reset the recorded step of vLLM's weights to its value before the block.

        The next generation then sends the weights again. Also let vLLM sleep after the block if sleep mode is on.
        """
        loaded_step = self._trainer._last_loaded_step
        try:
            yield
        finally:
            self._trainer.note_loaded_step(loaded_step)
            if self._sleeps:
                self._trainer.vllm_generation.llm.sleep(level=2)  # TRL's state between generations


class ColocatedRollouts(VllmRollouts):
    """Completions from vLLM inside the trainer processes (``weights.colocated``)."""

    bridge = BRIDGE

    def __init__(self, trainer: Trainer) -> None:
        """Use the seeds of the engine. An engine may span several ranks, which then sample the same prompts."""
        super().__init__(trainer)
        self.seeds = trainer.vllm_generation
        self._sampling_groups //= trainer.vllm_generation.tensor_parallel_size

    @property
    def transfers(self) -> int:
        """The number of transfers to the engines so far."""
        return int(self._trainer.vllm_generation.transfers)

    def checksum_error(self) -> str | None:
        """Return the first error of the engines' checksums of the last transfer on every rank, or None."""
        errors = gather_object([self._trainer.vllm_generation.checksum_error])
        return next(filter(None, errors), None)

    def _sample_part(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Tokens]]:
        """Sample this engine's prompts with vLLM, each with its own seed. Return token ids, (prompts, samples)."""
        from vllm import SamplingParams

        keys: dict[str, Any] = {"n": sampling.samples, "temperature": sampling.temperature}
        keys["max_tokens"] = sampling.max_tokens
        keys |= collect_sampling_keys(self._trainer)
        parameters = [SamplingParams(seed=prompt.seed, **keys) for prompt in prompts]
        requests = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        answers = self._trainer.vllm_generation.llm.generate(requests, sampling_params=parameters, use_tqdm=False)
        return [[list(output.token_ids) for output in answer.outputs] for answer in answers]


class ServerRollouts(VllmRollouts):
    """Completions from the run's vLLM server, through rank 0's client (``weights.client``)."""

    only_main_rank_samples = True

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.bridge = EXTERNAL if trainer.args.vllm_server_base_url else trainer.args.weight_sync
        self._client: Any = getattr(trainer.vllm_generation, "vllm_client", None)  # None on ranks other than 0
        if self._client is not None:
            self.seeds = self._client

    def using_base_model(self) -> AbstractContextManager[None]:
        """Sample from the model without its LoRA adapter in the block."""
        return nullcontext() if self._client is None else self._client.using_base_model()

    def checksum_error(self) -> str | None:
        """Return rank 0's checksum error of the last transfer on every rank, or None."""
        main = self._trainer.accelerator.is_main_process
        errors = [self._trainer.vllm_generation.vllm_client.checksum_error if main else None]
        error: str | None = broadcast_object_list(errors, from_process=0)[0]
        return error

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Tokens]]:
        """Sample benchmark prompts on the server, each with its own seed. Called only on rank 0."""
        ids, seeds = [prompt.ids for prompt in prompts], [prompt.seed for prompt in prompts]
        keys = {"n": sampling.samples, "temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
        client = self._trainer.vllm_generation.vllm_client
        answer = client.generate_seeded(ids, seeds, **keys, logprobs=None, **collect_sampling_keys(self._trainer))
        return _group_by_prompt(answer["completion_ids"], sampling.samples)

    def _broadcast_from_main(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` on rank 0, which has the client, and return its result on every rank."""
        result: Result = broadcast_object_list([None if self._client is None else work()], from_process=0)[0]
        return result


class ExternalRollouts(ServerRollouts):
    """Completions from a server that the run did not start, through rank 0's client (``rollouts.external``).

    The server computes no checksum, so its client reports no checksum error.
    """

    @property
    def probes(self) -> bool:
        """Always True: an external server may score the training's completions in another way."""
        return True

    def generate(self, draw: Callable[[], Sampled]) -> Sampled:
        """Sample with ``draw``, return its result, and set ``failed`` on every rank for missing completions."""
        sampled = draw()
        self.failed = self._broadcast_from_main(lambda: self._client.failed)
        return sampled

    def probe(self, prompt: Tokens) -> tuple[Tokens, list[float]]:
        """Return a new completion of this prompt and its log-probs, on every rank."""
        completion: tuple[Tokens, list[float]] = self._broadcast_from_main(lambda: self._client.probe(prompt))
        return completion


def _group_by_prompt(completions: list[Tokens], samples: int) -> list[list[Tokens]]:
    """Split a flat list of completions into a list per prompt, (prompts, samples)."""
    return [completions[start : start + samples] for start in range(0, len(completions), samples)]
