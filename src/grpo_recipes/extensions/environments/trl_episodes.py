"""Episodes of TRL environments: the policy answers a prompt of a dataset, and may call methods of the environment.

``ToolEpisodes`` finds the calls. They are actions of an environment in a child process, which keeps its state.
"""

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_recipes.extensions.environments.episode import Episode, Tokens
from grpo_recipes.extensions.environments.episodes import Episodes
from grpo_recipes.extensions.environments.stage import hash_turn, parse_turn
from grpo_recipes.extensions.environments.tool_episodes import ToolEpisodes
from grpo_recipes.extensions.environments.trl_environments import PLAY, SavedEnvironment, make_setup
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.datafiles import ENVIRONMENTS
from grpo_recipes.recipe.registry import SOURCE_REWARD
from grpo_recipes.rewards.chance import make_call_seed
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.source import PlayedCompletion, SamplingTrainer


class TRLEpisodes(ToolEpisodes):
    """Completions for recipes with a TRL environment: a class without ``step``, and a dataset.

    If the calls of a turn exceed a limit, they change nothing in the environment, and the policy reads the error.
    """

    _function = PLAY

    def __init__(self, script_args: ScriptArguments, args: GRPOConfig, run_dir: Path):
        super().__init__(script_args, args, run_dir)
        self._specs = {}  # the class is loaded by its own name, like rewards in the same file
        # By row: the episode as the child process sees it. Its actions are the calls of the turns that ended in time.
        self._sent: dict[int, Episode] = {}

    def _make_episode(self, row_index: int, row: dict[str, Any]) -> Episode:
        """Return the episode of a dataset row before its first turn, and store a copy for the child process.

        The class's ``reset`` gets the columns of the row as arguments.
        """
        setup = make_setup(partial(getattr, self._script), self._copies, row)
        seed = make_call_seed(self._args.seed, f"{self._name}/{row_index}")
        fields = row_index, self._script.environment, setup, seed
        self._sent[row_index] = Episode(*fields)
        return Episode(*fields)

    def _request_answers(
        self, episodes: Sequence[Episode], give_up_after: int | None, stopped: Callable[[], bool]
    ) -> list[Score]:
        """Reset the environments, or run the calls of the last turns; return a turn as JSON for each episode.

        If calls fail as a whole, for example by a limit, their turn is forgotten, and the policy reads the reason.
        The number of failures has no limit: ``give_up_after`` is not used.
        """
        calls = [self._find_calls(episode) for episode in episodes]
        asking = [index for index, episode in enumerate(episodes) if calls[index] or not episode.actions]
        for index in asking:
            texts = [json.dumps([call._asdict() for call in calls[index]])] if calls[index] else []
            self._sent[episodes[index].row].actions += texts
        scores = dict(zip(asking, self._ask([episodes[index] for index in asking], stopped), strict=True))
        for index, score in scores.items():
            if calls[index] and score.reason is not None:
                self._sent[episodes[index].row].actions.pop()
                scores[index] = self._write_turn(episodes[index], [(call, score) for call in calls[index]])
        return [scores.get(index) or self._write_turn(episode, []) for index, episode in enumerate(episodes)]

    def _write_turn(self, episode: Episode, results: Sequence[Any]) -> Score:
        """Return the result of ``_make_turn`` as JSON, in a Score."""
        return Score(json.dumps(asdict(self._make_turn(episode, results))))

    def _ask(self, episodes: Sequence[Episode], stopped: Callable[[], bool]) -> list[Score]:
        """Send the last actions to the child processes; return the environments' turns as JSON, or failures.

        Store the digest of each turn, to check a replay.
        """
        sent = [self._sent[episode.row] for episode in episodes]
        scores = Episodes._request_answers(self, sent, None, stopped)
        for episode, score in zip(sent, scores, strict=True):
            episode.last_digest = hash_turn(score.value) if score.reason is None else episode.last_digest
        return scores

    def _make_output(self, trainer: SamplingTrainer) -> dict[str, Any]:
        """End the episodes; return TRL's columns and the column ``environments``, for rewards.

        Only if ``reward_funcs`` has the reward ``environment``, ``get_reward`` is called, and an episode is unscored if
        its end fails. All ranks raise Stopped if any rank has seen a stop request.
        """
        playing = self._add_last_actions()
        with trainer.preemption.cutting_short(), trainer.rows.phase("score"):
            scores = self._ask(playing, trainer.preemption.stop.cuts)
        trainer.preemption.stop_if_agreed()
        environments = self._restore(self._save_environments(playing, scores))
        return {**Episodes._make_output(self, trainer), ENVIRONMENTS: environments}

    def _add_last_actions(self) -> list[Episode]:
        """Add the action that ends an episode to each that has not failed; return these episodes."""
        playing = [episode for episode in self.played if not episode.failed]
        for episode in playing:
            self._sent[episode.row].actions.append(json.dumps({"reward": self._is_rewarded}))
        return playing

    @property
    def _is_rewarded(self) -> bool:
        """Whether the recipe uses the reward of ``get_reward``."""
        return SOURCE_REWARD in self._script.reward_funcs

    def _save_environments(self, playing: Sequence[Episode], scores: Sequence[Score]) -> list[str]:
        """Store the rewards of episodes that ended with ``scores``; return each episode's environment as JSON."""
        saved = {episode.row: {"failed": episode.failed} for episode in self.played}
        for episode, score in zip(playing, scores, strict=True):
            if score.reason is not None:
                episode.failed = score.reason if self._is_rewarded else None
                saved[episode.row] = {"failed": score.reason}
                continue
            turn = parse_turn(score.value)
            saved[episode.row] = {"spec": self._script.environment, "state": str(turn.info["state"])}
            episode.turns[-1] = replace(episode.turns[-1], reward=turn.reward)
        return [json.dumps(saved[episode.row]) for episode in self.played]

    def _restore(self, saved: Sequence[str]) -> list[Any]:
        """Return environments, from JSON, as rewards get them: as texts, which another process loads, or loaded."""
        environments: list[Any] = [SavedEnvironment(text) for text in saved]
        for environment in environments:
            environment.copies = self._copies
        return pickle.loads(pickle.dumps(environments)) if self._script.reward_isolation == "none" else environments

    def benchmark_settings(self) -> dict[str, Any]:
        """Return the keys of the environment and of tools with their values, and a hash of the class's file."""
        names = ("environment", "environment_args")
        return {**{name: getattr(self._script, name) for name in names}, **super().benchmark_settings()}

    def play(
        self, prompts: Sequence[Tokens], seeds: Sequence[int], trainer: SamplingTrainer,
        sample: Callable[[list[int], list[Tokens]], list[Tokens | None]], rows: Sequence[Mapping[str, Any]] = (),
    ) -> list[PlayedCompletion | None]:  # fmt: skip
        """Play an episode per row; see ``Source.play``. ``reset`` completes the prompts, which are rendered here.

        The columns of a completion are its prompt, its reward and its environment.
        """
        self._name = ""
        self._sent.clear()
        self.played = [self._make_episode(seed, dict(row)) for seed, row in zip(seeds, rows, strict=True)]
        self._step_environments_locally(self.played, trainer)
        self._play_turns(seeds, trainer, sample)
        playing = self._add_last_actions()
        saved = self._save_environments(playing, self._ask(playing, lambda: False))
        return self._collect_played(
            [
                {
                    "prompt": episode.opening or row["prompt"], "episode_reward": self.reward(episode),
                    "episode_failed": episode.failed, ENVIRONMENTS: text,
                }
                for episode, row, text in zip(self.played, rows, saved, strict=True)
            ]
        )  # fmt: skip

    def restore_columns(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a completion with the environment as rewards get it."""
        (environment,) = self._restore([columns[ENVIRONMENTS]])
        return {**columns, ENVIRONMENTS: environment}
