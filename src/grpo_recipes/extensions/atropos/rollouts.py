"""Train on groups that Atropos environments have sampled and scored, instead of completions that TRL samples.

Rank 0 takes the groups from run-api and broadcasts them. The log-probs of a group come from the policy that sampled it,
however old, and the ratio of the loss uses them. TRL computes advantages from the scores of a group, unless the
environment sends an advantage for each token.
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
from typing import Any, TypeVar, cast

import numpy
import requests
import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset

from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.extensions.atropos.access import SETTINGS
from grpo_recipes.extensions.atropos.client import AtroposClient, AtroposError, Registration
from grpo_recipes.extensions.atropos.group import Group, Trajectory, to_trajectories
from grpo_recipes.extensions.atropos.recipe import find_trajectory_limit, list_environments
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.rollouts.source import SamplingTrainer, Source
from grpo_recipes.rollouts.turns import Message
from grpo_recipes.runs.rundir import Run
from grpo_recipes.server.middleware import ACTIVITY_PATH
from grpo_recipes.weights.transport import QUICK_SECONDS, ServerError

_Result = TypeVar("_Result")
_SHOWN_LOGS = ("run-api", "server", "environment-")  # roles with logs that may explain why no groups come
_COUNT_METRICS = (
    "rejected",
    "stale",
    "lost_batches",
    "stolen_batches",
)  # the client's counts that are metrics of a step
_MIN_DEVIATION = 1e-4  # advantages with a smaller standard deviation count as equal and are not divided by it
# Sampling parameter -> its values that do not change log-probs.
_NEUTRAL_VALUES: dict[str, tuple[float, ...]] = {name: (value,) for name, value in NEUTRAL_SAMPLING.items()}
_NEUTRAL_VALUES |= {"top_k": (0, -1), "presence_penalty": (0,), "frequency_penalty": (0,)}


@dataclass(frozen=True)
class Generation:
    """The groups that rank 0 took for a generation."""

    rows: list[Trajectory] = field(default_factory=list)  # rows of all ranks, in order
    # Whether each row was sampled with the current weights and neutral parameters: then its log-probs must equal the
    # trainer's.
    fresh: list[bool] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


_MIN_PLACEHOLDERS = 1024


class AtroposRollouts(Source):
    """The source of completions in runs with Atropos; as a function, TRL's ``rollout_func``."""

    @classmethod
    def training_prompts(cls, args: ScriptArguments, seed: int, least: int) -> Prompts:
        """Return placeholder prompts for TRL's dataloader, at least 1024 and a multiple of ``least``.

        The prompts of Atropos' groups replace them later.
        """
        environments = list_environments(partial(getattr, args))
        names = ", ".join(environment.id for environment in environments) or str(args.atropos_api_url)
        count = least * math.ceil(_MIN_PLACEHOLDERS / least)
        rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": names}]] * count})
        return Prompts(rows, Counts(read=count), names, f"groups of {names}")

    def __init__(self, script_args: ScriptArguments, args: GRPOConfig, run_dir: Path):
        """Store the configs, turn importance-sampling correction off in ``args``, and set TRL_EXPERIMENTAL_SILENCE."""
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns about rollout_func in every run
        args.vllm_importance_sampling_correction = False  # the ratio of the loss includes it
        self._script, self._args, self._run_dir = script_args, args, run_dir
        self.records: list[dict[str, Any]] = []
        self._placeholders: list[dict[str, Any]] = []  # the rank's rows of the next batch, as TRL draws them
        self._generation = Generation()
        self._rank_rows: list[Trajectory] = []  # the rank's rows of the generation
        self._rank_fresh: list[bool] = []  # Generation.fresh of these rows
        self._completions: list[list[Message]] = []
        self._client: AtroposClient | None = None  # only on rank 0, after the registration
        self._last_taken = 0.0  # time.monotonic() of the last groups
        self._labels: set[str] = set()  # all environments that have sent groups

    def attach(self, trainer: SamplingTrainer) -> None:
        """Wrap the trainer's weight sync: it first stores the optimizer step in the server's client.

        The client sends the step at the end of the sync, and the server adds it to its answers. Also tell the client
        whether environments outside of the launch may send requests at any time. If so, a generation does not pause
        the engine while its requests arrive. Do nothing without vLLM.
        """
        if not trainer.use_vllm:
            return
        generation = trainer.vllm_generation
        if trainer.accelerator.is_main_process:
            roles = {process.get("role") for process in Run(self._run_dir).plan.get("processes", [])}
            generation.vllm_client.expect_other_clients("run-api" not in roles)

        def sync_weights(sync: Callable[[], None]) -> None:
            """Store the optimizer step of the weights in the client, then sync them."""
            if trainer.accelerator.is_main_process:
                generation.vllm_client.set_policy_version(trainer.state.global_step)
            sync()

        generation.wrap_sync(lambda sync: partial(sync_weights, sync))

    def start_generation(self, rows: list[dict[str, Any]], name: str) -> None:
        """Store the rank's rows of the next batch; ``__call__`` replaces their prompts with the groups' prompts.

        ``name`` is not used.
        """
        self._placeholders = rows

    def __call__(self, prompts: list[Any], trainer: SamplingTrainer) -> dict[str, Any]:
        """Wait for the groups of a generation; return TRL's ``rollout_func`` fields and the scores of the rank's rows.

        Rank 0 requests the groups from run-api and broadcasts them. Its error is raised on every rank, on other ranks
        as AtroposError. If the run stops, Stopped is raised instead. Every rank must call this. ``prompts`` is not
        used.
        """
        with trainer.preemption.cutting_short(), trainer.rows.phase("sample"):
            get_result = _broadcast_result(partial(self._take_groups, trainer), trainer.accelerator.is_main_process)
        trainer.preemption.stop_if_agreed()  # before an error is raised: if the run stops, run-api may be gone too
        self._generation = generation = get_result()
        first = trainer.accelerator.process_index * len(self._placeholders)
        self._rank_rows = rows = generation.rows[first : first + len(self._placeholders)]
        self._rank_fresh = generation.fresh[first : first + len(self._placeholders)]
        self.brings_advantages = any(row.advantages is not None for row in generation.rows)
        self.temperatures = self._read_temperatures(trainer)
        for name, value in generation.metrics.items():
            trainer.add_metric(name, value)
        tokenizer = trainer.processing_class
        self._completions = [_to_messages(row, tokenizer) for row in rows]
        for placeholder, row in zip(self._placeholders, rows, strict=True):
            text = tokenizer.decode(row.prompt_ids, skip_special_tokens=True)
            placeholder["prompt"][:] = [{"role": "user", "content": text}]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in rows],
            "completion_ids": [row.completion_ids.tolist() for row in rows],
            "logprobs": [row.logprobs.tolist() for row in rows],
            "env_mask": [row.mask.astype(int).tolist() for row in rows],
            "episode_reward": [row.score for row in rows],
            "episode_failed": [None] * len(rows),
        }

    def completions(self) -> list[list[Message]]:
        """Return the rank's completions: turns of the policy, and messages of the environment between them."""
        return self._completions

    def annotate(self, trainer: SamplingTrainer, output: dict[str, Any]) -> None:
        """Change TRL's ``output`` in place: mask zeroed rows in "tool_mask", add "fresh" and maybe "temperature".

        A row is zeroed if its environment sets its advantage to 0. Its masked tokens still count in the mean over
        tokens, but get no KL penalty. A row is fresh if the current weights sampled it with neutral parameters.
        "temperature" is added if a row of any rank was sampled at another temperature than the recipe's.
        """
        device = output["completion_ids"].device
        output["tool_mask"] = output["tool_mask"] * ~self._find_zeroed_rows(device).unsqueeze(1)
        output["fresh"] = torch.tensor(self._rank_fresh, device=device)
        if self.temperatures is not None:
            output["temperature"] = self.temperatures

    def token_advantages(
        self, trainer: SamplingTrainer, output: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return advantages that replace TRL's for this rank's rows, and the mean of each row of all ranks.

        Return None if no group has its own advantages and no row is zeroed. The first tensor is (B,): TRL's advantages,
        with 0 in zeroed rows. It is (B, T) if a group of any rank brings advantages of tokens; every other row then
        repeats its number. The second tensor has a number for each row of all ranks, and is only shown in tables. Every
        rank calls this.
        """
        if not (self.brings_advantages or any(row.zeroed for row in self._generation.rows)):
            return None
        zeroed_B = self._find_zeroed_rows(output["advantages"].device)
        advantages = means_B = output["advantages"].masked_fill(zeroed_B, 0.0)
        if self.brings_advantages:
            first = trainer.accelerator.process_index * len(self._rank_rows)
            advantages, means_B = means_B.unsqueeze(1).repeat(1, output["completion_ids"].shape[1]), means_B.clone()
            for index, row in enumerate(self._rank_rows):
                if row.advantages is not None and not row.zeroed:
                    divisor = self._compute_advantage_divisor(
                        (first + index) // trainer.num_generations, trainer.num_generations
                    )
                    row_T = torch.from_numpy(numpy.where(row.mask, row.advantages / divisor, 0.0)).to(advantages)
                    advantages[index] = 0.0
                    advantages[index, : len(row_T)] = row_T
                    means_B[index] = row_T.sum() / row.mask.sum()
        return advantages, torch.tensor(gather_object(means_B.tolist()))

    def finish_generation(self, output: dict[str, Any]) -> None:
        """Replace the old log-probs of the loss by the log-probs of the policy that sampled the completions.

        ``output`` is changed in place: ``old_per_token_logps`` becomes ``sampling_per_token_logps``, and ``fresh`` is
        removed.
        """
        output.pop("fresh", None)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]

    def _find_zeroed_rows(self, device: torch.device) -> torch.Tensor:
        """Return a boolean tensor, (B,): whether the environment sets the advantage of each of the rank's rows to 0."""
        return torch.tensor([row.zeroed for row in self._rank_rows], device=device)

    def _compute_advantage_divisor(self, group: int, size: int) -> float:
        """Return the divisor of a group's token advantages: their standard deviation, or 1.

        It is 1 unless the recipe sets atropos_normalize_advantages, and if the deviation is about 0. Only trained
        tokens of rows that are not zeroed count. ``group`` is an index, ``size`` the rows of a group.
        """
        rows = [row for row in self._generation.rows[group * size : (group + 1) * size] if not row.zeroed]
        values = [row.advantages[row.mask.astype(bool)] for row in rows if row.advantages is not None]
        deviation = float(numpy.concatenate(values).std()) if values else 0.0
        return deviation if self._script.atropos_normalize_advantages and deviation > _MIN_DEVIATION else 1.0

    def _read_temperatures(self, trainer: SamplingTrainer) -> torch.Tensor | None:
        """Return the sampling temperature of each of the rank's rows, (B,), 1 for greedy rows.

        Return None if every row of all ranks has the recipe's temperature.
        """

        def effective_temperature(row: Trajectory) -> float:
            """Return the temperature that divided the logits of the row's log-probs; 1 for greedy sampling."""
            temperature = trainer.temperature if row.temperature is None else row.temperature
            return float(temperature) if temperature > 0 else 1.0  # for greedy tokens vLLM returns plain log-probs

        if all(effective_temperature(row) == trainer.temperature for row in self._generation.rows):
            return None
        temperatures = [effective_temperature(row) for row in self._rank_rows]
        return torch.tensor(temperatures, dtype=torch.float64, device=trainer.accelerator.device)

    # --- on rank 0 -------------------------------------------------------------------------------------------------

    def _take_groups(self, trainer: SamplingTrainer) -> Generation:
        """Wait for the groups of all ranks for a generation; return their rows with metrics. Called on rank 0.

        The first call registers this training at run-api. Raise AtroposError if the groups do not come in time, and
        WaitAborted if the run stops.
        """
        client = self._client = self._client or self._register(trainer)
        embeddings = cast(torch.nn.Embedding, trainer.model.get_input_embeddings())
        world, size, step = trainer.accelerator.num_processes, trainer.num_generations, trainer.state.global_step
        previous_counts, started = dict(client.counts), time.monotonic()
        groups = client.take_groups(
            len(self._placeholders) * world // size,
            size=size,
            longest=self._limit_trajectory(trainer),
            vocabulary=embeddings.num_embeddings,
            step=step,
            max_staleness=self._script.atropos_max_staleness,
        )
        now = time.monotonic()
        rows = [row for group in groups for row in to_trajectories(group)]
        fresh = [group.policy_version == step and _is_neutral(group) for group in groups for _ in group.tokens]
        counts = {name: count - previous_counts.get(name, 0) for name, count in client.counts.items()}
        tokens = sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
        minutes = (now - self._last_taken) / 60
        self._last_taken = now
        return Generation(
            rows,
            fresh,
            {
                "atropos/wait_seconds": now - started,
                "atropos/api_seconds": client.seconds["/batch"],
                "atropos/batches_per_minute": counts["batches"] / minutes,
                "atropos/tokens_per_second": tokens / minutes / 60,
                "atropos/queue": float(client.count_waiting_groups(size)),
                **{f"atropos/{name}": float(counts[name]) for name in _COUNT_METRICS},
                **_measure_staleness(groups, step),
                **self._compute_environment_metrics(groups),
            },
        )

    def _register(self, trainer: SamplingTrainer) -> AtroposClient:
        """Create a client of run-api and register this training, so that environments start to sample.

        Call this once the server has the weights. Raise AtroposError if run-api rejects the registration.
        """
        script, args = self._script, self._args
        client = AtroposClient(
            str(script.atropos_api_url),  # set by the launcher if it starts run-api
            timeout=script.atropos_timeout,
            attempts=script.atropos_batch_retry_attempts,
            delay=script.atropos_batch_retry_delay,
            max_wait=script.atropos_batch_max_wait_time,
            stopped=partial(self._reconnect_and_check_stop, trainer),
            say=lambda text: print(f"grpo: {text}", flush=True),
            describe_run=partial(self._describe_run, trainer),
            explain_wait=partial(self._explain_wait, trainer),
        )
        client.register(
            Registration(
                wandb_group=args.wandb_run_group or "",
                wandb_project=args.wandb_project or "",
                batch_size=len(self._placeholders) * trainer.accelerator.num_processes,
                max_token_len=self._limit_trajectory(trainer) + 1,  # environments drop sequences of this length
                checkpoint_dir=args.output_dir,
                save_checkpoint_interval=int(trainer.state.save_steps),
                starting_step=trainer.state.global_step,
                num_steps=trainer.state.max_steps,
            )
        )
        self._last_taken = time.monotonic()
        return client

    def _limit_trajectory(self, trainer: SamplingTrainer) -> int:
        """Return the most tokens of a trajectory: the recipe's limit, else the model's max_position_embeddings."""
        keys = {**vars(self._args), **vars(self._script)}
        return find_trajectory_limit(keys.__getitem__) or int(
            trainer.model.config.get_text_config().max_position_embeddings
        )

    def _describe_run(self, trainer: SamplingTrainer) -> list[str]:
        """Request the vLLM server's state; return it and the paths of logs as lines for the error if no groups come."""
        lines = []
        if trainer.use_vllm:
            client = trainer.vllm_generation.vllm_client
            state = "does not answer"
            with suppress(requests.RequestException, ServerError):
                response = client.session.get(f"{client.base_url}{ACTIVITY_PATH}", timeout=QUICK_SECONDS)
                state = f"answers {response.status_code} {response.text}"
            lines.append(f"vLLM server at {client.base_url}: {state}")
        for process in Run(self._run_dir).plan.get("processes", []):
            role, log = process.get("role"), process.get("log")
            if role and log and role.startswith(_SHOWN_LOGS):
                lines.append(f"log of {role}: {log}")
        return lines

    def _explain_wait(self, trainer: SamplingTrainer) -> str:
        """Return a message with a fix if the vLLM server rejected requests because of their token, else an empty text.

        Only a run that admits environments in other terminals asks the server.
        """
        settings = self._run_dir / SETTINGS
        if not (trainer.use_vllm and settings.exists()):
            return ""
        client = trainer.vllm_generation.vllm_client
        with suppress(requests.RequestException, ServerError, ValueError, AttributeError):
            response = client.session.get(f"{client.base_url}{ACTIVITY_PATH}", timeout=QUICK_SECONDS)
            if rejected := response.json().get("refused"):
                message = f"the vLLM server rejected {rejected} requests with a missing or wrong token"
                return f"{message}. Fix: start environments with: python ENVIRONMENT.py serve --config {settings}"
        return ""

    def _reconnect_and_check_stop(self, trainer: SamplingTrainer) -> bool:
        """Send the weights to the vLLM server again if it was restarted; return whether the run was asked to stop.

        While environments sample, the trainer sends the server no other request that would detect a restart.
        """
        if trainer.use_vllm:
            trainer.vllm_generation.vllm_client.reconnect()
        return bool(trainer.preemption.stop.cuts())

    def _compute_environment_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the mean score of each environment in ``groups``, and the fraction of groups that it sent, as metrics.

        Return {} until groups of a second environment have come. An environment without groups has the fraction 0.
        """
        scores: dict[str, list[list[float]]] = defaultdict(list)
        for group in groups:
            scores[str(group.generation_params.get("environment", group.env_id))].append(group.scores)
        self._labels |= scores.keys()
        if len(self._labels) < 2:
            return {}
        rewards = {f"atropos/reward_{label}": fmean(chain(*values)) for label, values in sorted(scores.items())}
        return rewards | {f"atropos/share_{label}": len(scores[label]) / len(groups) for label in sorted(self._labels)}


def _broadcast_result(work: Callable[[], _Result], is_main: bool) -> Callable[[], _Result]:
    """Call ``work`` on rank 0; return a function that returns its result, or raises its error, on every rank."""
    outcome: list[Any] = [None, None]
    failures: list[Exception] = []
    if is_main:
        try:
            outcome[0] = work()
        except Exception as error:  # any error: the other ranks wait for the broadcast
            failures.append(error)
            outcome[1] = str(error) if isinstance(error, AtroposError) else f"{type(error).__name__}: {error}"
    broadcast_object_list(outcome, from_process=0)

    def get_result() -> _Result:
        """Return the result of rank 0; raise its error, on other ranks as AtroposError."""
        if outcome[1] is not None:
            raise failures[0] if failures else AtroposError(outcome[1])
        result: _Result = outcome[0]
        return result

    return get_result


def _is_neutral(group: Group) -> bool:
    """Return whether a group's sampling parameters, except the temperature, leave the model's log-probs unchanged."""
    return all(group.generation_params.get(name) in (None, *values) for name, values in _NEUTRAL_VALUES.items())


def _measure_staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Return mean and maximum of the optimizer steps between each group's policy and ``step``, as two metrics.

    Return {} if no group has a policy version.
    """
    steps = [float(step - group.policy_version) for group in groups if group.policy_version is not None]
    return {"atropos/staleness_mean": fmean(steps), "atropos/staleness_max": max(steps)} if steps else {}


def _to_messages(row: Trajectory, tokenizer: Any) -> list[Message]:
    """Decode a completion to chat messages: each run of trained tokens as assistant message, other tokens as user's."""
    parts = groupby(zip(row.mask.tolist(), row.completion_ids.tolist(), strict=True), key=itemgetter(0))
    return [
        {
            "role": "assistant" if trained else "user",
            "content": tokenizer.decode([token for _, token in tokens], skip_special_tokens=True),
        }
        for trained, tokens in parts
    ]
