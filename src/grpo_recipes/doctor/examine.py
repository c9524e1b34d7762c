"""Every check, in the order they are shown, run side by side: each has an answer when the time is over."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.doctor import access, devices, environment, limits, recipes, training
from grpo_recipes.doctor.machine import Machine, NoAnswer
from grpo_recipes.errors import ConfigError
from grpo_recipes.runs import endings
from grpo_recipes.runs.finding import OK, PROBLEM, WARNING, Finding, problem, warning
from grpo_recipes.runs.rundir import Run
from grpo_recipes.secrets import masked

# A check's name is its function's name with spaces, its description the first line of the docstring.
MACHINE: tuple[Callable[[Machine], Finding], ...] = (
    environment.environment, environment.python, environment.versions, environment.modules, environment.user_packages,
    environment.documentation,
    devices.driver, devices.gpus, devices.gpu_memory, devices.gpu_health,
    limits.disk, limits.home_folder, limits.quota, limits.shared_memory, limits.leftovers, limits.clock,
    limits.open_files, limits.processes, limits.locked_memory, limits.core_files, limits.other_limits,
    limits.socket_paths, limits.cores, limits.memory,
    access.hub_token, access.wandb_login, access.proxies, access.hub, access.wandb_host, access.ports,
    access.host_name,
    devices.slurm, devices.nodes, devices.time_limit, devices.job,
    environment.login_shell, environment.old_variables, environment.vllm_variables, environment.libraries,
    environment.encoding, environment.code,
)  # fmt: skip
DEEP: tuple[Callable[[Machine], Finding], ...] = (environment.torch, environment.trl, environment.vllm)
RECIPE: tuple[Callable[[recipes.Case], Finding], ...] = (
    recipes.gpu_plan, recipes.model, recipes.datasets, recipes.gated, recipes.checkpoint_space, recipes.weights_way,
    recipes.training_memory,
)  # fmt: skip
RUN: tuple[Callable[[Run], Finding], ...] = (
    endings.ending, endings.server_log, endings.out_of_memory, endings.weights_guard, endings.known_messages,
    endings.checkpoints,
    training.reward, training.truncated, training.no_verdict, training.kl, training.entropy, training.gradients,
    training.server_agreement, training.phases, training.start,
)  # fmt: skip
_MARKS = {OK: "ok", WARNING: "warn", PROBLEM: "PROBLEM"}


@dataclass(frozen=True)
class Result:
    """A check's name and what it found, without secrets."""

    name: str
    status: str
    value: str
    fix: str


def name_of(check: Callable[..., Finding]) -> str:
    """Return the name of a check: its function's, with spaces."""
    return check.__name__.replace("_", " ")


def about(check: Callable[..., Finding]) -> str:
    """Return what a check looks at: the first line of its docstring."""
    return (inspect.getdoc(check) or "").splitlines()[0]


def examine(looks: Sequence[tuple[Callable[[Any], Finding], Any]], seconds: float) -> list[Result]:
    """Run checks side by side, each on its subject, for at most ``seconds`` together; return one result a check."""
    late = warning(f"no answer within {seconds:.0f} s", "what it looks at hangs: a file system, driver or daemon")
    findings = [late] * len(looks)

    def look(number: int) -> None:
        findings[number] = _guarded(*looks[number])

    # Daemon threads: one that hangs on a dead file system must not keep the command from ending.
    threads = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(len(looks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [
        Result(name_of(check), found.status, *(" ".join(masked(text).split()) for text in (found.value, found.fix)))
        for (check, _), found in zip(looks, list(findings), strict=True)
    ]


def _guarded(check: Callable[[Any], Finding], subject: Any) -> Finding:
    """Return the check's finding; a config error is a problem, and a check that fails hides no other."""
    try:
        return check(subject)
    except ConfigError as error:
        first = error.problems[0]
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return problem(f"{first.where}: {first.what}{more}", first.fix)
    except NoAnswer as error:
        return warning(str(error), "look at it by hand, or wait longer with --deep")
    except Exception as error:
        return warning(f"could not be looked at: {type(error).__name__}: {error}", "look at it by hand")


def as_text(results: Sequence[Result]) -> str:
    """Return a line a check, a line below it what to do, and the count."""
    width = max(len(result.name) for result in results)
    lines = []
    for result in results:
        lines.append(f"{_MARKS[result.status]:<8} {result.name:<{width}}  {result.value}")
        if result.fix:
            lines.append(f"{'':<8} {'':<{width}}  -> {result.fix}")
    counts = [f"{len(results)} checks"]
    for status in (WARNING, PROBLEM):
        number = sum(result.status == status for result in results)
        counts.append(f"{number or 'no'} {status}{'' if number == 1 else 's'}")
    return "\n".join([*lines, f"grpo: {', '.join(counts)}"])
