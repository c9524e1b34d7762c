"""What a run's metrics say of its learning: the one home of the limits that terminal, status, report and doctor share.

Pure: rows of ``metrics.jsonl`` in, notices out, a constant amount of work a row. A run may complete and have learned
nothing; every rule here is one way to notice that while the run goes on. No torch, no socket.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.recipe.registry import OBJECTIVES

MANY = 10  # steps in a row, or steps averaged, before anything is said while a run goes on; as many until it is over
FEW = 5  # steps of a run that ended with fewer than MANY
ZERO_REWARD = 1e-6
FEW_SIGNALS = 0.8  # share of completions whose whole group got one reward
CUT_OFF = 0.25  # share of completions that reach max_completion_length
LAST_STEPS = 5  # over which the latest level of a metric is averaged
UNSCORED = 0.05  # share of completions without a score
HIGH_KL = 1.0  # nats a token: the policy gives its own tokens e times the probability that the reference does
STEEP = 100.0  # median gradient norm
COLLAPSED = 0.05  # of the first entropies is what is left
LOW_RATE = 0.01  # of learning_rate is the most that a step took
WRONG_WEIGHT = 0.5  # share of a group's weight on wrong answers, and share of the steps where it is more

Row = Mapping[str, Any]
_MORE_SPREAD = "raise num_generations or temperature, or take prompts of another difficulty"
_SHORTER = (
    "raise {max_completion_length}, or ask for short answers in system_prompt; check that chat_template ends a turn as "
    "the model was trained to"
)


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

    def __init__(self, value: Callable[[str], Any]):
        self._rules: list[_Rule] = [rule(value) for rule in _RULES]
        self._rows = 0
        self._last = 0
        self._since: dict[str, int] = {}
        self._away: dict[str, int] = {}

    def add(self, row: Row) -> list[Notice]:
        """Look at the next row; return the notices that appear with it, or come back after ``MANY`` rows away."""
        step = number(row.get("step"))
        if step is None:
            return []
        self._rows, self._last = self._rows + 1, int(step)
        for rule in self._rules:
            rule.add(self._last, row)
        new = []
        holding = self._holding(MANY)
        for rule in self._rules:
            if rule not in holding:
                self._away[rule.name] = self._away.get(rule.name, MANY) + 1
                continue
            if self._away.get(rule.name, MANY) >= MANY:
                self._since[rule.name] = rule.first
                new.append(self._notice(rule))
            self._away[rule.name] = 0
        return new

    def notices(self, over: bool = False) -> list[Notice]:
        """Return what is true of the run as it stands.

        If it is ``over``, no row will follow: a run of fewer than ``MANY`` steps is then judged by those it has.
        """
        enough = min(MANY, max(FEW, self._rows)) if over else MANY
        return [self._notice(rule) for rule in self._holding(enough)]

    def _holding(self, enough: int) -> list[_Rule]:
        found = [rule for rule in self._rules if rule.holds(enough)]
        # What was said until a few rows ago is still in the averages of the rules that say less.
        names = {rule.name for rule in found} | {name for name, rows in self._away.items() if rows < MANY}
        return [rule for rule in found if not names & set(rule.said_by)]

    def _notice(self, rule: _Rule) -> Notice:
        first = self._since.get(rule.name, rule.first)
        return Notice(rule.name, rule.filled(rule.words), rule.filled(rule.remedy), first, self._last, rule.serious)


def notices_of(rows: Iterable[Row], value: Callable[[str], Any], over: bool = True) -> list[Notice]:
    """Return what is true of the run with these rows; ``value`` and ``over`` as in ``Health``."""
    health = Health(value)
    for row in rows:
        health.add(row)
    return health.notices(over)


def number(value: Any) -> float | None:
    """Return a number of a row that can be added up, or None: ``inf`` and ``nan`` are texts there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values without the gaps."""
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def first_and_last(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    """Return what stands for the reward in the beginning and in the end: means of the first 3 and the last 5 steps."""
    return mean(rewards[:3]), mean(rewards[-LAST_STEPS:])


def percent(share: float) -> str:
    """Return a share in per cent: 17 % or 51.2 %."""
    return f"{round(100 * share, 1):g} %"


class _Facts(dict[str, Any]):
    """What the texts of a rule are filled with: its facts, and recipe keys as in "beta (now 0.04)"."""

    def __init__(self, value: Callable[[str], Any], facts: Mapping[str, Any]):
        super().__init__(facts)
        self._value = value

    def __missing__(self, key: str) -> str:
        value = self._value(key)
        return f"{key} (now {f'{value:g}' if isinstance(value, int | float) else value})"


class _Rule:
    """One way in which a run does not learn; ``words`` and ``remedy`` name facts of the rule and recipe keys."""

    name = ""
    serious = True
    said_by: tuple[str, ...] = ()  # names of rules that say the same and more
    words = ""
    remedy = ""

    def __init__(self, value: Callable[[str], Any]):
        self._value = value
        self.first = 0

    def add(self, step: int, row: Row) -> None:
        """Look at a row."""

    def holds(self, enough: int) -> bool:
        """Return whether it is true, by this many rows at least."""
        return False

    def facts(self) -> dict[str, Any]:
        """Return what the texts name beside recipe keys."""
        return {}

    def filled(self, text: str) -> str:
        """Return a text with the facts in it."""
        return text.format_map(_Facts(self._value, self.facts()))


class _Streak(_Rule):
    """Something that is true in many steps in a row. Rows that have nothing to say of it are passed over."""

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._count = 0

    def met(self, row: Row) -> bool | None:
        """Return whether it is true in this row, None where the row does not say."""
        return None

    def add(self, step: int, row: Row) -> None:
        met = self.met(row)
        if met:
            self.first = self.first if self._count else step
            self._count += 1
        elif met is not None:
            self._count = 0

    def holds(self, enough: int) -> bool:
        return self._count >= enough

    def facts(self) -> dict[str, Any]:
        return {"in_steps": f"in {self._count} steps in a row, from step {self.first} on"}


class _ZeroReward(_Streak):
    name = "zero reward"
    words = "the reward is 0 {in_steps}"
    remedy = "test the reward on gold answers: grpo check-rewards RECIPE; look at the first prompt in the log"

    def met(self, row: Row) -> bool | None:
        reward = number(row.get("reward"))
        return None if reward is None else abs(reward) < ZERO_REWARD


class _NoSignal(_Streak):
    name = "no signal"
    said_by = ("zero reward",)
    words = "{what} {in_steps}: nothing is learned"
    remedy = "{remedy}"

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._low = self._high = 0.0

    def met(self, row: Row) -> bool | None:
        alike, reward = number(row.get("frac_reward_zero_std")), number(row.get("reward"))
        if alike is None or reward is None:
            return None
        low, high = (self._low, self._high) if self._count else (reward, reward)
        self._low, self._high = min(low, reward), max(high, reward)
        return alike >= 1

    def facts(self) -> dict[str, Any]:
        what, remedy = "all completions of each prompt got one reward", _MORE_SPREAD
        if self._high - self._low < ZERO_REWARD:
            what = f"every completion got the reward {self._high:.3g}"
            remedy = "see what the reward looks at: grpo check-rewards RECIPE; or take harder or easier prompts"
        return super().facts() | {"what": what, "remedy": remedy}


class _NoGradient(_Streak):
    name = "no gradient"
    words = "the gradient is exactly 0 {in_steps}, though rewards differ: no weight is changed"
    remedy = (
        "look for what masks every token: mask_truncated_completions with all of them cut off, or a clip range of 0"
    )

    def met(self, row: Row) -> bool | None:
        norm = number(row.get("grad_norm"))
        # Without a difference between rewards there is no gradient, which another rule says.
        return None if norm is None else norm == 0 and row.get("frac_reward_zero_std") != 1


class _AllCutOff(_Streak):
    name = "all cut off"
    words = "every completion was cut off at max_completion_length {in_steps}"
    remedy = _SHORTER

    def met(self, row: Row) -> bool | None:
        share = number(row.get("completions/clipped_ratio"))
        return None if share is None else share >= 1


class _Recent(_Rule):
    """The level of a metric over its last values is too high."""

    key = ""
    most = 0.0

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._window: deque[tuple[int, float]] = deque(maxlen=MANY)

    def add(self, step: int, row: Row) -> None:
        found = number(row.get(self.key))
        if found is not None:
            self._window.append((step, found))
            self.first = self._window[0][0]

    def level(self, values: Iterable[float]) -> float:
        """Return what stands for all of them."""
        return statistics.fmean(values)

    def holds(self, enough: int) -> bool:
        return len(self._window) >= enough and self.level(found for _, found in self._window) > self.most

    def facts(self) -> dict[str, Any]:
        level = self.level(found for _, found in self._window)
        return {"level": level, "share": percent(level)}


class _FewSignals(_Recent):
    name = "few signals"
    serious = False
    said_by = ("zero reward", "no signal")
    key, most = "frac_reward_zero_std", FEW_SIGNALS
    words = "{share} of groups get one reward for all completions: they teach nothing"
    remedy = _MORE_SPREAD


class _CutOff(_Recent):
    name = "cut off"
    serious = False
    said_by = ("all cut off",)
    key, most = "completions/clipped_ratio", CUT_OFF
    words = "{share} of completions reach max_completion_length"
    remedy = _SHORTER


class _Unscored(_Recent):
    name = "unscored"
    serious = False
    key, most = "rewards/no_verdict", UNSCORED
    words = "{share} of completions have no score, and teach nothing"
    remedy = "see slow_rewards.jsonl of the run; correct the reward, or raise {reward_timeout}"


class _Kl(_Recent):
    name = "kl"
    key, most = "kl", HIGH_KL
    words = "the KL divergence from the reference is {level:.2f} nats a token"
    remedy = "lower {learning_rate} or raise {beta}, also called init_kl_coeff; check chat_template and system_prompt"


class _Steep(_Recent):
    name = "steep"
    serious = False
    key, most = "grad_norm", STEEP
    words = "the gradient norm is {level:.3g}"
    remedy = "lower {learning_rate}; gradients are cut to {max_grad_norm}"

    def level(self, values: Iterable[float]) -> float:
        return statistics.median(values)  # single steep steps are cut, and are common


class _Entropy(_Rule):
    name = "entropy"
    words = "entropy fell from {before:.2g} to {now:.2g}: little is explored"
    remedy = "lower {learning_rate}, raise epsilon_high or beta, or stop earlier"

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._before: list[float] = []
        self._window: deque[tuple[int, float]] = deque(maxlen=FEW)
        self._count = 0

    def add(self, step: int, row: Row) -> None:
        found = number(row.get("entropy"))
        if found is None:
            return
        self._count += 1
        if len(self._before) < FEW:
            self._before.append(found)
        self._window.append((step, found))
        self.first = self._window[0][0]

    def holds(self, enough: int) -> bool:
        if self._count < enough:
            return False
        levels = self.facts()
        return bool(0 < levels["before"] * COLLAPSED > levels["now"])

    def facts(self) -> dict[str, Any]:
        now = statistics.median(found for _, found in self._window)
        return {"before": statistics.fmean(self._before), "now": now}


class _LearningRate(_Rule):
    """Every step so far took next to nothing of the learning rate, or the last ones took nothing."""

    name = "learning rate"
    words = "{what}"
    remedy = "look at {warmup_steps} and {lr_scheduler_type}"

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._count = self._zeros = 0
        self._begin = self._zeros_from = 0
        self._most = self._steps = 0.0

    def add(self, step: int, row: Row) -> None:
        found = number(row.get("learning_rate"))
        if found is None:
            return
        self._begin = self._begin if self._count else step
        self._count += 1
        self._most = max(self._most, found)
        self._zeros_from = self._zeros_from if self._zeros else step
        self._zeros = self._zeros + 1 if found == 0 else 0
        self._steps = number(row.get("max_steps")) or 0.0
        self.first = self._zeros_from if self._zeros else self._begin

    def holds(self, enough: int) -> bool:
        # A long warm-up passes through small rates: it is judged after a tenth of the run.
        never = self._count >= max(enough, self._steps / 10) and self._most < LOW_RATE * self._value("learning_rate")
        return never or self._zeros >= enough

    def facts(self) -> dict[str, Any]:
        if self._zeros >= FEW:
            return {"what": f"the learning rate is 0 in {self._zeros} steps in a row: no weight is changed"}
        of = _Facts(self._value, {})["learning_rate"]
        return {"what": f"no step of {self._count} took more than {self._most:.2g} of {of}"}


class _NotFinite(_Rule):
    name = "not finite"
    words = "loss or grad_norm is not a number at step {first} ({count} of {rows} steps)"
    remedy = "write bf16: true or dtype: float32 (not float16), lower {learning_rate}"

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._count = self._rows = 0

    def add(self, step: int, row: Row) -> None:
        self._rows += 1
        keys = ("loss",) if self._value("fp16") else ("loss", "grad_norm")  # fp16 skips such steps, and may
        if any(_is_broken(row.get(key)) for key in keys):
            self.first = self.first if self._count else step
            self._count += 1

    def holds(self, enough: int) -> bool:
        return self._count > 0

    def facts(self) -> dict[str, Any]:
        return {"first": self.first, "count": self._count, "rows": self._rows}


def _is_broken(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value))


class _WrongWeights(_Rule):
    """Where the policy is moved towards the weights, most of the weight must not be on wrong answers."""

    name = "wrong weights"
    serious = False
    words = (
        "more than half of the MaxEnt weight was on wrong answers in {share} of the steps, and {objective} moves the "
        "policy towards the weights"
    )
    remedy = "lower maxent_q_temperature, maxent_tau or maxent_beta"

    def __init__(self, value: Callable[[str], Any]):
        super().__init__(value)
        self._objective = value("maxent_objective")
        objective = OBJECTIVES.get(self._objective)
        self._applies = objective is not None and objective.targets_q
        self._count = self._wrong = 0

    def add(self, step: int, row: Row) -> None:
        mass = number(row.get("maxent/incorrect_mass"))
        if mass is None:
            return
        self._count += 1
        if mass > WRONG_WEIGHT:
            self.first = self.first if self._wrong else step
            self._wrong += 1

    def holds(self, enough: int) -> bool:
        return self._applies and self._count >= enough and self._wrong > WRONG_WEIGHT * self._count

    def facts(self) -> dict[str, Any]:
        return {"share": percent(self._wrong / self._count), "objective": self._objective}


_RULES: tuple[type[_Rule], ...] = (
    _ZeroReward, _NoSignal, _FewSignals, _NoGradient, _LearningRate, _NotFinite, _Kl, _Entropy, _AllCutOff, _CutOff,
    _Unscored, _Steep, _WrongWeights,
)  # fmt: skip
