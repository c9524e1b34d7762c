"""Recipe keys of environments: multi-turn episodes that replace a dataset. No torch."""

from dataclasses import dataclass
from typing import Any

from grpo_recipes.recipe.fields import MOST_ROWS, MOST_TOKENS, key
from grpo_recipes.recipe.sections import Key, Section


# fmt: off
@dataclass
class EnvironmentArguments:
    """Keys of environments: multi-turn episodes that replace a dataset."""

    benchmark_solved: float = key(1.0, "Reward at which an episode of a benchmark counts as solved.")
    environment: str | None = key(None,
        "Environment that provides prompts and rewards instead of a dataset: textarena:ID, reasoning_gym:NAME, "
        "verifiers:NAME, openenv:URL, or your own class as module:Class or file.py:Class. A class for TRL's "
        "environment_factory gets the rows of a dataset.")
    environment_args: dict[str, Any] | None = key(None, "Arguments of the environment, by name.")
    environment_mixture: dict[str, Any] | None = key(None, "Several environments: EnvironmentMixtureConfig.")
    environment_episodes: int = key(1024, "Number of different training episodes (seeds) in an epoch.", min=1)
    environment_eval_episodes: int = key(64, "Number of evaluation episodes; none of them is trained on.", min=1)
    environment_max_turns: int = key(1, "Maximum turns of the policy in an episode.", min=1, max=MOST_ROWS)
    environment_turn_length: int | None = key(None,
        "Maximum tokens of one turn of the policy. The default is half of max_completion_length divided by "
        "environment_max_turns; the other half is for the environment's messages between turns. With one turn, the "
        "default is max_completion_length.",
        min=1, max=MOST_TOKENS)
    environment_credit: str = key("all_turns",
        "Turns that an episode's reward trains: all_turns, last_turn, or per_turn (each turn by the rewards that "
        "follow it, compared with the same turn of the other episodes in the group).",
        choices=["all_turns", "last_turn", "per_turn"])
    environment_unfinished: str = key("score",
        "Reward of an episode that runs out of turns or tokens: its rewards so far (score), 0 (zero), or no reward, "
        "which leaves it out of training (unscored).", choices=["score", "zero", "unscored"])
    environment_timeout: float = key(30.0, "Seconds that an environment may use for one turn.", min=0.01)
    environment_memory_gib: float = key(4.0, "Memory limit in GiB of a process that runs environments.", min=0.1)
    environment_workers: int | None = key(None,
        "Number of processes that run environments; by default 1 per 2 cores, at most 8.", min=1, max=1024)
    environment_python: str | None = key(None,
        "Folder of a virtual environment, or its Python (3.11 or later), that runs environments of libraries that "
        "conflict with ours, e.g. verifiers 0.3.")
    environment_network: bool = key(False, "Whether environments and tools may use the network.")
    tools: list[str] | None = key(None,
        "Functions that the policy may call before it answers a prompt of the dataset: module:function or "
        "file.py:function, with type hints and a docstring. The keys environment_timeout, environment_memory_gib, "
        "environment_workers, environment_network and environment_turn_length apply to them.")
    max_tool_calls: int = key(8, "Maximum tool calls in an episode; further calls end it.", min=1, max=MOST_ROWS)


@dataclass
class EnvironmentConfig:
    """One environment of a mixture: an entry of ``environment_mixture.environments``."""

    id: str = key("", "Environment, in the format of the key environment.")
    args: dict[str, Any] | None = key(None, "Arguments, in the format of the key environment_args.")
    weight: float | None = key(None, "Share of environment_episodes relative to the other weights; 1 by default.",
        min=0.0001)


@dataclass
class EnvironmentMixtureConfig:
    """Several environments: the mapping under ``environment_mixture``."""

    environments: list[EnvironmentConfig] = key([], "Entries with the keys of EnvironmentConfig.")
# fmt: on


class EnvironmentKeys(Section):
    """The keys of environments that code reads, with their types."""

    environment = Key[str | None]("environment")
    args = Key[dict[str, Any] | None]("environment_args")
    mixture = Key[dict[str, Any] | None]("environment_mixture")
    max_turns = Key[int]("environment_max_turns")
    turn_length = Key[int | None]("environment_turn_length")
    credit = Key[str]("environment_credit")
    timeout = Key[float]("environment_timeout")
    network = Key[bool]("environment_network")
    python = Key[str | None]("environment_python")
    tools = Key[list[str] | None]("tools")
    max_tool_calls = Key[int]("max_tool_calls")
