"""Environments for Atropos: a base for your own, in which two methods make one, and the two that a recipe can name.

    class Doubles(RecipeEnv):
        def next_item(self):
            number = self.random.randrange(10)
            return {"prompt": f"Twice {number} is", "right": str(2 * number)}

        def score(self, item, text):
            return float(text.strip() == item["right"])

A recipe names it as ``atropos_environment: doubles.py:Doubles``. The token ids of the policy stay as they were sampled,
over several turns too: what is said between them is rendered alone. (atroposlib's ManagedServer renders the whole chat
again, which doubles the token at the end of each turn, and its ``completion`` masks earlier turns.)
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
from transformers.utils import cached_file

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.atropos.access import ENDLESS
from grpo_recipes.extensions.atropos.server import PromptTooLong, RunServer, RunServerConfig, generation_params, noting
from grpo_recipes.numbers import reward_problem
from grpo_recipes.recipe.keys import catalogue, nearest_of
from grpo_recipes.recipe.registry import SOURCE_REWARD, rewards
from grpo_recipes.recipe.user_code import copy_path, spec_problem
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score, call_reward, is_user_reward, make_reward
from grpo_recipes.rollouts.renderer import Renderer
from grpo_recipes.rollouts.turns import Message, Turn
from grpo_recipes.runs.rundir import json_mapping

MASKED, UNSAMPLED = -100, 1.0  # Atropos' signs for a token that is not trained on, in masks and log-probs
ENVIRONMENT = "environment"  # in generation_params: its name, for metrics

Item = Mapping[str, Any]
Worth = float | Sequence[float] | None  # of an episode, or of each of its turns; None: unscored
Fetched = Callable[[str, str | None, str], Path | None]  # hub id, configuration, split -> folder, as in data.problems


class RecipeEnvConfig(BaseEnvConfig):
    """The configuration of an environment of ours; ``atropos_environment_args`` of a recipe are its fields."""

    use_wandb: bool = Field(False, description="Whether it logs to W&B itself; the trainer does in any case.")
    wandb_name: str | None = Field(None, description="Its name; the class's by default.")
    ensure_scores_are_not_same: bool = Field(
        False, description="Drop groups whose scores are all the same; mean rewards are then of a selection."
    )
    include_messages: bool = Field(False, description="Send texts beside the token ids.")
    steps_per_eval: int = Field(0, description="Steps between two calls of evaluate; 0 for none.")
    total_steps: int = Field(ENDLESS, description="Steps after which it ends; the launch ends it with the run.")
    max_batches_offpolicy: int = Field(2, description="Batches that may wait for the trainer.")
    max_num_workers_per_node: int = Field(64, description="Most groups under way at once.")
    seed: int = Field(0, description="Of the items; the recipe's by default.")
    temperature: float = Field(1.0, description="Of the sampling; the recipe's.")
    max_tokens: int = Field(256, description="Most tokens of one turn; max_completion_length by default.")
    turn_advantages: bool = Field(
        False,
        description="Whether scores by turn become advantages by token: the turn's score minus its mean in the group.",
    )
    system_prompt: str | None = Field(None, description="Before every prompt that has no system message.")
    chat_template: str | None = Field(None, description="Instead of the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For the chat template.")


class Episode:
    """One row of a group, after its first turn: what the policy has read and written, token by token."""

    def __init__(self, environment: "RecipeEnv", prompt: list[int]):
        self._environment = environment
        self.tokens = list(prompt)
        self.masks = [MASKED] * len(prompt)
        self.logprobs = [UNSAMPLED] * len(prompt)
        self.turns: list[range] = []  # places of the tokens of each of the policy's turns
        self.texts: list[str] = []  # of these
        self.complete = True  # whether the last one ended itself, and was not cut

    @property
    def text(self) -> str:
        """What the policy said last."""
        return self.texts[-1]

    async def turn(self, said: str | list[Message]) -> str:
        """Say something to the policy and return its answer, an empty text where no room is left for one."""
        between = self._environment.renderer.between(_messages(said), self.tokens)
        room = self._environment.config.max_token_length - len(self.tokens) - len(between)
        if room < 1:
            self.texts.append("")
            self.complete = False
            return ""
        ((ids, logprobs, reason),) = await self._environment.sample([*self.tokens, *between], 1)
        self.tokens += between
        self.masks += [MASKED] * len(between)
        self.logprobs += [UNSAMPLED] * len(between)
        self.enter(ids, logprobs, reason)
        return self.text

    def enter(self, ids: list[int], logprobs: list[float], reason: str) -> None:
        """Append a turn as it was sampled."""
        self.turns.append(range(len(self.tokens), len(self.tokens) + len(ids)))
        self.tokens += ids
        self.masks += ids
        self.logprobs += logprobs
        self.texts.append(self._environment.renderer.text(ids))
        self.complete = reason == "stop"


class RecipeEnv(BaseEnv):
    """A subclass has ``next_item`` and ``score``; one of several turns, in the place of ``score``, ``play``."""

    env_config_cls = RecipeEnvConfig
    server_cls = RunServer
    config: Any

    def __init__(self, config: RecipeEnvConfig, server_configs: list[Any], slurm: bool = False, testing: bool = False):
        config.wandb_name = config.wandb_name or self.name or type(self).__name__
        super().__init__(config, server_configs, slurm, testing)
        self.tokenizer.chat_template = config.chat_template or self.tokenizer.chat_template
        if self.tokenizer.chat_template is None:
            raise config_error("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")
        self.renderer = Renderer(self.tokenizer, config.chat_template_kwargs, _stops(config.tokenizer_name))
        self.random = random.Random(config.seed)
        self.server.max_n_completions = config.group_size  # else a group of more than 8 takes several requests

    @classmethod
    def config_init(cls) -> tuple[RecipeEnvConfig, list[RunServerConfig]]:
        """Return the defaults; a list, since atroposlib takes no address from a server that stands alone."""
        return cls.env_config_cls(), [RunServerConfig()]

    @classmethod
    def look(cls, config: Any, copies: Path | None = None, fetched: Fetched | None = None) -> None:
        """Raise a ConfigError for what is wrong with a configuration; called by checks, which make no environment."""

    # --- what a subclass has ---------------------------------------------------------------------------------------

    def next_item(self) -> Item | None:
        """Return what a group is sampled for, by ``self.random``: a mapping with ``prompt``, a text or messages."""
        raise NotImplementedError("an environment has next_item")

    def score(self, item: Item, text: str) -> Any:
        """Return the score of a completion, None where there is none; may be async."""
        raise NotImplementedError("an environment has score, or play")

    async def play(self, item: Item, episode: Episode) -> Worth:
        """Return the score of an episode, or one for each turn, of which the sum counts.

        Its first turn is there; ``await episode.turn(text)`` goes on.
        """
        worth = self.score(item, episode.text)
        return await worth if inspect.isawaitable(worth) else worth

    async def scores(self, item: Item, episodes: list[Episode]) -> Sequence[Worth]:
        """Return what each episode of a group is worth, once it is over."""
        return await asyncio.gather(*(self.play(item, episode) for episode in episodes))

    # --- what atroposlib calls -------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Do nothing; called once, before the first item."""

    async def evaluate(self, *_: Any, **__: Any) -> None:
        """Do nothing: the recipe's benchmarks test the trained model."""

    async def register_env(self) -> None:
        """Register at run-api; the items then follow from the seed, the name and the step that training is at."""
        await super().register_env()
        self.random.seed(f"{self.config.seed}/{self.config.wandb_name}/{self.curr_step}")

    async def get_next_item(self) -> Item | None:
        """Return the next item."""
        return self.next_item()

    async def collect_trajectories(self, item: Item) -> tuple[dict[str, Any] | None, list[Item]]:
        """Sample a group and have it scored."""
        messages = _messages(item["prompt"])
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        prompt, most = self.renderer.prompt(Turn(messages)), self.config.max_token_length - self.config.max_tokens
        if len(prompt) > max(1, most):
            raise PromptTooLong(f"a prompt of {len(prompt)} tokens, where it may have {most}")
        with noting() as asked:
            episodes = [Episode(self, prompt) for _ in range(self.config.group_size)]
            for episode, sampled in zip(episodes, await self.sample(prompt, len(episodes)), strict=True):
                episode.enter(*sampled)
            worths = await self.scores(item, episodes)
        params = {**generation_params(asked), ENVIRONMENT: self.config.wandb_name}
        return scored(episodes, worths, params, by_turn=self.config.turn_advantages), []

    async def sample(self, ids: list[int], count: int) -> list[tuple[list[int], list[float], str]]:
        """Return token ids, their log-probs and the reason of the end of ``count`` completions."""
        limits = {"max_tokens": self.config.max_tokens, "temperature": self.config.temperature}
        _, sampled, logprobs, reasons = await self.server.tokens_and_logprobs_completion(
            input_ids=ids, n=count, **limits
        )
        return list(zip(sampled, logprobs, reasons, strict=True))


def scored(
    episodes: Sequence[Episode], worths: Sequence[Worth], params: dict[str, Any], by_turn: bool = False
) -> dict[str, Any] | None:
    """Return the group that Atropos takes; None where no episode has a score.

    ``by_turn`` gives each token the score of its turn minus the mean of that turn in the group. An episode without a
    score gets the group's mean, and is not trained on. ValueError for a score that is not a finite number.
    """
    rewards = [None if worth is None else _numbers(worth) for worth in worths]
    sums = [math.fsum(one) for one in rewards if one is not None]
    if not sums:
        return None
    mean = statistics.fmean(sums)
    group: dict[str, Any] = {
        "tokens": [one.tokens for one in episodes],
        "masks": [one.masks for one in episodes],
        "scores": [mean if one is None else math.fsum(one) for one in rewards],
        "inference_logprobs": [one.logprobs for one in episodes],
        "generation_params": params,
    }
    if len(sums) < len(episodes):
        group["overrides"] = [{"set_advantage_to_zero": True} if one is None else {} for one in rewards]
    if by_turn:
        group["advantages"] = _token_advantages(episodes, [one or [] for one in rewards])
    return group


def _token_advantages(episodes: Sequence[Episode], rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    turns = range(max(map(len, rewards)))
    means = [statistics.fmean([one[turn] for one in rewards if len(one) > turn]) for turn in turns]
    found = []
    for episode, own in zip(episodes, rewards, strict=True):
        advantages = [0.0] * len(episode.tokens)
        for places, reward, mean in zip(episode.turns, own, means, strict=False):
            advantages[places.start : places.stop] = [reward - mean] * len(places)
        found.append(advantages)
    return found


def _numbers(worth: float | Sequence[float]) -> list[float]:
    numbers = [float(one) for one in (worth if isinstance(worth, Sequence) else [worth])]
    problem = next(filter(None, map(reward_problem, numbers)), None) or reward_problem(math.fsum(numbers))
    if not numbers or problem:
        why = problem or "it is empty"
        raise ValueError(f"the score {worth!r} can't be trained on ({why}). Fix: return a number, or one per turn")
    return numbers


def _messages(said: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


def _stops(model: str) -> list[int]:
    """Return the tokens at which the server stops, beside the tokenizer's own: those of the generation config."""
    file = cached_file(model, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    found = (json_mapping(Path(file)) or {}).get("eos_token_id") if file else None
    return found if isinstance(found, list) else [] if found is None else [found]


class ArithmeticEnv(RecipeEnv):
    """Sums of two digits without an end: the smoke task, with prompts and answers as its model knows them."""

    name = "arithmetic"

    def next_item(self) -> Item:
        """Return a sum."""
        first, second = self.random.randrange(10), self.random.randrange(10)
        return {"prompt": f"{first}+{second}=", "answer": str(first + second)}

    def score(self, item: Item, text: str) -> float:
        """Return 1 for the right number in answer tags, else 0, as the smoke recipe's reward does."""
        (score,) = make_reward("pure_accuracy_math", _recipe({}))([text], answer=[item["answer"]])
        assert score is not None
        return score


class DatasetEnvConfig(RecipeEnvConfig):
    """The configuration of problems from a dataset; fields that are recipe keys too mean the same."""

    dataset_name: str = Field("", description="Hub id, local file or folder.")
    dataset_config: str | None = Field(None, description="Configuration of the dataset.")
    dataset_train_split: str = Field("train", description="Split that is read.")
    dataset_prompt_column: str = Field("problem", description="Column of the problem: a text, or messages.")
    dataset_solution_column: str = Field("answer", description="Column of the reference solution.")
    dataset_solution_marker: str | None = Field(
        None, description="Only what follows the last occurrence of this text in the solution, e.g. '####' for GSM8K."
    )
    reward: str = Field("pure_accuracy_math", description="A reward of ours, or module:function or file.py:function.")
    reward_args: dict[str, Any] = Field({}, description="Recipe keys of that reward, e.g. answer_matching.")
    reward_timeout: float = Field(5.0, description="Seconds that math_verify, or your own, may take for a completion.")
    reward_memory_gib: float = Field(4.0, description="Memory that it may take, in GiB.")


class DatasetEnv(RecipeEnv):
    """Problems of a dataset, shuffled anew each time they have all been drawn, scored by one reward."""

    name = "dataset"
    env_config_cls = DatasetEnvConfig
    copies: Path | None = None  # folder with the run's copies of the user's rewards
    fetched: Fetched | None = None  # where datasets of the hub are that were fetched for the run

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._reward = reward_of(self.config, self.copies)
        self._problems = problems_of(self.config, self.fetched)
        self._order: list[int] = []

    @classmethod
    def look(cls, config: Any, copies: Path | None = None, fetched: Fetched | None = None) -> None:
        """Read the dataset, and find the reward."""
        reward_of(config, copies, start=False)
        problems_of(config, fetched)

    def next_item(self) -> Item:
        """Return the next problem: ``prompt``, ``answer``, and the other scalar columns."""
        if not self._order:
            self._order = list(range(len(self._problems)))
            self.random.shuffle(self._order)
        row: Item = self._problems[self._order.pop()]
        return row

    async def scores(self, item: Item, episodes: list[Episode]) -> list[float | None]:
        """Return what the reward says of the group, which it sees at once."""
        rows = len(episodes)
        columns = {name: [value] * rows for name, value in item.items() if name != "prompt"}
        columns |= {"prompts": [item["prompt"]] * rows}
        columns |= {"completion_ids": [[one.tokens[place] for place in one.turns[-1]] for one in episodes]}
        completions = [[{"role": "assistant", "content": one.text}] for one in episodes]
        scores = await asyncio.get_running_loop().run_in_executor(None, self._reward, completions, columns)
        return [score.value for score in scores]


def _recipe(values: Mapping[str, Any]) -> SimpleNamespace:
    """Return what stands for a recipe's configs: the defaults of all keys, and these values."""
    return SimpleNamespace(**{key: entry["default"] for key, entry in catalogue().items()} | dict(values))


def problems_of(config: DatasetEnvConfig, fetched: Fetched | None = None) -> Any:
    """Return the problems of a dataset, ``prompt`` (a chat), ``answer`` and the other scalars; ConfigError without."""
    from grpo_recipes.data import problems as data  # which takes TRL

    if not config.dataset_name:
        fix = "add dataset_name to atropos_environment_args"
        raise config_error("dataset_name", "the environment 'dataset' names no dataset", fix)
    args, counts = _recipe(config.model_dump()), data.Counts()
    source = data.train_source(args)
    rows = data.load_rows(source, args, fetched)
    found = data.collect_rows(data.drop_duplicates(data.make_problems(rows, source, args, counts), counts))
    if len(found) == 0:
        what = "; ".join([f"no problem of '{config.dataset_name}' is left", *counts.lines()])
        raise config_error("dataset_name", what, "name another dataset, or other columns")
    return found


def reward_of(
    config: DatasetEnvConfig, copies: Path | None, start: bool = True
) -> Callable[[list[Any], dict[str, Any]], list[Score]]:
    """Return what scores completions with their columns; ConfigError where there is no such reward, or argument of it.

    Those that may hang, and the user's own, are called in child processes, which are started here unless told not to.
    """
    name, known = config.reward, {key: entry for key, entry in rewards().items() if key != SOURCE_REWARD}
    if is_user_reward(name):
        copied = copies is not None and copy_path(name, copies).exists()
        if not copied and (problem := spec_problem(name, "reward")):
            raise ConfigError(problem)
    elif name not in known:
        fix = f"write {nearest_of(name, known) or 'one of ' + ', '.join(known)}"
        raise config_error("reward", f"there is no reward '{name}'", fix)
    takes = known[name].keys if name in known else ()
    for key in config.reward_args:
        if key not in takes:
            fix = f"write {nearest_of(key, takes) or 'some of ' + ', '.join(takes)}" if takes else "remove reward_args"
            raise config_error("reward_args", f"'{name}' takes no '{key}'", fix)
    if name in known and not known[name].in_children:
        function = make_reward(name, _recipe({"max_completion_length": config.max_tokens, **config.reward_args}))
        return lambda completions, columns: call_reward(
            function, {"completions": completions, **columns}, len(completions)
        )
    pool = RewardPool(name, copies=copies, timeout=config.reward_timeout, memory_gib=config.reward_memory_gib)
    # Children end with the thread that started them, which alone may call them.
    thread = ThreadPoolExecutor(1)
    if start:
        thread.submit(pool.start).result()
    return lambda completions, columns: thread.submit(pool.score, name, completions, columns).result()
