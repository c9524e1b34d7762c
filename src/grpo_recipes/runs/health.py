"""Detect from a run's metrics that it does not learn; terminal, status, report and doctor all use these limits.

A run may complete without learning anything. Each rule in ``_RULES`` detects one such failure while the run continues,
for example a reward of 0 or a gradient of 0 in many consecutive steps. A rule that holds gives a ``Notice`` with a text
and a fix. Each row of ``metrics.jsonl`` costs constant work. No torch, no socket.

    for notice in find_notices(read_metrics(run.folder), run.value):
        print(notice)
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_recipes.recipe.registry import OBJECTIVES, TAU_TARGETS, tau_targets

ENOUGH_STEPS = 10  # consecutive or averaged steps before a notice appears during a run
ENOUGH_STEPS_AT_END = 5  # the same for a run that ended with fewer than ENOUGH_STEPS steps
ZERO_REWARD = 1e-6
FEW_SIGNALS = 0.8  # share of completions whose whole group got the same reward
CUT_OFF = 0.25  # share of completions that reach max_completion_length
AVERAGED_STEPS = 5  # steps averaged for the initial and the latest level of a metric
UNSCORED = 0.05  # share of completions without a score
HIGH_KL = 1.0  # nats per token: the policy gives its own tokens e times the probability that the reference does
STEEP = 100.0  # median gradient norm
COLLAPSED = 0.05  # share of the initial entropy that remains
LOW_RATE = 0.01  # highest learning rate of any step, as a share of learning_rate
OFF_TARGET = 0.05  # relative error of the quantity that the tau controller holds
WRONG_WEIGHT = 0.5  # share of a group's weight on wrong answers, and share of the steps above it

_REWARD = re.compile(r"rewards/(.+)/mean")
_PENALTIES = ("repetition_penalty", "soft_overlong")  # rewards with a maximum of 0

Row = Mapping[str, Any]
Value = Callable[[str], Any]  # returns the value of a recipe key in this run
Facts = dict[str, Any]  # values that a notice prints, next to recipe keys; "first" is the first step


@dataclass(frozen=True)
class Notice:
    """A sign that a run does not learn, with the steps in which it was seen and the fix."""

    name: str  # the rule's name, which never changes
    text: str
    fix: str
    first: int
    last: int
    serious: bool  # the run learns little or nothing, so the notice is repeated at the end

    def __str__(self) -> str:
        """Return text and fix in one line."""
        return f"{self.text}. Fix: {self.fix}"


@dataclass(eq=False)
class Health:
    """Apply the rules to a run's metrics row by row."""

    value: Value
    rows: int = 0  # rows so far
    last: int = 0  # step of the last row
    max_steps: float = 0.0
    streaks: dict[str, _Streak] = field(default_factory=lambda: {name: _Streak() for name in _STREAKS})
    metrics: dict[str, _Metric] = field(default_factory=lambda: {key: _Metric() for key in _METRICS})
    silent: dict[str, int] = field(default_factory=dict)  # reward -> consecutive last rows with a mean of 0
    _since: dict[str, int] = field(default_factory=dict)  # rule -> first step of its last notice
    _rows_since: dict[str, int] = field(default_factory=dict)  # rule -> rows since it last held

    def add(self, row: Row) -> list[Notice]:
        """Add the next row; return notices that hold now and did not hold in the ``ENOUGH_STEPS`` rows before it.

        A notice that stays active is returned only with its first row. A row without a step is ignored.
        """
        step = finite_number(row.get("step"))
        if step is None:
            return []
        self.rows, self.last = self.rows + 1, int(step)
        self.max_steps = finite_number(row.get("max_steps")) or 0.0
        for name, is_true in _STREAKS.items():
            self.streaks[name].add(self.last, is_true(row), finite_number(row.get("reward")) or 0.0)
        for key, metric in self.metrics.items():
            metric.add(self.last, finite_number(row.get(key)))
        for key in row:
            if (match := _REWARD.fullmatch(key)) and (value := finite_number(row[key])) is not None:
                reward = match[1]
                self.silent[reward] = self.silent.get(reward, 0) + 1 if abs(value) < ZERO_REWARD else 0
        new_notices, active = [], self._find_active_rules(ENOUGH_STEPS)
        for rule in _RULES:
            rows_since = self._rows_since.get(rule.name, ENOUGH_STEPS)
            self._rows_since[rule.name] = 0 if rule.name in active else rows_since + 1
            if rule.name in active and rows_since >= ENOUGH_STEPS:
                self._since[rule.name] = active[rule.name]["first"]
                new_notices.append(self._make_notice(rule, active[rule.name]))
        return new_notices

    def notices(self, over: bool = False) -> list[Notice]:
        """Return the notices that hold after the last row.

        By default, a sign must hold for ``ENOUGH_STEPS`` rows. If the run is ``over``, fewer rows are enough for a
        short run.
        """
        enough = min(ENOUGH_STEPS, max(ENOUGH_STEPS_AT_END, self.rows)) if over else ENOUGH_STEPS
        active = self._find_active_rules(enough)
        return [self._make_notice(rule, active[rule.name]) for rule in _RULES if rule.name in active]

    def _find_active_rules(self, enough: int) -> dict[str, Facts]:
        """Return the name and the facts of each rule that holds for at least ``enough`` rows.

        A rule is left out if a stronger rule (``implied_by``) holds, or held in the last ``ENOUGH_STEPS`` rows.
        With a teacher, the rules in ``_SIGNALS`` are left out, because the run also learns without rewards.
        """
        without = _SIGNALS if self.value("teacher_model_name_or_path") else ()
        rules = [rule for rule in _RULES if rule.name not in without]
        facts_by_rule = {rule.name: facts for rule in rules if (facts := rule.facts(self, enough))}
        # The averages of weaker rules still include rows of a rule that held until a few rows ago.
        recent_rules = {name for name, rows_since in self._rows_since.items() if rows_since < ENOUGH_STEPS}
        stronger_rules = facts_by_rule.keys() | recent_rules
        return {
            rule.name: facts_by_rule[rule.name]
            for rule in _RULES
            if rule.name in facts_by_rule and stronger_rules.isdisjoint(rule.implied_by)
        }

    def _make_notice(self, rule: _Rule, facts: Facts) -> Notice:
        """Return the notice of a rule, with its facts and the current recipe values in text and fix."""
        values = _TextValues(self.value, facts)
        text, fix = rule.text.format_map(values), rule.fix.format_map(values)
        first = self._since.get(rule.name) or int(facts["first"])
        return Notice(rule.name, text, fix, first, self.last, rule.serious)


def find_notices(rows: Iterable[Row], value: Value, over: bool = True) -> list[Notice]:
    """Return the notices for a run with these rows of ``metrics.jsonl``.

    ``value`` returns the value of a recipe key in this run. With ``over``, the run has ended, so fewer rows are enough
    for a short run.
    """
    health = Health(value)
    for row in rows:
        health.add(row)
    return health.notices(over)


def finite_number(value: Any) -> float | None:
    """Return a value of a row as a float if it is a finite number below 1e300, else None (also for bool and text).

    Rows contain ``inf`` and ``nan`` as texts.
    """
    is_usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_usable else None


def drop_missing(values: Iterable[float | None]) -> list[float]:
    """Return the values that are not None as a list."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None for no values."""
    return sum(values) / len(values) if values else None


def average_first_and_last(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the initial and the final reward: the means of the first and of the last 5 rewards.

    Both are None without rewards. With fewer than 10 rewards, some count in both means.
    """
    return mean(rewards[:AVERAGED_STEPS]), mean(rewards[-AVERAGED_STEPS:])


def summarize_rewards(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return ``initial_reward`` and ``final_reward`` of rows of ``metrics.jsonl``; both are None without rows.

    If no row has a reward, also return ``initial_loss`` and ``final_loss``.
    """
    has_rewards = not rows or any("reward" in row for row in rows)
    averages: dict[str, float | None] = {}
    for name in ("reward",) if has_rewards else ("reward", "loss"):
        first, last = average_first_and_last(drop_missing(finite_number(row.get(name)) for row in rows))
        averages |= {f"initial_{name}": first, f"final_{name}": last}
    return averages


def format_rewards(first: float, last: float, steps: int) -> str:
    """Format the result of ``average_first_and_last`` for a run of ``steps`` steps.

    For example "0.565 -> 0.966, means of the first and the last 5 of 60 steps". With fewer than 10 steps both means
    contain the same steps, so only the last is shown: "0.539, mean of 2 steps".
    """
    if steps >= 2 * AVERAGED_STEPS:
        return f"{first:.3f} -> {last:.3f}, means of the first and the last {AVERAGED_STEPS} of {steps:,} steps"
    averaged = f"the last {AVERAGED_STEPS} of {steps}" if steps > AVERAGED_STEPS else str(steps)
    return f"{last:.3f}, mean of {averaged} step{'s' * (steps != 1)}"


def percent(share: float) -> str:
    """Format a fraction as a percentage: 17 % or 51.2 %."""
    return f"{round(100 * share, 1):g} %"


class _TextValues(Facts):
    """Values for the texts of a rule: its facts, and recipe keys as in "beta (now 0.04)"."""

    def __init__(self, value: Value, facts: Facts):
        super().__init__(facts)
        self._value = value

    def __missing__(self, key: str) -> str:
        """Return a recipe key with its value, e.g. "beta (now 0.04)"."""
        value = self._value(key)
        return f"{key} (now {f'{value:g}' if isinstance(value, int | float) else value})"


@dataclass
class _Streak:
    """Count the rows in which a condition was true; rows without the metric are skipped."""

    count: int = 0  # consecutive rows, up to the last row
    first: int = 0  # step of the first of them
    total: int = 0  # all rows
    begin: int = 0  # step of the first of all rows
    rewards: tuple[float, float] = (0.0, 0.0)  # lowest and highest reward of the consecutive rows

    def add(self, step: int, is_true: bool | None, reward: float) -> None:
        """Count a row of step ``step`` if the condition is true; end the streak if it is false.

        ``is_true`` is None if the row does not have the metric; the row is then skipped. ``reward`` is the row's
        mean reward; the lowest and the highest of the streak are kept.
        """
        if is_true:
            low, high = self.rewards if self.count else (reward, reward)
            self.rewards = min(low, reward), max(high, reward)
            self.first, self.begin = (self.first if self.count else step), self.begin or step
            self.count, self.total = self.count + 1, self.total + 1
        elif is_true is not None:
            self.count = 0

    def facts(self) -> Facts:
        """Return the values for the text of a notice: the first step of the streak, and its length in words."""
        return {"first": self.first, "in_steps": f"in {self.count} steps in a row, from step {self.first} on"}


@dataclass
class _Metric:
    """Keep the first and the last values of a metric, each with its step."""

    begin: list[tuple[int, float]] = field(default_factory=list)  # at most ENOUGH_STEPS_AT_END
    window: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ENOUGH_STEPS))
    count: int = 0
    highest: float = -math.inf

    def add(self, step: int, value: float | None) -> None:
        """Store the value of a metric in step ``step``; skip a value of None."""
        if value is not None:
            self.begin += [(step, value)] if self.count < ENOUGH_STEPS_AT_END else []
            self.window.append((step, value))
            self.count, self.highest = self.count + 1, max(self.highest, value)


def _make_metric_test(key: str, test: Callable[[float], bool], required: str = "step") -> Callable[[Row], bool | None]:
    """Return a function that applies ``test`` to the metric ``key`` of a row.

    The function returns None if the metric, or the metric ``required``, is not a finite number.
    """

    def is_true(row: Row) -> bool | None:
        """Return the result of ``test`` for a row; None if a metric is missing."""
        value = finite_number(row.get(key))
        return None if value is None or finite_number(row.get(required)) is None else test(value)

    return is_true


def _has_no_gradient(row: Row) -> bool | None:
    """Return whether a step's gradient norm is 0 although some rewards differ; None if the row has no gradient norm."""
    norm = finite_number(row.get("grad_norm"))
    # Equal rewards give no gradient either; the rule "no signal" covers them.
    return None if norm is None else norm == 0 and row.get("frac_reward_zero_std") != 1


def _make_not_finite_test(*keys: str) -> Callable[[Row], bool]:
    """Return a function that tells whether one of these metrics is present in a row and not finite."""
    return lambda row: any(finite_number(row.get(key)) is None for key in keys if row.get(key) is not None)


_STREAKS: dict[str, Callable[[Row], bool | None]] = {
    "zero reward": _make_metric_test("reward", lambda reward: abs(reward) < ZERO_REWARD),
    "no signal": _make_metric_test("frac_reward_zero_std", lambda share: share >= 1, required="reward"),
    "no gradient": _has_no_gradient,
    "all cut off": _make_metric_test("completions/clipped_ratio", lambda share: share >= 1),
    "learning rate 0": _make_metric_test("learning_rate", lambda rate: rate == 0),
    "not finite": _make_not_finite_test("loss", "grad_norm"),
    "loss not finite": _make_not_finite_test("loss"),
    "wrong weights": _make_metric_test("maxent/incorrect_mass", lambda mass: mass > WRONG_WEIGHT),
}
_METRICS: tuple[str, ...] = (
    "frac_reward_zero_std", "completions/clipped_ratio", "rewards/no_verdict", "kl", "grad_norm", "entropy",
    "learning_rate", "maxent/incorrect_mass", "maxent/tau", *(f"maxent/{name}" for name in TAU_TARGETS.values()),
)  # fmt: skip


@dataclass(frozen=True)
class _Rule:
    """A sign that a run does not learn; ``text`` and ``fix`` contain facts of the rule and recipe keys in braces."""

    name: str
    facts: Callable[[Health, int], Facts | None]  # facts if the rule holds for at least this many rows, else None
    text: str
    fix: str
    serious: bool = True
    implied_by: tuple[str, ...] = ()  # names of rules that say the same and more


def _make_streak_test(name: str) -> Callable[[Health, int], Facts | None]:
    """Return a ``facts`` function for a rule: it holds if a condition of ``_STREAKS`` was true in enough last rows."""
    return lambda health, enough: streak.facts() if (streak := health.streaks[name]).count >= enough else None


def _make_level_test(
    key: str, limit: float, level_of: Callable[[Iterable[float]], float] = statistics.fmean
) -> Callable[[Health, int], Facts | None]:
    """Return a ``facts`` function for a rule: it holds if the mean of a metric's last 10 values is above ``limit``.

    ``level_of`` computes the level; it may be another function than the mean. With fewer values than the rule's
    ``enough``, it does not hold.
    """

    def facts(health: Health, enough: int) -> Facts | None:
        """Return the window's first step and its level, or None for too few values or a level within the limit."""
        window = health.metrics[key].window
        if len(window) < enough or (level := level_of(value for _, value in window)) <= limit:
            return None
        first = next(step for step, value in window if value > limit)
        return {"first": first, "level": level, "share": percent(level)}

    return facts


def _detect_no_signal(health: Health, enough: int) -> Facts | None:
    """Return facts if in ``enough`` rows up to the last all completions of each prompt got one reward, else None."""
    streak = health.streaks["no signal"]
    (low, high), observation, remedy = streak.rewards, "all completions of each prompt got one reward", _MORE_SPREAD
    if high - low < ZERO_REWARD:
        observation = f"every completion got the reward {high:.3g}"
        remedy = "test the reward: grpo check-rewards RECIPE, or use harder or easier prompts"
    return streak.facts() | {"observation": observation, "remedy": remedy} if streak.count >= enough else None


def _detect_silent_rewards(health: Health, enough: int) -> Facts | None:
    """Return facts if one or more of several rewards had a mean of 0 in each of the last ``enough`` rows, else None.

    Rewards with a maximum of 0 (``_PENALTIES``) are not reported.
    """
    rows = {name: rows for name, rows in health.silent.items() if rows >= enough and name not in _PENALTIES}
    if not rows or len(health.silent) == 1:
        return None
    return {"first": health.last - min(rows.values()) + 1, "names": " and ".join(rows), "count": min(rows.values())}


def _detect_entropy_collapse(health: Health, enough: int) -> Facts | None:
    """Return facts if the median of the last entropies is below 5 % of the mean of the first ones, else None.

    Return None for fewer than ``enough`` values too.
    """
    metric = health.metrics["entropy"]
    if metric.count < enough:
        return None
    recent = list(metric.window)[-ENOUGH_STEPS_AT_END:]
    initial, now = statistics.fmean(value for _, value in metric.begin), statistics.median(value for _, value in recent)
    return {"first": recent[0][0], "initial": initial, "now": now} if 0 < initial * COLLAPSED > now else None


def _detect_low_learning_rate(health: Health, enough: int) -> Facts | None:
    """Return facts if the learning rate was near 0 in every step so far, or exactly 0 in the last steps, else None."""
    metric, zero = health.metrics["learning_rate"], health.streaks["learning rate 0"]
    rate = health.value("learning_rate")
    # A long warm-up has small rates at first: it is judged after a tenth of the run.
    always_low = metric.count >= max(enough, health.max_steps / 10) and metric.highest < LOW_RATE * rate
    if not always_low and zero.count < enough:
        return None
    observation = f"no step of {metric.count} used more than {metric.highest:.2g} of learning_rate (now {rate:g})"
    if zero.count >= ENOUGH_STEPS_AT_END:
        observation = f"the learning rate is 0 in {zero.count} steps in a row: no weight changes"
    return {"first": zero.first if zero.count else metric.begin[0][0], "observation": observation}


def _detect_not_finite(health: Health, _: int) -> Facts | None:
    """Return facts if loss or gradient norm was not finite in any step, else None. With fp16, only the loss counts."""
    # With fp16, steps with an infinite gradient are skipped by design.
    streak = health.streaks["loss not finite" if health.value("fp16") else "not finite"]
    return {"first": streak.begin, "count": streak.total, "rows": health.rows} if streak.total else None


def _detect_wrong_weights(health: Health, enough: int) -> Facts | None:
    """Return facts if wrong answers had over half of the MaxEnt weight in over half of the steps, else None.

    The rule applies only to objectives that move the policy towards the weights, from ``enough`` steps on.
    """
    name, steps = health.value("maxent_objective"), health.metrics["maxent/incorrect_mass"].count
    objective, streak = OBJECTIVES.get(name), health.streaks["wrong weights"]
    if objective is None or not objective.targets_q or steps < enough or streak.total <= WRONG_WEIGHT * steps:
        return None
    return {"first": streak.begin, "share": percent(streak.total / steps), "objective": name}


def _detect_tau_at_limit(health: Health, enough: int) -> Facts | None:
    """Return facts if tau stays at a limit of its controller and misses its target, else None.

    ``enough`` is the number of rows in which tau must have been at the limit.
    """
    taus = health.metrics["maxent/tau"].window
    for key in tau_targets(health.value) if len(taus) >= enough else ():
        measure, target, is_ratio = f"maxent/{TAU_TARGETS[key]}", health.value(key), key == "maxent_target_ratio"
        window = health.metrics[measure].window
        if len(window) < enough:
            continue
        level = statistics.fmean(value for _, value in window)
        # A smaller tau means less entropy, fewer effective completions and a larger ratio.
        limit_key = "maxent_tau_min" if (level > target) != is_ratio else "maxent_tau_max"
        limit, is_min = health.value(limit_key), limit_key == "maxent_tau_min"
        if abs(level / target - 1) <= OFF_TARGET or not all(math.isclose(tau, limit) for _, tau in taus):
            continue
        remedy = f"{'raise' if level > target else 'lower'} {key}, or {'lower' if is_min else 'raise'} {limit_key}"
        if is_min and is_ratio and health.value("maxent_beta"):
            remedy += " or maxent_beta"
        if is_min and not is_ratio:
            remedy = f"set maxent_target_ratio instead, which any number of right answers can reach, or raise {key}"
        observation = (
            f"tau stays at {limit_key} ({limit:g}) and {measure} at {level:.3g}: {key} ({target:g}) is out of reach"
        )
        return {"first": taus[0][0], "observation": observation, "remedy": remedy}
    return None


_SIGNALS = ("zero reward", "no signal", "few signals")  # rules of runs that learn only from rewards
_MORE_SPREAD = "raise num_generations or temperature, or use easier or harder prompts"
_SHORTER = (
    "raise {max_completion_length}, or ask for short answers in system_prompt; check that chat_template ends a turn "
    "with the token that the model was trained on"
)
_RULES = (
    _Rule("zero reward", _make_streak_test("zero reward"), "the reward is 0 {in_steps}",
          "test the reward on gold answers: grpo check-rewards RECIPE; read the first prompt in the log"),
    _Rule("silent reward", _detect_silent_rewards,
          "{names} gave 0 in {count} steps in a row: only the other rewards are learned",
          "test the reward on right answers: grpo check-rewards RECIPE", serious=False, implied_by=("zero reward",)),
    _Rule("no signal", _detect_no_signal, "{observation} {in_steps}: nothing is learned", "{remedy}",
          implied_by=("zero reward",)),
    _Rule("few signals", _make_level_test("frac_reward_zero_std", FEW_SIGNALS),
          "{share} of groups get one reward for all completions: they teach nothing", _MORE_SPREAD,
          serious=False, implied_by=("zero reward", "no signal")),
    _Rule("no gradient", _make_streak_test("no gradient"),
          "the gradient is exactly 0 {in_steps}, although rewards differ: no weight changes",
          "find out why every token is masked: mask_truncated_completions if all are cut off, or a clip range of 0"),
    _Rule("learning rate", _detect_low_learning_rate, "{observation}", "check {warmup_steps} and {lr_scheduler_type}"),
    _Rule("not finite", _detect_not_finite,
          "loss or grad_norm is not a number at step {first} ({count} of {rows} steps)",
          "set bf16: true or dtype: float32 (not float16), or lower {learning_rate}"),
    _Rule("kl", _make_level_test("kl", HIGH_KL), "the KL divergence from the reference is {level:.2f} nats per token",
          "lower {learning_rate} or raise {beta} (also called init_kl_coeff); check chat_template and system_prompt"),
    _Rule("entropy", _detect_entropy_collapse,
          "entropy fell from {initial:.2g} to {now:.2g}: the model explores little",
          "lower {learning_rate}, raise epsilon_high or beta, or stop earlier"),
    _Rule("all cut off", _make_streak_test("all cut off"),
          "every completion was clipped at max_completion_length {in_steps}", _SHORTER),
    _Rule("cut off", _make_level_test("completions/clipped_ratio", CUT_OFF),
          "{share} of completions are clipped at max_completion_length", _SHORTER,
          serious=False, implied_by=("all cut off",)),
    _Rule("unscored", _make_level_test("rewards/no_verdict", UNSCORED),
          "{share} of completions have no score and teach nothing",
          "read slow_rewards.jsonl of the run; fix the reward, or raise {reward_timeout}", serious=False),
    # The median, because single steep steps are common and their gradients are clipped.
    _Rule("steep", _make_level_test("grad_norm", STEEP, statistics.median), "the gradient norm is {level:.3g}",
          "lower {learning_rate}; gradients are clipped to {max_grad_norm}", serious=False),
    _Rule("wrong weights", _detect_wrong_weights,
          "more than half of the MaxEnt weight was on wrong answers in {share} of the steps, and {objective} moves the "
          "policy towards the weights",
          "lower maxent_q_temperature, maxent_tau or maxent_beta", serious=False),
    _Rule("tau at its limit", _detect_tau_at_limit, "{observation}", "{remedy}", serious=False),
)  # fmt: skip
