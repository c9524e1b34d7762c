"""Rules of MaxEnt-GRPO, of its controllers and of the reference, as a table beside that of ``rules``."""

import math
from collections.abc import Callable

from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import OBJECTIVES, Objective
from grpo_recipes.recipe.rules import Rule, given, matching, removal
from grpo_recipes.recipe.tasks import MAXENT, task_of

# Targets of tau's controller: the name of the largest value, the smallest value, and the largest for a group's size.
_ENTROPY, _ROLLOUTS = "maxent_target_weight_entropy", "maxent_target_eff_rollouts"
_TARGETS: dict[str, tuple[str, int, Callable[[int], float]]] = {
    _ENTROPY: ("log(num_generations)", 0, math.log),
    _ROLLOUTS: ("num_generations", 1, float),
}


def objective_of(recipe: Recipe) -> Objective | None:
    """Return the objective of a MaxEnt recipe, None of another."""
    return OBJECTIVES[recipe["maxent_objective"]] if task_of(recipe) == MAXENT else None


def _targets_q(recipe: Recipe) -> bool:
    objective = objective_of(recipe)
    return objective is not None and objective.targets_q


def _tau(recipe: Recipe) -> float:
    return OBJECTIVES[recipe["maxent_objective"]].tau_or_default(recipe["maxent_tau"])


def _target(recipe: Recipe, count: int = 1) -> list[str]:
    """Return the targets that a MaxEnt recipe gives to the controller of tau, where there are ``count`` of them."""
    targets = [key for key in _TARGETS if recipe[key] is not None and task_of(recipe) == MAXENT]
    return targets if len(targets) == count else []


def _equal_weights(recipe: Recipe, target: str) -> float:
    return _TARGETS[target][2](recipe["num_generations"])


def _outside(recipe: Recipe) -> list[str]:
    """Return the key by which the controller's tau starts outside of its limits; swapped limits have a rule."""
    low, high, tau = recipe["maxent_tau_min"], recipe["maxent_tau_max"], _tau(recipe)
    if not _target(recipe) or low <= tau <= high or (low > high and 0 < tau < math.inf):
        return []
    limit = "maxent_tau_min" if tau < low else "maxent_tau_max"
    return [limit if recipe.given(limit) and not recipe.given("maxent_tau") else "maxent_tau"]


def _unread(recipe: Recipe) -> list[str]:
    """Return the maxent keys that a MaxEnt recipe gives and its objective does not read."""
    objective = objective_of(recipe)
    return [key for key in matching(" ".join(objective.unread)) if recipe.given(key)] if objective else []


def _fixed(recipe: Recipe) -> dict[str, str]:
    """Return the keys of TRL that the objective fixes, with their values."""
    objective = objective_of(recipe)
    return objective.fixed_keys(recipe["maxent_length_normalize_policy"]) if objective else {}


# fmt: off
RULES = (
    Rule("{item}", lambda r: task_of(r) != MAXENT and given(r, "maxent_*"), "'{item}' changes nothing in a GRPO run",
        "{removal}, or make it a MaxEnt run (maxent_objective in the recipe, or MAXENT=1)"),
    Rule("{item}", _unread, "'{item}' changes nothing under maxent_objective: {maxent_objective}",
        lambda r, key: f"{removal(r, key)}, or write maxent_objective: "
        + " or ".join(name for name, objective in sorted(OBJECTIVES.items()) if key not in objective.unread)),
    Rule("{item}", lambda r: [key for key, value in _fixed(r).items() if r.given(key) and r[key] != value],
        lambda r, key: f"{key}: {r[key]} contradicts maxent_objective: {r['maxent_objective']}, whose {key} is "
        f"{_fixed(r)[key]}", "{removal}"),
    Rule("maxent_q_epsilon", lambda r: _targets_q(r) and r["maxent_q_epsilon"] * r["num_generations"] >= 1,
        lambda r, _: f"maxent_q_epsilon {r['maxent_q_epsilon']:g} is not below 1 / num_generations "
        f"({1 / r['num_generations']:g}): q would be negative",
        lambda r, _: f"write less than {1 / r['num_generations']:g}, e.g. maxent_q_epsilon: 1e-6"),
    Rule("maxent_tau", lambda r: _targets_q(r) and _tau(r) + r["maxent_beta"] <= 0,
        "maxent_tau and maxent_beta are both 0: the target's exponents 1 / (tau + beta) are not defined",
        "write maxent_tau: 0.01 or more, or a maxent_beta"),
    Rule("{item}", lambda r: _targets_q(r) and r["maxent_beta"] == 0 and given(r, "maxent_length_normalize_ref"),
        "'{item}' changes nothing with maxent_beta 0: no reference is read", "{removal}, or add a maxent_beta"),
    Rule("{item}", lambda r: task_of(r) == MAXENT and not _target(r) and not _target(r, 2)
        and given(r, "maxent_tau_lr maxent_tau_min maxent_tau_max maxent_tau_warmup_steps"),
        "'{item}' changes nothing without a target: tau is fixed", f"{{removal}}, or add {_ENTROPY} or {_ROLLOUTS}"),
    Rule(_ROLLOUTS, lambda r: bool(_target(r, 2)),
        f"{_ENTROPY} and {_ROLLOUTS} are both given, and tau can follow only one target", "keep one of the two"),
    Rule("{item}", lambda r: [key for key in _target(r) if not _TARGETS[key][1] < r[key] <= _equal_weights(r, key)],
        lambda r, key: f"{key} {r[key]:g} is not between {_TARGETS[key][1]}, that of all weight on one completion, and "
        f"{_TARGETS[key][0]} ({_equal_weights(r, key):g}), that of equal weights", "write a value between the two"),
    Rule("maxent_tau_min", lambda r: _target(r) and r["maxent_tau_min"] > r["maxent_tau_max"],
        "maxent_tau_min {maxent_tau_min:g} is above maxent_tau_max {maxent_tau_max:g}", "swap the two"),
    Rule("{item}", _outside,
        lambda r, _: f"tau starts at {_tau(r):g}, outside of maxent_tau_min {r['maxent_tau_min']:g} and maxent_tau_max "
        f"{r['maxent_tau_max']:g}", "write a maxent_tau between them, or another limit"),
    Rule("{item}", lambda r: r["kl_target"] is None and given(r, "kl_horizon kl_ctl_step_size"),
        "'{item}' changes nothing without kl_target: beta is fixed", "{removal}, or add kl_target"),
    Rule("kl_target", lambda r: r["kl_target"] is not None and r["beta"] == 0,
        "the controller multiplies beta, which is 0: there is no KL to hold",
        "write beta (init_kl_coeff) above 0, e.g. beta: 0.04"),
    Rule("ref_model_name_or_path",
        lambda r: r["ref_model_name_or_path"] and r["beta"] == 0 and not (_targets_q(r) and r["maxent_beta"] > 0),
        "'ref_model_name_or_path' changes nothing: no term of the loss reads a reference",
        "remove it, or write beta above 0"),
    Rule("sync_ref_model",
        lambda r: r["sync_ref_model"] and not r["use_peft"] and r["beta"] == 0
        and not (_targets_q(r) and r["maxent_beta"] > 0),
        lambda r, _: "sync_ref_model has no reference to sync: "
        + ("beta and maxent_beta are 0" if _targets_q(r) else "beta is 0"),
        "remove sync_ref_model, or write beta above 0"),
)
# fmt: on
