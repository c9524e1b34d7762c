"""Multi-turn episodes for training: the policy and an environment alternate, for all episodes of a batch in parallel.

TRL calls ``Episodes`` instead of its own sampler (its ``rollout_func``). The token ids of the policy's turns stay as
sampled. The environment's text between them is tokenized separately and appended with mask 0, so that the loss, the
log-probs and their metrics ignore it. The environments run in child processes with limits.
"""

import hashlib
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.data.prompts import Prompts
from grpo_recipes.extensions.environments.benchmarks import play_benchmark
from grpo_recipes.extensions.environments.environment_python import find_python, record_packages
from grpo_recipes.extensions.environments.episode import Episode, Opponent, Tokens, make_environment_pool
from grpo_recipes.extensions.environments.libraries import LIBRARIES
from grpo_recipes.extensions.environments.recipe import compute_turn_tokens, list_episode_environments
from grpo_recipes.extensions.environments.rows import make_evaluation_rows, make_prompts, make_training_rows
from grpo_recipes.extensions.environments.rules import SOURCE
from grpo_recipes.extensions.environments.stage import PLAY
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_path, source_path, split_spec
from grpo_recipes.rewards.load import LimitRecords, hash_call
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.renderer import DUMMY, Renderer
from grpo_recipes.rollouts.source import SamplingTrainer, Source
from grpo_recipes.rollouts.turns import BASE, Message, Turn
from grpo_recipes.trainer_protocol import Mode

_EPSILON = 1e-4  # added to a standard deviation, as in TRL


class Episodes(Source):
    """Completions for runs with environments: it plays the episodes of each batch, as TRL's ``rollout_func``."""

    _function = PLAY  # the function that the child processes call

    def __init__(self, script_args: ScriptArguments, args: GRPOConfig, run_dir: Path):
        """Start the child processes that run the environments; ``run_dir`` has copies of the user's code.

        Also silence a warning of TRL by an environment variable.

        Raise RewardFailed if a child process can't load its code.
        """
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns about rollout_func in every run
        self._script, self._args = script_args, args
        self._rows: list[dict[str, Any]] = []  # rows of the batch to play
        self._name = ""  # name of the batch to play; sampling seeds are derived from it
        self.played: list[Episode] = []  # this rank's episodes of the last batch
        self.records: list[dict[str, Any]] = []  # all ranks' episodes of the last training batch
        copies = run_dir / REWARD_COPIES
        self._user_specs = SOURCE.user_code(partial(getattr, script_args))
        files = [spec for spec in self._user_specs if split_spec(spec)[0].endswith(".py")]
        self._specs = {spec: f"{copy_path(spec, copies)}:{split_spec(spec)[1]}" for spec in files}
        self._limit_records = LimitRecords(copies / f"episodes_{os.environ.get('RANK', '0')}.jsonl")
        if python := find_python(partial(getattr, script_args)):
            record_packages(python, copies)
        self._labels = choose_environment_labels(list_episode_environments(partial(getattr, script_args)))
        self._pool = make_environment_pool(partial(getattr, script_args), copies, function=self._function)
        self._pool.start()
        self.turn_tokens = compute_turn_tokens(
            script_args.environment_turn_length, args.max_completion_length, self._max_turns
        )

    @property
    def _max_turns(self) -> int:
        """The number of turns of the policy after which an episode is unfinished."""
        return int(self._script.environment_max_turns)

    def _make_episode(self, row_index: int, row: dict[str, Any]) -> Episode:
        """Return the episode of a dataset row, before its first turn."""
        return Episode(row_index, row["environment"], row["arguments"], row["seed"])

    @classmethod
    def training_prompts(cls, args: ScriptArguments, seed: int, least: int) -> Prompts:
        """Return one row per training episode; raise ConfigError if there are fewer than a step needs (``least``)."""
        return make_prompts(make_training_rows(args, seed), args, least)

    @classmethod
    def evaluation_prompts(cls, args: ScriptArguments) -> Prompts:
        """Return the evaluation prompts: one row per evaluation episode; raise ConfigError if there are no episodes."""
        return make_prompts(make_evaluation_rows(args), args, 1, "evaluating on ")

    def run_benchmark(self, runner: Any, name: str, rows: list[dict[str, Any]]) -> None:
        """Play the evaluation episodes of the environment ``name`` as a benchmark, and add a row per seed to ``rows``.

        Every rank must call this.
        """
        play_benchmark(self, runner, name, rows)

    def benchmark_settings(self) -> dict[str, Any]:
        """Return the recipe keys and values that change the result of a benchmark: environment* and benchmark_solved.

        A stored result is reused only if they are equal.
        """
        return {
            key: value
            for key, value in vars(self._script).items()
            if key.startswith(("environment", "benchmark_solved"))
        }

    def close(self) -> None:
        """End the child processes; they also end with this process."""
        self._pool.close()

    def start_generation(self, rows: list[dict[str, Any]], name: str) -> None:
        """Store this rank's rows of the batch that TRL samples next; ``name`` is the name of the generation."""
        self._rows, self._name = rows, name

    def __call__(self, prompts: list[Any], trainer: SamplingTrainer) -> dict[str, Any]:
        """Play the batch of ``start_generation`` to its end; return the columns of TRL's ``rollout_func`` and rewards.

        Every rank must call this. All ranks raise Stopped if any rank has seen a stop request. ``prompts`` is not
        used, because each environment provides its prompt: the rows' prompts are replaced in place.
        """
        first = trainer.accelerator.process_index * len(self._rows)
        self.played = episodes = [self._make_episode(first + index, row) for index, row in enumerate(self._rows)]
        renderer = make_trainer_renderer(trainer)
        self._step_environments(episodes, trainer)
        move = 0
        while any(
            models_of_ranks := gather_object([Counter(episode.next_model for episode in episodes if episode.active)])
        ):
            active = [episode for episode in episodes if episode.active]
            for model in sorted({name for counter in models_of_ranks for name in counter}):
                moving = [episode for episode in active if episode.next_model == model]
                most_rows = max(counter[model] for counter in models_of_ranks)
                self._sample_turns(model, moving, most_rows, f"{self._name}/turn{move}", trainer)
            self._step_environments(active, trainer)
            move += 1
        for episode, row in zip(episodes, self._rows, strict=True):
            row["prompt"][:] = episode.opening or row["prompt"]  # the prompt in tables of completions
            episode.prompt_ids = episode.prompt_ids or renderer.prompt(Turn(DUMMY[:1]))
        return self._make_output(trainer)

    def start_episodes(self, episodes: Sequence[Episode], name: str, trainer: SamplingTrainer) -> None:
        """Reset the environments of benchmark episodes and append their first messages, in this process only."""
        self._name = name
        self._step_environments_locally(episodes, trainer)

    def continue_episodes(self, active: Sequence[Episode], samples: Sequence[Tokens], trainer: SamplingTrainer) -> None:
        """Add a sampled turn to each benchmark episode and let the environments answer, in this process only.

        ``samples`` has the sampled tokens of each episode with a ``next_model``. The other episodes get an empty turn.
        """
        remaining_samples, renderer = iter(samples), make_trainer_renderer(trainer)
        for episode in active:
            ids = list(next(remaining_samples)) if episode.next_model else []
            episode.add_action(ids, None, renderer.text(ids))
        self._step_environments_locally(active, trainer)

    def _step_environments_locally(self, episodes: Sequence[Episode], trainer: SamplingTrainer) -> None:
        """Send the last actions to the environments and append their answers to the episodes, in this process only.

        Unlike ``_step_environments``, this ignores the limit on failures and stop requests.
        """
        renderer = make_trainer_renderer(trainer)
        for episode, score in zip(episodes, self._request_answers(episodes, None, lambda: False), strict=True):
            episode.add_answer(score)
            self._append_messages(episode, renderer)

    def _append_messages(self, episode: Episode, renderer: Renderer) -> None:
        """Tokenize the environment's last messages and append them to the tokens of the next model.

        Set ``unfinished`` if the policy's turns or tokens are used up, ``failed`` if its first prompt is too long, and
        ``out_of_room`` if an opponent has no tokens for a turn. Do nothing if the episode has ended.
        """
        if not episode.active:
            return
        turn, max_prompt = episode.turns[-1], self._script.max_prompt_length
        if turn.opponent:
            opponent = episode.opponents.get(turn.seat)
            if opponent is None:
                ids = renderer.prompt(turn)
                too_long = max_prompt is not None and len(ids) > max_prompt
                opponent = Opponent(ids, 0 if too_long else len(ids) + self._args.max_completion_length)
                episode.opponents[turn.seat] = opponent
            else:
                opponent.ids += renderer.between(turn.messages, opponent.ids)
            opponent.out_of_room = len(opponent.ids) + self.turn_tokens > opponent.max_tokens
            return
        if not episode.prompt_ids:
            episode.prompt_ids = renderer.prompt(turn)
            if max_prompt is not None and len(episode.prompt_ids) > max_prompt:
                tokens = len(episode.prompt_ids)
                episode.failed = f"its first observation has {tokens} tokens, more than max_prompt_length"
            return
        if len(episode.policy_actions) == self._max_turns:
            episode.unfinished = "environment_max_turns"
            return
        between = renderer.between(turn.messages, episode.ids)
        if self._args.max_completion_length - len(episode.ids) - len(between) < self.turn_tokens:
            episode.unfinished = "max_completion_length"
            return
        episode.ids += between
        episode.logprobs += [0.0] * len(between)
        episode.turn_ids += [None] * len(between)

    def _sample_turns(
        self, model: str, episodes: list[Episode], most_rows: int, name: str, trainer: SamplingTrainer
    ) -> None:
        """Sample the next turn of each of these episodes with ``model``, and append the turns to the episodes.

        If ``model`` is "", append empty turns without sampling. Every rank must call this. ``most_rows`` is the largest
        number of episodes on a rank. Sampling seeds derive from the episodes' rows and from the generation's ``name``.
        """
        if not model:
            for episode in episodes:
                episode.add_action([], [], "")
            return
        prompts, rows = [episode.context() for episode in episodes], [episode.row for episode in episodes]
        # Some backends need the same number of rows on every rank. The samples of these fillers come last.
        fillers = most_rows - len(prompts)
        filler = prompts[0] if prompts else [trainer.processing_class.eos_token_id]
        rows += [-1 - row for row in range(fillers)]
        limit = trainer.sampling_with(max_completion_length=self.turn_tokens)
        base_model = trainer.rollouts.using_base_model() if model == BASE else nullcontext()
        with base_model, trainer.rollouts.named_generation(name, rows), limit:
            samples, logprobs = trainer._generate_single_turn([*prompts, *[filler] * fillers], None, {}, 1)
        renderer = make_trainer_renderer(trainer)
        logprobs_of_rows: list[list[float] | None] = [*logprobs] if logprobs else [None] * len(episodes)
        for episode, ids, token_logprobs in zip(episodes, samples, logprobs_of_rows, strict=False):
            episode.add_action(list(ids), token_logprobs, renderer.text(list(ids)))

    def _step_environments(self, episodes: Sequence[Episode], trainer: SamplingTrainer) -> None:
        """Send the last actions to the environments in the child processes, and append their answers to the episodes.

        Every rank must call this with its own episodes. All ranks raise Stopped if any rank has seen a stop request.
        """
        with trainer.preemption.cutting_short(), trainer.rows.phase("score"):
            rows = len(self._rows) * trainer.accelerator.num_processes
            give_up_after = trainer.scoring.most_unscored(rows) if trainer.model.training else None
            scores = self._request_answers(episodes, give_up_after, trainer.preemption.stop.cuts)
        trainer.preemption.stop_if_agreed()
        renderer = make_trainer_renderer(trainer)
        for episode, score in zip(episodes, scores, strict=True):
            episode.add_answer(score)
            self._append_messages(episode, renderer)

    def _request_answers(
        self, episodes: Sequence[Episode], give_up_after: int | None, stopped: Callable[[], bool]
    ) -> list[Score]:
        """Call the child processes; return each environment's answer to the last action: JSON of a turn, or a failure.

        A call that exceeds a time or memory limit is recorded in a file of the run, and never repeated: its recorded
        failure is returned. The calls end early after more than ``give_up_after`` failures (None: no limit), or once
        ``stopped`` returns true.
        """
        columns: dict[str, list[Any]] = {
            "environment": [self._specs.get(episode.spec, episode.spec) for episode in episodes],
            "arguments": [episode.arguments for episode in episodes],
            "seed": [episode.seed for episode in episodes],
            "episode": [f"{self._name}/{episode.row}" for episode in episodes],
            "last_digest": [episode.last_digest for episode in episodes],
        }
        keys = [hash_call(self._describe_call(episode), {"actions": episode.actions}) for episode in episodes]
        scores = {index: self._limit_records.find(key, 0) for index, key in enumerate(keys)}
        calls = [index for index in range(len(episodes)) if scores[index] is None]
        call_columns = {name: [values[index] for index in calls] for name, values in columns.items()}
        actions = [episodes[index].actions for index in calls]
        new_scores = self._pool.score(
            self._function, actions, call_columns, give_up_after, stopped, call_columns["episode"]
        )
        for index, score in zip(calls, new_scores, strict=True):
            scores[index] = score
            self._limit_records.add(keys[index], 0, score)
        return [score for score in scores.values() if score is not None]

    def _describe_call(self, episode: Episode) -> tuple[Any, ...]:
        """Return a tuple that identifies a call, except its actions: code, limits, arguments, seed, generation and row.

        It is part of the key under which exceeded limits are recorded. The generation and row are included because the
        same call may end in time in another generation.
        """
        spec = self._specs.get(episode.spec, episode.spec)
        path = source_path(spec) if episode.spec in self._user_specs else None
        code = hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
        limits = self._pool.timeout, self._pool.memory_gib
        return episode.spec, code, *limits, episode.arguments, episode.seed, f"{self._name}/{episode.row}"

    def _make_output(self, trainer: SamplingTrainer) -> dict[str, Any]:
        """Log the mean of each episode metric over all ranks; return the columns of TRL's ``rollout_func``.

        The columns have this rank's episodes. An episode without tokens gets one end token, with mask 0. In training
        with ``report_samples`` above 0, also set ``self.records`` to the records of all ranks' episodes.
        """
        for episode in self.played:
            if not episode.ids:  # it failed before its first turn; TRL needs a token
                episode.ids, episode.logprobs, episode.turn_ids = [trainer.processing_class.eos_token_id], [0.0], [None]
        mode: Mode = "train" if trainer.model.training else "eval"
        if trainer.model.training and self._args.report_samples > 0:
            self.records = gather_object([episode.record() for episode in self.played])
        metrics = gather_object([self._compute_metrics(episode) for episode in self.played])
        for name in dict.fromkeys(name for row in metrics for name in row):
            values = [row[name] for row in metrics if name in row]
            trainer.add_metric(f"episodes/{name}", math.fsum(values) / len(values), mode)
        return {
            "prompt_ids": [episode.prompt_ids for episode in self.played],
            "completion_ids": [episode.ids for episode in self.played],
            "logprobs": [episode.logprobs for episode in self.played] if trainer.use_vllm else None,
            "env_mask": [self._make_mask(episode) for episode in self.played],
            "episode_reward": [self.reward(episode) for episode in self.played],
            "episode_failed": [episode.failed for episode in self.played],
        }

    def _make_mask(self, episode: Episode) -> list[int]:
        """Return 1 for each completion token that is trained on, else 0.

        All turns of the policy are trained on, or only its last turn with environment_credit: last_turn.
        """
        last = max((turn for turn in episode.turn_ids if turn is not None), default=None)
        all_turns = self._script.environment_credit != "last_turn"
        return [int(turn is not None and (all_turns or turn == last)) for turn in episode.turn_ids]

    def reward(self, episode: Episode) -> float | None:
        """Return the sum of an episode's rewards, or None if the episode has no reward.

        It has none if it failed. If it is unfinished, environment_unfinished decides: None (unscored), 0.0 (zero),
        or the sum of its rewards so far (score).
        """
        if episode.failed or (episode.unfinished and self._script.environment_unfinished == "unscored"):
            return None
        return 0.0 if self._is_zeroed(episode) else math.fsum(turn.reward for turn in episode.turns)

    def turn_rewards(self, episode: Episode) -> list[float]:
        """Return the reward of each of the policy's turns; the episode must have a reward.

        All are 0 if the episode is unfinished and the recipe gives such episodes 0.
        """
        rewards = [turn.reward for turn in episode.policy_turns[1:]]
        return [0.0] * len(rewards) if self._is_zeroed(episode) else rewards

    def _is_zeroed(self, episode: Episode) -> bool:
        """Return whether the episode is unfinished and the recipe gives such episodes the reward 0."""
        return bool(episode.unfinished) and self._script.environment_unfinished == "zero"

    def completions(self) -> list[list[Message]]:
        """Return the messages after the first observation of each of this rank's episodes, as TRL's completions."""
        return [
            episode.transcript()[len(episode.opening) :] or [{"role": "assistant", "content": ""}]
            for episode in self.played
        ]

    def token_advantages(
        self, trainer: SamplingTrainer, output: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the advantages of ``environment_credit: per_turn``: per token (B, T), and per row of all ranks.

        Return None with any other environment_credit. The advantage of a turn compares the rewards from that turn on
        with the same turn of the group's other episodes. Other tokens, and episodes without a reward, get 0. The
        advantage of a row is the mean over its tokens, for display only. The advantage of each turn is also stored
        in ``records``.
        """
        if self._script.environment_credit != "per_turn":
            return None
        weight = float(trainer.reward_weights[0])  # weight of the environment's reward, which is the only reward
        episode_rewards = [
            (episode.row, self.reward(episode), [weight * reward for reward in self.turn_rewards(episode)])
            for episode in self.played
        ]
        advantages = compute_turn_advantages(
            gather_object(episode_rewards), trainer.num_generations, trainer.scale_rewards
        )
        for row, record in enumerate(self.records):
            for turn, turn_record in enumerate(record["turns"]):
                if (row, turn) in advantages:
                    turn_record["advantage"] = round(advantages[row, turn], 4)
        advantages_BT = torch.zeros(output["completion_ids"].shape)
        means = []
        for index, episode in enumerate(self.played):
            advantages_T = [advantages.get((episode.row, turn), 0.0) for turn in episode.turn_ids]
            advantages_BT[index, : len(advantages_T)] = torch.tensor(advantages_T)
            means.append(math.fsum(advantages_T) / max(1, sum(turn is not None for turn in episode.turn_ids)))
        return advantages_BT.to(output["advantages"]), torch.tensor(gather_object(means))

    def _compute_metrics(self, episode: Episode) -> dict[str, float]:
        """Return an episode's metrics by name: means of the info's numbers, turns, and 0 or 1 for unfinished, unscored.

        "unscored" is 1 if the episode failed. The reward is added as ``reward_ROLE`` if the info has a role. With
        several environments, reward, "won" and "legal" are added with the environment's label, e.g. ``won_LABEL``.
        """
        numbers: dict[str, list[float]] = {}
        # The first turn, which precedes all actions, counts only if the episode ended with it.
        for turn in episode.turns if len(episode.turns) == 1 and episode.done else episode.turns[1:]:
            for name, value in turn.info.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    numbers.setdefault(name, []).append(float(value))
        metrics = {name: sum(values) / len(values) for name, values in numbers.items()}
        metrics |= {"turns": float(len(episode.policy_actions))}
        metrics |= {"unfinished": float(bool(episode.unfinished)), "unscored": float(episode.failed is not None)}
        role, reward = episode.turns[-1].info.get("role") if episode.turns else None, self.reward(episode)
        if role is not None and reward is not None:
            metrics[f"reward_{str(role).lower()}"] = reward
        if label := self._labels.get((episode.spec, episode.arguments)):
            labeled = {"reward": reward, **{name: metrics.get(name) for name in ("won", "legal")}}
            metrics |= {f"{name}_{label}": value for name, value in labeled.items() if value is not None}
        return metrics


def make_trainer_renderer(trainer: SamplingTrainer) -> Renderer:
    """Create a renderer of chat messages to token ids with the trainer's tokenizer, chat template and stop tokens."""
    return Renderer(trainer.processing_class, trainer.chat_template_kwargs, trainer.eos_token_ids)


def choose_environment_labels(environments: Sequence[tuple[str, dict[str, Any], float]]) -> dict[tuple[str, str], str]:
    """Return a name for each environment's metrics, by (spec, arguments as JSON); {} if there is only one environment.

    The label is the name in its library or file, followed by its number in the mixture if the name is not unique.
    """
    keys = list(dict.fromkeys((spec, json.dumps(arguments, sort_keys=True)) for spec, arguments, _ in environments))
    names = [spec.partition(":")[2] if spec.partition(":")[0] in LIBRARIES else split_spec(spec)[1] for spec, _ in keys]
    labels = [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, start=1)]
    return dict(zip(keys, labels, strict=True)) if len(keys) > 1 else {}


def compute_turn_advantages(
    episodes: Sequence[tuple[int, float | None, list[float]]], group_size: int, scale: str = "group"
) -> dict[tuple[int, int | None], float]:
    """Return an advantage by (row, turn): the sum of turn rewards from the turn on, minus the group's mean of the turn.

    ``episodes`` are (row, reward, rewards of the turns). Episodes with the reward None are left out; otherwise only the
    turn rewards count. Means and deviations of a turn are over the episodes that have this turn. ``scale`` is TRL's
    ``scale_rewards``: divide by the standard deviation of the group ("group") or of the batch, plus 1e-4, or do not
    divide ("none").
    """
    advantages: dict[tuple[int, int | None], float] = {}
    scored = [(row, rewards) for row, reward, rewards in episodes if reward is not None]
    for turn in range(max((len(rewards) for _, rewards in scored), default=0)):
        returns = {row: math.fsum(rewards[turn:]) for row, rewards in scored if len(rewards) > turn}
        for group in {row // group_size for row in returns}:
            group_returns = {row: value for row, value in returns.items() if row // group_size == group}
            mean = statistics.fmean(group_returns.values())
            values = list((group_returns if scale == "group" else returns).values())
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            divisor = 1.0 if scale == "none" else deviation + _EPSILON
            advantages |= {(row, turn): (value - mean) / divisor for row, value in group_returns.items()}
    return advantages
