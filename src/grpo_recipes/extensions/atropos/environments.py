"""Environments for Atropos: a base class for your own, and the shipped ``arithmetic`` and ``dataset``.

An environment needs two methods:

    class Doubles(RecipeEnv):
        def next_item(self):
            number = self.random.randrange(10)
            return {"prompt": f"Twice {number} is", "right": str(2 * number)}

        def score(self, item, text):
            return float(text.strip() == item["right"])

A recipe selects it with ``atropos_environment: doubles.py:Doubles``. With several turns, the sampled token ids stay
unchanged: only the messages between the turns are rendered. (atroposlib's ManagedServer renders the whole chat again,
which doubles the token at the end of each turn, and its ``completion`` masks earlier turns.)
"""

import asyncio
import inspect
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from pydantic import Field

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.atropos.access import ENDLESS
from grpo_recipes.extensions.atropos.server import (
    PromptTooLong,
    RunServer,
    RunServerConfig,
    build_generation_params,
    record_requests,
)
from grpo_recipes.numbers import find_reward_problem
from grpo_recipes.recipe.keys import catalogue, nearest_of
from grpo_recipes.recipe.registry import SOURCE_REWARD, rewards
from grpo_recipes.recipe.user_code import copy_path, spec_problem
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score, call_reward, is_user_reward, make_reward
from grpo_recipes.rollouts.renderer import Renderer, read_stop_tokens
from grpo_recipes.rollouts.turns import Message, Turn

MASKED, UNSAMPLED = -100, 1.0  # mask and log-prob of a token that is not trained on
ENVIRONMENT = "environment"  # key of generation_params: name of the environment, for metrics

Item = Mapping[str, Any]
EpisodeScore = float | Sequence[float] | None  # score of an episode, or of each of its turns; None: unscored
Fetched = Callable[[str, str | None, str], Path | None]  # hub id, configuration, split -> folder, as in data.problems


class RecipeEnvConfig(BaseEnvConfig):
    """The configuration of a ``RecipeEnv``; a recipe sets its fields in ``atropos_environment_args``."""

    use_wandb: bool = Field(False, description="Whether the environment logs to W&B, in addition to the trainer.")
    wandb_name: str | None = Field(None, description="Name of the environment; by default, the name of the class.")
    ensure_scores_are_not_same: bool = Field(
        False, description="Drop groups with equal scores; mean rewards then leave these groups out."
    )
    include_messages: bool = Field(False, description="Send texts together with the token ids.")
    steps_per_eval: int = Field(0, description="Steps between two calls of evaluate; 0 never calls it.")
    total_steps: int = Field(ENDLESS, description="Steps of the environment; the launch ends it with the run.")
    max_batches_offpolicy: int = Field(2, description="Batches that may wait for the trainer.")
    max_num_workers_per_node: int = Field(64, description="Most groups that are sampled at the same time.")
    seed: int = Field(0, description="Seed of the items; by default, the recipe's seed.")
    temperature: float = Field(1.0, description="Sampling temperature; the launch sets the recipe's.")
    max_tokens: int = Field(256, description="Most tokens of a turn; by default, max_completion_length.")
    turn_advantages: bool = Field(
        False,
        description="Whether scores of turns become advantages of tokens: score minus mean of the turn in the group.",
    )
    system_prompt: str | None = Field(None, description="System message of every prompt without one.")
    chat_template: str | None = Field(None, description="Chat template that replaces the tokenizer's.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")


class Episode:
    """One row of a group: the token ids that the policy has read and written, with masks and log-probs."""

    def __init__(self, environment: "RecipeEnv", prompt: list[int]):
        """Create an episode with the token ids of its prompt, none of them trained on, and without turns."""
        self._environment = environment
        self.tokens = list(prompt)
        self.masks = [MASKED] * len(prompt)
        self.logprobs = [UNSAMPLED] * len(prompt)
        self.turns: list[range] = []  # indices of the tokens of each turn of the policy
        self.texts: list[str] = []  # text of each turn
        self.complete = True  # whether the policy ended the last turn itself, below the token limit

    @property
    def text(self) -> str:
        """The text of the last turn."""
        return self.texts[-1]

    async def turn(self, messages: str | list[Message]) -> str:
        """Send messages to the policy, append messages and answer to the episode, and return the answer.

        If the token limit leaves no token for an answer, send nothing, append only an empty text to ``texts``, set
        ``complete`` to false and return "".
        """
        between = self._environment.renderer.between(_to_messages(messages), self.tokens)
        room = self._environment.config.max_token_length - len(self.tokens) - len(between)
        if room < 1:
            self.texts.append("")
            self.complete = False
            return ""
        ((ids, logprobs, reason),) = await self._environment.sample([*self.tokens, *between], 1)
        self.tokens += between
        self.masks += [MASKED] * len(between)
        self.logprobs += [UNSAMPLED] * len(between)
        self.append_turn(ids, logprobs, reason)
        return self.text

    def append_turn(self, ids: list[int], logprobs: list[float], reason: str) -> None:
        """Append the sampled tokens of a turn to the episode, all trained on.

        ``reason`` is vLLM's finish reason: "stop" sets ``complete`` to true, any other to false.
        """
        self.turns.append(range(len(self.tokens), len(self.tokens) + len(ids)))
        self.tokens += ids
        self.masks += ids
        self.logprobs += logprobs
        self.texts.append(self._environment.renderer.text(ids))
        self.complete = reason == "stop"


class RecipeEnv(BaseEnv):
    """Base class of environments: implement ``next_item``, and ``score`` or, with several turns, ``play``."""

    env_config_cls = RecipeEnvConfig
    server_cls = RunServer
    config: Any

    def __init__(self, config: RecipeEnvConfig, server_configs: list[Any], slurm: bool = False, testing: bool = False):
        """Set ``config.wandb_name`` if it is missing; raise ConfigError if there is no chat template."""
        config.wandb_name = config.wandb_name or self.name or type(self).__name__
        super().__init__(config, server_configs, slurm, testing)
        self.tokenizer.chat_template = config.chat_template or self.tokenizer.chat_template
        if self.tokenizer.chat_template is None:
            raise config_error("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")
        self.renderer = Renderer(self.tokenizer, config.chat_template_kwargs, read_stop_tokens(config.tokenizer_name))
        self.random = random.Random(config.seed)
        self.server.max_n_completions = config.group_size  # otherwise a group of more than 8 needs several requests

    @classmethod
    def config_init(cls) -> tuple[RecipeEnvConfig, list[RunServerConfig]]:
        """Return a default configuration, and a list with a default server for atroposlib's command line."""
        return cls.env_config_cls(), [RunServerConfig()]

    @classmethod
    def check_config(cls, config: Any, copies: Path | None = None, fetched: Fetched | None = None) -> None:
        """Raise ConfigError if a configuration is wrong; a subclass overrides this, here every configuration is valid.

        `grpo check --deep` calls this without creating an environment. ``copies`` is the folder with the run's copies
        of the user's code, ``fetched`` finds downloaded hub datasets.
        """

    # --- methods of a subclass -------------------------------------------------------------------------------------

    def next_item(self) -> Item | None:
        """Return the next item, drawn with ``self.random``: a mapping with ``prompt``, a text or a list of messages.

        None means that no group starts now. Here raise NotImplementedError.
        """
        raise NotImplementedError("an environment must define next_item")

    def score(self, item: Item, text: str) -> Any:
        """Return the score of a completion, or None if it is unscored; may be async. Here raise NotImplementedError."""
        raise NotImplementedError("an environment must define score or play")

    async def play(self, item: Item, episode: Episode) -> EpisodeScore:
        """Play an episode after its first turn; return its score, a list of its turns' scores, or None if unscored.

        ``await episode.turn(text)`` plays another turn. The scores of all turns are added. A subclass overrides this to
        play more turns; here return ``score`` of the first turn.
        """
        score = self.score(item, episode.text)
        value: EpisodeScore = await score if inspect.isawaitable(score) else score
        return value

    async def scores(self, item: Item, episodes: list[Episode]) -> Sequence[EpisodeScore]:
        """Play the other turns of all episodes of a group concurrently; return the score of each, None if unscored."""
        return await asyncio.gather(*(self.play(item, episode) for episode in episodes))

    # --- methods for atroposlib ------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Do nothing; called once, before the first item."""

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Do nothing: the recipe's benchmarks test the trained model."""

    async def register_env(self) -> None:
        """Register at run-api, then seed ``random`` with the configured seed, the name and the training step.

        The step lets a resumed training get new items.
        """
        await super().register_env()
        self.random.seed(f"{self.config.seed}/{self.config.wandb_name}/{self.curr_step}")

    async def get_next_item(self) -> Item | None:
        """Return ``next_item()``, for atroposlib."""
        return self.next_item()

    async def collect_trajectories(self, item: Item) -> tuple[dict[str, Any] | None, list[Item]]:
        """Sample the first turn of each episode, play and score the episodes; return the group and [] (no backlog).

        The configured system prompt comes first, unless the item has one. The group is None if no episode has a score.
        Raise PromptTooLong if the prompt leaves less than ``max_tokens`` for the completion, and ValueError for a score
        that is not finite.
        """
        messages = _to_messages(item["prompt"])
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        prompt, limit = self.renderer.prompt(Turn(messages)), self.config.max_token_length - self.config.max_tokens
        if len(prompt) > max(1, limit):
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens, at most {limit} are allowed")
        with record_requests() as requests:
            episodes = [Episode(self, prompt) for _ in range(self.config.group_size)]
            for episode, sampled in zip(episodes, await self.sample(prompt, len(episodes)), strict=True):
                episode.append_turn(*sampled)
            scores = await self.scores(item, episodes)
        params = {**build_generation_params(requests), ENVIRONMENT: self.config.wandb_name}
        return build_group(episodes, scores, params, turn_advantages=self.config.turn_advantages), []

    async def sample(self, ids: list[int], count: int) -> list[tuple[list[int], list[float], str]]:
        """Sample ``count`` completions of the prompt ``ids``; return token ids, log-probs and finish reason of each."""
        limits = {"max_tokens": self.config.max_tokens, "temperature": self.config.temperature}
        _, sampled, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            input_ids=ids, n=count, **limits
        )
        return list(zip(sampled, logprobs, reasons, strict=True))


def build_group(
    episodes: Sequence[Episode], scores: Sequence[EpisodeScore], params: dict[str, Any], turn_advantages: bool = False
) -> dict[str, Any] | None:
    """Build Atropos' JSON of a group from episodes and scores; return None if no episode has a score.

    ``params`` are the group's generation_params. ``turn_advantages`` gives each token the score of its turn minus
    the mean of that turn in the group. An unscored episode gets the group's mean score, and is not trained on.
    Raise ValueError for a score that is not finite.
    """
    turn_scores = [None if score is None else _list_turn_scores(score) for score in scores]
    sums = [None if turns is None else math.fsum(turns) for turns in turn_scores]
    known_sums = [total for total in sums if total is not None]
    if not known_sums:
        return None
    mean_sum = statistics.fmean(known_sums)
    group: dict[str, Any] = {
        "tokens": [episode.tokens for episode in episodes],
        "masks": [episode.masks for episode in episodes],
        "scores": [mean_sum if total is None else total for total in sums],
        "inference_logprobs": [episode.logprobs for episode in episodes],
        "generation_params": params,
    }
    if len(known_sums) < len(episodes):
        group["overrides"] = [{"set_advantage_to_zero": True} if total is None else {} for total in sums]
    if turn_advantages:
        # Tokens outside of turns, and tokens of turns without a score, get 0.
        scores_of_turns = [turns or [] for turns in turn_scores]
        indices = range(max(map(len, scores_of_turns)))
        means = [
            statistics.fmean([turns[index] for turns in scores_of_turns if len(turns) > index]) for index in indices
        ]
        group["advantages"] = []
        for episode, turns in zip(episodes, scores_of_turns, strict=True):
            row = [0.0] * len(episode.tokens)
            for tokens, score, mean in zip(episode.turns, turns, means, strict=False):
                row[tokens.start : tokens.stop] = [score - mean] * len(tokens)
            group["advantages"].append(row)
    return group


def _list_turn_scores(score: float | Sequence[float]) -> list[float]:
    """Return the scores of turns as floats, or the only score of an episode as a list of one.

    Raise ValueError if the list is empty, or a score or the sum of all is not finite or too large.
    """
    scores = [float(value) for value in (score if isinstance(score, Sequence) else [score])]
    problem = next(filter(None, map(find_reward_problem, scores)), None) or find_reward_problem(math.fsum(scores))
    if not scores or problem:
        reason = problem or "it is empty"
        raise ValueError(
            f"the score {score!r} can't be trained on ({reason}). Fix: return a number, or a list of numbers per turn"
        )
    return scores


def _to_messages(messages: str | list[Message]) -> list[Message]:
    """Return a text as a list with one user message; return a list of messages unchanged."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


class ArithmeticEnv(RecipeEnv):
    """An endless stream of sums of two digits: the smoke task, in the format that its model was trained on."""

    name = "arithmetic"

    def next_item(self) -> Item:
        """Return a random sum of two digits as ``prompt``, and its result as ``answer``."""
        first, second = self.random.randrange(10), self.random.randrange(10)
        return {"prompt": f"{first}+{second}=", "answer": str(first + second)}

    def score(self, item: Item, text: str) -> float:
        """Return 1 if the text has the right number in answer tags, else 0, like the reward pure_accuracy_math."""
        (score,) = make_reward("pure_accuracy_math", _make_config({}))([text], answer=[item["answer"]])
        assert score is not None
        return score


class DatasetEnvConfig(RecipeEnvConfig):
    """The configuration of ``DatasetEnv``; fields with the name of a recipe key have the same meaning."""

    dataset_name: str = Field("", description="Hub id, local file or folder.")
    dataset_config: str | None = Field(None, description="Configuration of the dataset.")
    dataset_train_split: str = Field("train", description="Split of the dataset.")
    dataset_prompt_column: str = Field("problem", description="Column of the problem: a text or messages.")
    dataset_solution_column: str = Field("answer", description="Column of the reference solution.")
    dataset_solution_marker: str | None = Field(
        None,
        description="Last text before the answer in the solution column, e.g. '####' for GSM8K.",
    )
    reward: str = Field("pure_accuracy_math", description="A shipped reward, or module:function or file.py:function.")
    reward_args: dict[str, Any] = Field({}, description="Recipe keys of the reward, e.g. answer_matching.")
    reward_timeout: float = Field(5.0, description="Most seconds of math_verify, or of your reward, for a completion.")
    reward_memory_gib: float = Field(4.0, description="Memory limit of the reward in GiB.")


class DatasetEnv(RecipeEnv):
    """Problems of a dataset, scored by a reward; every pass over the dataset has a new random order."""

    name = "dataset"
    env_config_cls = DatasetEnvConfig
    copies: Path | None = None  # folder with the run's copies of the user's rewards
    fetched: Fetched | None = None  # finds the hub datasets that were downloaded for the run

    def __init__(self, *args: Any, **kwargs: Any):
        """Load the reward, start its processes, and read the dataset; raise ConfigError if one of them is wrong.

        Raise RewardFailed if a process can't load the reward.
        """
        super().__init__(*args, **kwargs)
        self._reward = load_reward(self.config, self.copies)
        self._problems = load_problems(self.config, self.fetched)
        self._order: list[int] = []  # indices of the problems that remain in this pass

    @classmethod
    def check_config(cls, config: Any, copies: Path | None = None, fetched: Fetched | None = None) -> None:
        """Read the dataset and find the reward; raise ConfigError if no problem is usable or the reward is unknown.

        No reward process is started.
        """
        load_reward(config, copies, start=False)
        load_problems(config, fetched)

    def next_item(self) -> Item:
        """Return the next problem: ``prompt``, ``answer`` and the other scalar columns.

        After the last problem, a new pass starts in a new random order.
        """
        if not self._order:
            self._order = list(range(len(self._problems)))
            self.random.shuffle(self._order)
        row: Item = self._problems[self._order.pop()]
        return row

    async def scores(self, item: Item, episodes: list[Episode]) -> list[float | None]:
        """Return the scores of a group's last turns, None if unscored, from a single call of the reward in a thread."""
        rows = len(episodes)
        columns = {name: [value] * rows for name, value in item.items() if name != "prompt"}
        columns |= {"prompts": [item["prompt"]] * rows}
        columns |= {"completion_ids": [[episode.tokens[index] for index in episode.turns[-1]] for episode in episodes]}
        completions = [[{"role": "assistant", "content": episode.text}] for episode in episodes]
        scores = await asyncio.get_running_loop().run_in_executor(None, self._reward, completions, columns)
        return [score.value for score in scores]


def _make_config(values: Mapping[str, Any]) -> Any:
    """Return an object with every recipe key as an attribute: ``values``, and the defaults of all other keys."""
    return SimpleNamespace(**{key: entry["default"] for key, entry in catalogue().items()} | dict(values))


def load_problems(config: DatasetEnvConfig, fetched: Fetched | None = None) -> Any:
    """Read a dataset and return its problems with ``prompt`` (a chat), ``answer`` and the other scalar columns.

    Duplicates and unusable rows are dropped. ``fetched`` finds downloaded hub datasets. Raise ConfigError if no
    dataset is given, or no problem remains.
    """
    from grpo_recipes.data import problems as data  # imports TRL

    if not config.dataset_name:
        fix = "add dataset_name to atropos_environment_args"
        raise config_error("dataset_name", "the environment 'dataset' needs a dataset", fix)
    args, counts = _make_config({**config.model_dump(), "reward_funcs": [config.reward]}), data.Counts()
    source = data.get_train_source(args)
    rows = data.load_rows(source, args, fetched)
    problems = data.collect_rows(data.drop_duplicates(data.make_problems(rows, source, args, counts), counts))
    if len(problems) == 0:
        message = "; ".join([f"'{config.dataset_name}' has no usable problem", *counts.lines()])
        raise config_error("dataset_name", message, "set another dataset or other columns")
    return problems


def load_reward(
    config: DatasetEnvConfig, copies: Path | None, start: bool = True
) -> Callable[[list[Any], dict[str, Any]], list[Score]]:
    """Return a function that scores completions, given their columns; raise ConfigError for an unknown reward or key.

    The user's rewards, and shipped rewards that may hang, run in child processes. The processes start now; if
    ``start`` is false, they never start, and the function can't be called. ``copies`` is the folder with the run's
    copies of the user's code. Raise RewardFailed if a process can't load the reward.
    """
    name, known = config.reward, {key: entry for key, entry in rewards().items() if key != SOURCE_REWARD}
    if is_user_reward(name):
        copied = copies is not None and copy_path(name, copies).exists()
        if not copied and (problem := spec_problem(name, "reward")):
            raise ConfigError(problem)
    elif name not in known:
        fix = f"set {nearest_of(name, known) or 'one of ' + ', '.join(known)}"
        raise config_error("reward", f"unknown reward '{name}'", fix)
    keys = known[name].keys if name in known else ()
    for key in config.reward_args:
        if key not in keys:
            fix = f"use {nearest_of(key, keys) or 'some of ' + ', '.join(keys)}" if keys else "remove reward_args"
            raise config_error("reward_args", f"'{name}' has no argument '{key}'", fix)
    if name in known and not known[name].in_children:
        function = make_reward(name, _make_config({"max_completion_length": config.max_tokens, **config.reward_args}))
        return lambda completions, columns: call_reward(
            function, {"completions": completions, **columns}, len(completions)
        )
    pool = RewardPool(name, copies=copies, timeout=config.reward_timeout, memory_gib=config.reward_memory_gib)
    # The children end with the thread that started them, and only this thread may call them.
    thread = ThreadPoolExecutor(1)
    if start:
        thread.submit(pool.start).result()
    return lambda completions, columns: thread.submit(pool.score, name, completions, columns).result()
