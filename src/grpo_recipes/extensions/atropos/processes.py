"""Add Atropos to a plan: run-api, the environments that post groups to it, and the line that describes both."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.atropos.access import grant_access, revoke_access
from grpo_recipes.extensions.atropos.recipe import (
    ENVIRONMENT_TOKEN,
    admits_environments,
    atropos_environments,
    atropos_labels,
    uses_atropos,
)
from grpo_recipes.extensions.atropos.rules import packing_problems
from grpo_recipes.paths import python_module
from grpo_recipes.plan.devices import rows_of_generation
from grpo_recipes.plan.ports import LOOPBACK, Ports
from grpo_recipes.plan.roles import Roles
from grpo_recipes.plan.types import Data, Names, Plan, Process
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.server.middleware import ENVIRONMENT_TOKEN_VARIABLE, SAMPLING_VARIABLE

# They wait for the server most of the time, and share the machine's cores with the trainers.
_MODEST = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
# W&B would take what an environment logs for rows of the trainers' run, whose id is in every process.
_SILENT = {"WANDB_MODE": "disabled"}
RUN_API = "run-api"  # role of Atropos' server of groups
ENVIRONMENT = "environment-"  # begins the role of an environment; its label follows
PORT = "atropos_port"


def api_url(recipe: Recipe, ports: Ports) -> str | None:
    """Return where run-api is asked: the launch's own, or the one that the recipe names; None without Atropos."""
    if not uses_atropos(recipe.__getitem__):
        return None
    return (
        f"http://{LOOPBACK}:{ports.extensions[PORT]}"
        if PORT in ports.extensions
        else str(recipe["atropos_api_url"]).rstrip("/")
    )


def atropos_line(recipe: Recipe, plan: Plan) -> str | None:
    """Return for a person where the groups come from, and what is registered at run-api; None without Atropos."""
    url = api_url(recipe, plan.ports)
    if url is None:
        return None
    labels, found = atropos_labels(recipe.__getitem__), atropos_environments(recipe.__getitem__)
    total = sum(one.weight for one in found)
    shares = [f"weight {one.weight / total:.0%}" if len(found) > 1 else "" for one in found]
    least = [f"first {one.min_allocation:.0%}" if one.min_allocation is not None else "" for one in found]
    told = [", ".join(filter(None, pair)) for pair in zip(shares, least, strict=True)]
    names = [f"{label} ({more})" if more else label for label, more in zip(labels, told, strict=True)]
    rows, group, most = (
        rows_of_generation(recipe, plan.batch),
        plan.batch.num_generations,
        recipe["atropos_max_staleness"],
    )
    batch = f"{rows} sequences ({rows // group} groups of {group}) a batch"
    own = "" if PORT in plan.ports.extensions else " of yours, which must be a new one in each attempt"
    stale = "of any age" if most is None else f"at most {most} step{'' if most == 1 else 's'} old"
    return f"{', '.join(names) or 'environments of yours'}; {batch}, {stale}; run-api{own} at {url}"


def restart_note(recipe: Recipe) -> str:
    """Return what weight_sync: restart costs a run with Atropos."""
    stale = recipe["atropos_max_staleness"]
    old = "of any age" if stale is None else f"up to {stale} steps old"
    return (
        "weight_sync: restart starts a new server after each generation, which takes about a minute, and the trainer "
        f"still takes groups {old} that wait at run-api. weight_sync: file takes under a second; "
        "atropos_max_staleness: 0 takes only new groups"
    )


def server_variables(recipe: Recipe, names: Names) -> dict[str, str]:
    """Return the server's variables for such environments: where their token is, and the recipe's sampling."""
    if not admits_environments(recipe.__getitem__):
        return {}
    sampling = {key: recipe[key] for key in ("temperature", *NEUTRAL_SAMPLING) if recipe[key] is not None}
    return {
        ENVIRONMENT_TOKEN_VARIABLE: str(names.run_dir / ENVIRONMENT_TOKEN),
        SAMPLING_VARIABLE: json.dumps(sampling),
    }


def run_api(plan: Plan, names: Names) -> Process | None:
    """Return run-api, on the first node; None where the launch starts none.

    It keeps everything in memory and ignores a second registration: it never outlives the trainers that registered.
    """
    port = plan.ports.extensions.get(PORT)
    if port is None:
        return None
    address = ("--host", LOOPBACK, "--port", str(port))  # by itself it listens on all interfaces
    return Process(
        RUN_API,
        python_module("atroposlib.cli.run_api", *address),
        dict(_MODEST),
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


def environments(recipe: Recipe, plan: Plan, names: Names) -> list[Process]:
    """Return the environments that a launch starts, on the first node."""
    url = api_url(recipe, plan.ports)
    addresses = ("--api-url", str(url), "--server-url", f"http://{plan.server_host}:{plan.ports.server}")
    after = (RUN_API, "server") if PORT in plan.ports.extensions else ("server",)
    return [
        Process(
            f"{ENVIRONMENT}{label}",
            python_module("grpo_recipes.extensions.atropos.serve", str(index), *addresses),
            {**_MODEST, **_SILENT},
            (),
            f"logs/liv_env-{label}_{names.run}_{names.timestamp}.log",
            after=after,
            title=f"environment {label}",
            on_loss="restart",
            with_trainers=True,
            until_trained=True,
        )
        for index, label in enumerate(atropos_labels(recipe.__getitem__))
    ]


class AtroposRoles(Roles):
    """run-api, and the environments that post groups to it."""

    def data(self, recipe: Recipe, plan: Plan) -> Data | None:
        """Return the environments, the batch and the address of run-api."""
        line = atropos_line(recipe, plan)
        return Data("groups", line) if line else None

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """Yield why run-api would hand out no batch, or rank 0 could not ask it."""
        if not uses_atropos(recipe.__getitem__):
            return
        deadlocks = [*packing_problems(recipe, rows_of_generation(recipe, plan.batch))]
        yield from deadlocks
        if not deadlocks and PORT in plan.ports.extensions and plan.server_apart:
            where, node = recipe.location("atropos_environment"), plan.placement[0].node
            what = f"rank 0 is on node {node}, and run-api listens on the loopback of the first node alone: "
            what += "it wants no token"
            fix = "lower vllm_tensor_parallel_size, or start a run-api yourself and name it in atropos_api_url"
            yield Problem(where, what, fix)

    def notes(self, recipe: Recipe, plan: Plan) -> Iterator[str]:
        """Yield what weight_sync: restart costs."""
        if plan.bridge == "restart" and uses_atropos(recipe.__getitem__):
            yield restart_note(recipe)

    def needs_server(self, recipe: Recipe) -> tuple[str, str] | None:
        """Return that environments send requests to the server."""
        return ("Atropos' environments need", "") if uses_atropos(recipe.__getitem__) else None

    def samples_by_itself(self, recipe: Recipe) -> bool:
        """Return True with Atropos: environments work on groups of later steps too."""
        return uses_atropos(recipe.__getitem__)

    def processes(self, recipe: Recipe, plan: Plan, names: Names) -> list[Process]:
        """Return run-api and the environments that the launch starts."""
        server = run_api(plan, names)
        return [*([server] if server else []), *environments(recipe, plan, names)]

    def server_variables(self, recipe: Recipe, names: Names) -> dict[str, str]:
        """Return what lets environments in other terminals sample."""
        return server_variables(recipe, names)

    def trainer_flags(self, recipe: Recipe, plan: Plan) -> Mapping[str, object]:
        """Return the address of run-api."""
        return {"--atropos_api_url": api_url(recipe, plan.ports)}

    def admit(self, recipe: Recipe, plan: Plan, names: Names) -> str | None:
        """Write token and settings for environments in other terminals."""
        return grant_access(recipe, plan, names)

    def dismiss(self, run_dir: Path) -> None:
        """Remove them."""
        revoke_access(run_dir)


ROLES = AtroposRoles()
