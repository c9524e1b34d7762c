"""What an answer's length does to ``listwise``, its repair and other methods, on the tables of ``tabular_policy.py``.

    python evidence/tabular_length.py [--out FILE.json] [--figure FILE.svg]

The task is that of ``tabular_maxent.py``, with T tokens in each answer; log pi(y) is that of the whole answer. Losses
are a mean over tokens with a learning rate of T, or a sum: the length of the loss cancels, that in the weights stays.

The law. Per token s = softmax(log pi(y) / T) over the group. As T grows s goes to 1 / G, and the advantage G (w - s) to
G w - 1, which at a small tau is MaxRL's (r - mean r) / mean r: what is left of the pull towards the answers that the
policy has too little of is of order 1 / T.

The repair. A temperature kappa that is not the length: s = softmax(log pi(y) / kappa). Where every group is w = s the
policy rests, whatever is sampled: w ~ exp(r / (T_q tau)) and s ~ pi^(1 / kappa), hence pi ~ exp(kappa r / (T_q tau)),
the policy of most entropy at its reward: all right answers alike. The gradient of an infinite group on the logits is
w_k - s_k, with w_k ~ pi_k exp(r_k / (T_q tau)) and s_k ~ pi_k^(1 + 1 / kappa): no other policy that gives each answer
a probability rests. Per token all this holds with kappa = T: length takes the pull away, not the place it leads to.
``spread`` is kappa = max(1, c times the standard deviation of the group's summed log-probabilities).

Words. Where an answer can be said in many ways, a completion's log-probability holds that of its wording too. Here each
token but the last is one of two words, of probability 0.8 and 0.2, whatever the answer; they are not trained.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_tools import DOCS, RESULTS, Line, Panel, begin, write_figure, write_record
from tabular_maxent import SELECTION_SEEDS, WITH_ENTROPY, WITH_KL, best_of, with_interval
from tabular_policy import (
    MATCHED,
    MEASURES,
    Arm,
    Groups,
    Policy,
    Task,
    make_task,
    maxrl_advantages,
    random_numbers,
    sampled_step,
    train,
    weigh,
)

TAU = 0.2
LENGTHS = (1, 2, 3, 5, 10, 30, 100)
LIKELIER_WORD = 0.8
SPOKEN = "What the length of answers does to several right answers"  # of the figure
SHOWN = ("modes", "reward", "coverage@8")


def per_token(length: int) -> Arm:
    """Listwise as shipped, at the learning rate that the length of the loss asks for."""
    return Arm("listwise", TAU, per_token=True, lr=length)


PLAIN = {"GRPO": Arm("grpo"), "Dr.GRPO": Arm("dr_grpo"), "MaxRL": Arm("maxrl")}
KAPPA = {f"listwise, kappa {kappa}": Arm("listwise", TAU, kappa=kappa) for kappa in (1, 2, 3)}
SPREAD = {f"listwise, kappa from spread, c {c:g}": Arm("listwise", TAU, spread=c) for c in (0.5, 1, 2)}
# Each is tuned over its values.
GRIDS = {
    "GRPO + KL": {f"{arm.kl:g}": arm for arm in WITH_KL},
    "GRPO + entropy": {f"{arm.entropy:g}": arm for arm in WITH_ENTROPY},
    "entropy in the reward": {f"{tau:g}": Arm("soft_reward", tau) for tau in (0.05, 0.1, 0.2, 0.3)},
}


def of_length(task: Task, length: int, words: bool = False) -> Task:
    """The task with answers of one length, said in one way or (``words``) in many."""
    wordings = binomial(length - 1) if words else None
    return replace(task, lengths_PK=torch.full_like(task.lengths_PK, length), wordings=wordings)


def binomial(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each number of likelier words: the cumulative probability, and the log-probability of one such wording."""
    likelier_W = torch.arange(tokens + 1, dtype=torch.float64)
    logps_W = likelier_W * math.log(LIKELIER_WORD) + (tokens - likelier_W) * math.log(1 - LIKELIER_WORD)
    ways_W = torch.tensor([math.comb(tokens, count) for count in range(tokens + 1)], dtype=torch.float64)
    return (ways_W.log() + logps_W).exp().cumsum(0), logps_W


def with_longer(task: Task, length: int) -> tuple[Task, torch.Tensor]:
    """The task with every second answer, right or wrong, three times as long, and where; right ones start alike.

    Whether the first is the longer changes from prompt to prompt.
    """
    longer_PK = torch.zeros_like(task.right_PK)
    for prompt, right_K in enumerate(task.right_PK):
        for members_K in (right_K, ~right_K):
            longer_PK[prompt, members_K.nonzero()[prompt % 2 :: 2, 0]] = True
    return replace(task, lengths_PK=torch.where(longer_PK, 3 * length, length)), longer_PK


def ends(arm: Arm, task: Task, seeds: Sequence[int], steps: int) -> dict[str, list[float]]:
    """The MEASURES at the end of an arm's runs, each with its interval."""
    final = train(arm, task, seeds, steps, steps).final.T.tolist()
    return {name: with_interval(column) for name, column in zip(MEASURES, final, strict=True)}


def by_length(task: Task, seeds: Sequence[int], steps: int, words: bool) -> dict[str, Any]:
    """Arms that see a completion's log-probability, at each length; ``any`` length where it makes no difference."""
    tasks = {length: of_length(task, length, words) for length in LENGTHS}
    result = {
        "listwise, per token": {f"{length}": ends(per_token(length), tasks[length], seeds, steps) for length in LENGTHS}
    }
    arms = KAPPA | SPREAD
    if not words:
        return result | {name: {"any": ends(arm, tasks[1], seeds, steps)} for name, arm in (arms | PLAIN).items()}
    arms |= {"entropy in the reward, 0.2": Arm("soft_reward", 0.2)}
    return result | {
        name: {f"{length}": ends(arm, tasks[length], seeds, steps) for length in LENGTHS} for name, arm in arms.items()
    }


def tuned(task: Task, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Each grid on the seeds of the table, and the value chosen on others: most coverage@8 of those whose reward
    ends at the matched one or above."""
    result = {}
    for name, grid in GRIDS.items():
        finals = {value: train(arm, task, SELECTION_SEEDS, steps, steps).final.mean(0) for value, arm in grid.items()}
        chosen = best_of({value: dict(zip(MEASURES, final.tolist(), strict=True)) for value, final in finals.items()})
        result[name] = {"chosen": chosen, "grid": {value: ends(arm, task, seeds, steps) for value, arm in grid.items()}}
    return result


UNEQUAL = {
    "listwise, per token": Arm("listwise", TAU, per_token=True),
    "listwise, kappa 2": Arm("listwise", TAU, kappa=2),
    "listwise, kappa from spread, c 1": Arm("listwise", TAU, spread=1),
    "MaxRL": Arm("maxrl"),
    "Dr.GRPO (sum over tokens)": Arm("dr_grpo"),
    "GRPO (mean over tokens)": Arm("grpo", per_token=True),
}


def unequal(prompts: int, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """For each arm and T: the share of the right answers' probability on those of 3 T, and the MEASURES."""
    result: dict[str, Any] = {}
    even = make_task(prompts, right_ratio=1.0)
    for name, arm in UNEQUAL.items():
        result[name] = {}
        for length in (3, 30) if arm.per_token else (3,):
            task, longer_PK = with_longer(even, length)
            trained = train(replace(arm, lr=length) if arm.per_token else arm, task, seeds, steps, steps)
            rights_PK = trained.policy.chances_PK * task.right_PK.repeat(len(seeds), 1)
            share_P = (rights_PK * longer_PK.repeat(len(seeds), 1)).sum(1) / rights_PK.sum(1)
            rows = {name: column for name, column in zip(MEASURES, trained.final.T.tolist(), strict=True)}
            rows["longer"] = share_P.view(len(seeds), -1).mean(1).tolist()
            result[name][f"{length}" if arm.per_token else "any"] = {
                key: with_interval(column) for key, column in rows.items()
            }
    return result


def cosines(task: Task, groups: int = 200) -> dict[str, float]:
    """Mean cosine of listwise per token and MaxRL, by length, over groups of the policy before training."""
    policy = Policy.of(task.start_PK)
    draws_PG = random_numbers(1, groups, len(task.right_PK)).transpose(0, 1).flatten(1)
    answers_PG = torch.searchsorted(policy.chances_PK.cumsum(1), draws_PG).clamp(max=task.right_PK.shape[1] - 1)
    seen = [values.gather(1, answers_PG).view(-1, 16) for values in (task.right_PK.double(), policy.logps_PK)]
    mixed_P = seen[0].std(1) > 0
    rewards_PG, logps_PG = (values[mixed_P] for values in seen)
    result = {}
    for length in LENGTHS:
        lengths_PG = torch.full_like(rewards_PG, length)
        groups_seen = Groups(torch.zeros_like(rewards_PG), rewards_PG, logps_PG, logps_PG, lengths_PG)
        advantages_PG, _ = weigh(Arm("listwise", TAU, per_token=True), groups_seen)
        likeness_P = torch.nn.functional.cosine_similarity(advantages_PG, maxrl_advantages(rewards_PG), dim=1)
        result[f"{length}"] = round(float(likeness_P.mean()), 6)
    return result


def rests(kappa: float, tau: float = 0.5, steps: int = 3000) -> dict[str, float]:
    """How near training with groups of 16 and of all answers comes to exp(kappa r / tau), and the step taken there.

    24 answers, 8 prompts, from random logits; a tau at which wrong answers keep a share that can be compared.
    """
    start_PK = torch.randn(8, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(1)
    task = replace(make_task(8, answers=24), start_PK=start_PK)
    rest = Policy.of(kappa * task.right_PK.double() / tau)
    sampled = Arm("listwise", tau, kappa=kappa, lr=2)
    draws_PG = random_numbers(1, 1, 8)[0]
    result = {"reward": float((rest.chances_PK * task.right_PK).sum(1).mean())}
    for name, arm in (("sampled", sampled), ("expected", replace(sampled, sampled=False))):
        end = train(arm, task, [1], steps, steps).policy
        distances_P = (end.chances_PK - rest.chances_PK).abs().sum(1) / 2
        result[f"{name}_distance"] = float(distances_P.max())
    for name, policy in (("start", Policy.of(start_PK)), ("rest", rest)):
        result[f"step_at_{name}"] = float(sampled_step(sampled, policy, task, draws_PG).gradient_PK.abs().max())
    return {name: float(f"{value:.3g}") for name, value in result.items()}


def figure_panels(result: dict[str, Any]) -> list[Panel]:
    """Right answers alive over length, in one wording and in many, and what reward each amount of coverage costs."""
    names = ("listwise, per token", "listwise, kappa 2", "listwise, kappa from spread, c 1")
    panels = []
    for title, rows in (("answers said in one way", result["by_length"]), ("in many ways", result["words"])):
        lines = []
        for colour, name in enumerate(names, start=1):
            shares = [_at(rows[name], length)["modes_share"][0] for length in LENGTHS]
            lines.append(Line(name, LENGTHS, shares, colour, marked=True))
        flat = {"MaxRL": result["by_length"]["MaxRL"]["any"]}
        flat |= {name: result["tuned"][name]["grid"][result["tuned"][name]["chosen"]] for name in list(GRIDS)[:2]}
        for colour, (name, row) in enumerate(flat.items(), start=4):
            lines.append(Line(name, (LENGTHS[0], LENGTHS[-1]), [row["modes_share"][0]] * 2, colour))
        panels.append(Panel(f"right answers alive, {title}", "tokens", lines, logarithmic=True))
    ways = {
        names[0]: ([_at(result["by_length"][names[0]], length) for length in LENGTHS], 1),
        **{
            name: (list(result["tuned"][name]["grid"].values()), colour)
            for colour, name in enumerate(list(GRIDS)[:2], start=5)
        },
        list(GRIDS)[2]: (list(result["tuned"][list(GRIDS)[2]]["grid"].values()), 0),
    }
    frontier = []
    for name, (rows, colour) in ways.items():
        kept = [row for row in rows if row["reward"][0] >= MATCHED] or rows
        xs, ys = ([row[measure][0] for row in kept] for measure in ("reward", "coverage@8"))
        frontier.append(Line(name, xs, ys, colour, marked=True))
    return [*panels, Panel("coverage@8 at the end, over reward", "reward", frontier)]


def _at(row: dict[str, Any], length: int) -> dict[str, list[float]]:
    return row.get("any") or row[f"{length}"]


def tables(result: dict[str, Any]) -> str:
    """The result in Markdown, for the page."""
    lines = [
        "| answers said in one way | tokens | right answers alive | reward | coverage@8 |",
        "|---|---|---|---|---|",
    ]
    for name, rows in result["by_length"].items():
        lines += [_row(name, length, *_cells(row)) for length, row in rows.items()]
    for name, part in result["tuned"].items():
        lines.append(_row(f"{name}, {part['chosen']} (tuned)", "any", *_cells(part["grid"][part["chosen"]])))
    lines += ["", _row("in many ways: alive (reward)", *LENGTHS), "|---" * (len(LENGTHS) + 1) + "|"]
    for name, rows in result["words"].items():
        cells = [f"{row['modes'][0]:.2f} ({row['reward'][0]:.2f})" for row in rows.values()]
        lines.append(_row(name, *cells))
    lines += ["", "| right answers of T and of 3 T tokens | T | share of 3 T | right answers alive | reward |"]
    lines.append("|---|---|---|---|---|")
    for name, rows in result["unequal"].items():
        for length, row in rows.items():
            lines.append(_row(name, length, f"{row['longer'][0]:.2f}", *_cells(row)[:2]))
    lines += ["", _row("tokens", *result["cosines"]), "|---" * (len(LENGTHS) + 1) + "|"]
    lines.append(_row("cosine to MaxRL, per token", *[f"{value:.3f}" for value in result["cosines"].values()]))
    lines += ["", "| kappa | reward at rest | distance after training: groups of 16 | all | step at rest | before |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for kappa, row in result["rest"].items():
        steps = [f"{row[f'step_at_{place}']:.0e}" for place in ("rest", "start")]
        distances = [f"{row[f'{kind}_distance']:.3f}" for kind in ("sampled", "expected")]
        lines.append(_row(kappa, f"{row['reward']:.3f}", *distances, *steps))
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _cells(row: dict[str, list[float]]) -> list[str]:
    return [f"{row[name][0]:.{2 if name == 'modes' else 3}f}" for name in SHOWN]


def run(prompts: int, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """The whole measurement; the same arguments give the same result."""
    torch.set_num_threads(1)
    task = make_task(prompts)
    return {
        "measures": MEASURES | {"longer": "share of the right answers' probability on those of three times the length"},
        "setting": {"prompts": prompts, "steps": steps, "seeds": list(seeds), "tau": TAU, "words": LIKELIER_WORD,
                    "selection_seeds": list(SELECTION_SEEDS)},
        "by_length": by_length(task, seeds, steps, words=False),
        "tuned": tuned(of_length(task, 1), seeds, steps),
        "words": by_length(task, seeds, steps, words=True),
        "unequal": unequal(prompts, seeds, steps),
        "cosines": cosines(task),
        "rest": {f"{kappa}": rests(kappa) for kappa in (1, 2, 3)},
    }  # fmt: skip


def main() -> None:
    """Run, write the result and the figure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 11), help="runs of an arm")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS / "tabular_length.json")
    parser.add_argument("--figure", type=Path, default=DOCS / "assets/tabular_length.svg")
    options = parser.parse_args()
    origin = begin(options.out)
    result = run(options.prompts, range(1, options.seeds + 1), options.steps)
    write_record(options.out, result, origin)
    write_figure(options.figure, figure_panels(result), SPOKEN)
    print(tables(result))


if __name__ == "__main__":
    main()
