"""Completions of benchmark prompts from wherever the run samples: its server, vLLM in the trainers, transformers.

Seeds come from the run's seed, the benchmark and the problem's place in it, so that a problem gets the same noise
whatever is sampled beside it. With transformers they are per batch: its sampler has one stream of noise.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.weights.client import BridgeClient

Tokens = list[int]


@dataclass(frozen=True)
class Prompt:
    """A rendered problem.

    Attributes:
        ids: tokens.
        seed: what its completions are drawn by.
    """

    ids: Tokens
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        samples: completions of a prompt.
        temperature: 0 is greedy.
        max_tokens: longest completion.
    """

    samples: int
    temperature: float
    max_tokens: int


def problem_seed(run_seed: int, benchmark: str, index: int) -> int:
    """A seed of 31 bits; vLLM adds the completion's number to it, so neighbours must be far apart."""
    text = f"{run_seed}/benchmark/{benchmark}/{index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def sample(trainer: Any, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
    """Draw completions. Called by every rank with the same arguments, except with a server: by rank 0 alone.

    Args:
        trainer: whose weights the server or vLLM already holds.
        prompts: rendered problems.
        how: number, temperature and length.

    Returns:
        (prompts, samples) completions as token ids.
    """
    if not trainer.use_vllm:
        return _spread(trainer, prompts, lambda share: _from_transformers(trainer, share, how), trainer.args.world_size)
    if trainer.vllm_generation.mode == "server":
        return _from_server(trainer.vllm_generation.vllm_client, prompts, how, sampling_keys(trainer))
    groups = trainer.args.world_size // trainer.vllm_generation.tensor_parallel_size
    engine = trainer.vllm_generation.llm
    return _spread(trainer, prompts, lambda share: _from_engine(engine, share, how, sampling_keys(trainer)), groups)


def sampling_keys(trainer: Any) -> dict[str, Any]:
    """The recipe's own truncation of the distribution."""
    return {
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
    }


def _spread(trainer: Any, prompts: Sequence[Prompt], draw: Any, groups: int) -> list[list[Tokens]]:
    """Let every group of ranks draw its share, and give all of them everything.

    Shares are of one size, filled up with the last prompt: sharded models want the same number of passes of each rank.
    """
    rank, world = trainer.args.process_index, trainer.args.world_size
    each = -(-len(prompts) // groups)
    filled = [*prompts, *[prompts[-1]] * (each * groups - len(prompts))]
    group, size = rank * groups // world, world // groups
    mine = draw(filled[group * each : (group + 1) * each])
    drawn = gather_object(mine if rank % size == 0 else [])
    return list(drawn[: len(prompts)])


def _from_server(
    client: BridgeClient, prompts: Sequence[Prompt], how: Sampling, keys: dict[str, Any]
) -> list[list[Tokens]]:
    answer = client.generate_seeded(
        [prompt.ids for prompt in prompts],
        [prompt.seed for prompt in prompts],
        n=how.samples,
        temperature=how.temperature,
        max_tokens=how.max_tokens,
        logprobs=None,
        **keys,
    )
    drawn = answer["completion_ids"]
    return [drawn[start : start + how.samples] for start in range(0, len(drawn), how.samples)]


def _from_engine(engine: Any, prompts: Sequence[Prompt], how: Sampling, keys: dict[str, Any]) -> list[list[Tokens]]:
    from vllm import SamplingParams

    parameters = [
        SamplingParams(n=how.samples, temperature=how.temperature, max_tokens=how.max_tokens, seed=prompt.seed, **keys)
        for prompt in prompts
    ]
    requests = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
    answers = engine.generate(requests, sampling_params=parameters, use_tqdm=False)
    return [[list(output.token_ids) for output in answer.outputs] for answer in answers]


def _from_transformers(trainer: Any, prompts: Sequence[Prompt], how: Sampling) -> list[list[Tokens]]:
    """TRL's own sampling with other settings, a few problems at a time."""
    kept = trainer.generation_config
    trainer.generation_config = _generation_config(kept, how)
    step = max(1, trainer.args.per_device_train_batch_size // how.samples)
    drawn: list[Tokens] = []
    try:
        for start in range(0, len(prompts), step):
            batch = prompts[start : start + step]
            torch.manual_seed(batch[0].seed)
            repeated = [prompt.ids for prompt in batch for _ in range(how.samples)]
            drawn += trainer._generate_single_turn(repeated, None, {}, how.samples)[0]
    finally:
        trainer.generation_config = kept
    return [drawn[start : start + how.samples] for start in range(0, len(drawn), how.samples)]


def _generation_config(training: Any, how: Sampling) -> Any:
    config = copy.deepcopy(training)
    config.max_new_tokens = how.max_tokens
    config.do_sample = how.temperature > 0
    config.temperature = how.temperature or None
    if not config.do_sample:
        config.top_p = config.top_k = config.min_p = None
    return config
