"""Where completions come from: the run's vLLM server, vLLM inside the trainers, or transformers.

The trainer knows ``Rollouts`` alone: prompts in, token ids and log-probs out. Each benchmark prompt has a seed, so that
a problem gets the same noise whatever is sampled beside it; transformers has one stream of noise per batch.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from grpo_recipes.attributes import replaced
from grpo_recipes.recipe.registry import EXTERNAL
from grpo_recipes.weights.colocated import BRIDGE

Tokens = list[int]


@dataclass(frozen=True)
class Prompt:
    """A rendered problem."""

    ids: Tokens
    seed: int  # of its completions


@dataclass(frozen=True)
class Sampling:
    """How completions of a benchmark are drawn."""

    samples: int  # completions of a prompt
    temperature: float  # 0 is greedy
    max_tokens: int


def make_rollouts(trainer: Any) -> Rollouts:
    """Return where this trainer's completions come from."""
    if not trainer.use_vllm:
        return Rollouts(trainer)
    if trainer.vllm_generation.mode != "server":
        return ColocatedRollouts(trainer)
    return ExternalRollouts(trainer) if trainer.args.vllm_server_base_url else ServerRollouts(trainer)


def problem_seed(run_seed: int, benchmark: str, index: int) -> int:
    """Return a seed of 31 bits; vLLM adds the completion's number to it, so neighbours must be far apart."""
    text = f"{run_seed}/benchmark/{benchmark}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def sampling_keys(trainer: Any) -> dict[str, Any]:
    """Return the recipe's own truncation of the distribution."""
    keys = {"top_p": trainer.top_p, "top_k": trainer.top_k, "min_p": trainer.min_p or 0.0}
    return {**keys, "repetition_penalty": trainer.repetition_penalty}


class Rollouts:
    """Where completions come from, with the trainer's weights in it: here transformers, on the trained model itself."""

    guarded = False  # whether the weights travel to another process, and the guard looks at them there
    probes = False  # whether the guard looks at completions of ``probe``, and not at those of the training
    only_main_rank_samples = False  # whether rank 0 alone calls ``sample``; else all call it, with the same arguments
    bridge = ""  # what carries the weights, in messages of the guard
    failed: Sequence[bool] = ()  # of each completion of the last generation, over all ranks, whether it was not given

    def __init__(self, trainer: Any):
        self._trainer = trainer

    @property
    def transfers(self) -> int:
        """Return a number that each transfer of weights changes."""
        return 0

    def name_generation(self, name: str) -> None:
        """Set the name that sampling seeds of the next generation are derived from, where there are any."""

    def named_generation(self, name: str, rows: list[int]) -> AbstractContextManager[Any]:
        """Derive the sampling seeds of the generation inside from this name and these numbers of the rank's prompts.

        Called by every rank, with as many rows.
        """
        return nullcontext()

    def using_seed(self, seed: int) -> AbstractContextManager[None]:
        """Derive sampling seeds inside, where there are any, from this one in the place of the run's."""
        return nullcontext()

    def begin_epoch(self, epoch: int, micro_steps: int) -> None:
        """Note the epoch that begins, of which so many micro-steps were taken before a resume. Called by every rank."""

    def using_base_model(self) -> AbstractContextManager[Any]:
        """Let generations inside come from the untrained model, which only a server of adapters has."""
        raise NotImplementedError

    def generate(self, draw: Callable[[], tuple[list[Tokens], Any]]) -> tuple[list[Tokens], Any]:
        """Return ids, and log-probs or None, of completions for training by ``draw``: TRL's sampler, weights first."""
        return draw()

    def mask_failed(self, output: dict[str, Any]) -> None:
        """Let the loss read no token of a completion that was not given: TRL wants one for every row."""
        rows = len(output["completion_ids"])
        start = self._trainer.args.process_index * rows
        if any(own := self.failed[start : start + rows]):
            given = ~torch.tensor(own, device=output["completion_ids"].device)
            mask = output.get("tool_mask", output["completion_mask"])
            output["tool_mask"] = mask * given.unsqueeze(1)

    def probe(self, prompt: Tokens) -> tuple[Tokens, list[float]]:
        """Return a completion, drawn from the plain distribution, with its log-probs. Called by every rank."""
        raise NotImplementedError

    def serve_weights(self) -> bool:
        """Send the weights of now, unless they are there; return whether it was needed. Called by every rank."""
        return False

    def checksum_error(self) -> str | None:
        """Return on every rank how the last sync failed the checksum, or None."""
        return None

    def resending_weights(self) -> AbstractContextManager[None]:
        """Let the first generation after this sync and be guarded as if nothing was sampled inside."""
        return nullcontext()

    @property
    def pending_generation(self) -> Any:
        """Return the generation that is sampled ahead, for ``restore_pending_generation``, or None."""
        return None

    def finish_pending_generation(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds of a generation sampled ahead, once it is there; None without any."""
        return None

    def restore_pending_generation(self, flight: Any) -> None:
        """Use a generation of ``pending_generation`` or of a checkpoint next; cancel one that was sampled since."""

    def sample(self, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
        """Draw completions of benchmark prompts, (prompts, samples), with the weights that were sent last."""
        return self._share(prompts, how, self._trainer.args.world_size)

    def _share(self, prompts: Sequence[Prompt], how: Sampling, groups: int) -> list[list[Tokens]]:
        """Let every group of ranks draw its share, and give all of them everything."""
        # Shares are of one size, filled up with the last prompt: sharded models want as many passes of each rank.
        rank, world = self._trainer.args.process_index, self._trainer.args.world_size
        each = -(-len(prompts) // groups)
        filled = [*prompts, *[prompts[-1]] * (each * groups - len(prompts))]
        group, size = rank * groups // world, world // groups
        mine = self._draw(filled[group * each : (group + 1) * each], how)
        drawn = gather_object(mine if rank % size == 0 else [])
        return list(drawn[: len(prompts)])

    def _draw(self, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
        """Draw a few problems at a time."""
        trainer = self._trainer
        config = copy.deepcopy(trainer.generation_config)
        config.max_new_tokens, config.do_sample = how.max_tokens, how.temperature > 0
        config.temperature = how.temperature or None
        if not config.do_sample:
            config.top_p = config.top_k = config.min_p = None
        step = max(1, trainer.args.per_device_train_batch_size // how.samples)
        drawn: list[Tokens] = []
        with replaced(trainer, generation_config=config):
            for start in range(0, len(prompts), step):
                batch = prompts[start : start + step]
                torch.manual_seed(batch[0].seed)
                repeated = [prompt.ids for prompt in batch for _ in range(how.samples)]
                drawn += trainer._generate_single_turn(repeated, None, {}, how.samples)[0]
        return _grouped(drawn, how.samples)


class VllmRollouts(Rollouts):
    """vLLM, to which TRL sends the weights of a new step before it samples."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.guarded = bool(trainer.args.weight_guard)

    @property
    def transfers(self) -> int:
        return int(self._trainer._last_loaded_step)

    @property
    def _sleeps(self) -> bool:
        generation = self._trainer.vllm_generation
        return bool(generation.mode == "colocate" and generation.enable_sleep_mode)

    def serve_weights(self) -> bool:
        sends = self._sleeps or self._trainer._last_loaded_step != self._trainer.state.global_step
        if sends:
            self._trainer.vllm_generation.sync_weights()
            self._trainer._last_loaded_step = self._trainer.state.global_step
        if self._sleeps:
            self._trainer.vllm_generation.llm.wake_up(tags=["kv_cache"])
        return sends

    @contextmanager
    def resending_weights(self) -> Iterator[None]:
        with ExitStack() as afterwards, replaced(self._trainer, _last_loaded_step=self._trainer._last_loaded_step):
            if self._sleeps:
                afterwards.callback(self._trainer.vllm_generation.llm.sleep, level=2)  # as TRL leaves it
            yield


class ColocatedRollouts(VllmRollouts):
    """vLLM inside the trainer processes, of ``weights.colocated``."""

    bridge = BRIDGE

    @property
    def transfers(self) -> int:
        return int(self._trainer.vllm_generation.transfers)

    def name_generation(self, name: str) -> None:
        self._trainer.vllm_generation.generation_name = name

    def named_generation(self, name: str, rows: list[int]) -> AbstractContextManager[Any]:
        return replaced(self._trainer.vllm_generation, generation_name=name, seed_numbers=gather_object(rows))

    def using_seed(self, seed: int) -> AbstractContextManager[None]:
        inside: AbstractContextManager[None] = self._trainer.vllm_generation.using_seed(seed)
        return inside

    def checksum_error(self) -> str | None:
        errors = gather_object([self._trainer.vllm_generation.checksum_error])
        return next(filter(None, errors), None)

    def sample(self, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
        """Draw with the engines of the ranks, each its share."""
        groups = self._trainer.args.world_size // self._trainer.vllm_generation.tensor_parallel_size
        return self._share(prompts, how, groups)

    def _draw(self, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
        from vllm import SamplingParams

        common = {"n": how.samples, "temperature": how.temperature, "max_tokens": how.max_tokens}
        keys = common | sampling_keys(self._trainer)
        parameters = [SamplingParams(seed=prompt.seed, **keys) for prompt in prompts]
        requests = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        answers = self._trainer.vllm_generation.llm.generate(requests, sampling_params=parameters, use_tqdm=False)
        return [[list(output.token_ids) for output in answer.outputs] for answer in answers]


class ServerRollouts(VllmRollouts):
    """The run's vLLM server, through the client of ``weights.client`` that rank 0 holds."""

    only_main_rank_samples = True

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.bridge = trainer.args.weight_sync
        self._client = getattr(trainer.vllm_generation, "vllm_client", None)  # rank 0's
        if self._client is not None:
            self._client.vocabulary = trainer.model.get_input_embeddings().num_embeddings

    def name_generation(self, name: str) -> None:
        if self._client is not None:
            self._client.generation_name = name

    def named_generation(self, name: str, rows: list[int]) -> AbstractContextManager[Any]:
        every = gather_object(rows)
        return (
            nullcontext() if self._client is None else replaced(self._client, generation_name=name, seed_numbers=every)
        )

    def using_seed(self, seed: int) -> AbstractContextManager[None]:
        return nullcontext() if self._client is None else self._client.using_seed(seed)

    def using_base_model(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._client is None else replaced(self._client, samples_base=True)

    def checksum_error(self) -> str | None:
        main = self._trainer.accelerator.is_main_process
        errors = [self._trainer.vllm_generation.vllm_client.checksum_error if main else None]
        return broadcast_object_list(errors, from_process=0)[0]

    def sample(self, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
        """Ask the server, a request and a seed per prompt."""
        ids, seeds = [prompt.ids for prompt in prompts], [prompt.seed for prompt in prompts]
        keys = {"n": how.samples, "temperature": how.temperature, "max_tokens": how.max_tokens, "logprobs": None}
        client = self._trainer.vllm_generation.vllm_client
        answer = client.generate_seeded(ids, seeds, **keys, **sampling_keys(self._trainer))
        return _grouped(answer["completion_ids"], how.samples)

    def _from_main(self, work: Callable[[], Any]) -> Any:
        return broadcast_object_list([None if self._client is None else work()], from_process=0)[0]


class ExternalRollouts(ServerRollouts):
    """A server that somebody started, through the client of ``rollouts.external`` that rank 0 holds."""

    probes = True

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.bridge = EXTERNAL

    def generate(self, draw: Callable[[], tuple[list[Tokens], Any]]) -> tuple[list[Tokens], Any]:
        """Generate, and tell every rank which completions the server did not give."""
        drawn = draw()
        self.failed = self._from_main(lambda: self._client.failed)
        return drawn

    def checksum_error(self) -> str | None:
        return None

    def probe(self, prompt: Tokens) -> tuple[Tokens, list[float]]:
        found: tuple[Tokens, list[float]] = self._from_main(lambda: self._client.probe(prompt))
        return found


def _grouped(drawn: list[Tokens], samples: int) -> list[list[Tokens]]:
    return [drawn[start : start + samples] for start in range(0, len(drawn), samples)]
