"""Keys of environments: multi-turn episodes that replace a dataset. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import MOST_ROWS, MOST_TOKENS, key


# fmt: off
@dataclass
class EnvironmentArguments:
    """Keys of environments: multi-turn episodes that replace a dataset."""

    benchmark_solved: float = key(1.0, "Reward from which an episode of a benchmark counts as solved.")
    environment: str | None = key(None,
        "Environment that prompts and rewards come from, instead of a dataset: textarena:ID, reasoning_gym:NAME, "
        "verifiers:NAME, openenv:URL, or a class of yours as module:Class or file.py:Class.")
    environment_args: dict | None = key(None, "Arguments of the environment, by name.")
    environment_mixture: dict | None = key(None, "Several environments: EnvironmentMixtureConfig.")
    environment_episodes: int = key(1024, "Different episodes to train on, by seed: an epoch.", min=1)
    environment_eval_episodes: int = key(64, "Episodes to evaluate on, none of them in training.", min=1)
    environment_max_turns: int = key(1, "Most turns of the policy in an episode.", min=1, max=MOST_ROWS)
    environment_turn_length: int | None = key(None,
        "Most tokens of one turn of the policy. By default half of max_completion_length, divided by "
        "environment_max_turns: the other half is for what the environment says between them. A single turn has all.",
        min=1, max=MOST_TOKENS)
    environment_credit: str = key("all_turns",
        "Which turns an episode's reward trains: all_turns, last_turn, or per_turn (each turn by the rewards that come "
        "after it, compared with the same turn of the group's other episodes).",
        choices=["all_turns", "last_turn", "per_turn"])
    environment_unfinished: str = key("score",
        "Reward of an episode that ends for want of turns or tokens: its rewards so far (score), 0 (zero), or none "
        "(unscored: it is not trained on).", choices=["score", "zero", "unscored"])
    environment_timeout: float = key(30.0, "Seconds an environment may take for one turn.", min=0.01)
    environment_memory_gib: float = key(4.0, "Memory in GiB that a process with environments may take.", min=0.1)
    environment_workers: int | None = key(None,
        "Processes with environments; by default 1 per 2 cores, at most 8.", min=1, max=1024)
    environment_network: bool = key(False, "Whether environments may reach the network.")


@dataclass
class EnvironmentConfig:
    """One environment of a mixture: an entry of ``environment_mixture.environments``."""

    id: str = key("", "As the key environment.")
    args: dict | None = key(None, "As the key environment_args.")
    weight: float | None = key(None, "Its share of environment_episodes, relative to the others'; 1 by default.",
        min=0.0001)


@dataclass
class EnvironmentMixtureConfig:
    """Several environments: the mapping under ``environment_mixture``."""

    environments: list[EnvironmentConfig] = key([], "Entries with the keys of EnvironmentConfig.")
# fmt: on
