"""Rules of MaxEnt-GRPO, its controllers and the reference, as a second table next to ``rules``.

``limit_note`` also tells the user if the settings make an objective almost equal to another method.
"""

import math
from collections.abc import Callable

from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import OBJECTIVES, TAU_TARGETS, Objective, policy_per_token, tau_targets
from grpo_recipes.recipe.rules import Rule, matching_keys, removal, set_by_user
from grpo_recipes.recipe.tasks import MAXENT, task_of

_MOST = 700.0  # nats; exp of more overflows a float
# Ratios of a right answer's weight to a wrong answer's weight. Below the first, all weights are practically equal.
# Above the second, w is practically r / sum r. Above the third, wrong answers have practically no weight.
_EQUAL_RATIO, _PROPORTIONAL_RATIO, _RIGHT_ONLY_RATIO = 1.2, 100.0, 1000.0
# Tokens per completion. From the first, listwise with temperature 0 is MaxRL per token. From the second, a fixed
# temperature puts nearly all of s on one completion of a group (docs/maxent-formulas.md).
_LONG, _VERY_LONG = 30, 100

_RATIO = "maxent_target_ratio"
# Target of tau's controller that the group size limits -> the name of the largest value, the smallest value, and a
# function (num_generations) that returns the largest value.
_LIMITED: dict[str, tuple[str, int, Callable[[int], float]]] = {
    "maxent_target_weight_entropy": ("log(num_generations)", 0, math.log),
    "maxent_target_eff_rollouts": ("num_generations", 1, float),
}


def objective_of(recipe: Recipe) -> Objective | None:
    """Return the objective of a MaxEnt recipe; None for GRPO recipes, and if no objective is set."""
    return OBJECTIVES.get(recipe.maxent.objective or "") if task_of(recipe) == MAXENT else None


def targets_q(recipe: Recipe) -> bool:
    """Return whether the recipe's MaxEnt weights come from q and the reference."""
    objective = objective_of(recipe)
    return objective is not None and objective.targets_q


def _get_tau(recipe: Recipe) -> float | None:
    """Return the recipe's tau, or its objective's default; None without an objective or without a temperature."""
    objective = OBJECTIVES.get(recipe.maxent.objective or "")
    return objective.tau_or_default(recipe.maxent.tau) if objective else None


def weight_ratio(recipe: Recipe, tau: float | None = None) -> float:
    """Return the weight of a right answer divided by the weight of a wrong answer, for rewards of 0 and 1.

    Half of the group is right. All completions have max_completion_length and the same probability under the reference.
    ``tau`` is the temperature of the weights, by default the recipe's at the start. If the recipe sets
    maxent_target_ratio and ``tau`` is None, return that ratio. Return infinity if wrong answers have no weight, and for
    an objective without tau.
    """
    if tau is None and _find_target(recipe) == [_RATIO]:
        return float(recipe[_RATIO])
    tau = _get_tau(recipe) if tau is None else tau
    if tau is None:
        return math.inf
    if not targets_q(recipe):
        return _exp(1 / tau) if tau else math.inf
    group, epsilon = recipe.batch.num_generations, recipe.maxent.q_epsilon
    softmax_wrong = 1 / (1 + _exp(1 / recipe.maxent.q_temperature)) * 2 / group
    softmax_right = 2 / group - softmax_wrong
    q_wrong, q_right = (mass * (1 - group * epsilon) + epsilon for mass in (softmax_wrong, softmax_right))
    pull = tau + recipe.maxent.beta
    return _exp(math.log(q_right / q_wrong) / pull) if q_wrong and pull else math.inf


def _exp(power: float) -> float:
    """Return e to a power, or infinity if that overflows a float."""
    return math.exp(power) if power < _MOST else math.inf


def limit_note(recipe: Recipe) -> str | None:
    """Return a note if a MaxEnt recipe is practically another method, else None. It may name a setting to change.

    Either right and wrong answers have nearly equal weights, or wrong answers have practically no weight. ``listwise``
    has further cases for long completions. Return None for other tasks, without tau, and if a controller moves tau.
    """
    name, ratio, tau = recipe.maxent.objective or "", weight_ratio(recipe), _get_tau(recipe)
    if task_of(recipe) != MAXENT or tau is None or _list_targets(recipe):
        return None
    times = format_ratio(ratio)
    weight = f"maxent_objective: {name} with tau {tau:g}: a right answer weighs {times} as much as a wrong answer"
    if ratio < _EQUAL_RATIO:
        methods = {"tempered": "this is Dr.GRPO", "weighted_mle": "this is training on the policy's own samples"}
        key = "maxent_beta" if targets_q(recipe) and weight_ratio(recipe, 0.0) < _EQUAL_RATIO else "maxent_tau"
        return f"{weight}, so {methods.get(name, 'it hardly learns from rewards')}; a lower {key} changes that"
    if name == "listwise":
        return _describe_listwise(recipe, ratio)
    if ratio > _RIGHT_ONLY_RATIO:
        method = "this is training only on right answers"
        if name == "tempered":
            method = "wrong answers are not pushed down: this is the positive half of MaxRL (maxent_objective: maxrl)"
        return f"{weight}, so {method}"
    return None


def _describe_listwise(recipe: Recipe, ratio: float) -> str | None:
    """Return a note if the objective ``listwise`` has an effect with long completions that users do not expect.

    This is the case if the policy's temperature is above 0 and the limit is very long, or if log-probs are divided by
    the length and the limit is long; else return None. ``ratio`` is the result of ``weight_ratio``.
    """
    limit, temperature = recipe.sampling.max_completion_length, recipe.maxent.policy_temperature
    longest, length = limit or math.inf, f"max_completion_length is {limit or 'not set'}"
    if temperature and longest >= _VERY_LONG and not recipe.maxent.policy_spread:
        return (
            f"maxent_objective: listwise with maxent_policy_temperature {temperature:g}: completions of {_VERY_LONG} "
            f"tokens or more ({length}) differ by many more nats, so the most likely completion has nearly all of the "
            "policy's distribution over a group; maxent_policy_spread: 1 widens it"
        )
    if policy_per_token(recipe.__getitem__) and longest >= _LONG:
        right_only = ratio > _PROPORTIONAL_RATIO and recipe.maxent.beta == 0
        effect = "this is MaxRL" if right_only else "it does not make right answers equally likely"
        return (
            f"maxent_policy_temperature: 0 divides log-probs by the length: at {_LONG} tokens a completion or more "
            f"({length}) {effect}; a value above 0 does not weaken with the length"
        )
    return None


def format_ratio(ratio: float) -> str:
    """Return a ratio of weights as text, e.g. ``3.5 times``."""
    return "infinitely many times" if ratio == math.inf else f"{ratio:.3g} times"


def _list_targets(recipe: Recipe) -> list[str]:
    """Return the keys of a MaxEnt recipe that set a target for tau's controller; [] for recipes of other tasks."""
    return tau_targets(recipe.__getitem__) if task_of(recipe) == MAXENT else []


def _find_target(recipe: Recipe) -> list[str]:
    """Return the key of the target in a list, or an empty list if the recipe has no target or several."""
    return targets if len(targets := _list_targets(recipe)) == 1 else []


def _bound_target(recipe: Recipe, target: str) -> float:
    """Return the largest value of a limited target for the recipe's group size: its value at equal weights."""
    return _LIMITED[target][2](recipe.batch.num_generations)


def _find_unreachable_target(recipe: Recipe) -> list[str]:
    """Return the key of the target in a list if no weights of a group can reach its value, else []."""
    limited = [key for key in _find_target(recipe) if key in _LIMITED]
    return [key for key in limited if not _LIMITED[key][1] < recipe[key] <= _bound_target(recipe, key)]


def _start_outside_limits(recipe: Recipe) -> list[str]:
    """Return, in a list, the key to change if tau starts outside the controller's limits, else [].

    The key is the broken limit if the user set only the limit, else maxent_tau. Another rule checks swapped limits.
    """
    low, high, tau = recipe.maxent.tau_min, recipe.maxent.tau_max, _get_tau(recipe)
    if tau is None or not _find_target(recipe) or low <= tau <= high or (low > high and 0 < tau < math.inf):
        return []
    limit = "maxent_tau_min" if tau < low else "maxent_tau_max"
    return [limit if recipe.is_set(limit) and not recipe.is_set("maxent_tau") else "maxent_tau"]


def _suggest_start(recipe: Recipe, _: str) -> str:
    """Return the fix for a tau that starts outside the controller's limits: a value between them, or other limits."""
    low, high = sorted((recipe.maxent.tau_min, recipe.maxent.tau_max))
    middle = f"set maxent_tau: {math.sqrt(low * high):.3g}"
    return f"{middle}, or other limits" if low < high else f"remove maxent_tau_max, or {middle}"


def _list_unread_keys(recipe: Recipe) -> list[str]:
    """Return the maxent keys that a MaxEnt recipe sets, but its objective does not read; [] without an objective."""
    objective = objective_of(recipe)
    return [key for key in matching_keys(" ".join(objective.unread)) if recipe.is_set(key)] if objective else []


def _get_fixed_keys(recipe: Recipe) -> dict[str, str]:
    """Return TRL's keys with the values that the recipe's objective needs; {} without an objective."""
    objective = objective_of(recipe)
    return objective.fixed_keys(recipe.__getitem__) if objective else {}


# fmt: off
RULES = (
    Rule("{item}", lambda r: task_of(r) != MAXENT and set_by_user(r, "maxent_*"),
        "'{item}' changes nothing in a GRPO run",
        "{removal}, or make it a MaxEnt run (maxent_objective in the recipe)"),
    Rule("maxent_objective", lambda r: task_of(r) == MAXENT and r.maxent.objective is None,
        "maxent_objective is null, and the recipe names no other task",
        "set maxent_objective: listwise, or remove it; docs/maxent.md has the evidence for each objective"),
    Rule("{item}", _list_unread_keys, "'{item}' changes nothing under maxent_objective: {maxent_objective}",
        lambda r, key: f"{removal(r, key)}, or write maxent_objective: "
        + " or ".join(name for name, objective in sorted(OBJECTIVES.items()) if key not in objective.unread)),
    Rule("{item}", lambda r: [key for key, value in _get_fixed_keys(r).items() if r.is_set(key) and r[key] != value],
        lambda r, key: f"{key}: {r[key]} contradicts maxent_objective: {r.maxent.objective}, whose {key} is "
        f"{_get_fixed_keys(r)[key]}", "{removal}"),
    Rule("maxent_length_normalize_policy",
        lambda r: r.maxent.objective == "listwise" and r.maxent.policy_temperature > 0
        and set_by_user(r, "maxent_length_normalize_policy"),
        "'{item}' changes nothing with maxent_policy_temperature {maxent_policy_temperature:g}, which divides the "
        "summed log-prob", "{removal}, or write maxent_policy_temperature: 0"),
    Rule("maxent_policy_spread",
        lambda r: r.maxent.objective == "listwise" and r.maxent.policy_temperature == 0
        and set_by_user(r, "maxent_policy_spread"),
        "'{item}' changes nothing with maxent_policy_temperature 0: it raises one above 0",
        "{removal}, or remove maxent_policy_temperature"),
    Rule("maxent_q_epsilon", lambda r: targets_q(r) and r.maxent.q_epsilon * r.batch.num_generations >= 1,
        lambda r, _: f"maxent_q_epsilon {r.maxent.q_epsilon:g} is not below 1 / num_generations "
        f"({1 / r.batch.num_generations:g}): q would be negative",
        lambda r, _: f"write less than {1 / r.batch.num_generations:g}, e.g. maxent_q_epsilon: 1e-6"),
    Rule("maxent_tau", lambda r: targets_q(r) and (_get_tau(r) or 0) + r.maxent.beta <= 0,
        "maxent_tau and maxent_beta are both 0: the target's exponents 1 / (tau + beta) are not defined",
        "write maxent_tau: 0.01 or more, or a maxent_beta"),
    Rule("{item}", lambda r: task_of(r) == MAXENT and _get_tau(r) is not None and not _list_targets(r)
        and set_by_user(r, "maxent_tau_lr maxent_tau_min maxent_tau_max maxent_tau_warmup_steps"),
        "'{item}' changes nothing without a target: tau is fixed", f"{{removal}}, or add {next(iter(TAU_TARGETS))}"),
    Rule("{item}", lambda r: _list_targets(r)[1:],
        lambda r, key: f"{key} and {_list_targets(r)[0]} are both set, and tau can follow only one target",
        "keep one of them"),
    Rule("{item}", _find_unreachable_target,
        lambda r, key: f"{key} {r[key]:g} is not between {_LIMITED[key][1]} (all weight on one completion) and "
        f"{_LIMITED[key][0]} = {_bound_target(r, key):g} (equal weights)", 
        lambda r, key: f"set {key}: {(_LIMITED[key][1] + _bound_target(r, key)) / 2:.3g}"),
    Rule(_RATIO, lambda r: _find_target(r) == [_RATIO] and r[_RATIO] > weight_ratio(r, r.maxent.tau_min),
        lambda r, _: f"{_RATIO} {r[_RATIO]:g} is out of reach: at maxent_tau_min {r.maxent.tau_min:g} a right "
        f"answer weighs {format_ratio(weight_ratio(r, r.maxent.tau_min))} as much as a wrong answer",
        "lower it, or lower maxent_tau_min or maxent_beta"),
    Rule("maxent_tau_lr", lambda r: _find_target(r) == [_RATIO] and r.maxent.tau_lr >= 2,
        "maxent_tau_lr {maxent_tau_lr:g} takes tau further past maxent_target_ratio with each step",
        "set maxent_tau_lr: 0.2, which corrects a fifth of the error, or 1, which corrects all of it"),
    Rule("maxent_tau_min", lambda r: _find_target(r) and r.maxent.tau_min > r.maxent.tau_max,
        "maxent_tau_min {maxent_tau_min:g} is above maxent_tau_max {maxent_tau_max:g}",
        "set maxent_tau_min: {maxent_tau_max:g} and maxent_tau_max: {maxent_tau_min:g}"),
    Rule("{item}", _start_outside_limits,
        lambda r, _: f"tau starts at {_get_tau(r):g}, outside of maxent_tau_min {r.maxent.tau_min:g} and "
        f"maxent_tau_max {r.maxent.tau_max:g}", _suggest_start),
    Rule("{item}", lambda r: r.loss.kl_target is None and set_by_user(r, "kl_horizon kl_ctl_step_size kl_beta_min"),
        "'{item}' changes nothing without kl_target: beta is fixed", "{removal}, or add kl_target"),
    Rule("kl_target", lambda r: r.loss.kl_target is not None and r.loss.beta == 0,
        "the controller multiplies beta, which is 0: there is no KL to hold",
        "write beta (init_kl_coeff) above 0, e.g. beta: 0.04"),
    Rule("{item}", lambda r: ["kl_beta_min" if r.is_set("kl_beta_min") else "beta"]
        if r.loss.kl_target is not None and 0 < r.loss.beta < r.loss.kl_beta_min else [],
        "kl_beta_min {kl_beta_min:g} is above beta (init_kl_coeff) {beta:g}, the first value of the controller",
        lambda r, _: f"write kl_beta_min: {r.loss.beta / 100:g}, or a larger beta"),
    Rule("ref_model_name_or_path",
        lambda r: r.loss.ref_model_name_or_path and r.loss.beta == 0 and not (targets_q(r) and r.maxent.beta > 0),
        "'ref_model_name_or_path' changes nothing: no term of the loss reads a reference",
        "remove it, or write beta above 0"),
    Rule("sync_ref_model",
        lambda r: r.loss.sync_ref_model and not r.lora.use_peft and r.loss.beta == 0
        and not (targets_q(r) and r.maxent.beta > 0),
        lambda r, _: "sync_ref_model has no reference to sync: "
        + ("beta and maxent_beta are 0" if targets_q(r) else "beta is 0"),
        "remove sync_ref_model, or write beta above 0"),
)
# fmt: on
