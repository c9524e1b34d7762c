"""Recipe keys of Atropos: scored groups replace a dataset and its rewards. This module imports no torch."""

from dataclasses import dataclass
from typing import Any

from grpo_recipes.recipe.fields import key
from grpo_recipes.recipe.sections import Key, Section


# fmt: off
@dataclass
class AtroposArguments:
    """Keys of Atropos: scored groups replace a dataset and its rewards."""

    atropos_environment: str | None = key(None,
        "Atropos environment that replaces the dataset with scored groups: arithmetic, dataset, or your own BaseEnv as "
        "module:Class or file.py:Class. The launch starts run-api and the environment.")
    atropos_environment_args: dict[str, Any] | None = key(None, "Fields of the Atropos environment's configuration.")
    atropos_mixture: dict[str, Any] | None = key(None, "Several Atropos environments: AtroposMixtureConfig.")
    atropos_api_url: str | None = key(None,
        "URL of a running Atropos run-api, e.g. http://localhost:8000; by default the launch starts one.")
    atropos_port: int | None = key(None, "Port of the launch's run-api; 8001 outside Slurm.", min=1024, max=65535)
    atropos_timeout: float = key(30.0, "Longest wait in seconds for an answer of run-api.", min=0.1)
    atropos_batch_retry_attempts: int = key(8, "Attempts of a request to run-api.", min=1)
    atropos_batch_retry_delay: float = key(0.3,
        "Seconds before a request to run-api is repeated; grows by half each time, to at most 2 s.", min=0.01)
    atropos_batch_max_wait_time: float = key(600.0,
        "Longest wait in seconds for the groups of a step; then the run ends with a diagnosis.", min=0.1)
    atropos_max_staleness: int | None = key(4,
        "Most optimizer steps between sampling and training of a group; older ones are dropped. null keeps all.", min=0)
    atropos_normalize_advantages: bool = key(False,
        "Whether an environment's per-token advantages are divided by their standard deviation in the group.")


@dataclass
class AtroposEnvironmentConfig:
    """One Atropos environment of a mixture: an entry of ``atropos_mixture.environments``."""

    id: str = key("", "As the key atropos_environment.")
    args: dict[str, Any] | None = key(None, "As the key atropos_environment_args.")
    weight: float | None = key(None, "Relative number of its groups under way; 1 by default.",
        min=0.0001)
    min_allocation: float | None = key(None, "Fraction of a batch that its groups fill first; none by default.",
        min=0.0, max=1.0)


@dataclass
class AtroposMixtureConfig:
    """Several Atropos environments: the mapping under ``atropos_mixture``."""

    environments: list[AtroposEnvironmentConfig] = key([], "Entries with the keys of AtroposEnvironmentConfig.")
# fmt: on


class AtroposKeys(Section):
    """The keys of Atropos that code reads, with their types."""

    environment = Key[str | None]("atropos_environment")
    environment_args = Key[dict[str, Any] | None]("atropos_environment_args")
    mixture = Key[dict[str, Any] | None]("atropos_mixture")
    api_url = Key[str | None]("atropos_api_url")
    batch_max_wait_time = Key[float]("atropos_batch_max_wait_time")
    max_staleness = Key[int | None]("atropos_max_staleness")
