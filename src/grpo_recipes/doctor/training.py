"""Checks of what a run's metrics say: did it learn, and where did its time go?"""

from __future__ import annotations

import json
import statistics
from collections import Counter

from grpo_recipes.runs.find import RunFiles
from grpo_recipes.runs.finding import Finding, ok, problem, warning
from grpo_recipes.runs.health import UNSCORED, ZERO_REWARD, Notice, notices_of

_NOTHING = "no step was taken"
_DOMINATES = 0.5
_SLOW_START = 300.0
_PHASES = ("sample", "score", "sync", "save", "evaluate", "update")
_PHASE_FIXES = {
    "score": "see the rewards that are slow: grpo check-rewards RECIPE times them; raise reward_workers",
    "sync": "a step is too short for its weight transfer: raise prompts_per_step",
    "evaluate": "raise eval_steps, or lower eval_max_prompts",
    "save": "raise save_steps, or set run_root to a faster file system",
}


def _noticed(run: RunFiles, *names: str) -> Notice | None:
    """Return the first of these notices that is true of the run."""
    found = {notice.name: notice for notice in notices_of(run.rows, run.value, over=not run.is_running())}
    return next((found[name] for name in names if name in found), None)


def reward(run: RunFiles) -> Finding:
    """Whether any completion earned a reward, and whether rewards differ within a group."""
    recent = run.recent("reward")
    if recent is None:
        return ok(_NOTHING) if not run.rows else problem("no reward is a number", "see no verdict")
    zero = _noticed(run, "zero reward")
    if zero is not None:
        return problem(f"{zero.text}{_clipped_too(run)}", zero.fix)
    if not run.is_running() and not any(abs(value) >= ZERO_REWARD for value in run.numbers("reward")):
        return problem(f"0 in all {len(run.rows)} steps{_clipped_too(run)}", "look at it: grpo check-rewards RECIPE")
    what = f"{run.numbers('reward')[0]:.3f} -> {recent:.3f}"
    alike = _noticed(run, "no signal", "few signals")
    if alike is None:
        return ok(what)
    said = f"{what}; {alike.text}"
    return problem(said, alike.fix) if alike.serious else warning(said, alike.fix)


def _clipped_too(run: RunFiles) -> str:
    clipped = run.recent("completions/clipped_ratio") or 0.0
    return f", {clipped:.0%} of the completions cut off" if clipped > 0.1 else ""


def truncated(run: RunFiles) -> Finding:
    """Share of completions cut off at max_completion_length."""
    clipped = run.recent("completions/clipped_ratio")
    if clipped is None:
        return ok(_NOTHING)
    what = f"{clipped:.0%} of the last completions"
    cut = _noticed(run, "all cut off", "cut off")
    return warning(what, cut.fix) if cut else ok(what)


def no_verdict(run: RunFiles) -> Finding:
    """Share of completions on which a reward gave no verdict (time limit, crash, not a number)."""
    most = run.value("reward_max_no_verdict")
    if "TooManyWithoutVerdict" in run.cause:
        return problem(f"more than reward_max_no_verdict ({most:g}) in one step{_usual_reason(run)}", _verdict_fix(run))
    silent = run.keys(lambda name: name.startswith("rewards/") and run.rows[-1][name] in (None, "nan"))
    if silent:
        return problem(
            f"{silent[0].split('/')[1]} judged nothing in the last step{_usual_reason(run)}", _verdict_fix(run)
        )
    shares = {key: run.recent(key) for key in run.keys(lambda name: name.endswith("/no_verdict"))}
    high = {key: share for key, share in shares.items() if share and share > UNSCORED}
    if high:
        what = ", ".join(f"{key} {share:.0%}" for key, share in high.items())
        return warning(what + _usual_reason(run), _verdict_fix(run))
    return ok("a verdict on nearly all" if run.rows else _NOTHING)


def _usual_reason(run: RunFiles) -> str:
    """The most frequent reason in ``slow_rewards.jsonl``."""
    path = run.folder / "slow_rewards.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    reasons = Counter(row["reason"] for row in map(json.loads, lines) if row.get("reason"))
    return f"; most often: {reasons.most_common(1)[0][0]}" if reasons else ""


def _verdict_fix(run: RunFiles) -> str:
    timeout = run.value("reward_timeout")
    return f"see slow_rewards.jsonl of the run; mend the reward, or raise reward_timeout (now {timeout:g} s)"


def kl(run: RunFiles) -> Finding:
    """Divergence from the reference, in nats a token; above 1 the policy has left it."""
    recent = run.recent("kl")
    if recent is None:
        return ok("not measured: beta is 0" if run.rows else _NOTHING)
    high = _noticed(run, "kl")
    return problem(f"{recent:.2f}", high.fix) if high else ok(f"{recent:.3f}")


def entropy(run: RunFiles) -> Finding:
    """Entropy of the policy on its completions; near 0 every sample is the same."""
    values = run.numbers("entropy")
    if not values:
        return ok(_NOTHING)
    what = f"{values[0]:.3f} -> {run.recent('entropy') or 0.0:.3f}"
    fallen = _noticed(run, "entropy")
    return warning(f"{what}: it collapsed", fallen.fix) if fallen else ok(what)


def gradients(run: RunFiles) -> Finding:
    """Loss, gradient norm and learning rate: numbers, not 0, and not too large."""
    wrong = _noticed(run, "not finite", "no gradient", "learning rate")
    if wrong is not None:
        return problem(wrong.text, wrong.fix)
    norms = run.numbers("grad_norm")
    if not norms:
        return ok(_NOTHING)
    what = f"grad_norm {statistics.median(norms):.2g} in the middle, {run.recent('grad_norm') or 0.0:.2g} last"
    steep = _noticed(run, "steep")
    return warning(what, steep.fix) if steep else ok(what)


def server_agreement(run: RunFiles) -> Finding:
    """How far the server's log-probs are from the trainer's."""
    recent = run.recent("sampling/importance_sampling_ratio/mean")
    difference = run.recent("sampling/sampling_logp_difference/mean")
    if recent is None or difference is None:
        return ok("not measured")
    what = f"mean difference {difference:.2g}, mean ratio {recent:.3f}"
    if not 0.8 < recent < 1.2:
        return warning(what, "use one dtype for both (bf16 and dtype), and temperature 1.0; see Weights in the docs")
    return ok(what)


def phases(run: RunFiles) -> Finding:
    """Where the time of the steps went: sample, score, sync, save, evaluate, update."""
    seconds = {phase: sum(run.numbers(f"seconds/{phase}")) for phase in _PHASES}
    total = sum(seconds.values())
    if not total:
        return ok(_NOTHING)
    what = ", ".join(f"{phase} {spent / total:.0%}" for phase, spent in seconds.items())
    slow = [phase for phase in _PHASE_FIXES if seconds[phase] > _DOMINATES * total]
    return warning(what, _PHASE_FIXES[slow[0]]) if slow else ok(what)


def start(run: RunFiles) -> Finding:
    """Seconds from the launch to the first step: server, model and data; slow data is found here."""
    file, identity = run.folder / "metrics.jsonl", run.folder / "run.json"
    if not run.rows or run.summary.get("restarts"):
        return ok(_NOTHING if not run.rows else "not known of a resumed run")
    steps = sum(run.numbers("seconds/step"))
    seconds = file.stat().st_mtime - steps - identity.stat().st_mtime
    what = f"{max(seconds, 0.0):.0f} s before {len(run.rows)} steps of {steps:.0f} s"
    if seconds > _SLOW_START and seconds > steps:
        fix = (
            "bring model and data first (grpo fetch RECIPE); name only the columns used (columns in dataset_mixture), "
            "max_train_prompts or dataset_streaming; no dataset read twice"
        )
        return warning(what, fix)
    return ok(what)
