"""Checks of what a run's metrics say: did it learn, and where did its time go?"""

from __future__ import annotations

import json
import statistics
from collections import Counter

from grpo_recipes.doctor.examine import judge
from grpo_recipes.runs.finding import PROBLEM, WARNING, Finding, ok, problem, warning
from grpo_recipes.runs.health import UNSCORED, ZERO_REWARD, notices_of
from grpo_recipes.runs.rundir import Run

_NOTHING = ok("no step was taken")
_DOMINATES = 0.5
_SLOW_START = 300.0
_PHASES = ("sample", "score", "sync", "save", "evaluate", "update")
_PHASE_FIXES = {
    "score": "see the rewards that are slow: grpo check-rewards RECIPE times them; raise reward_workers",
    "sync": "a step is too short for its weight transfer: raise prompts_per_step",
    "evaluate": "raise eval_steps, or lower eval_max_prompts",
    "save": "raise save_steps, or set run_root to a faster file system",
}


def _judge(run: Run, value: str, *names: str, worst: str = PROBLEM) -> Finding:
    """Return a value with the first of these notices of the run, ok without one."""
    found = {notice.name: notice for notice in notices_of(run.rows, run.value, over=not run.is_running())}
    for name in names:
        if notice := found.get(name):
            return Finding(worst if notice.serious else WARNING, f"{value}; {notice.text}", notice.fix)
    return ok(value)


def reward(run: Run) -> Finding:
    """Whether any completion earned a reward, and whether rewards differ within a group."""
    rewards, recent, clipped = (
        run.numbers("reward"),
        run.recent("reward"),
        run.recent("completions/clipped_ratio") or 0.0,
    )
    if recent is None:
        return problem("no reward is a number", "see the check no verdict") if run.rows else _NOTHING
    what = f"{rewards[0]:.3f} -> {recent:.3f}"
    what += f", {clipped:.0%} of the completions cut off" if clipped > 0.1 else ""
    found = _judge(run, what, "zero reward", "no signal", "few signals")
    zero = not run.is_running() and not any(abs(value) >= ZERO_REWARD for value in rewards)
    if zero and found.status != PROBLEM:  # too short a run for a notice
        return problem(f"{what} in all {len(run.rows)} steps", "look at it: grpo check-rewards RECIPE")
    return found


def truncated(run: Run) -> Finding:
    """Share of completions cut off at max_completion_length."""
    clipped = run.recent("completions/clipped_ratio")
    if clipped is None:
        return _NOTHING
    return _judge(run, f"{clipped:.0%} of the last completions", "all cut off", "cut off", worst=WARNING)


def no_verdict(run: Run) -> Finding:
    """Share of completions that a reward left unscored (time limit, crash, not a number)."""
    limit = f"{run.value('reward_timeout'):g} s"
    fix = f"see slow_rewards.jsonl of the run; correct the reward, or raise reward_timeout (now {limit})"
    path = run.folder / "slow_rewards.jsonl"
    slow = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    reasons = Counter(row["reason"] for row in slow if row.get("reason"))
    usual = f"; most often: {reasons.most_common(1)[0][0]}" if reasons else ""
    if "TooManyWithoutVerdict" in run.cause:
        most = run.value("reward_max_no_verdict")
        return problem(f"more than reward_max_no_verdict ({most:g}) in one step{usual}", fix)
    if silent := run.keys(lambda name: name.startswith("rewards/") and run.rows[-1][name] in (None, "nan")):
        return problem(f"{silent[0].split('/')[1]} scored nothing in the last step{usual}", fix)
    shares = {key: run.recent(key) for key in run.keys(lambda name: name.endswith("/no_verdict"))}
    high = ", ".join(f"{key} {share:.0%}" for key, share in shares.items() if share and share > UNSCORED)
    if high:
        return warning(high + usual, fix)
    return ok("nearly all are scored") if run.rows else _NOTHING


def kl(run: Run) -> Finding:
    """Divergence from the reference, in nats a token; above 1 the policy has left it."""
    recent = run.recent("kl")
    if recent is None:
        return ok("not measured: beta is 0") if run.rows else _NOTHING
    return _judge(run, f"{recent:.3f}", "kl")


def entropy(run: Run) -> Finding:
    """Entropy of the policy on its completions; near 0 every sample is the same."""
    values = run.numbers("entropy")
    if not values:
        return _NOTHING
    return _judge(run, f"{values[0]:.3f} -> {run.recent('entropy') or 0.0:.3f}", "entropy", worst=WARNING)


def gradients(run: Run) -> Finding:
    """Loss, gradient norm and learning rate: numbers, not 0, and not too large."""
    norms, what = run.numbers("grad_norm"), "no gradient norm is a number"
    if norms:
        what = f"grad_norm {statistics.median(norms):.2g} in the middle, {run.recent('grad_norm') or 0.0:.2g} last"
    return _judge(run, what, "not finite", "no gradient", "learning rate", "steep") if run.rows else _NOTHING


def server_agreement(run: Run) -> Finding:
    """How far the server's log-probs are from the trainer's."""
    recent = run.recent("sampling/importance_sampling_ratio/mean")
    difference = run.recent("sampling/sampling_logp_difference/mean")
    if recent is None or difference is None:
        return ok("not measured")
    fix = "use one dtype for both (bf16 and dtype), and temperature 1.0; see Weights in the docs"
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
