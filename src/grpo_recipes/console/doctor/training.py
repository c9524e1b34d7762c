"""Checks of a run's metrics for ``grpo doctor --run``: did it learn, and where did its time go?

They read ``metrics.jsonl`` of the run directory. ``LEVELS`` has a check for each important metric.
"""

from collections.abc import Callable

from grpo_recipes.console.doctor.examine import apply_all_rules, apply_first_rule
from grpo_recipes.recipe.registry import SOURCE_REWARD
from grpo_recipes.runs.commands import fill_commands
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


def _make_level_check(
    name: str, description: str, key: str, *notices: str, worst: str = PROBLEM
) -> Callable[[Run], Finding]:
    """Create a check function for one metric of a run; ``name`` and ``description`` become its name and docstring.

    The check returns a finding with the first and the latest value of the column ``key`` in ``metrics.jsonl``.
    ``notices`` are names of training problems that ``find_notices`` may detect in the run. The first detected one is
    shown: as a finding of status ``worst`` if it is serious, otherwise as a warning.
    """

    def check_level(run: Run) -> Finding:
        """Return the finding about the metric: ok, or the status of the first detected notice.

        Without a notice, a reward that is 0 in all steps of an ended run, or not a number, is a problem too.
        """
        values, recent = run.numbers(key), run.recent(key)
        run_notices = {notice.name: notice for notice in find_notices(run.rows, run.value, over=not run.is_running())}
        change = "no value that is a number" if recent is None else f"{values[0]:.3g} -> {recent:.3g}"
        if notice := next((run_notices[name] for name in notices if name in run_notices), None):
            return Finding(
                worst if notice.serious else WARNING, f"{change}; {notice.text}", fill_commands(notice.fix, run)
            )
        if not run.rows:
            return _NOTHING
        if key in _UNMEASURED and all(row.get(key) is None for row in run.rows):
            return ok(f"not measured: {_UNMEASURED[key]}")
        zero = not run.is_running() and not any(abs(value) >= ZERO_REWARD for value in values)  # too short for a notice
        return apply_first_rule(
            change,
            (key == "reward" and recent is None, PROBLEM, "see the check no verdict"),
            (key == "reward" and zero, PROBLEM, fill_commands("check the reward: grpo check-rewards RECIPE", run)),
        )

    check_level.__name__, check_level.__doc__ = name, description
    return check_level


LEVELS = (
    _make_level_check(
        "reward", "Whether any completion earned a reward, and whether rewards differ within a group.", "reward",
        "zero reward", "no signal", "few signals",
    ),
    _make_level_check(
        "truncated", "Share of completions truncated at max_completion_length.", "completions/clipped_ratio",
        "all cut off", "cut off", worst=WARNING,
    ),
    _make_level_check(
        "kl", "KL divergence from the reference, in nats per token; above 1, it is far away.", "kl", "kl"
    ),
    _make_level_check(
        "entropy", "Entropy of the policy on its completions; near 0, all samples are equal.", "entropy",
        "entropy", worst=WARNING,
    ),
    _make_level_check(
        "gradients", "Whether loss, gradient norm and learning rate are finite, not 0, and small.", "grad_norm",
        "not finite", "no gradient", "learning rate", "steep",
    ),
    _make_level_check(
        "maxent", "Whether MaxEnt-GRPO weights favor right answers, and tau is not at a limit of its controller.",
        "maxent/tau", "tau at its limit", "wrong weights", worst=WARNING,
    ),
)  # fmt: skip


def no_verdict(run: Run) -> Finding:
    """Share of completions that a reward left unscored (time limit, crash, not a number).

    Return a warning for a high share. Return a problem if a reward scored nothing, or if the run ended because of
    unscored completions.
    """
    shares = {key: run.recent(key) or 0.0 for key in run.keys(lambda name: name.endswith("/no_verdict"))}
    unscored = ", ".join(f"{key} {share:.0%}" for key, share in shares.items() if share > UNSCORED)
    kind = SOURCE_REWARD if SOURCE_REWARD in run.value("reward_funcs") else "reward"
    limit = f"raise {kind}_timeout (now {run.value(f'{kind}_timeout'):g} s)"
    fix = f"see slow_rewards.jsonl of the run; correct the {kind}, or {limit}"
    max_share = run.value("reward_max_no_verdict")
    means = run.keys(lambda name: name.startswith("rewards/") and name.endswith("/mean"))
    silent = [key.removeprefix("rewards/").removesuffix("/mean") for key in means if run.rows[-1][key] in (None, "nan")]
    return apply_all_rules(
        "nearly all completions are scored" if run.rows else _NOTHING.value,
        (
            "TooManyWithoutVerdict" in run.cause,
            PROBLEM,
            f"more than reward_max_no_verdict ({max_share}) in one step",
            fix,
        ),
        (silent, PROBLEM, f"{', '.join(silent)} scored nothing in the last step", fix),
        (unscored, PROBLEM if 1.0 in shares.values() else WARNING, unscored, fix),
    )


def server_agreement(run: Run) -> Finding:
    """Difference between the server's and the trainer's log-probs.

    Return a warning if the mean ratio of probabilities is below 0.8 or above 1.2.
    """
    recent = run.recent("sampling/importance_sampling_ratio/mean")
    difference = run.recent("sampling/sampling_logp_difference/mean")
    if recent is None or difference is None:
        return ok("not measured")
    fix = "use one dtype for both (bf16 and dtype), and temperature 1.0; see Weights in the docs"
    if run.value("overlap_generation"):
        fix = (
            "lower learning_rate, or remove overlap_generation: the policy moves far from the sampling policy in a step"
        )
    far_apart = not 0.8 < recent < 1.2
    return apply_first_rule(f"mean difference {difference:.2g}, mean ratio {recent:.3f}", (far_apart, WARNING, fix))


def phases(run: Run) -> Finding:
    """Time of the steps by phase: sample, score, sync, save, evaluate, update.

    Return a warning if a phase except sample and update took more than half of the time.
    """
    seconds = {phase: sum(run.numbers(f"seconds/{phase}")) for phase in _PHASES}
    total = sum(seconds.values())
    if not total:
        return _NOTHING
    shares = ", ".join(f"{phase} {phase_seconds / total:.0%}" for phase, phase_seconds in seconds.items())
    return apply_first_rule(
        shares, *((seconds[name] > _DOMINATES * total, WARNING, fix) for name, fix in _PHASE_FIXES.items())
    )


def start(run: Run) -> Finding:
    """Seconds from the launch to the first step: start of server, model and data.

    Return a warning if this took more than 5 minutes and also longer than all steps together.
    """
    if not run.rows or run.summary.get("restarts"):
        return ok("unknown for a resumed run") if run.rows else _NOTHING
    steps = sum(run.numbers("seconds/step"))
    launched, written = ((run.folder / name).stat().st_mtime for name in ("run.json", "metrics.jsonl"))
    seconds = max(written - steps - launched, 0.0)
    fix = (
        "download model and data first (grpo fetch RECIPE), list only the used columns (columns in dataset_mixture), "
        "use max_train_prompts or dataset_streaming, or read each dataset only once"
    )
    value = f"{seconds:.0f} s before {len(run.rows)} steps of {steps:.0f} s"
    return apply_first_rule(value, (seconds > max(_SLOW_START, steps), WARNING, fill_commands(fix, run)))
