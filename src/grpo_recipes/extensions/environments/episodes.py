"""Episodes of several turns: the policy and an environment take turns, the episodes of a batch side by side.

TRL calls ``Episodes`` in the place of its own sampler (its ``rollout_func``). The token ids of each of the policy's
turns stay as they were sampled: the text between them is tokenized alone and appended, and its mask is 0, which keeps
it out of the loss, of log-probs and of their metrics. The environments run in child processes with limits.
"""

import hashlib
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.attributes import replaced
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.extensions.environments.benchmarks import play_benchmark
from grpo_recipes.extensions.environments.episode import Episode, Side, Tokens, environment_pool
from grpo_recipes.extensions.environments.libraries import LIBRARIES
from grpo_recipes.extensions.environments.recipe import environments_of, turn_tokens
from grpo_recipes.extensions.environments.rows import episode_prompts, evaluation_episodes, training_episodes
from grpo_recipes.extensions.environments.rules import SOURCE
from grpo_recipes.extensions.environments.stage import PLAY
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_path, source_path, split_spec
from grpo_recipes.rewards.load import LimitRecords, key_of
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.renderer import DUMMY, Renderer
from grpo_recipes.rollouts.source import Source
from grpo_recipes.rollouts.turns import BASE, Message, Turn

_EPSILON = 1e-4  # added to a standard deviation, as in TRL


class Episodes(Source):
    """Play the episodes of each batch; TRL's ``rollout_func``."""

    def __init__(self, script_args: ScriptArguments, args: GRPOConfig, run_dir: Path):
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of rollout_func in every run
        self._script, self._args = script_args, args
        self._rows: list[dict[str, Any]] = []  # of the batch to play
        self._name = ""  # of the batch to play, from which sampling seeds are derived
        self.played: list[Episode] = []  # the rank's rows of the last batch
        self.records: list[dict[str, Any]] = []  # of the last batch to train on, over all ranks
        copies = run_dir / REWARD_COPIES
        self._own = SOURCE.user_code(partial(getattr, script_args))
        files = [spec for spec in self._own if split_spec(spec)[0].endswith(".py")]
        self._specs = {spec: f"{copy_path(spec, copies)}:{split_spec(spec)[1]}" for spec in files}
        self._records = LimitRecords(copies / f"episodes_{os.environ.get('RANK', '0')}.jsonl")
        self._labels = labels_of(environments_of(partial(getattr, script_args)))
        self._pool = environment_pool(partial(getattr, script_args), copies)
        self._pool.start()
        self.turn_tokens = turn_tokens(
            script_args.environment_turn_length, args.max_completion_length, script_args.environment_max_turns
        )

    @classmethod
    def training_prompts(cls, args: ScriptArguments, seed: int, least: int) -> Prompts:
        """Return a row for each episode to train on."""
        return episode_prompts(training_episodes(args, seed), args, least)

    @classmethod
    def evaluation_prompts(cls, args: ScriptArguments) -> Prompts:
        """Return a row for each episode to evaluate on."""
        return episode_prompts(evaluation_episodes(args), args, 1, "evaluating on ")

    def run_benchmark(self, runner: Any, name: str, rows: list[dict[str, Any]]) -> None:
        """Play the held-out episodes of an environment."""
        play_benchmark(self, runner, name, rows)

    def benchmark_settings(self) -> dict[str, Any]:
        """Return the keys of environments."""
        return {
            key: value
            for key, value in vars(self._script).items()
            if key.startswith(("environment", "benchmark_solved"))
        }

    def close(self) -> None:
        """End the children; they end with this process in any case."""
        self._pool.close()

    def start_generation(self, rows: list[dict[str, Any]], name: str) -> None:
        """Take the rank's rows of the batch that TRL will sample next; ``name`` is its generation's."""
        self._rows, self._name = rows, name

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Play the batch; return what TRL's ``rollout_func`` returns, and the episodes' rewards beside it."""
        first = trainer.accelerator.process_index * len(self._rows)
        self.played = episodes = [
            Episode(first + place, row["environment"], row["arguments"], row["seed"])
            for place, row in enumerate(self._rows)
        ]
        renderer = renderer_for(trainer)
        self._advance(episodes, trainer)
        for episode in episodes:
            self._read(episode, renderer)
        move = 0
        while any(moves := gather_object([Counter(one.mover for one in episodes if one.active)])):
            active = [one for one in episodes if one.active]
            for mover in sorted({name for counter in moves for name in counter}):
                moving = [one for one in active if one.mover == mover]
                self._move(mover, moving, max(counter[mover] for counter in moves), f"{self._name}/turn{move}", trainer)
            self._advance(active, trainer)
            for episode in active:
                self._read(episode, renderer)
            move += 1
        for episode, row in zip(episodes, self._rows, strict=True):
            row["prompt"][:] = episode.opening or row["prompt"]  # what tables show
            episode.prompt_ids = episode.prompt_ids or renderer.prompt(Turn(DUMMY[:1]))
        return self._output(trainer)

    def enter(self, episodes: Sequence[Episode], name: str, trainer: Any) -> None:
        """Begin episodes of a benchmark in this process, without the other ranks."""
        self._name = name
        self._advance_here(episodes, trainer)

    def go_on(self, active: Sequence[Episode], sampled: Sequence[Tokens], trainer: Any) -> None:
        """Take episodes of ``enter`` one turn further; ``sampled`` has the turns of those whose mover has room."""
        turns, renderer = iter(sampled), renderer_for(trainer)
        for episode in active:
            ids = list(next(turns)) if episode.mover else []
            episode.write(ids, None, renderer.text(ids))
        self._advance_here(active, trainer)

    def _advance_here(self, episodes: Sequence[Episode], trainer: Any) -> None:
        renderer = renderer_for(trainer)
        for episode, score in zip(episodes, self._scores(episodes, None, lambda: False), strict=True):
            episode.take(score)
            self._read(episode, renderer)

    def _read(self, episode: Episode, renderer: Renderer) -> None:
        """Append what the environment says to what the policy, or an opponent, has read; end it for want of room."""
        if not episode.active:
            return
        turn, longest = episode.turns[-1], self._script.max_prompt_length
        if turn.opponent:
            side = episode.opponents.get(turn.seat)
            if side is None:
                ids = renderer.prompt(turn)
                most = len(ids) + self._args.max_completion_length
                side = Side(ids, 0 if longest is not None and len(ids) > longest else most)
                episode.opponents[turn.seat] = side
            else:
                side.ids += renderer.between(turn.messages, side.ids)
            side.speechless = len(side.ids) + self.turn_tokens > side.most
            return
        if not episode.prompt_ids:
            episode.prompt_ids = renderer.prompt(turn)
            if longest is not None and len(episode.prompt_ids) > longest:
                tokens = len(episode.prompt_ids)
                episode.failed = f"its first observation has {tokens} tokens, more than max_prompt_length"
            return
        if len(episode.own_actions) == self._script.environment_max_turns:
            episode.unfinished = "environment_max_turns"
            return
        between = renderer.between(turn.messages, episode.ids)
        if self._args.max_completion_length - len(episode.ids) - len(between) < self.turn_tokens:
            episode.unfinished = "max_completion_length"
            return
        episode.ids += between
        episode.logprobs += [0.0] * len(between)
        episode.turn_ids += [None] * len(between)

    def _move(self, mover: str, episodes: list[Episode], most: int, name: str, trainer: Any) -> None:
        """Have a model take a turn in each of these episodes; every rank calls it, with at ``most`` so many of them."""
        if not mover:
            for episode in episodes:
                episode.write([], [], "")
            return
        prompts, rows = [episode.read() for episode in episodes], [episode.row for episode in episodes]
        with trainer.rollouts.using_base_model() if mover == BASE else nullcontext():
            sampled, logprobs = self._sample(prompts, rows, most, name, trainer)
        renderer = renderer_for(trainer)
        for episode, ids, of_ids in zip(episodes, sampled, logprobs or [None] * len(episodes), strict=False):
            episode.write(list(ids), of_ids, renderer.text(list(ids)))

    def _sample(self, prompts: list[Tokens], rows: list[int], most: int, name: str, trainer: Any) -> Any:
        """Sample with TRL's sampler, as many rows on every rank, since some ways to sample need that."""
        fillers = most - len(prompts)
        filler = prompts[0] if prompts else [trainer.processing_class.eos_token_id]
        with (
            trainer.rollouts.named_generation(name, [*rows, *[-1 - row for row in range(fillers)]]),
            self._limit(trainer),
        ):
            return trainer._generate_single_turn([*prompts, *[filler] * fillers], None, {}, 1)

    def _limit(self, trainer: Any) -> AbstractContextManager[Any]:
        """Let a completion be no longer than a turn."""
        if trainer.use_vllm:
            return replaced(trainer.vllm_generation, max_completion_length=self.turn_tokens)
        return replaced(trainer.generation_config, max_new_tokens=self.turn_tokens)

    def _advance(self, episodes: Sequence[Episode], trainer: Any) -> None:
        """Have the environments take these episodes one turn further, in the children; called by every rank."""
        with trainer.preemption.cutting_short(), trainer.rows.phase("score"):
            rows = len(self._rows) * trainer.accelerator.num_processes
            hopeless = trainer.scoring.most_unscored(rows) if trainer.model.training else None
            scores = self._scores(episodes, hopeless, trainer.preemption.stop.cuts)
        trainer.preemption.stop_if_agreed()
        for episode, score in zip(episodes, scores, strict=True):
            episode.take(score)

    def _scores(
        self, episodes: Sequence[Episode], give_up_after: int | None, stopped: Callable[[], bool]
    ) -> list[Score]:
        columns: dict[str, list[Any]] = {
            "environment": [self._specs.get(one.spec, one.spec) for one in episodes],
            "arguments": [one.arguments for one in episodes],
            "seed": [one.seed for one in episodes],
            "episode": [f"{self._name}/{one.row}" for one in episodes],
            "seen": [one.seen for one in episodes],
        }
        keys = [key_of(self._identity(one), {"actions": one.actions}) for one in episodes]
        known = {place: self._records.find(key, 0) for place, key in enumerate(keys)}
        called = [place for place in range(len(episodes)) if known[place] is None]
        asked = {name: [values[place] for place in called] for name, values in columns.items()}
        actions = [episodes[place].actions for place in called]
        scores = self._pool.score(PLAY, actions, asked, give_up_after, stopped, asked["episode"])
        for place, score in zip(called, scores, strict=True):
            known[place] = score
            self._records.add(keys[place], 0, score)
        return [score for score in known.values() if score is not None]

    def _identity(self, episode: Episode) -> tuple[Any, ...]:
        """Return what a limit that an episode meets depends on beside the actions: its code and the limits themselves.

        Its row of its generation is among them, since the same call may end in time in another one. The generation's
        number, which ``LimitRecords`` asks for, would say nothing more.
        """
        spec = self._specs.get(episode.spec, episode.spec)
        path = source_path(spec) if episode.spec in self._own else None
        code = hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
        limits = self._pool.timeout, self._pool.memory_gib
        return episode.spec, code, *limits, episode.arguments, episode.seed, f"{self._name}/{episode.row}"

    def _output(self, trainer: Any) -> dict[str, Any]:
        """Return what TRL takes, and log what is known of the batch's episodes over all ranks."""
        for episode in self.played:
            if not episode.ids:  # it failed before its first turn; TRL needs a token
                episode.ids, episode.logprobs, episode.turn_ids = [trainer.processing_class.eos_token_id], [0.0], [None]
        self._log(trainer)
        return {
            "prompt_ids": [one.prompt_ids for one in self.played],
            "completion_ids": [one.ids for one in self.played],
            "logprobs": [one.logprobs for one in self.played] if trainer.use_vllm else None,
            "env_mask": [self._mask(one) for one in self.played],
            "episode_reward": [self.reward(one) for one in self.played],
            "episode_failed": [one.failed for one in self.played],
        }

    def _mask(self, episode: Episode) -> list[int]:
        """Return 1 for the tokens that are trained on."""
        last = max((turn for turn in episode.turn_ids if turn is not None), default=None)
        whole = self._script.environment_credit != "last_turn"
        return [int(turn is not None and (whole or turn == last)) for turn in episode.turn_ids]

    def reward(self, episode: Episode) -> float | None:
        """Return the sum of an episode's rewards, None where it has none."""
        if episode.failed or (episode.unfinished and self._script.environment_unfinished == "unscored"):
            return None
        return 0.0 if self._is_worthless(episode) else math.fsum(turn.reward for turn in episode.turns)

    def turn_rewards(self, episode: Episode) -> list[float]:
        """Return the rewards of the policy's turns, of an episode that has a reward."""
        rewards = [turn.reward for turn in episode.own_turns[1:]]
        return [0.0] * len(rewards) if self._is_worthless(episode) else rewards

    def _is_worthless(self, episode: Episode) -> bool:
        return bool(episode.unfinished) and self._script.environment_unfinished == "zero"

    def completions(self) -> list[list[Message]]:
        """Return the rank's episodes as TRL's completions: the messages after the first observation."""
        return [one.transcript()[len(one.opening) :] or [{"role": "assistant", "content": ""}] for one in self.played]

    def token_advantages(self, trainer: Any, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the advantages of ``environment_credit: per_turn``: per token, (B, T), and of the rows of all ranks.

        A turn's is of the rewards from it on, compared with those of the same turn in the group's other episodes,
        wherever these were played. A row's, for people, is the mean over its tokens. The records get each turn's.
        """
        if self._script.environment_credit != "per_turn":
            return None
        weight = float(trainer.reward_weights[0])  # of the environment's reward, the only one
        own = [(one.row, self.reward(one), [weight * worth for worth in self.turn_rewards(one)]) for one in self.played]
        found = compared_turns(gather_object(own), trainer.num_generations, trainer.scale_rewards)
        for row, record in enumerate(self.records):
            for turn, said in enumerate(record["turns"]):
                said |= {"advantage": round(found[row, turn], 4)} if (row, turn) in found else {}
        advantages_BT = torch.zeros(output["completion_ids"].shape)
        means = []
        for place, one in enumerate(self.played):
            of_tokens = [found.get((one.row, turn), 0.0) for turn in one.turn_ids]
            advantages_BT[place, : len(of_tokens)] = torch.tensor(of_tokens)
            means.append(math.fsum(of_tokens) / max(1, sum(turn is not None for turn in one.turn_ids)))
        return advantages_BT.to(output["advantages"]), torch.tensor(gather_object(means))

    def _log(self, trainer: Any) -> None:
        mode = "train" if trainer.model.training else "eval"
        if trainer.model.training and self._args.report_samples > 0:
            self.records = gather_object([one.record() for one in self.played])
        gathered = gather_object([self._facts(one) for one in self.played])
        for name in dict.fromkeys(name for row in gathered for name in row):
            values = [row[name] for row in gathered if name in row]
            trainer._metrics[mode][f"episodes/{name}"].append(math.fsum(values) / len(values))

    def _facts(self, episode: Episode) -> dict[str, float]:
        """Return an episode's share in the metrics; those of roles and of several environments have names of theirs."""
        found = {**_numbers(episode), "turns": float(len(episode.own_actions))}
        found |= {"unfinished": float(bool(episode.unfinished)), "unscored": float(episode.failed is not None)}
        role, reward = episode.turns[-1].info.get("role") if episode.turns else None, self.reward(episode)
        if role is not None and reward is not None:
            found[f"reward_{str(role).lower()}"] = reward
        if label := self._labels.get((episode.spec, episode.arguments)):
            known = {"reward": reward, **{name: found.get(name) for name in ("won", "legal")}}
            found |= {f"{name}_{label}": value for name, value in known.items() if value is not None}
        return found


def renderer_for(trainer: Any) -> Renderer:
    """Return the renderer of a trainer's template, which knows at which tokens its sampling stops."""
    return Renderer(trainer.processing_class, trainer.chat_template_kwargs, trainer.eos_token_ids)


def labels_of(environments: Sequence[tuple[str, dict[str, Any], float]]) -> dict[tuple[str, str], str]:
    """Return what metrics call each of several environments, by name and arguments as JSON; nothing for one alone.

    That is the name in its library or file, with its place in the mixture where another one has it too.
    """
    keys = list(dict.fromkeys((spec, json.dumps(given, sort_keys=True)) for spec, given, _ in environments))
    short = [spec.partition(":")[2] if spec.partition(":")[0] in LIBRARIES else split_spec(spec)[1] for spec, _ in keys]
    numbered = [name if short.count(name) == 1 else f"{name}_{place + 1}" for place, name in enumerate(short)]
    return dict(zip(keys, numbered, strict=True)) if len(keys) > 1 else {}


def compared_turns(
    episodes: Sequence[tuple[int, float | None, list[float]]], group: int, scale: str = "group"
) -> dict[tuple[int, int | None], float]:
    """Return the advantage of each turn: (row, turn) -> that of the rewards from the turn on, in its group.

    ``episodes`` are (row, reward, rewards of the turns); those without a reward are left out. ``scale`` is TRL's
    ``scale_rewards``: what is divided by, the standard deviation in the group or in the batch, or none.
    """
    found: dict[tuple[int, int | None], float] = {}
    scored = [(row, rewards) for row, reward, rewards in episodes if reward is not None]
    for turn in range(max((len(rewards) for _, rewards in scored), default=0)):
        to_come = {row: math.fsum(rewards[turn:]) for row, rewards in scored if len(rewards) > turn}
        for number in {row // group for row in to_come}:
            same = {row: value for row, value in to_come.items() if row // group == number}
            mean = statistics.fmean(same.values())
            values = list((same if scale == "group" else to_come).values())
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            divisor = 1.0 if scale == "none" else spread + _EPSILON
            found |= {(row, turn): (value - mean) / divisor for row, value in same.items()}
    return found


def _numbers(episode: Episode) -> dict[str, float]:
    """Return the numbers that the environment gave with its turns: their mean over the turns that have them.

    What it gives before any action counts where the episode was over then.
    """
    found: dict[str, list[float]] = {}
    for turn in episode.turns if len(episode.turns) == 1 and episode.done else episode.turns[1:]:
        for name, value in turn.info.items():
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
