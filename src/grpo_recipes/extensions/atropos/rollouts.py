"""Groups that the environments of Atropos have sampled and scored, in the place of completions that TRL samples.

Rank 0 takes them from run-api and the other ranks get them from it. The log-probs of a group are those of the policy
that sampled it, however old: the ratio of the loss is taken against them. Advantages come from the scores of a group as
TRL makes them, or, where the environment sends them, per token from the group itself.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy
import requests
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset

from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.extensions.atropos.access import SETTINGS
from grpo_recipes.extensions.atropos.client import AtroposClient, AtroposError, Registration
from grpo_recipes.extensions.atropos.group import Group, Trajectory, trajectories
from grpo_recipes.extensions.atropos.recipe import atropos_environments, longest_trajectory
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.rollouts.source import Source
from grpo_recipes.rollouts.turns import Message
from grpo_recipes.runs.rundir import Run
from grpo_recipes.server.middleware import ACTIVITY_PATH
from grpo_recipes.weights.transport import QUICK_SECONDS, ServerError

_Found = TypeVar("_Found")
_LOGGED = ("run-api", "server", "environment-")  # roles of processes whose logs may say why no groups come
_COUNTED = ("rejected", "stale", "lost_batches", "stolen_batches")  # the client's counts that are metrics of a step
_LEAST_SPREAD = 1e-4  # below it advantages are taken to be equal, and not divided by it
# Ways to sample that change log-probs -> their values that do not.
_PLAIN: dict[str, tuple[float, ...]] = {name: (value,) for name, value in NEUTRAL_SAMPLING.items()}
_PLAIN |= {"top_k": (0, -1), "presence_penalty": (0,), "frequency_penalty": (0,)}


@dataclass(frozen=True)
class Taken:
    """What rank 0 took for a generation."""

    rows: list[Trajectory] = field(default_factory=list)  # of all ranks, in order
    # Whether the log-probs of each row must be the trainer's own: it was sampled with the weights of now, and plainly.
    fresh: list[bool] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


_LEAST_PLACEHOLDERS = 1024


class AtroposRollouts(Source):
    """Train on what the environments of Atropos send; TRL's ``rollout_func``."""

    @classmethod
    def training_prompts(cls, args: ScriptArguments, seed: int, least: int) -> Prompts:
        """Return rows that groups of run-api replace; an epoch has whole generations."""
        environments = atropos_environments(partial(getattr, args))
        names = ", ".join(environment.id for environment in environments) or str(args.atropos_api_url)
        count = least * math.ceil(_LEAST_PLACEHOLDERS / least)
        rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": names}]] * count})
        return Prompts(rows, Counts(read=count), names, f"groups of {names}")

    def __init__(self, script_args: ScriptArguments, args: GRPOConfig, run_dir: Path):
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of rollout_func in every run
        args.vllm_importance_sampling_correction = False  # the ratio of the loss has it in it
        self._script, self._args, self._run_dir = script_args, args, run_dir
        self.records: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []  # of the batch to take
        self._taken = Taken()
        self._own: list[Trajectory] = []  # the rank's rows of it
        self._fresh: list[bool] = []
        self._texts: list[list[Message]] = []
        self._client: AtroposClient | None = None  # rank 0's, once it is registered
        self._since = 0.0  # when the last groups were taken, by time.monotonic
        self._labels: set[str] = set()  # of all environments that groups came from

    def attach(self, trainer: Any) -> None:
        """Number the weights that the server gets by their optimizer step: it answers environments with the number.

        Environments of the launch's own run-api end with the training; others go on asking while benchmarks sample.
        """
        if not trainer.use_vllm:
            return
        generation = trainer.vllm_generation
        if trainer.accelerator.is_main_process:
            planned = {one.get("role") for one in Run(self._run_dir).plan.get("processes", [])}
            generation.vllm_client.expect_other_clients("run-api" not in planned)

        def with_policy_version(sync: Callable[[], None]) -> Callable[[], None]:
            def sync_weights() -> None:
                if trainer.accelerator.is_main_process:
                    generation.vllm_client.set_policy_version(trainer.state.global_step)
                sync()

            return sync_weights

        generation.wrap_sync(with_policy_version)

    def start_generation(self, rows: list[dict[str, Any]], name: str) -> None:
        """Take the rank's placeholders of the batch, whose prompts the groups' take the place of."""
        self._rows = rows

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Wait for the batch; return what TRL's ``rollout_func`` returns, and the scores beside it."""
        with trainer.preemption.cutting_short(), trainer.rows.phase("sample"):
            take = _from_main(partial(self._take, trainer), trainer.accelerator.is_main_process)
        trainer.preemption.stop_if_agreed()  # before an error: where the run stops, run-api may be gone too
        self._taken = taken = take()
        first = trainer.accelerator.process_index * len(self._rows)
        self._own = own = taken.rows[first : first + len(self._rows)]
        self._fresh = taken.fresh[first : first + len(self._rows)]
        self.brings_advantages = any(row.advantages is not None for row in taken.rows)
        self.temperatures = self._own_temperatures(trainer)
        for name, value in taken.metrics.items():
            trainer._metrics["train"][name].append(value)
        tokenizer = trainer.processing_class
        self._texts = [_messages(row, tokenizer) for row in own]
        for placeholder, row in zip(self._rows, own, strict=True):
            text = tokenizer.decode(row.prompt_ids, skip_special_tokens=True)
            placeholder["prompt"][:] = [{"role": "user", "content": text}]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in own],
            "completion_ids": [row.completion_ids.tolist() for row in own],
            "logprobs": [row.logprobs.tolist() for row in own],
            "env_mask": [row.mask.astype(int).tolist() for row in own],
            "episode_reward": [row.score for row in own],
            "episode_failed": [None] * len(own),
        }

    def completions(self) -> list[list[Message]]:
        """Return the rank's completions: the policy's turns, and what it read between them."""
        return self._texts

    def annotate(self, trainer: Any, output: dict[str, Any]) -> None:
        """Leave trajectories out whose advantage is set to zero; note temperatures, and what the guard may compare.

        The tokens of one that is left out still count in the mean over tokens, as they would with an advantage of 0;
        but no penalty for leaving the reference reaches them.
        """
        device = output["completion_ids"].device
        output["tool_mask"] = output["tool_mask"] * ~self._zeroed(device).unsqueeze(1)
        output["fresh"] = torch.tensor(self._fresh, device=device)
        if self.temperatures is not None:
            output["temperature"] = self.temperatures

    def token_advantages(self, trainer: Any, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return TRL's advantages, (B,), without those set to zero; (B, T) where a group of any rank brings its own."""
        if not (self.brings_advantages or any(row.zeroed for row in self._taken.rows)):
            return None
        zeroed_B = self._zeroed(output["advantages"].device)
        found = means_B = output["advantages"].masked_fill(zeroed_B, 0.0)
        if self.brings_advantages:
            first = trainer.accelerator.process_index * len(self._own)
            found, means_B = means_B.unsqueeze(1).repeat(1, output["completion_ids"].shape[1]), means_B.clone()
            for place, row in enumerate(self._own):
                if row.advantages is not None and not row.zeroed:
                    divisor = self._divisor((first + place) // trainer.num_generations, trainer.num_generations)
                    of_tokens = torch.from_numpy(numpy.where(row.mask, row.advantages / divisor, 0.0)).to(found)
                    found[place] = 0.0
                    found[place, : len(of_tokens)] = of_tokens
                    means_B[place] = of_tokens.sum() / row.mask.sum()
        return found, torch.tensor(gather_object(means_B.tolist()))

    def finish_generation(self, output: dict[str, Any]) -> None:
        """Make the policy that sampled the old policy of the loss."""
        output.pop("fresh", None)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]

    def _zeroed(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([row.zeroed for row in self._own], device=device)

    def _divisor(self, group: int, size: int) -> float:
        """Return what the advantages that this group brings are divided by: 1 unless the recipe normalises them."""
        rows = [row for row in self._taken.rows[group * size : (group + 1) * size] if not row.zeroed]
        values = [row.advantages[row.mask.astype(bool)] for row in rows if row.advantages is not None]
        spread = float(numpy.concatenate(values).std()) if values else 0.0
        return spread if self._script.atropos_normalize_advantages and spread > _LEAST_SPREAD else 1.0

    def _own_temperatures(self, trainer: Any) -> torch.Tensor | None:
        """Return the temperature of each of the rank's rows; None where those of all ranks are the recipe's."""

        def of(row: Trajectory) -> float:
            given = trainer.temperature if row.temperature is None else row.temperature
            return float(given) if given > 0 else 1.0  # of a greedy token vLLM gives the plain log-prob

        if all(of(row) == trainer.temperature for row in self._taken.rows):
            return None
        device = trainer.accelerator.device
        return torch.tensor([of(row) for row in self._own], dtype=torch.float64, device=device)

    # --- on rank 0 -------------------------------------------------------------------------------------------------

    def _take(self, trainer: Any) -> Taken:
        """Register this training with run-api, once, and take the groups of a generation."""
        client = self._client = self._client or self._registered(trainer)
        world, size, step = trainer.accelerator.num_processes, trainer.num_generations, trainer.state.global_step
        before, began = dict(client.counts), time.monotonic()
        groups = client.take(
            len(self._rows) * world // size,
            size=size,
            longest=self._longest(trainer),
            vocabulary=trainer.model.get_input_embeddings().num_embeddings,
            current=step,
            max_staleness=self._script.atropos_max_staleness,
        )
        now = time.monotonic()
        rows = [row for group in groups for row in trajectories(group)]
        fresh = [group.policy_version == step and _is_plain(group) for group in groups for _ in group.tokens]
        counted = {name: count - before.get(name, 0) for name, count in client.counts.items()}
        minutes, tokens = (now - self._since) / 60, sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
        self._since = now
        return Taken(
            rows,
            fresh,
            {
                "atropos/wait_seconds": now - began,
                "atropos/api_seconds": client.seconds["/batch"],
                "atropos/batches_per_minute": counted["batches"] / minutes,
                "atropos/tokens_per_second": tokens / minutes / 60,
                "atropos/queue": float(client.waiting(size)),
                **{f"atropos/{name}": float(counted[name]) for name in _COUNTED},
                **_staleness(groups, step),
                **self._by_environment(groups),
            },
        )

    def _registered(self, trainer: Any) -> AtroposClient:
        """Return a client of run-api, which lets environments begin from now on: the server has the weights."""
        script, args = self._script, self._args
        client = AtroposClient(
            str(script.atropos_api_url),  # the launcher names its own one
            timeout=script.atropos_timeout,
            attempts=script.atropos_batch_retry_attempts,
            delay=script.atropos_batch_retry_delay,
            max_wait=script.atropos_batch_max_wait_time,
            stopped=partial(self._looks_up, trainer),
            say=lambda text: print(f"grpo: {text}", flush=True),
            diagnose=partial(self._seen, trainer),
            likely=partial(self._refused_requests, trainer),
        )
        client.register(
            Registration(
                wandb_group=args.wandb_run_group or "",
                wandb_project=args.wandb_project or "",
                batch_size=len(self._rows) * trainer.accelerator.num_processes,
                max_token_len=self._longest(trainer) + 1,  # environments drop what has as many
                checkpoint_dir=args.output_dir,
                save_checkpoint_interval=int(trainer.state.save_steps),
                starting_step=trainer.state.global_step,
                num_steps=trainer.state.max_steps,
            )
        )
        self._since = time.monotonic()
        return client

    def _longest(self, trainer: Any) -> int:
        """Return the most tokens of a trajectory."""
        keys = {**vars(self._args), **vars(self._script)}
        return longest_trajectory(keys.__getitem__) or int(
            trainer.model.config.get_text_config().max_position_embeddings
        )

    def _seen(self, trainer: Any) -> list[str]:
        """Return what there is to say of the rest of the run where no groups come."""
        lines = []
        if trainer.use_vllm:
            client = trainer.vllm_generation.vllm_client
            answer = "does not answer"
            with suppress(requests.RequestException, ServerError):
                found = client.session.get(f"{client.base_url}{ACTIVITY_PATH}", timeout=QUICK_SECONDS)
                answer = f"answers {found.status_code} {found.text}"
            lines.append(f"vLLM server at {client.base_url}: {answer}")
        logs = [(one.get("role"), one.get("log")) for one in Run(self._run_dir).plan.get("processes", [])]
        return lines + [f"log of {role}: {log}" for role, log in logs if role and log and role.startswith(_LOGGED)]

    def _refused_requests(self, trainer: Any) -> str:
        """Return that the server refused requests of environments in other terminals, and what to do; else nothing."""
        settings = self._run_dir / SETTINGS
        if not (trainer.use_vllm and settings.exists()):
            return ""
        client = trainer.vllm_generation.vllm_client
        with suppress(requests.RequestException, ServerError, ValueError, AttributeError):
            answer = client.session.get(f"{client.base_url}{ACTIVITY_PATH}", timeout=QUICK_SECONDS)
            if refused := answer.json().get("refused"):
                what = f"the vLLM server refused {refused} requests with a missing or wrong token"
                return f"{what}. Fix: start environments with: python ENVIRONMENT.py serve --config {settings}"
        return ""

    def _looks_up(self, trainer: Any) -> bool:
        """Return whether the run stops; give a server that was started again meanwhile the weights.

        Nothing else of the trainer asks the server while environments sample, so nothing else would see its restart.
        """
        if trainer.use_vllm:
            trainer.vllm_generation.vllm_client.reconnect()
        return bool(trainer.preemption.stop.cuts())

    def _by_environment(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return each environment's mean score and its share of the groups, where there are several environments."""
        scores: dict[str, list[list[float]]] = defaultdict(list)
        for group in groups:
            scores[str(group.generation_params.get("environment", group.env_id))].append(group.scores)
        self._labels |= scores.keys()
        if len(self._labels) < 2:
            return {}
        rewards = {f"atropos/reward_{label}": fmean(chain(*found)) for label, found in sorted(scores.items())}
        return rewards | {f"atropos/share_{label}": len(scores[label]) / len(groups) for label in sorted(self._labels)}


def _from_main(work: Callable[[], _Found], main: bool) -> Callable[[], _Found]:
    """Do something in rank 0; return what gives the result, or raises the failure, on every rank."""
    outcome: list[Any] = [None, None]
    failures: list[Exception] = []
    if main:
        try:
            outcome[0] = work()
        except Exception as error:  # whatever it is: the other ranks wait, and must hear of it
            failures.append(error)
            outcome[1] = str(error) if isinstance(error, AtroposError) else f"{type(error).__name__}: {error}"
    broadcast_object_list(outcome, from_process=0)

    def result() -> _Found:
        if outcome[1] is not None:
            raise failures[0] if failures else AtroposError(outcome[1])
        found: _Found = outcome[0]
        return found

    return result


def _is_plain(group: Group) -> bool:
    """Return whether nothing but the temperature changed the distribution that the group was sampled from."""
    return all(group.generation_params.get(name) in (None, *values) for name, values in _PLAIN.items())


def _staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Return by how many optimizer steps the weights of the groups are behind, mean and most; nothing if unknown."""
    steps = [float(step - group.policy_version) for group in groups if group.policy_version is not None]
    return {"atropos/staleness_mean": fmean(steps), "atropos/staleness_max": max(steps)} if steps else {}


def _messages(row: Trajectory, tokenizer: Any) -> list[Message]:
    """Return a completion as messages: what is trained on is the policy's, what comes between the environment's."""
    parts = groupby(zip(row.mask.tolist(), row.completion_ids.tolist(), strict=True), key=itemgetter(0))
    return [
        {
            "role": "assistant" if trained else "user",
            "content": tokenizer.decode([token for _, token in tokens], skip_special_tokens=True),
        }
        for trained, tokens in parts
    ]
