"""Keys of Atropos: scored groups that replace a dataset and its rewards. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import key


# fmt: off
@dataclass
class AtroposArguments:
    """Keys of Atropos: scored groups that replace a dataset and its rewards."""

    atropos_environment: str | None = key(None,
        "Atropos environment whose scored groups are trained on, instead of a dataset: arithmetic, dataset, or a "
        "BaseEnv of yours as module:Class or file.py:Class. The launch starts run-api and the environment.")
    atropos_environment_args: dict | None = key(None, "Fields of the Atropos environment's configuration, by name.")
    atropos_mixture: dict | None = key(None, "Several Atropos environments: AtroposMixtureConfig.")
    atropos_api_url: str | None = key(None,
        "URL of an Atropos run-api that runs already, e.g. http://localhost:8000; by default the launch starts one.")
    atropos_port: int | None = key(None, "Port of the launch's run-api; 8001 outside Slurm.", min=1024, max=65535)
    atropos_timeout: float = key(30.0, "Seconds that run-api may take for one answer.", min=0.1)
    atropos_batch_retry_attempts: int = key(8, "Times that a request to run-api is tried.", min=1)
    atropos_batch_retry_delay: float = key(0.3,
        "Seconds before run-api is asked again; each time half as long again, at most 2 s.", min=0.01)
    atropos_batch_max_wait_time: float = key(600.0,
        "Longest wait in seconds for the groups of one step; then the run ends with what was seen.", min=0.1)
    atropos_max_staleness: int | None = key(4,
        "Most optimizer steps that a group's weights may be behind; older groups are dropped. null keeps all.", min=0)
    atropos_normalize_advantages: bool = key(False,
        "Whether per-token advantages that a group brings are divided by their standard deviation in the group.")


@dataclass
class AtroposEnvironmentConfig:
    """One Atropos environment of a mixture: an entry of ``atropos_mixture.environments``."""

    id: str = key("", "As the key atropos_environment.")
    args: dict | None = key(None, "As the key atropos_environment_args.")
    weight: float | None = key(None, "Its share of the groups under way, relative to the others'; 1 by default.",
        min=0.0001)
    min_allocation: float | None = key(None, "Share of a batch that its groups fill first; none by default.",
        min=0.0, max=1.0)


@dataclass
class AtroposMixtureConfig:
    """Several Atropos environments: the mapping under ``atropos_mixture``."""

    environments: list[AtroposEnvironmentConfig] = key([], "Entries with the keys of AtroposEnvironmentConfig.")
# fmt: on
