"""What a recipe must hold of MaxEnt-GRPO's keys and of the two controllers. Pure: no torch, no socket."""

from __future__ import annotations

import math
from collections.abc import Iterable

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, catalogue
from grpo_recipes.recipe.objectives import OBJECTIVES, SCALE_REWARDS, Objective
from grpo_recipes.recipe.tasks import MAXENT, task_of

_TARGETS = ("maxent_target_weight_entropy", "maxent_target_eff_rollouts")
_TAU_CONTROLLER = ("maxent_tau_lr", "maxent_tau_min", "maxent_tau_max", "maxent_tau_warmup_steps")
_KL_CONTROLLER = ("kl_horizon", "kl_ctl_step_size")


def unread(recipe: Recipe) -> list[Problem]:
    """MaxEnt keys that nothing reads: in a GRPO run, or under another objective."""
    given = _given(recipe, (key for key in catalogue() if key.startswith("maxent_")))
    if task_of(recipe) != MAXENT:
        return [
            Problem(
                recipe.place(key),
                f"'{key}' changes nothing in a GRPO run",
                f"{_removal(recipe, key)}, or make it a MaxEnt run (maxent_objective in the recipe, or MAXENT=1)",
            )
            for key in given
        ]
    name = recipe["maxent_objective"]
    return [
        Problem(
            recipe.place(key),
            f"'{key}' changes nothing under maxent_objective: {name}",
            f"{_removal(recipe, key)}, or write maxent_objective: {' or '.join(_readers(key))}",
        )
        for key in given
        if key not in OBJECTIVES[name].keys
    ]


def fixed(recipe: Recipe) -> list[Problem]:
    """Keys of TRL that the objective fixes."""
    objective = _objective(recipe)
    if objective is None:
        return []
    fixed_values = {
        "loss_type": objective.loss_type(recipe["maxent_length_normalize_policy"]),
        "scale_rewards": SCALE_REWARDS,
        "multi_objective_aggregation": "sum_then_normalize",
    }
    return [
        Problem(
            recipe.place(key),
            f"{key}: {recipe[key]} contradicts maxent_objective: {recipe['maxent_objective']}, whose {key} is {value}",
            _removal(recipe, key),
        )
        for key, value in fixed_values.items()
        if recipe.given(key) and recipe[key] != value
    ]


def target(recipe: Recipe) -> list[Problem]:
    """The target over a group: its least mass, its exponents, and the reference in it."""
    objective = _objective(recipe)
    if objective is None or not objective.targets_q:
        return []
    problems = []
    group, epsilon, beta = recipe["num_generations"], recipe["maxent_q_epsilon"], recipe["maxent_beta"]
    if epsilon * group >= 1:
        what = f"maxent_q_epsilon {epsilon:g} is not below 1 / num_generations ({1 / group:g}): q would be negative"
        fix = f"write less than {1 / group:g}, e.g. maxent_q_epsilon: 1e-6"
        problems.append(Problem(recipe.place("maxent_q_epsilon"), what, fix))
    if objective.tau_or_default(recipe["maxent_tau"]) + beta <= 0:
        what = "maxent_tau and maxent_beta are both 0: the target's exponents 1 / (tau + beta) are not defined"
        problems.append(Problem(recipe.place("maxent_tau"), what, "write maxent_tau: 0.01 or more, or a maxent_beta"))
    if beta == 0 and recipe.given("maxent_length_normalize_ref"):
        what = "'maxent_length_normalize_ref' changes nothing with maxent_beta 0: no reference is read"
        fix = f"{_removal(recipe, 'maxent_length_normalize_ref')}, or add a maxent_beta"
        problems.append(Problem(recipe.place("maxent_length_normalize_ref"), what, fix))
    return problems


def tau_controller(recipe: Recipe) -> list[Problem]:
    """The controller that moves tau to hold an entropy or an effective number of completions."""
    objective = _objective(recipe)
    if objective is None:
        return []
    targets = [key for key in _TARGETS if recipe[key] is not None]
    if not targets:
        return [
            Problem(
                recipe.place(key),
                f"'{key}' changes nothing without a target: tau is fixed",
                f"{_removal(recipe, key)}, or add {' or '.join(_TARGETS)}",
            )
            for key in _given(recipe, _TAU_CONTROLLER)
        ]
    if len(targets) == 2:
        what = f"{_TARGETS[0]} and {_TARGETS[1]} are both given, one tau holds one of them"
        return [Problem(recipe.place(_TARGETS[1]), what, "keep one of the two")]
    return [*_reachable(recipe, targets[0]), *_start(recipe, objective.tau_or_default(recipe["maxent_tau"]))]


def _reachable(recipe: Recipe, key: str) -> list[Problem]:
    """A target above that of equal weights cannot be reached, nor one that tau 0 has."""
    group = recipe["num_generations"]
    of_rollouts = key.endswith("rollouts")
    least, most, name = (1, group, "num_generations") if of_rollouts else (0, math.log(group), "log(num_generations)")
    if recipe[key] <= least:
        what = f"{key} {recipe[key]:g} is that of all weight on one completion, which no tau above 0 has"
        return [Problem(recipe.place(key), what, f"write more than {least}")]
    if recipe[key] <= most:
        return []
    what = f"{key} {recipe[key]:g} is more than {name} ({most:g}), that of equal weights"
    return [Problem(recipe.place(key), what, f"write less than {most:g}")]


def _start(recipe: Recipe, tau: float) -> list[Problem]:
    """Where the controller starts, and between what it moves."""
    low, high = recipe["maxent_tau_min"], recipe["maxent_tau_max"]
    problems = []
    if low > high:
        what = f"maxent_tau_min {low:g} is above maxent_tau_max {high:g}"
        problems.append(Problem(recipe.place("maxent_tau_min"), what, "swap the two"))
    if tau == 0 or math.isinf(tau):
        what, fix = f"the controller multiplies tau, which stays {tau:g}", "write a maxent_tau above 0 and below .inf"
        problems.append(Problem(recipe.place("maxent_tau"), what, f"{fix}, e.g. 0.2"))
    if problems or low <= tau <= high:
        return problems
    key = "maxent_tau_min" if tau < low else "maxent_tau_max"
    place = next((name for name in ("maxent_tau", key) if recipe.given(name)), key)
    what = f"tau starts at {tau:g}, outside of maxent_tau_min {low:g} and maxent_tau_max {high:g}"
    return [Problem(recipe.place(place), what, f"write a maxent_tau between them, or another {key}")]


def kl_controller(recipe: Recipe) -> list[Problem]:
    """The controller that moves ``beta`` to hold a KL divergence."""
    if recipe["kl_target"] is None:
        return [
            Problem(
                recipe.place(key),
                f"'{key}' changes nothing without kl_target: beta is fixed",
                f"{_removal(recipe, key)}, or add kl_target",
            )
            for key in _given(recipe, _KL_CONTROLLER)
        ]
    if recipe["beta"] == 0:
        what = "the controller multiplies beta, which is 0: there is no KL to hold"
        return [Problem(recipe.place("kl_target"), what, "write beta (init_kl_coeff) above 0, e.g. beta: 0.04")]
    return []


def synced_reference(recipe: Recipe) -> list[Problem]:
    """``sync_ref_model`` where no reference is built; that of LoRA is no copy, which ``check_lora`` tells."""
    objective = _objective(recipe)
    of_target = objective is not None and objective.targets_q and recipe["maxent_beta"] > 0
    if not recipe["sync_ref_model"] or recipe["use_peft"] or recipe["beta"] > 0 or of_target:
        return []
    names = "beta and maxent_beta are" if objective is not None and objective.targets_q else "beta is"
    what = f"sync_ref_model has no reference to sync: {names} 0"
    return [Problem(recipe.place("sync_ref_model"), what, "remove sync_ref_model, or write beta above 0")]


def _objective(recipe: Recipe) -> Objective | None:
    """The objective of a MaxEnt recipe, None of another."""
    return OBJECTIVES[recipe["maxent_objective"]] if task_of(recipe) == MAXENT else None


def _readers(key: str) -> list[str]:
    return [name for name, objective in sorted(OBJECTIVES.items()) if key in objective.keys]


def _given(recipe: Recipe, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if recipe.given(key)]


def _removal(recipe: Recipe, key: str) -> str:
    origin = recipe.origin(key)
    return f"unset {origin}" if origin in ENVIRONMENT_KEYS else f"remove {key}"


RULES = (unread, fixed, target, tau_controller, kl_controller, synced_reference)
