"""Metrics of an environment that is not ours, in a file of the run directory: W&B belongs to the trainer."""

import json
from pathlib import Path
from typing import Any

import numpy
from atroposlib.envs.base import BaseEnv

from grpo_recipes.extensions.atropos.environments import RecipeEnv


def metrics_file(run: Path, label: str) -> Path:
    """Return the file of an environment's metrics."""
    return run / f"environment-{label}.jsonl"


class Recorded(BaseEnv):
    """The base of a class that ``recorded`` makes: it stands below the environment's own ``wandb_log``."""

    metrics_file: Path

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Append the numbers that the environment logs, also those of its ``evaluate``, with run-api's step."""
        metrics = {} if wandb_metrics is None else wandb_metrics
        await super().wandb_log(metrics)
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float | numpy.number)
        }
        if numbers:
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"step": self.curr_step, **numbers}) + "\n")


def recorded(kind: type[BaseEnv], file: Path) -> type[BaseEnv]:
    """Return a subclass of an environment that also writes its metrics to ``file``; our own environments log none."""
    if issubclass(kind, RecipeEnv):
        return kind
    return type(kind.__name__, (kind, Recorded), {"metrics_file": file, "__module__": kind.__module__})
