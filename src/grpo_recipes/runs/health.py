"""What a run's metrics say about its learning: the one home of the limits that terminal, status, report and doctor use.

Pure: rows of ``metrics.jsonl`` in, notices out, a constant amount of work a row. A run may complete and have learned
nothing; every rule of ``_RULES`` is one way to notice that while the run goes on. No torch, no socket.
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

ENOUGH_STEPS = (
    10  # steps in a row, or steps averaged, before anything is said while a run goes on; as many until it is over
)
ENOUGH_STEPS_AT_END = 5  # steps of a run that ended with fewer than MANY
ZERO_REWARD = 1e-6
FEW_SIGNALS = 0.8  # share of completions whose whole group got one reward
CUT_OFF = 0.25  # share of completions that reach max_completion_length
FIRST_STEPS = 3  # of a run, the level it began with
LAST_STEPS = 5  # over which the latest level of a metric is averaged
UNSCORED = 0.05  # share of completions without a score
HIGH_KL = 1.0  # nats a token: the policy gives its own tokens e times the probability that the reference does
STEEP = 100.0  # median gradient norm
COLLAPSED = 0.05  # share of the first entropies that is left
LOW_RATE = 0.01  # share of learning_rate that a step took at most
OFF_TARGET = 0.05  # relative error of what the controller of tau holds
WRONG_WEIGHT = 0.5  # share of a group's weight on wrong answers, and share of the steps where it is more

_REWARD = re.compile(r"rewards/(.+)/mean")
_PENALTIES = ("repetition_penalty", "soft_overlong")  # 0 is their best

Row = Mapping[str, Any]
Value = Callable[[str], Any]  # the value of a recipe key in this run
Facts = dict[str, Any]  # what a notice names beside recipe keys; "first" is the step from which it holds


@dataclass(frozen=True)
class Notice:
    """Something worth a look in a run's metrics: what is seen from one step to another, and what to do about it."""

    name: str  # of the rule, which stays the same
    text: str
    fix: str
    first: int
    last: int
    serious: bool  # a run with this has learned little or nothing, so that it is said again at the end

    def __str__(self) -> str:
        return f"{self.text}. Fix: {self.fix}"


class Health:
    """Follow a run's metrics, row by row; ``value`` returns the value of a recipe key in this run."""

    def __init__(self, value: Value):
        self.value = value
        self.rows = self.last = 0  # rows so far, and the step of the last of them
        self.max_steps = 0.0
        self.streaks = {name: _Streak() for name in _STREAKS}
        self.metrics = {key: _Metric() for key in _METRICS}
        self.silent: dict[str, int] = {}  # reward -> rows in a row, up to now, in which its mean is 0
        self._since: dict[str, int] = {}  # rule -> step from which it held when it was last said
        self._away: dict[str, int] = {}  # rule -> rows since it held

    def add(self, row: Row) -> list[Notice]:
        """Look at the next row; return the notices that appear with it, or come back after ``MANY`` rows away."""
        step = finite_number(row.get("step"))
        if step is None:
            return []
        self.rows, self.last, self.max_steps = self.rows + 1, int(step), finite_number(row.get("max_steps")) or 0.0
        for name, is_true in _STREAKS.items():
            self.streaks[name].add(self.last, is_true(row), finite_number(row.get("reward")) or 0.0)
        for key, metric in self.metrics.items():
            metric.add(self.last, finite_number(row.get(key)))
        for key in row:
            if (one := _REWARD.fullmatch(key)) and (value := finite_number(row[key])) is not None:
                self.silent[one[1]] = self.silent.get(one[1], 0) + 1 if abs(value) < ZERO_REWARD else 0
        new, holding = [], self._holding(ENOUGH_STEPS)
        for rule in _RULES:
            away = self._away.get(rule.name, ENOUGH_STEPS)
            self._away[rule.name] = 0 if rule.name in holding else away + 1
            if rule.name in holding and away >= ENOUGH_STEPS:
                self._since[rule.name] = holding[rule.name]["first"]
                new.append(self._notice(rule, holding[rule.name]))
        return new

    def notices(self, over: bool = False) -> list[Notice]:
        """Return what is true of the run now; one that is ``over`` before ``MANY`` steps is judged by those it has."""
        holding = self._holding(min(ENOUGH_STEPS, max(ENOUGH_STEPS_AT_END, self.rows)) if over else ENOUGH_STEPS)
        return [self._notice(rule, holding[rule.name]) for rule in _RULES if rule.name in holding]

    def _holding(self, enough: int) -> dict[str, Facts]:
        """Return the facts of each rule that holds by this many rows at least, unless another rule says more."""
        found = {rule.name: facts for rule in _RULES if (facts := rule.facts(self, enough))}
        # What was said until a few rows ago is still in the averages of the rules that say less.
        said = found.keys() | {name for name, rows in self._away.items() if rows < ENOUGH_STEPS}
        return {rule.name: found[rule.name] for rule in _RULES if rule.name in found and said.isdisjoint(rule.said_by)}

    def _notice(self, rule: _Rule, facts: Facts) -> Notice:
        filled = _Filled(self.value, facts)
        text, fix = rule.words.format_map(filled), rule.remedy.format_map(filled)
        first = self._since.get(rule.name) or int(facts["first"])
        return Notice(rule.name, text, fix, first, self.last, rule.serious)


def find_notices(rows: Iterable[Row], value: Value, over: bool = True) -> list[Notice]:
    """Return what is true of the run with these rows; ``value`` and ``over`` as in ``Health``."""
    health = Health(value)
    for row in rows:
        health.add(row)
    return health.notices(over)


def finite_number(value: Any) -> float | None:
    """Return a number of a row that can be added up, or None: ``inf`` and ``nan`` are texts there."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if usable else None


def without_gaps(values: Iterable[float | None]) -> list[float]:
    """Return the values without the gaps."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def first_and_last(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the reward in the beginning and in the end: means of the first 3 and the last 5 steps."""
    return mean(rewards[:FIRST_STEPS]), mean(rewards[-LAST_STEPS:])


def describe_means(steps: int) -> str:
    """Return which steps the two means of ``first_and_last`` are of, which overlap in a short run."""
    text = f"means of the first {min(steps, FIRST_STEPS)} and the last {min(steps, LAST_STEPS)}"
    return text + (", which overlap" if steps < FIRST_STEPS + LAST_STEPS else "")


def percent(share: float) -> str:
    """Return a share in per cent: 17 % or 51.2 %."""
    return f"{round(100 * share, 1):g} %"


class _Filled(Facts):
    """Fill the texts of a rule with its facts, and with recipe keys as in "beta (now 0.04)"."""

    def __init__(self, value: Value, facts: Facts):
        super().__init__(facts)
        self._value = value

    def __missing__(self, key: str) -> str:
        value = self._value(key)
        return f"{key} (now {f'{value:g}' if isinstance(value, int | float) else value})"


@dataclass
class _Streak:
    """Count the rows in which something was true. Rows that say nothing about it are passed over."""

    count: int = 0  # in a row, up to now
    first: int = 0  # step of the first of those
    total: int = 0  # in all rows
    begin: int = 0  # step of the first of those
    rewards: tuple[float, float] = (0.0, 0.0)  # the lowest and the highest in a row

    def add(self, step: int, is_true: bool | None, reward: float) -> None:
        """Look at a row."""
        if is_true:
            low, high = self.rewards if self.count else (reward, reward)
            self.rewards = min(low, reward), max(high, reward)
            self.first, self.begin = (self.first if self.count else step), self.begin or step
            self.count, self.total = self.count + 1, self.total + 1
        elif is_true is not None:
            self.count = 0

    def facts(self) -> Facts:
        """Return what a notice says about it."""
        return {"first": self.first, "in_steps": f"in {self.count} steps in a row, from step {self.first} on"}


@dataclass
class _Metric:
    """Keep the first and the last values of a metric, each with its step."""

    begin: list[tuple[int, float]] = field(default_factory=list)  # FEW
    window: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ENOUGH_STEPS))
    count: int = 0
    most: float = -math.inf

    def add(self, step: int, value: float | None) -> None:
        """Look at a row."""
        if value is not None:
            self.begin += [(step, value)] if self.count < ENOUGH_STEPS_AT_END else []
            self.window.append((step, value))
            self.count, self.most = self.count + 1, max(self.most, value)


def _where(key: str, test: Callable[[float], bool], also: str = "step") -> Callable[[Row], bool | None]:
    """Return a test of one metric of a row: None where that metric, or ``also``, is not a number."""

    def is_true(row: Row) -> bool | None:
        found = finite_number(row.get(key))
        return None if found is None or finite_number(row.get(also)) is None else test(found)

    return is_true


def _no_gradient(row: Row) -> bool | None:
    norm = finite_number(row.get("grad_norm"))
    # Without a difference between rewards there is no gradient, which another rule says.
    return None if norm is None else norm == 0 and row.get("frac_reward_zero_std") != 1


def _broken(*keys: str) -> Callable[[Row], bool]:
    """Return a test of whether one of the metrics is there and not finite."""
    return lambda row: any(finite_number(row.get(key)) is None for key in keys if row.get(key) is not None)


_STREAKS: dict[str, Callable[[Row], bool | None]] = {
    "zero reward": _where("reward", lambda reward: abs(reward) < ZERO_REWARD),
    "no signal": _where("frac_reward_zero_std", lambda alike: alike >= 1, also="reward"),
    "no gradient": _no_gradient,
    "all cut off": _where("completions/clipped_ratio", lambda share: share >= 1),
    "learning rate 0": _where("learning_rate", lambda rate: rate == 0),
    "not finite": _broken("loss", "grad_norm"),
    "loss not finite": _broken("loss"),
    "wrong weights": _where("maxent/incorrect_mass", lambda mass: mass > WRONG_WEIGHT),
}
_METRICS = (
    "frac_reward_zero_std", "completions/clipped_ratio", "rewards/no_verdict", "kl", "grad_norm", "entropy",
    "learning_rate", "maxent/incorrect_mass", "maxent/tau", *(f"maxent/{name}" for name in TAU_TARGETS.values()),
)  # fmt: skip


@dataclass(frozen=True)
class _Rule:
    """A way in which a run does not learn; ``words`` and ``remedy`` name facts of the rule and recipe keys."""

    name: str
    facts: Callable[[Health, int], Facts | None]  # those by which it is true, by this many rows at least
    words: str
    remedy: str
    serious: bool = True
    said_by: tuple[str, ...] = ()  # names of rules that say the same and more


def _in_a_row(name: str) -> Callable[[Health, int], Facts | None]:
    """Return the test of something that is true in many steps in a row."""
    return lambda health, enough: streak.facts() if (streak := health.streaks[name]).count >= enough else None


def _above(
    key: str, most: float, level_of: Callable[[Iterable[float]], float] = statistics.fmean
) -> Callable[[Health, int], Facts | None]:
    """Return the test of a metric whose level over its last values is too high."""

    def facts(health: Health, enough: int) -> Facts | None:
        window = health.metrics[key].window
        if len(window) < enough or (level := level_of(value for _, value in window)) <= most:
            return None
        return {"first": window[0][0], "level": level, "share": percent(level)}

    return facts


def _no_signal(health: Health, enough: int) -> Facts | None:
    streak = health.streaks["no signal"]
    (low, high), what, remedy = streak.rewards, "all completions of each prompt got one reward", _MORE_SPREAD
    if high - low < ZERO_REWARD:
        what = f"every completion got the reward {high:.3g}"
        remedy = "see what the reward looks at: grpo check-rewards RECIPE; or take harder or easier prompts"
    return streak.facts() | {"what": what, "remedy": remedy} if streak.count >= enough else None


def _silent(health: Health, enough: int) -> Facts | None:
    """Return facts where one of several rewards gives nothing, so that the others alone are learned."""
    rows = {name: rows for name, rows in health.silent.items() if rows >= enough and name not in _PENALTIES}
    if not rows or len(health.silent) == 1:
        return None
    return {"first": health.last - min(rows.values()) + 1, "names": " and ".join(rows), "count": min(rows.values())}


def _entropy(health: Health, enough: int) -> Facts | None:
    metric = health.metrics["entropy"]
    if metric.count < enough:
        return None
    recent = list(metric.window)[-ENOUGH_STEPS_AT_END:]
    before, now = statistics.fmean(value for _, value in metric.begin), statistics.median(value for _, value in recent)
    return {"first": recent[0][0], "before": before, "now": now} if 0 < before * COLLAPSED > now else None


def _learning_rate(health: Health, enough: int) -> Facts | None:
    """Return facts where every step so far took next to nothing of the learning rate, or the last ones nothing."""
    metric, zero = health.metrics["learning_rate"], health.streaks["learning rate 0"]
    rate = health.value("learning_rate")
    # A long warm-up passes through small rates: it is judged after a tenth of the run.
    never = metric.count >= max(enough, health.max_steps / 10) and metric.most < LOW_RATE * rate
    if not never and zero.count < enough:
        return None
    what = f"no step of {metric.count} took more than {metric.most:.2g} of learning_rate (now {rate:g})"
    if zero.count >= ENOUGH_STEPS_AT_END:
        what = f"the learning rate is 0 in {zero.count} steps in a row: no weight is changed"
    return {"first": zero.first if zero.count else metric.begin[0][0], "what": what}


def _not_finite(health: Health, _: int) -> Facts | None:
    # fp16 skips steps whose gradient is not finite, and may.
    streak = health.streaks["loss not finite" if health.value("fp16") else "not finite"]
    return {"first": streak.begin, "count": streak.total, "rows": health.rows} if streak.total else None


def _wrong_weights(health: Health, enough: int) -> Facts | None:
    """Return facts where the policy is moved towards the weights, and most of the weight is on wrong answers."""
    name, steps = health.value("maxent_objective"), health.metrics["maxent/incorrect_mass"].count
    objective, streak = OBJECTIVES.get(name), health.streaks["wrong weights"]
    if objective is None or not objective.targets_q or steps < enough or streak.total <= WRONG_WEIGHT * steps:
        return None
    return {"first": streak.begin, "share": percent(streak.total / steps), "objective": name}


def _tau_at_limit(health: Health, enough: int) -> Facts | None:
    """Return facts where tau stays at a limit of its controller, beyond which its target would be."""
    taus = health.metrics["maxent/tau"].window
    for key in tau_targets(health.value) if len(taus) >= enough else ():
        measure, target, ratio = f"maxent/{TAU_TARGETS[key]}", health.value(key), key == "maxent_target_ratio"
        window = health.metrics[measure].window
        if len(window) < enough:
            continue
        level = statistics.fmean(value for _, value in window)
        # A smaller tau has less entropy, fewer effective completions and a larger ratio.
        limit = "maxent_tau_min" if (level > target) != ratio else "maxent_tau_max"
        at, low = health.value(limit), limit == "maxent_tau_min"
        if abs(level / target - 1) <= OFF_TARGET or not all(math.isclose(tau, at) for _, tau in taus):
            continue
        remedy = f"{'raise' if level > target else 'lower'} {key}, or {'lower' if low else 'raise'} {limit}"
        if low and ratio and health.value("maxent_beta"):
            remedy += " or maxent_beta"
        if low and not ratio:
            remedy = (
                f"write maxent_target_ratio instead, which is in reach at any number of right answers, or raise {key}"
            )
        what = f"tau stays at {limit} ({at:g}), where {measure} is {level:.3g}: {key} ({target:g}) is out of reach"
        return {"first": taus[0][0], "what": what, "remedy": remedy}
    return None


_MORE_SPREAD = "raise num_generations or temperature, or take prompts of another difficulty"
_SHORTER = (
    "raise {max_completion_length}, or ask for short answers in system_prompt; check that chat_template ends a turn as "
    "the model was trained to"
)
_RULES = (
    _Rule("zero reward", _in_a_row("zero reward"), "the reward is 0 {in_steps}",
          "test the reward on gold answers: grpo check-rewards RECIPE; look at the first prompt in the log"),
    _Rule("silent reward", _silent, "{names} gave 0 in {count} steps in a row: what else is rewarded is learned",
          "see what it gives right answers: grpo check-rewards RECIPE", serious=False, said_by=("zero reward",)),
    _Rule("no signal", _no_signal, "{what} {in_steps}: nothing is learned", "{remedy}", said_by=("zero reward",)),
    _Rule("few signals", _above("frac_reward_zero_std", FEW_SIGNALS),
          "{share} of groups get one reward for all completions: they teach nothing", _MORE_SPREAD,
          serious=False, said_by=("zero reward", "no signal")),
    _Rule("no gradient", _in_a_row("no gradient"),
          "the gradient is exactly 0 {in_steps}, though rewards differ: no weight is changed",
          "look for what masks every token: mask_truncated_completions with all of them cut off, or a clip range of 0"),
    _Rule("learning rate", _learning_rate, "{what}", "look at {warmup_steps} and {lr_scheduler_type}"),
    _Rule("not finite", _not_finite, "loss or grad_norm is not a number at step {first} ({count} of {rows} steps)",
          "write bf16: true or dtype: float32 (not float16), lower {learning_rate}"),
    _Rule("kl", _above("kl", HIGH_KL), "the KL divergence from the reference is {level:.2f} nats a token",
          "lower {learning_rate} or raise {beta}, also called init_kl_coeff; check chat_template and system_prompt"),
    _Rule("entropy", _entropy, "entropy fell from {before:.2g} to {now:.2g}: little is explored",
          "lower {learning_rate}, raise epsilon_high or beta, or stop earlier"),
    _Rule("all cut off", _in_a_row("all cut off"),
          "every completion was cut off at max_completion_length {in_steps}", _SHORTER),
    _Rule("cut off", _above("completions/clipped_ratio", CUT_OFF),
          "{share} of completions reach max_completion_length", _SHORTER, serious=False, said_by=("all cut off",)),
    _Rule("unscored", _above("rewards/no_verdict", UNSCORED), "{share} of completions have no score, and teach nothing",
          "see slow_rewards.jsonl of the run; correct the reward, or raise {reward_timeout}", serious=False),
    # Single steep steps are cut, and are common: the median.
    _Rule("steep", _above("grad_norm", STEEP, statistics.median), "the gradient norm is {level:.3g}",
          "lower {learning_rate}; gradients are cut to {max_grad_norm}", serious=False),
    _Rule("wrong weights", _wrong_weights,
          "more than half of the MaxEnt weight was on wrong answers in {share} of the steps, and {objective} moves the "
          "policy towards the weights",
          "lower maxent_q_temperature, maxent_tau or maxent_beta", serious=False),
    _Rule("tau at its limit", _tau_at_limit, "{what}", "{remedy}", serious=False),
)  # fmt: skip
