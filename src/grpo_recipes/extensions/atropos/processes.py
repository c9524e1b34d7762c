"""Add Atropos to a plan: the processes of run-api and of the environments, and a line that describes them.

The planner and the launcher call the methods of ``ROLES``. run-api starts before the trainers, and the environments
start after run-api and the vLLM server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.atropos.access import grant_access, revoke_access
from grpo_recipes.extensions.atropos.arguments import AtroposKeys
from grpo_recipes.extensions.atropos.recipe import (
    ENVIRONMENT_TOKEN,
    admits_environments,
    list_environments,
    make_environment_labels,
    uses_atropos,
)
from grpo_recipes.extensions.atropos.rules import find_packing_problems
from grpo_recipes.paths import module_command
from grpo_recipes.plan.devices import count_generation_completions
from grpo_recipes.plan.ports import LOOPBACK, Ports
from grpo_recipes.plan.roles import Roles
from grpo_recipes.plan.types import Data, Names, Plan, Process
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.server.middleware import ENVIRONMENT_TOKEN_VARIABLE, SAMPLING_VARIABLE

# These processes mostly wait for the server, and share the machine's cores with the trainers.
_FEW_THREADS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
# Every process has the id of the trainers' W&B run, so W&B would add an environment's metrics to that run.
_WITHOUT_WANDB = {"WANDB_MODE": "disabled"}
RUN_API = "run-api"  # role of run-api
ENVIRONMENT = "environment-"  # prefix of an environment's role; its label follows
PORT = "atropos_port"


def find_api_url(recipe: Recipe, ports: Ports) -> str | None:
    """Return the URL of run-api: on loopback if the launch starts it, else from the recipe; None without Atropos."""
    if not uses_atropos(recipe.__getitem__):
        return None
    return (
        f"http://{LOOPBACK}:{ports.extensions[PORT]}"
        if PORT in ports.extensions
        else str(AtroposKeys(recipe).api_url).rstrip("/")
    )


def _plan_run_api(plan: Plan, names: Names) -> Process | None:
    """Describe the run-api process that the launch starts on the first node; return None if it starts none.

    It restarts together with the trainers, because run-api ignores a second registration.
    """
    port = plan.ports.extensions.get(PORT)
    if port is None:
        return None
    address = ("--host", LOOPBACK, "--port", str(port))  # its default is all interfaces
    return Process(
        RUN_API,
        module_command("atroposlib.cli.run_api", *address),
        dict(_FEW_THREADS),
        (),
        f"logs/liv_run-api_{names.run}_{names.timestamp}.log",
        ready="answering",
        ready_url=f"http://{LOOPBACK}:{port}/info",
        before_trainers=True,
        port=port,
        title=RUN_API,
        handed=False,
        on_loss="restart with trainers",
        with_trainers=True,
        until_trained=True,
    )


class AtroposRoles(Roles):
    """The processes of Atropos: run-api and the environments that send groups to it."""

    def data(self, recipe: Recipe, plan: Plan) -> Data | None:
        """Return the plan's line about environments, batch size, staleness and run-api; None without Atropos."""
        url = find_api_url(recipe, plan.ports)
        if url is None:
            return None
        environments = list_environments(recipe.__getitem__)
        total_weight = sum(environment.weight for environment in environments)
        names = []
        for label, environment in zip(make_environment_labels(recipe.__getitem__), environments, strict=True):
            weight = f"weight {environment.weight / total_weight:.0%}" if len(environments) > 1 else ""
            allocation = environment.min_allocation
            details = ", ".join(filter(None, (weight, "" if allocation is None else f"first {allocation:.0%}")))
            names.append(f"{label} ({details})" if details else label)
        rows, group_size = count_generation_completions(recipe, plan.batch), plan.batch.num_generations
        batch = f"{rows} sequences ({rows // group_size} groups of {group_size}) a batch"
        staleness = AtroposKeys(recipe).max_staleness
        age = "of any age" if staleness is None else f"at most {staleness} step{'' if staleness == 1 else 's'} old"
        starts_api = PORT in plan.ports.extensions
        api = f"run-api at {url}" if starts_api else f"your run-api at {url} (restart it for each attempt)"
        return Data("groups", f"{', '.join(names) or 'your environments'}; {batch}, {age}; {api}")

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """Yield a problem if run-api would hand out no batch, or if rank 0 is on another node than run-api.

        Only the launch's own run-api is checked for its node.
        """
        if not uses_atropos(recipe.__getitem__):
            return
        deadlocks = [*find_packing_problems(recipe, count_generation_completions(recipe, plan.batch))]
        yield from deadlocks
        if not deadlocks and PORT in plan.ports.extensions and plan.server_apart:
            where, node = recipe.location("atropos_environment"), plan.placement[0].node
            message = (
                f"rank 0 is on node {node}, but run-api checks no token and listens only on the first node's loopback"
            )
            fix = "lower vllm_tensor_parallel_size, or start a run-api yourself and set atropos_api_url"
            yield Problem(where, message, fix)

    def notes(self, recipe: Recipe, plan: Plan) -> Iterator[str]:
        """Yield a note about the cost of weight_sync: restart, if the plan uses it with Atropos."""
        if plan.bridge != "restart" or not uses_atropos(recipe.__getitem__):
            return
        staleness = AtroposKeys(recipe).max_staleness
        age = "of any age" if staleness is None else f"up to {staleness} steps old"
        yield (
            "weight_sync: restart starts a new server after each generation. That takes about a minute, and the "
            f"trainer still trains on groups {age} that wait at run-api. weight_sync: file takes under a second; "
            "atropos_max_staleness: 0 trains only on new groups"
        )

    def needs_server(self, recipe: Recipe) -> tuple[str, str] | None:
        """Return the subject of the error for a plan without vLLM server, and "" for its fix; None without Atropos."""
        return ("Atropos' environments need", "") if uses_atropos(recipe.__getitem__) else None

    def samples_by_itself(self, recipe: Recipe) -> bool:
        """Return whether environments send requests to the server while the trainers update: in runs with Atropos."""
        return uses_atropos(recipe.__getitem__)

    def processes(self, recipe: Recipe, plan: Plan, names: Names) -> list[Process]:
        """Return the processes that the launch starts for Atropos: run-api, if it starts one, and the environments."""
        server = _plan_run_api(plan, names)
        planned = [server] if server else []
        url = find_api_url(recipe, plan.ports)
        addresses = ("--api-url", str(url), "--server-url", f"http://{plan.server_host}:{plan.ports.server}")
        after = (RUN_API, "server") if PORT in plan.ports.extensions else ("server",)
        for index, label in enumerate(make_environment_labels(recipe.__getitem__)):
            process = Process(
                f"{ENVIRONMENT}{label}",
                module_command("grpo_recipes.extensions.atropos.serve", str(index), *addresses),
                {**_FEW_THREADS, **_WITHOUT_WANDB},
                (),
                f"logs/liv_env-{label}_{names.run}_{names.timestamp}.log",
                after=after,
                title=f"environment {label}",
                on_loss="restart",
                with_trainers=True,
                until_trained=True,
            )
            planned.append(process)
        return planned

    def server_variables(self, recipe: Recipe, names: Names) -> dict[str, str]:
        """Return environment variables for the server if environments that the user starts may join, else {}.

        They have the path of the environments' token, and the recipe's sampling parameters as JSON.
        """
        if not admits_environments(recipe.__getitem__):
            return {}
        sampling = {key: recipe[key] for key in ("temperature", *NEUTRAL_SAMPLING) if recipe[key] is not None}
        return {
            ENVIRONMENT_TOKEN_VARIABLE: str(names.run_dir / ENVIRONMENT_TOKEN),
            SAMPLING_VARIABLE: json.dumps(sampling),
        }

    def trainer_flags(self, recipe: Recipe, plan: Plan) -> Mapping[str, object]:
        """Return the trainers' flag --atropos_api_url with the URL of run-api; its value is None without Atropos."""
        return {"--atropos_api_url": find_api_url(recipe, plan.ports)}

    def admit(self, recipe: Recipe, plan: Plan, names: Names) -> str | None:
        """Write token and settings for environments that the user starts into the run directory.

        The launcher calls this before the server starts. Return the shell command that starts such an environment, or
        None if none may join.
        """
        return grant_access(recipe, plan, names)

    def dismiss(self, run_dir: Path) -> None:
        """Remove the token and settings that ``admit`` wrote; the launcher calls this when it ends."""
        revoke_access(run_dir)


ROLES = AtroposRoles()
