"""Cards with what to try next: each sign that a run does not learn, with a chart to look at and a command to copy.

The signs come from ``runs.health``, and a collapsed reward from the whole run. A completed run without a sign gets its
usual next steps.
"""

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grpo_recipes.console.report.page import format_number
from grpo_recipes.console.report.read import RunRecord
from grpo_recipes.console.report.run_charts import METRICS
from grpo_recipes.paths import display_path
from grpo_recipes.runs.health import AVERAGED_STEPS, Notice
from grpo_recipes.stats import compare_ends

_TASKS = ("grpo", "maxent")  # trainers that `grpo launch` starts from a recipe
_NEAR_MAXIMUM = 0.95  # share of the highest reward of a completion, from which the data is too easy
_LOST = 0.5  # share of its rise that a reward has lost, from which it has collapsed
_FAR = 5.0  # least distance of the best from the last level, in standard errors, of a collapse


@dataclass(frozen=True)
class Card:
    """A next step."""

    title: str
    text: str
    chart: str = ""  # title of the chart that shows it
    step: int | None = None  # first step that shows it
    command: str = ""  # to copy; "" if the step has none
    serious: bool = False  # the run learns little or nothing

    @property
    def is_sign(self) -> bool:
        """Whether the card is a sign that the run does not learn, which the page shows first."""
        return self.step is not None


class Collapse(NamedTuple):
    """The fall of a reward that collapsed."""

    best: float  # level before the fall
    best_step: int
    last: float  # mean reward of the last 5 steps
    last_step: int

    def __str__(self) -> str:
        """Return e.g. "from 0.8 at step 40 to 0.1, the mean of the last 5 steps"."""
        best, last = format_number(self.best), format_number(self.last)
        return f"from {best} at step {self.best_step:,} to {last}, the mean of the last {AVERAGED_STEPS} steps"


@dataclass(frozen=True)
class _Advice:
    """The card of a health rule: title, chart, and new values of recipe keys."""

    title: str
    chart: str
    factors: dict[str, float] = field(default_factory=dict)  # recipe key -> factor of its current value


_CLIPPED, _SIGNAL = METRICS["completions/clipped_ratio"].title, METRICS["frac_reward_zero_std"].title
_GRADIENT, _WRONG = METRICS["grad_norm"].title, METRICS["maxent/incorrect_mass"].title
_COLLAPSE = "collapse"
# Rules that a collapsed model also breaks. Their usual fixes don't help it.
_CONSEQUENCES = {"zero reward", "no signal", "few signals", "kl", "entropy", "all cut off", "cut off", "steep"}
# Name of a rule in ``runs.health`` -> its card.
_ADVICE = {
    _COLLAPSE: _Advice("The reward collapsed", "Reward", {"learning_rate": 0.2, "beta": 2}),
    "zero reward": _Advice("No completion is rewarded", "Reward"),
    "silent reward": _Advice("A reward is always 0", "Single rewards"),
    "no signal": _Advice("Nothing is learned", _SIGNAL, {"num_generations": 2}),
    "few signals": _Advice("Most groups teach nothing", _SIGNAL, {"num_generations": 2}),
    "no gradient": _Advice("No weight changes", _GRADIENT),
    "learning rate": _Advice("The learning rate is near 0", METRICS["learning_rate"].title),
    "kl": _Advice("Far from the reference", METRICS["kl"].title, {"learning_rate": 0.5, "beta": 2}),
    "entropy": _Advice("Little exploration", METRICS["entropy"].title, {"learning_rate": 0.5}),
    "all cut off": _Advice("Every completion is clipped", _CLIPPED, {"max_completion_length": 2}),
    "cut off": _Advice("Many completions are clipped", _CLIPPED, {"max_completion_length": 2}),
    "unscored": _Advice("Completions without a score", "Unscored", {"reward_timeout": 2}),
    "steep": _Advice("Steep gradients", _GRADIENT, {"learning_rate": 0.5}),
    "wrong weights": _Advice("Weight on wrong answers", _WRONG, {"maxent_tau": 0.5}),
    "tau at its limit": _Advice("The temperature is at its limit", METRICS["maxent/tau"].title),
}


def make_cards(run: RunRecord, folder: Path, notices: list[Notice]) -> list[Card]:
    """Return a card for a collapsed reward and each notice, or else the usual next steps of a completed run.

    Notices that follow from the collapse get no card, and neither does a run without a sign that is not completed.
    ``folder`` is the run directory in the commands.
    """
    recipe = shlex.quote(f"{display_path(folder)}/recipe.yaml")
    if collapse := find_collapse(run):
        text = f"the reward fell {collapse}"
        fix = "lower learning_rate or raise beta; load_best_model_at_end keeps the best model"
        first_step, last_step = collapse.best_step, collapse.last_step
        causes = [item for item in notices if item.first < first_step or item.name not in _CONSEQUENCES]
        notices = [Notice(_COLLAPSE, text, fix, first_step, last_step, serious=True), *causes]
    if notices:
        return [_make_notice_card(run, recipe, notice) for notice in notices]
    return _list_usual_steps(run, shlex.quote(display_path(folder)), recipe) if run.status == "completed" else []


def find_collapse(run: RunRecord) -> Collapse | None:
    """Return the fall of a reward that lost half of its rise, or of its first value, and more than noise explains.

    The best and the last level are means of 5 steps. The noise is estimated from the differences of successive steps. A
    reward that falls at once has no rise, so its first value is compared too, with the noise of the second half. Return
    None without such a fall, and for fewer than 10 rewards.
    """
    rewards, (first, last, best, *_) = run.metrics.known("reward"), run.outcome
    if first is None or last is None or best is None or len(rewards) < 2 * AVERAGED_STEPS:
        return None
    level, step = best
    error = math.sqrt(2 * _estimate_noise(rewards) / AVERAGED_STEPS)
    if level - last <= max(_FAR * error, _LOST * (level - first)):
        level, step = rewards[0], run.metrics.steps[0]
        error = math.sqrt(_estimate_noise(rewards[len(rewards) // 2 :]))
        if level - last <= max(_FAR * error, _LOST * abs(level)):
            return None
    return Collapse(level, int(step), last, int(run.metrics.steps[-1]))


def _estimate_noise(rewards: Sequence[float]) -> float:
    """Return the variance of rewards around their trend."""
    return sum((b - a) ** 2 for a, b in itertools.pairwise(rewards)) / (2 * (len(rewards) - 1))


def _make_notice_card(run: RunRecord, recipe: str, notice: Notice) -> Card:
    """Return the card of a notice, with a command that starts the recipe with other values."""
    advice = _ADVICE.get(notice.name, _Advice(notice.name.capitalize(), ""))
    text = f"{notice.text[0].upper()}{notice.text[1:]}. To fix it, {notice.fix.replace('RECIPE', recipe)}."
    # Multiply the run's values of the keys in the fix. Keys without a factor, without a number or with 0 get no flag.
    numbers = {key: run.value(key) for key in advice.factors if key in notice.fix}
    changed = {
        key: type(number)(number * advice.factors[key])
        for key, number in numbers.items()
        if isinstance(number, int | float) and number
    }
    flags = " ".join(f"--{key} {number:g}" for key, number in changed.items())
    command = f"grpo launch {recipe} {flags}" if flags and run.plan.get("task") in _TASKS else ""
    return Card(advice.title, text, advice.chart, notice.first, command, notice.serious)


def _list_usual_steps(run: RunRecord, folder: str, recipe: str) -> list[Card]:
    """Return the next steps of a completed run that shows no sign of a problem.

    ``folder`` and ``recipe`` are the words for them in commands.
    """
    cards, rewards = [], run.metrics.known("reward")
    highest = max((max(row.rewards) for row in run.scored if row.rewards), default=None)
    is_solved = bool(rewards and highest and (run.outcome.last or 0.0) >= _NEAR_MAXIMUM * highest > 0)
    if is_solved:
        text = (
            f"The reward reached {run.outcome.last:.3g} of at most {highest:.3g}. More steps on this data teach little."
        )
        cards.append(Card("Use harder prompts", text, "Reward"))
    elif compare_ends(rewards[len(rewards) // 2 :]) > 0 and run.plan.get("task") in _TASKS:
        steps = int(2 * run.outcome.steps)
        text = "The reward still rises in the second half of the run."
        cards.append(Card("Train longer", text, "Reward", command=f"grpo launch {recipe} --max_steps {steps}"))
    if not run.benchmarks and not run.evals.steps:
        text = "Rewards of training prompts do not show how the model does on other prompts."
        cards.append(Card("Evaluate the model", text, command=f"grpo eval {folder}"))
    if run.plan.get("task") in _TASKS:
        text = "One seed can't show whether a change helps. Five or more seeds give an interval."
        cards.append(Card("Repeat it with other seeds", text, command=f"grpo sweep {recipe} seed=1..5"))
    return cards
