"""Checks of what a run's metrics say: did it learn, and where did its time go?"""

from collections.abc import Callable

from grpo_recipes.console.doctor.examine import each, judge
from grpo_recipes.recipe.registry import SOURCE_REWARD
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding, ok
from grpo_recipes.runs.health import UNSCORED, ZERO_REWARD, find_notices
from grpo_recipes.runs.rundir import Run

_NOTHING = ok("no step was taken")
_UNMEASURED = {
    "kl": "beta is 0",
    "maxent/tau": "no temperature, as in GRPO and MaxRL",
}  # metric -> why a run may have none
_DOMINATES = 0.5
_SLOW_START = 300.0
_PHASES = ("sample", "score", "sync", "save", "evaluate", "update")
_PHASE_FIXES = {
    "score": "see rewards/NAME/seconds_max in metrics.jsonl, and slow_rewards.jsonl; raise reward_workers",
    "sync": "a step is too short for its weight transfer: raise prompts_per_step",
    "evaluate": "raise eval_steps, or lower eval_max_prompts",
    "save": "raise save_steps, or set run_root to a faster file system",
}


def _level(name: str, about: str, key: str, *notices: str, worst: str = PROBLEM) -> Callable[[Run], Finding]:
    """Return the check of a metric: its first and latest level, with the first of these notices of the run."""

    def look(run: Run) -> Finding:
        """Judge the metric by the notices of the run, else by its level."""
        values, recent = run.numbers(key), run.recent(key)
        found = {notice.name: notice for notice in find_notices(run.rows, run.value, over=not run.is_running())}
        what = "no value that is a number" if recent is None else f"{values[0]:.3g} -> {recent:.3g}"
        if notice := next((found[name] for name in notices if name in found), None):
            return Finding(worst if notice.serious else WARNING, f"{what}; {notice.text}", notice.fix)
        if not run.rows:
            return _NOTHING
        if key in _UNMEASURED and all(row.get(key) is None for row in run.rows):
            return ok(f"not measured: {_UNMEASURED[key]}")
        zero = not run.is_running() and not any(abs(value) >= ZERO_REWARD for value in values)  # too short for a notice
        return judge(
            what,
            (key == "reward" and recent is None, PROBLEM, "see the check no verdict"),
            (key == "reward" and zero, PROBLEM, "look at it: grpo check-rewards RECIPE"),
        )

    look.__name__, look.__doc__ = name, about
    return look


LEVELS = (
    _level("reward", "Whether any completion earned a reward, and whether rewards differ within a group.", "reward",
           "zero reward", "no signal", "few signals"),
    _level("truncated", "Share of completions cut off at max_completion_length.", "completions/clipped_ratio",
           "all cut off", "cut off", worst=WARNING),
    _level("kl", "Divergence from the reference, in nats a token; above 1 the policy has left it.", "kl", "kl"),
    _level("entropy", "Entropy of the policy on its completions; near 0 every sample is the same.", "entropy",
           "entropy", worst=WARNING),
    _level("gradients", "Loss, gradient norm and learning rate: numbers, not 0, and not too large.", "grad_norm",
           "not finite", "no gradient", "learning rate", "steep"),
    _level("maxent", "Weights of MaxEnt-GRPO: on right answers, and tau not stuck at a limit of its controller.",
           "maxent/tau", "tau at its limit", "wrong weights", worst=WARNING),
)  # fmt: skip


def no_verdict(run: Run) -> Finding:
    """Share of completions that a reward left unscored (time limit, crash, not a number)."""
    shares = {key: run.recent(key) or 0.0 for key in run.keys(lambda name: name.endswith("/no_verdict"))}
    many = ", ".join(f"{key} {share:.0%}" for key, share in shares.items() if share > UNSCORED)
    kind = SOURCE_REWARD if SOURCE_REWARD in run.value("reward_funcs") else "reward"
    limit = f"raise {kind}_timeout (now {run.value(f'{kind}_timeout'):g} s)"
    fix = f"see slow_rewards.jsonl of the run; correct the {kind}, or {limit}"
    most = run.value("reward_max_no_verdict")
    means = run.keys(lambda name: name.startswith("rewards/") and name.endswith("/mean"))
    silent = [key.removeprefix("rewards/").removesuffix("/mean") for key in means if run.rows[-1][key] in (None, "nan")]
    return each(
        "nearly all are scored" if run.rows else _NOTHING.value,
        ("TooManyWithoutVerdict" in run.cause, PROBLEM, f"more than reward_max_no_verdict ({most}) in one step", fix),
        (silent, PROBLEM, f"{', '.join(silent)} scored nothing in the last step", fix),
        (many, PROBLEM if 1.0 in shares.values() else WARNING, many, fix),
    )


def server_agreement(run: Run) -> Finding:
    """How far the server's log-probs are from the trainer's."""
    recent = run.recent("sampling/importance_sampling_ratio/mean")
    difference = run.recent("sampling/sampling_logp_difference/mean")
    if recent is None or difference is None:
        return ok("not measured")
    fix = "use one dtype for both (bf16 and dtype), and temperature 1.0; see Weights in the docs"
    if run.value("overlap_generation"):
        fix = "a step moves the policy far from the one that sampled: lower learning_rate, or remove overlap_generation"
    apart = not 0.8 < recent < 1.2
    return judge(f"mean difference {difference:.2g}, mean ratio {recent:.3f}", (apart, WARNING, fix))


def phases(run: Run) -> Finding:
    """Where the time of the steps went: sample, score, sync, save, evaluate, update."""
    seconds = {phase: sum(run.numbers(f"seconds/{phase}")) for phase in _PHASES}
    total = sum(seconds.values())
    if not total:
        return _NOTHING
    what = ", ".join(f"{phase} {spent / total:.0%}" for phase, spent in seconds.items())
    return judge(what, *((seconds[name] > _DOMINATES * total, WARNING, fix) for name, fix in _PHASE_FIXES.items()))


def start(run: Run) -> Finding:
    """Seconds from the launch to the first step: server, model and data; slow data is found here."""
    if not run.rows or run.summary.get("restarts"):
        return ok("not known of a resumed run") if run.rows else _NOTHING
    steps = sum(run.numbers("seconds/step"))
    launched, written = ((run.folder / name).stat().st_mtime for name in ("run.json", "metrics.jsonl"))
    seconds = max(written - steps - launched, 0.0)
    fix = (
        "bring model and data first (grpo fetch RECIPE); name only the columns used (columns in dataset_mixture), "
        "max_train_prompts or dataset_streaming; read no dataset twice"
    )
    what = f"{seconds:.0f} s before {len(run.rows)} steps of {steps:.0f} s"
    return judge(what, (seconds > max(_SLOW_START, steps), WARNING, fix))
