"""Adapt the class of an Atropos environment to a run: ``adapt_class`` returns a subclass that overrides three methods.

* ``collect_trajectories`` limits the groups under way by the environment's weight, adds the sampling settings to each
  group, and ends the process after repeated failures.
* ``register_env`` records the environment's id, so that a restarted process can disconnect its predecessor.
* ``wandb_log`` writes metrics to a file of the run directory, because W&B belongs to the trainer.
"""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy
import psutil
import requests
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError
from grpo_recipes.extensions.atropos.environments import ENVIRONMENT, RecipeEnv
from grpo_recipes.extensions.atropos.server import (
    PromptTooLong,
    RunServer,
    ServerGone,
    build_generation_params,
    record_requests,
)
from grpo_recipes.plan.ports import find_listener
from grpo_recipes.process.reports import say
from grpo_recipes.process.sessions import BoundedAdapter
from grpo_recipes.runs.rundir import load_json_mapping, write_json

_MAX_FAILURES = 24  # failed groups in a row that end the process
_API_SECONDS = 10.0  # limit for an answer of run-api
# Optional fields of a trajectory, next to tokens, masks and scores.
_TRAJECTORY_FIELDS = ("inference_logprobs", "advantages", "ref_logprobs", "messages", "images")
Collected = dict[str, Any] | list[dict[str, Any] | None] | None  # a group, several, or None


class MetricsFile(BaseEnv):
    """Base class below the environment's class: its ``wandb_log`` writes metrics to a file instead of W&B."""

    metrics_file: Path

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Call BaseEnv's method, then append run-api's step and the metrics that are numbers as a line of JSON.

        Without such metrics, no line is written.
        """
        metrics = {} if wandb_metrics is None else wandb_metrics
        await super().wandb_log(metrics)
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float | numpy.number)
        }
        if numbers:
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"step": self.curr_step, **numbers}) + "\n")


class RunEnvironment(BaseEnv):
    """Base class above the environment's class: its methods run first and call the environment's."""

    label: str  # name of the environment in the run
    api_url: str  # URL of run-api
    id_file: Path  # JSON file with the environment's id at run-api
    run_template: str | None  # chat template of the recipe
    collects_rows: bool  # whether the environment defines collect_trajectory instead of collect_trajectories

    def __init__(self, *args: Any, **kwargs: Any):
        """Create the environment, and give its tokenizer the recipe's chat template if there is one."""
        super().__init__(*args, **kwargs)
        if self.run_template is not None:
            self.tokenizer.chat_template = self.run_template
        self._failures = 0  # failed groups in a row
        self._running = 0  # groups under way
        self._slots: AsyncSemWithAdaptiveWeight | None = None  # limits the groups under way

    async def collect_trajectories(self, item: Any) -> tuple[Collected, list[Any]]:
        """Call the environment's ``collect_trajectories`` and add generation_params to its groups.

        A key that the environment sets there is kept. Raise SystemExit, which ends the process, for a wrong
        configuration and after 24 failures in a row, except failures of a lost server. Other errors are raised again,
        and atroposlib continues with the next item.
        """
        self._running += 1
        try:
            with record_requests() as requests:
                collected, backlog = await self._collect_in_slot(item)
        except ConfigError as error:
            say(str(error))
            raise SystemExit(EXIT_CONFIG_ERROR) from error
        except Exception as error:  # atroposlib logs it and continues with the next item
            is_data = isinstance(error, PromptTooLong) and self._running > 1
            self._failures += not (isinstance(error, ServerGone) or is_data)
            if self._failures == 1 and not isinstance(error, PromptTooLong):  # the log has its message already
                traceback.print_exception(error)
            if self._failures >= _MAX_FAILURES:
                last = f"{type(error).__name__}: {error}"
                say(f"{self.label}: {self._failures} groups in a row failed, the last with {last}")
                raise SystemExit(1) from error
            raise
        finally:
            self._running -= 1
        self._failures = 0
        for group in collected if isinstance(collected, list) else [collected]:
            if group is not None:
                explicit = group.get("generation_params") or {}
                group["generation_params"] = {**build_generation_params(requests), ENVIRONMENT: self.label, **explicit}
        return collected, backlog

    async def _collect_in_slot(self, item: Any) -> tuple[Collected, list[Any]]:
        """Wait until the environment's weight allows another concurrent group, then collect the group and return it.

        At most as many groups are sampled at the same time as may wait for the trainer, or as there are workers.
        atroposlib limits only single requests by weight. An environment that samples a whole group with one request
        never reaches that limit.
        """
        collect = self._collect_rows if self.collects_rows else super().collect_trajectories
        if not hasattr(self, "status_dict"):  # before atroposlib's first request to run-api, and so before training
            return await collect(item)
        if self._slots is None:
            waiting = self.config.max_batches_offpolicy * self.config.batch_size // self.config.group_size
            self._slots = AsyncSemWithAdaptiveWeight(max(1, min(self.max_num_workers, waiting)))
        self._slots.update_weight(self.status_dict["env_weight"])  # 1 without other environments
        async with self._slots:
            return await collect(item)

    async def _collect_rows(self, item: Any) -> tuple[Collected, list[Any]]:
        """Call the environment's ``collect_trajectory`` concurrently for each row; return the group and the backlog.

        Unlike BaseEnv's method, this keeps log-probs. An optional field is left out unless all trajectories have it.
        Settings of the whole group are merged. Raise ValueError if a trajectory is not a dict.
        """
        results = await asyncio.gather(*(self.collect_trajectory(item) for _ in range(self.config.group_size)))
        rows = [row for row, _ in results]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("collect_trajectory must return a trajectory as a dict")
        group: dict[str, Any] = {name: [row[name] for row in rows] for name in ("tokens", "masks", "scores")}
        group |= {
            name: [row[name] for row in rows] for name in _TRAJECTORY_FIELDS if all(row.get(name) for row in rows)
        }
        if any(row.get("overrides") for row in rows):
            group["overrides"] = [row.get("overrides") or {} for row in rows]
        for name in ("group_overrides", "generation_params"):
            group[name] = {key: value for row in rows for key, value in (row.get(name) or {}).items()}
        return group, [later for _, backlog in results for later in backlog]

    async def register_env(self) -> None:
        """Register at run-api as the environment does, print its id and write it to ``id_file`` for a later process."""
        await super().register_env()
        record_id(self.id_file, self.api_url, self.env_id)
        say(f"registered at run-api as environment {self.env_id}, {self.config.wandb_name}")


def adapt_class(kind: type[BaseEnv], run: Path, index: int, label: str, **attributes: Any) -> type[BaseEnv]:
    """Create a subclass of an environment's class with RunEnvironment's methods, for the INDEX-th environment of a run.

    ``attributes`` become class attributes. ``wandb_log`` writes metrics to a file, except in subclasses of RecipeEnv,
    which log no metrics.
    """
    bases = (RunEnvironment, kind) if issubclass(kind, RecipeEnv) else (RunEnvironment, kind, MetricsFile)
    values = {
        "__module__": kind.__module__,
        "server_cls": RunServer,
        "label": label,
        "id_file": run / "processes" / f"atropos_{index}.json",
        "metrics_file": run / f"environment-{label}.jsonl",
        "collects_rows": kind.collect_trajectories is BaseEnv.collect_trajectories,
    }
    return type(kind.__name__, bases, {**values, **attributes})


def record_id(file: Path, api_url: str, env_id: int) -> None:
    """Write the environment's id, this process's id, and URL and start time of run-api to a JSON file."""
    file.parent.mkdir(exist_ok=True)
    write_json(file, {**_identify_api(api_url), "env_id": env_id, "pid": os.getpid()})


def disconnect_predecessor(file: Path, api_url: str) -> None:
    """Disconnect the environment that ``file`` records from run-api, and remove the file.

    Do nothing without a record, or if run-api has restarted since, because a new run-api does not know the environment.
    Without this call, run-api counts a dead environment as connected, and waits for its min_allocation of each batch.
    Raise requests.RequestException if run-api does not answer; an answer with an error is only printed.
    """
    record = load_json_mapping(file) or {}
    if "env_id" not in record or not record.items() >= _identify_api(api_url).items():
        return
    with requests.Session() as session:
        session.trust_env = False  # a proxy cannot reach the run's run-api
        session.mount(api_url, BoundedAdapter(_API_SECONDS))
        response = session.post(f"{api_url}/disconnect-env", json={"env_id": record["env_id"]})
    say(f"disconnected environment {record['env_id']} of an earlier process from run-api: {response.text[:200]}")
    file.unlink()


def _identify_api(url: str) -> dict[str, Any]:
    """Return run-api's URL as "api", and the start time of its process as "api_since", to detect a restart.

    No request is sent. The start time is None if the URL is on another machine, or if no process of this user listens
    on the port.
    """
    parts = urlsplit(url)
    pid = find_listener(parts.port or 80) if parts.hostname in ("127.0.0.1", "localhost") else None
    return {"api": url, "api_since": psutil.Process(pid).create_time() if pid else None}
