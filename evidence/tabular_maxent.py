"""What GRPO and MaxEnt-GRPO do to many right answers, on policies that are tables: no model, float64, one core.

    python evidence/tabular_maxent.py [--out FILE.json] [--figure FILE.svg]

A prompt has 100 answers, 2 to 8 of them right, each half as likely as the one before. The policy is a softmax over a
logit for each. A step samples a group per prompt, turns its rewards to advantages with ``algorithms.maxent``, and
climbs the mean of advantage times log-probability by plain gradient steps. Every measure is computed from the policy's
probabilities, so the only noise is that of the groups: all arms of a seed see the same random numbers.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_tools import DOCS, RESULTS, Line, Panel, begin, write_figure, write_record
from tabular_policy import GROUP, MATCHED, MEASURES, Arm, Policy, Task, Training, make_task, measure, train

POINTS = 25  # of a curve in the result, beside the start
SELECTION_SEEDS = range(101, 106)  # choose the tau of an objective; no table uses them
SPOKEN = "What stops the collapse onto one right answer"  # of the figure
SMALL = 0.01  # a difference that no one would notice, whatever its interval
CURVES = ("reward", "modes_share", "coverage@8")
SHOWN_MEASURES = ("reward", "pass@8", "modes", "coverage@8")
# Student's t for a 95 % interval, by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def with_interval(values: Sequence[float]) -> list[float]:
    """Mean over runs and its 95 % interval (t); the mean alone for one run."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return [round(mean, 6)]
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(number, 6) for number in (mean, mean - half, mean + half)]


def summary(arm: Arm, training: Training, base: Training) -> dict[str, Any]:
    """An arm's part of the result; differences are to ``base``, run by run."""
    final, matched = training.final, training.matched
    reached = [row for row in matched if row is not None]
    result: dict[str, Any] = {
        "objective": arm.objective, "tau": None if arm.tau == math.inf else arm.tau, "beta": arm.beta,
        "utility": arm.utility, "per_token": arm.per_token, "lr": arm.lr, "kl": arm.kl, "entropy": arm.entropy,
        "final": _intervals(final.tolist(), MEASURES),
        "runs": {name: _rounded(final[:, place].tolist()) for place, name in enumerate(MEASURES)},
        "runs_that_reach_the_matched_reward": len(reached),
        "wrong_mass": training.wrong_mass, "eff_rollouts": training.eff_rollouts,
    }  # fmt: skip
    if len(reached) == len(matched):
        result["at_matched_reward"] = _intervals(reached, [*MEASURES, "step"])
    if arm.sampled:
        result["less_dr_grpo"] = _intervals((final - base.final).tolist(), MEASURES)
        pairs = [(row, other) for row, other in zip(matched, base.matched, strict=True) if row and other]
        if len(pairs) == len(matched):
            gaps = [[one - two for one, two in zip(row, other, strict=True)] for row, other in pairs]
            result["less_dr_grpo_at_matched_reward"] = _intervals(gaps, [*MEASURES, "step"])
    columns = dict(zip(MEASURES, training.curve.mean(1).T.tolist(), strict=True))
    result["curve"] = {name: _rounded(columns[name], 4) for name in CURVES}
    return result


def _stride(steps: int) -> int:
    return max(1, steps // POINTS)


def _intervals(rows: Sequence[Sequence[float]], names: Iterable[str]) -> dict[str, list[float]]:
    """Mean and interval over the runs, for each measure."""
    return {name: with_interval(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _rounded(values: Iterable[float], digits: int = 6) -> list[float]:
    return [round(value, digits) for value in values]


def baselines(task: Task) -> dict[str, dict[str, float | None]]:
    """What needs no training: any answer alike, the same answer always, the policy before its first step."""
    share_K = task.right_PK.double().mean(0)
    best = int(share_K.argmax())
    covered = (task.right_PK[:, best] / task.right_PK.sum(1)).mean()
    reward = round(float(share_K[best]), 6)
    means = {"random": torch.zeros_like(task.start_PK), "untrained": task.start_PK}
    table: dict[str, dict[str, float | None]] = {
        name: dict(zip(MEASURES, _rounded(measure(Policy.of(logits_PK), task).mean(0).tolist()), strict=True))
        for name, logits_PK in means.items()
    }
    constant = [reward, reward, None, None, round(float(covered), 6)]
    return table | {"constant": dict(zip(MEASURES, constant, strict=True))}


# What is compared.
TAUS: dict[str, tuple[float, ...]] = {
    "listwise": (0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
    "listwise per token": (0.1, 0.2, 0.5, 1.0, 2.0),
    "weighted_mle": (0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
    "tempered": (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    "length_scaled": (0.0, 0.02, 0.05, 0.1, 0.2, 0.5),
    "adaptive": (0.05, 0.2, 0.5, 1.0),
    "seed": (0.04, 1.0, 4.0),
}
DR_GRPO = Arm("dr_grpo")
PLAIN = [Arm("grpo"), DR_GRPO]
WITH_KL = [Arm("grpo", kl=beta) for beta in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)]
WITH_ENTROPY = [Arm("grpo", entropy=bonus) for bonus in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)]
BASELINES = [*PLAIN, Arm("maxrl"), Arm("pass_at_k"), *WITH_KL, *WITH_ENTROPY]
PLACEBOS = [Arm("grpo", again=True), Arm("dr_grpo", again=True), Arm("tempered", 1000.0)]
# tau 0.2 with beta 3 are the values of an early recipe for weighted_mle.
WITH_REFERENCE = [Arm(name, *pair) for name in ("listwise", "weighted_mle") for pair in ((0.1, 0.1), (0.2, 3.0))]
SHOWN = [*PLAIN, Arm("listwise", 0.2), Arm("weighted_mle", 0.2), Arm("tempered", 0.2)]
EXPECTED = [replace(arm, sampled=False) for arm in SHOWN]
PER_TOKEN = Arm("listwise", 0.2, per_token=True)
OTHER_LR = [replace(arm, lr=lr) for arm in (*SHOWN, PER_TOKEN) for lr in (0.25, 4.0)]


def grid(kind: str) -> list[Arm]:
    """The arms of an objective over tau."""
    if kind == "length_scaled":
        return [Arm("tempered", tau, utility=kind) for tau in TAUS[kind]]
    if kind == "listwise per token":
        return [Arm("listwise", tau, per_token=True) for tau in TAUS[kind]]
    return [Arm(kind, tau) for tau in TAUS[kind]]


def run_arms(arms: Sequence[Arm], task: Task, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Each arm's summary, by name; differences are to Dr.GRPO on the same seeds."""
    stride = _stride(steps)
    base = train(DR_GRPO, task, seeds, steps, stride)
    results = {}
    for arm in arms:
        results[arm.name] = summary(arm, base if arm == DR_GRPO else train(arm, task, seeds, steps, stride), base)
        final = results[arm.name]["final"]
        print(f"{arm.name:<40} {' '.join(f'{name} {final[name][0]:.3f}' for name in MEASURES)}", flush=True)
    return results


def select(task: Task, steps: int) -> dict[str, Any]:
    """The best tau of each objective, on seeds of their own."""
    chosen = {}
    for kind in TAUS:
        by_tau = {}
        for arm in grid(kind):
            final = train(arm, task, SELECTION_SEEDS, steps, steps).final.mean(0).tolist()
            by_tau[f"{arm.tau:g}"] = dict(zip(MEASURES, _rounded(final), strict=True))
        best = best_of(by_tau)
        name = next(arm.name for arm in grid(kind) if f"{arm.tau:g}" == best)
        chosen[kind] = {"tau": float(best), "arm": name, "by_tau": by_tau}
    return chosen


def best_of(by_value: dict[str, dict[str, float]]) -> str:
    """The most coverage@8 among those that reach the matched reward; among all where none does."""
    able = [value for value, row in by_value.items() if row["reward"] >= MATCHED] or list(by_value)
    return max(able, key=lambda value: by_value[value]["coverage@8"])


def conclusions(result: dict[str, Any]) -> list[str]:
    """What the numbers say, each sentence made from them."""
    arms, start = result["arms"], result["baselines"]["untrained"]
    equal = result["variants"]["right answers equally likely before training"]["arms"]
    lines = [
        f"{name}: reward {_at(arms, name, 'reward')}, {_at(arms, name, 'modes')} effective right answers "
        f"({start['modes']:.2f} before training), coverage@8 {_at(arms, name, 'coverage@8')} "
        f"({start['coverage@8']:.3f} before). With the expected update: {_at(arms, f'{name}, expected', 'modes')} and "
        f"{_at(arms, f'{name}, expected', 'coverage@8')}; with right answers equally likely at the start "
        f"{_at(equal, name, 'modes')} sampled and {_at(equal, f'{name}, expected', 'modes')} expected."
        for name in ("grpo", "dr_grpo")
    ]
    for kind, chosen in result["selection"]["objectives"].items():
        row = arms[chosen["arm"]]
        lines.append(
            f"{kind}, best at {chosen['arm']} on other seeds: against Dr.GRPO "
            + ", ".join(f"{name} {_verdict(row['less_dr_grpo'][name])}" for name in ("coverage@8", "reward"))
            + f"; {_at(arms, chosen['arm'], 'modes')} effective right answers. Where reward is first {MATCHED}: "
            + _matched_verdict(row)
        )
    for name in (arm.name for arm in PLACEBOS[1:]):
        gap = arms[name]["less_dr_grpo"]["coverage@8"]
        lines.append(f"{name}, which is Dr.GRPO but for its noise: coverage@8 {_verdict(gap)}.")
    for name in (arm.name for arm in WITH_REFERENCE):
        row = arms[name]
        lines.append(
            f"{name}: reward {_at(arms, name, 'reward')}, coverage@8 {_at(arms, name, 'coverage@8')}, share of the "
            f"weight on wrong answers {row['wrong_mass']:.3f} over the training."
        )
    return lines


def _matched_verdict(row: dict[str, Any]) -> str:
    gaps = row.get("less_dr_grpo_at_matched_reward")
    if gaps is None:
        return "not reached by all runs."
    verdicts = ", ".join(f"{name} {_verdict(gaps[name])}" for name in ("coverage@8", "pass@8"))
    later = gaps["step"][0]
    return f"{verdicts}, {abs(later):.0f} steps {'later' if later > 0 else 'earlier'}."


def _at(arms: dict[str, Any], name: str, measure_name: str) -> str:
    return f"{arms[name]['final'][measure_name][0]:.3f}"


def _verdict(gap: Sequence[float]) -> str:
    mean, low, high = gap
    word = "about equal" if abs(mean) < SMALL else "higher" if low > 0 else "lower" if high < 0 else "not different"
    return f"{word} ({mean:+.3f} [{low:+.3f}, {high:+.3f}])"


def figure_panels(result: dict[str, Any]) -> list[Panel]:
    """Reward and effective right answers over steps, and coverage over tau."""
    arms, steps = result["arms"], result["curve_steps"]
    plain = arms[DR_GRPO.name]["final"]["coverage@8"][0]
    labels = ("GRPO", "Dr.GRPO", "listwise", "weighted_mle", "tempered", "listwise per token")
    shown = list(zip(labels, (*SHOWN, PER_TOKEN), strict=True))
    panels = [
        Panel(
            f"{title}, tau {PER_TOKEN.tau:g}",
            "step",
            [
                Line(label, steps, arms[arm.name]["curve"][name], colour)
                for colour, (label, arm) in enumerate(shown, start=1)
            ],
        )
        for name, title in (("reward", "reward"), ("modes_share", "share of right answers alive"))
    ]
    lines = [Line("Dr.GRPO", (0.05, 1.0), (plain, plain), 2)]
    for colour, kind in enumerate(labels[2:], start=3):
        taus = [arm for arm in grid(kind) if 0.05 <= arm.tau <= 1]
        ends = [arms[arm.name]["final"]["coverage@8"][0] for arm in taus]
        lines.append(Line(kind, [arm.tau for arm in taus], ends, colour, marked=True))
    before = result["baselines"]["untrained"]["coverage@8"]
    lines.append(Line("before training", (0.05, 1.0), (before, before), 0, dashed=True))
    return [*panels, Panel("coverage@8 at the end, over tau", "tau", lines, logarithmic=True)]


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = ["| arm | reward | pass@8 | modes | coverage@8 | coverage@8 less Dr.GRPO's | coverage@8 at reward "
            f"{MATCHED} | step of it |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, values in result["baselines"].items():
        known = ["-" if values[key] is None else f"{values[key]:.3f}" for key in SHOWN_MEASURES]
        rows.append(f"| {name} | {' | '.join(known)} | | | |")
    for name, arm in result["arms"].items():
        gap, matched = arm.get("less_dr_grpo"), arm.get("at_matched_reward")
        cells = [
            *[f"{arm['final'][key][0]:.3f}" for key in SHOWN_MEASURES],
            "" if gap is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gap["coverage@8"]),
            f"{matched['coverage@8'][0]:.3f}" if matched else "not reached",
            f"{matched['step'][0]:.0f}" if matched else "",
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def run(prompts: int, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """The whole comparison; the same arguments give the same result."""
    torch.set_num_threads(1)
    task = make_task(prompts)
    every = [*BASELINES, *PLACEBOS, *(arm for kind in TAUS for arm in grid(kind))]
    every += [*WITH_REFERENCE, *EXPECTED, *OTHER_LR]
    variants = {
        "right answers equally likely before training": make_task(prompts, right_ratio=1.0),
        "24 answers a prompt": make_task(prompts, answers=24),
    }
    result: dict[str, Any] = {
        "measures": MEASURES,
        "setting": {
            "prompts": prompts, "answers": task.right_PK.shape[1], "group": GROUP, "steps": steps,
            "seeds": list(seeds), "matched_reward": MATCHED,
            "right_answers": [int(count) for count in task.right_PK.sum(1)],
        },
        "curve_steps": list(range(0, steps + 1, _stride(steps))),
        "baselines": baselines(task),
        "arms": run_arms(every, task, seeds, steps),
        "variants": {
            name: {"baselines": baselines(other), "arms": run_arms([*SHOWN, PER_TOKEN, *EXPECTED], other, seeds, steps)}
            for name, other in variants.items()
        },
        "selection": {
            "seeds": list(SELECTION_SEEDS), "by": f"coverage@8 where reward is {MATCHED}",
            "objectives": select(task, steps),
        },
    }  # fmt: skip
    return result | {"conclusions": conclusions(result)}


def main() -> None:
    """Run, write the result and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=10, choices=range(2, 11), help="runs of an arm")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "tabular_maxent.json")
    parser.add_argument("--figure", type=Path, default=DOCS / "assets/maxent_tabular.svg")
    options = parser.parse_args()
    origin = begin(options.out)
    result = run(options.prompts, range(1, options.seeds + 1), options.steps)
    write_record(options.out, result, origin)
    write_figure(options.figure, figure_panels(result), SPOKEN)
    print(table(result), *result["conclusions"], sep="\n")


if __name__ == "__main__":
    main()
