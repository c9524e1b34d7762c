"""Checks of what a run's metrics say: did it learn, and where did its time go?"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from typing import Any

from grpo_recipes.doctor.finding import Finding, ok, problem, warning
from grpo_recipes.doctor.rundirs import RunFiles

_NOTHING = "no step was taken"
# Nats a token: the policy gives its own tokens e times the probability that the reference does.
_HIGH_KL = 1.0
_NO_REWARD = 1e-6
_ALL_ALIKE = 0.9
_CLIPPED = 0.5
_COLLAPSED = 0.01
_STEEP = 100.0
_DOMINATES = 0.5
_WITHOUT_VERDICT = 0.05
_SLOW_START = 300.0
_PHASES = ("sample", "score", "sync", "save", "evaluate", "update")
_PHASE_FIXES = {
    "score": "see the rewards that are slow: grpo check-rewards RECIPE times them; raise reward_workers",
    "sync": "a step is too short for its weight transfer: raise prompts_per_step",
    "evaluate": "raise eval_steps, or lower eval_max_prompts",
    "save": "raise save_steps, or set run_root to a faster file system",
}


def reward(run: RunFiles) -> Finding:
    """Whether any completion earned a reward, and whether rewards differ within a group."""
    recent = run.recent("reward")
    if recent is None:
        return ok(_NOTHING) if not run.rows else problem("no reward is a number", "see no verdict")
    if all(abs(value) < _NO_REWARD for value in run.numbers("reward")):
        fix = (
            "test the reward on gold answers: grpo check-rewards RECIPE; look at the first prompt in the trainer's log"
        )
        return problem(f"0 in all {len(run.rows)} steps{_clipped_too(run)}", fix)
    alike = run.recent("frac_reward_zero_std")
    what = f"{run.numbers('reward')[0]:.3f} -> {recent:.3f}"
    if alike is not None and alike > _ALL_ALIKE:
        fix = "raise num_generations or temperature, or take prompts of another difficulty"
        return warning(f"{what}; in {alike:.0%} of the groups all completions get the same: nothing to learn", fix)
    return ok(what)


def _clipped_too(run: RunFiles) -> str:
    clipped = run.recent("completions/clipped_ratio") or 0.0
    return f", {clipped:.0%} of the completions cut off" if clipped > 0.1 else ""


def truncated(run: RunFiles) -> Finding:
    """Share of completions cut off at max_completion_length."""
    clipped = run.recent("completions/clipped_ratio")
    if clipped is None:
        return ok(_NOTHING)
    what = f"{clipped:.0%} of the last completions"
    if clipped > _CLIPPED:
        fix = (
            f"raise max_completion_length (now {run.value('max_completion_length')}), or ask for short answers in "
            "system_prompt; check that chat_template ends a turn as the model was trained to"
        )
        return warning(what, fix)
    return ok(what)


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
    high = {key: share for key, share in shares.items() if share and share > _WITHOUT_VERDICT}
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
    if recent > _HIGH_KL:
        fix = (
            f"lower learning_rate (now {run.value('learning_rate'):g}) or raise beta (now {run.value('beta'):g}, also "
            "called init_kl_coeff); check chat_template and system_prompt"
        )
        return problem(f"{recent:.2f}", fix)
    return ok(f"{recent:.3f}")


def entropy(run: RunFiles) -> Finding:
    """Entropy of the policy on its completions; near 0 every sample is the same."""
    values = run.numbers("entropy")
    if not values:
        return ok(_NOTHING)
    recent = run.recent("entropy") or 0.0
    what = f"{values[0]:.3f} -> {recent:.3f}"
    if recent < _COLLAPSED and values[0] > 5 * _COLLAPSED:
        fix = f"lower learning_rate (now {run.value('learning_rate'):g}), raise epsilon_high or beta, or stop earlier"
        return warning(f"{what}: it collapsed", fix)
    return ok(what)


def gradients(run: RunFiles) -> Finding:
    """Loss and gradient norm: numbers, and not too large."""
    broken = [row["step"] for row in run.rows if any(_broken(row.get(key)) for key in ("loss", "grad_norm"))]
    if broken:
        fix = "write bf16: true or dtype: float32 (not float16), lower learning_rate; look for an empty completion"
        return problem(
            f"loss or grad_norm is no number at step {broken[0]} ({len(broken)} of {len(run.rows)} steps)", fix
        )
    norms = run.numbers("grad_norm")
    if not norms:
        return ok(_NOTHING)
    recent = run.recent("grad_norm") or 0.0
    what = f"grad_norm {statistics.median(norms):.2g} in the middle, {recent:.2g} last"
    if recent > _STEEP:
        rate, most = run.value("learning_rate"), run.value("max_grad_norm")
        return warning(what, f"lower learning_rate (now {rate:g}); gradients are cut to max_grad_norm {most:g}")
    return ok(what)


def _broken(value: Any) -> bool:
    """metrics.jsonl writes infinities and NaN as texts."""
    return isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value))


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
