"""The page of one run, the page that compares runs, and the page of an evaluation.

A comparison groups runs that differ only in their seed, and shows an interval over the seeds.
"""

import itertools
import json
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_recipes.console.report import run_charts
from grpo_recipes.console.report.chart import Chart, choose_window, make_clock, make_curve, make_histogram, split_rows
from grpo_recipes.console.report.next_steps import make_cards
from grpo_recipes.console.report.page import (
    ENOUGH_SEEDS,
    SMOKE_BADGE,
    Polling,
    format_mean,
    format_number,
    render,
    render_fragment,
)
from grpo_recipes.console.report.read import Group, RunRecord, read_rows, read_run
from grpo_recipes.console.report.samples import pair_prompts, render_steps
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.endings import reward_fix
from grpo_recipes.runs.health import Notice, find_notices, finite_number, percent
from grpo_recipes.runs.metric import Metric
from grpo_recipes.runs.rundir import BEST, Run, read_json, write_atomically
from grpo_recipes.stats import compare_ends, score_names, t_interval_half_width

# Status -> its symbol, and the start of the sentence about the reward.
_STATUSES = {
    "completed": ("✓", ""),
    "running": ("●", "Running. "),
    "stopped": ("■", "Stopped. "),
    "requeued": ("↻", "Waiting to continue. "),
    "failed": ("✕", "Failed. "),
}
_WRITING = threading.Lock()
UNFINISHED = ("running", "requeued")  # statuses of a run that will write its page again
_SILENT_SECONDS = 900.0  # a run that is silent for this time and for ten usual steps was probably killed
# Baseline of a benchmark -> its title on the page.
_BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a running or ended run, by default to ``report.html`` in its directory; return the path.

    Raise ConfigError if the folder is not a run directory, and OSError if the page can't be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_atomically(path, render_run_page(run, path))
    return path


def try_write_report(folder: Path) -> str:
    """Write ``report.html`` of a run and return a line with its path, or with the error if that fails.

    It never raises an exception, so a failure does not change the exit code of the run. Only one thread writes at a
    time.
    """
    try:
        with _WRITING:
            return f"report in {display_path(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}). Try again with: grpo report {shell_path(folder)}"


def render_run_page(
    run: RunRecord, path: Path | None, folder: Path | None = None, polling: Polling | None = None
) -> str:
    """Return the report of a run as HTML.

    Args:
        run: the run.
        path: the file for the page, because links to the run's files depend on it; None: no links.
        folder: the run directory to show, if ``run`` was read from a copy of it.
        polling: how a served page stays current.
    """
    folder, samples_file = folder or run.folder, run.folder / "samples.jsonl"
    kind = run.status if run.status in _STATUSES else "unknown"
    badges = [(f"{_STATUSES.get(run.status, '?')[0]} {run.status}", kind)]
    stamp = str(run.identity.get("timestamp", ""))
    totals = {name: sum(seconds) for name in run_charts.PHASES if (seconds := run.metrics.known(f"seconds/{name}"))}
    charts, same = run_charts.make_other_charts(run)
    rows, newest_file = len(run.metrics.steps), run.folder / "metrics.jsonl"
    if not newest_file.exists():
        newest_file = run.folder / "run.json"
    silent = time.time() - newest_file.stat().st_mtime
    usual = statistics.median_high(run.metrics.known("seconds/step") or [0.0])
    probably_killed = run.status == "running" and silent >= max(_SILENT_SECONDS, 10 * usual)
    return render(
        "run.html.j2",
        run=run, title=f"{folder.name}: {run.status}", name=folder.name, headline=make_headline(run), kind=kind,
        badges=[*badges, SMOKE_BADGE] if run.summary.get("smoke") else badges,
        reward_fix=reward_fix(Run(folder), str(run.summary.get("cause") or "")),
        folder=folder, shown_folder=display_path(folder), silent=silent if probably_killed else 0.0,
        stop_requested=run.summary.get("exit_code") == EXIT_STOPPED,
        checkpoint=find_newest_complete(run.folder / "checkpoints"),
        started=re.sub(r"^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)\d\d$", r"\1-\2-\3 \4:\5", stamp),
        notices=describe_gaps(run), cards=make_cards(run, folder, collect_notices(run)),
        reward=run_charts.make_reward_chart(run),
        curves=run_charts.make_curve_charts(run), rows=rows, points=len(split_rows(rows)), window=choose_window(rows),
        others=charts, same=same, histogram=make_histogram(run.scored), baselines=_BASELINES,
        steps=render_steps(samples_file, len(run.scored) - 1), pairs=pair_prompts(samples_file),
        phase_chart=run_charts.make_phase_chart(run.metrics),
        phases=run_charts.PHASES, totals=totals,
        files=sorted(file.name for file in run.folder.iterdir() if not file.name.startswith((".", "report."))),
        linked=path is not None and path.absolute().parent == run.folder, live=run.status in UNFINISHED,
        resumed=[step for step in run.summary.get("resumed_at") or () if isinstance(step, int)],
        tracked=read_wandb_address(run), polling=polling, clocks=[make_clock([run.metrics])],
        best=read_json(run.folder / BEST),
    )  # fmt: skip


def read_wandb_address(run: RunRecord) -> str:
    """Return the run's URL in W&B from its ``tracked.json``, or "" if the file has no http(s) address."""
    address = str(read_json(run.folder / "tracked.json").get("wandb") or "")
    return address if address.startswith(("https://", "http://")) else ""


def make_headline(run: RunRecord) -> str:
    """Return the headline of a run's report: its status if not completed, and whether the reward rose or fell.

    For example "Failed. Reward rose from 0.1 to 0.6 over 40 steps." The mean rewards of the first and of the last tenth
    of the steps (at least 3 steps each) are compared. Below two standard errors, the sentence is "Reward changed
    little". With overlap_generation, it adds "one step off-policy". Without rewards, it names the reason.
    """
    outcome, rewards = run.outcome, run.metrics.known("reward")
    status = _STATUSES.get(run.status, ("", ""))[1]
    if outcome.first is None or outcome.last is None:
        return status + ("No step has a reward." if outcome.steps else "No step was finished.")
    change = (
        f"from {format_number(outcome.first)} to {format_number(outcome.last)} over {plural(outcome.steps, 'step')}"
    )
    change += ", one step off-policy" if run.value("overlap_generation") else ""
    if compare_ends(rewards):
        return f"{status}Reward {'rose' if outcome.last > outcome.first else 'fell'} {change}."
    return f"{status}Reward changed little, {change}."


def collect_notices(run: RunRecord) -> list[Notice]:
    """Return the signs that a run does not learn, without "not finite", which ``describe_gaps`` names by metric."""
    rows = read_rows(run.folder / "metrics.jsonl")
    notices = find_notices(rows, run.value, over=run.status != "running")
    return [notice for notice in notices if notice.name != "not finite"]


def describe_gaps(run: RunRecord) -> list[str]:
    """Return a sentence for each gap in the data of the training; [] if there is none.

    Gaps are dropped prompts that were too long, metrics that were inf or nan, and unreadable lines of
    ``metrics.jsonl``.
    """
    metrics, sentences = run.metrics, list[str]()
    for counts in [*read_rows(run.folder / "prompts.jsonl")][-1:]:  # the last attempt
        if too_long := counts.get("too_long"):
            sentences.append(
                f"{too_long} of {counts.get('read')} prompts were longer than max_prompt_length and dropped."
            )
    for name, value_counts in metrics.nonfinite.items():
        expected = value_counts["inf"] if name in run_charts.METRICS and run_charts.METRICS[name].infinite else 0
        if unexpected := value_counts.total() - expected:
            sentences.append(f"{name} was inf or nan in {plural(unexpected, 'step')}.")
    if metrics.unreadable:
        sentences.append(f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read.")
    return sentences


# --- an evaluation

_MAX_PROMPTS, _MAX_COMPLETIONS = 60, 8  # limits of prompts on the page, and of completions per prompt
_MAX_MARKUP = 700_000  # limit of the HTML of all prompts, in characters


def render_evaluation_page(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page of `grpo eval`: scores from ``eval.json`` (``result``), and samples from ``rows``.

    ``rows`` are the scored rows of ``scores.jsonl``. At most 60 prompts, spread over the dataset, are shown. If their
    HTML exceeds 700,000 characters, their number is halved until it fits.
    """
    last = len(rows) - 1
    chosen = {round(number * last / (_MAX_PROMPTS - 1)) for number in range(_MAX_PROMPTS)}
    groups = [
        render_fragment("completions.html.j2", "judged", _select_completions(rows[index])) for index in sorted(chosen)
    ]
    while len(groups) > 1 and sum(map(len, groups)) > _MAX_MARKUP:
        groups = groups[::2]
    names = [name.split("@") for name in score_names(result)]
    kinds, ks = (list(dict.fromkeys(part)) for part in zip(*names, strict=True))
    score, limits = finite_number(result[f"pass@{ks[0]}"]), result.get(f"pass@{ks[0]}_ci")
    headline = f"No score for pass@{ks[0]}" if score is None else f"pass@{ks[0]} {percent(score)}"
    headline += f" ({percent(limits[0])} to {percent(limits[1])})" if limits else ""
    tiles = [(f"{kind}@{ks[-1]}", "share of prompts") for kind in kinds if kind in ("pass", "majority")]
    return render(
        "evaluation.html.j2", title=f"Evaluation of {result['model']}", badges=[("evaluation", "running")],
        name=str(result["model"]), headline=f"{headline} on {plural(result['prompts'], 'prompt')}", result=result,
        kinds=kinds, ks=ks, tiles=tiles, groups=groups, rewards=", ".join(result["settings"]["reward_funcs"]),
    )  # fmt: skip


def _select_completions(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scored row with its prompt as one text and at most 8 of its completions, in their order.

    Right, wrong and unscored completions are selected in equal numbers if possible.
    """
    counts, ranks = Counter[bool | None](), list[tuple[int, int]]()
    for index, completion in enumerate(row["completions"]):
        ranks.append((counts[completion["right"]], index))
        counts[completion["right"]] += 1
    indices = sorted(index for _, index in sorted(ranks)[:_MAX_COMPLETIONS])
    prompt = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in row["prompt"])
    return {**row, "prompt": prompt, "completions": [row["completions"][index] for index in indices]}


# --- a comparison of runs

_COLOURS = 7
# Keys that do not change the training, for example names, folders and ports.
BOOKKEEPING_KEYS = frozenset(
    {"run_name", "run_root", "report_to", "vllm_server_port", "vllm_group_port", "main_process_port", "save_steps",
     "save_total_limit", "report_samples", "show_completion_steps", "wandb_project", "wandb_entity", "wandb_run_group"}
)  # fmt: skip


def _describe_rewards(run: RunRecord) -> str:
    """Return the names of a run's rewards and, if the recipe sets reward_weights, the weights, as text."""
    names = run_charts.find_reward_names(run.metrics).values() or run.value("reward_funcs") or ()
    weights = run.value("reward_weights")
    return ", ".join(map(str, names)) + (f" weighted {weights}" if weights else "")


# Facts that are not in the recipe and may differ between runs.
_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.plan.get("batch", {}).get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
    "rewards": _describe_rewards,
    "completions per step": lambda run: run.plan.get("batch", {}).get("completions"),
}
# Facts that make runs hard to compare if they differ.
_WARNINGS = {
    "rewards": "The runs have different rewards, so their totals can't be compared.",
    "completions per step": "The runs have different numbers of completions per step: compare by time.",
}


def make_group(label: str, runs: Sequence[RunRecord], number: int) -> Group:
    """Return a group of runs with a color and a line style that depend on ``number``, its index in the comparison.

    If there are several runs, their number is added to the label: "LABEL (3 seeds)".
    """
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return Group(label + seeds, runs, number % _COLOURS + 1, "line" if number < _COLOURS else "line dashed")


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Return groups of runs that differ only in their seed; runs with equal recipe and seed become separate groups.

    Recipe keys that do not change the training (``BOOKKEEPING_KEYS``) are ignored. The label of a group is the name of
    its first run, its folder's name or its path: the first of these that is unique for all groups.
    """
    by_recipe: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.recipe.items() if key != "seed" and key not in BOOKKEEPING_KEYS}
        signature = json.dumps([run.plan.get("task"), settings], sort_keys=True, default=str)
        by_recipe.setdefault(signature, []).append(run)
    sets = []
    for members in by_recipe.values():
        distinct = len({str(run.value("seed")) for run in members}) == len(members)
        sets.extend([members] if distinct else [[run] for run in members])
    firsts = [members[0] for members in sets]
    # Use the names of the runs, or of their folders, or the folders, whichever is unique first.
    names = [run.name for run in firsts], [run.folder.name for run in firsts]
    folders = [display_path(run.folder) for run in firsts]
    labels = next((candidates for candidates in names if len(set(candidates)) == len(candidates)), folders)
    return [
        make_group(label, members, number) for number, (members, label) in enumerate(zip(sets, labels, strict=True))
    ]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the HTML page that compares the runs in ``folders`` to ``path``, and return ``path``.

    A repeated folder counts once. Raise ConfigError if a folder is not a run directory, and OSError if the page can't
    be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_atomically(path, render_comparison_page([read_run(folder) for folder in unique]))
    return path


def render_comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page that compares runs as HTML; runs that differ only in their seed form a group."""
    title = f"{len(runs)} runs"
    values = compare_groups(group_runs(runs))
    return render("compare.html.j2", title=f"{title} compared", badges=[(title, "running")], name="", **values)


def compare_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the variables of the template ``compare.html.j2``: headline, charts, benchmark scores, differences."""
    runs = [run for group in groups for run in group.runs]
    columns = [(name, key) for run in runs for name, scores in run.benchmarks.items()
               for key in score_names(scores) if finite_number(scores[key]) is not None]  # fmt: skip
    baselines: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in _BASELINES}
    for run in reversed(runs):  # so that the scores of the first run remain
        for benchmark, result in run.benchmarks.items():
            for name in baselines.keys() & (result.get("baselines") or {}):
                baselines[name][benchmark] = result["baselines"][name]
    most = max((len(group.runs) for group in groups), default=0)
    spread = "shaded: 95 % interval of the mean over seeds" if most >= ENOUGH_SEEDS else "faint: single seeds"
    note = "Mean over the completions of a step, smoothed" + f"; {spread}" * (most > 1)
    facts, charts = find_differing_facts(groups), []
    if groups:
        draw, metric = run_charts.make_metric_chart, Metric
        charts = [draw(groups, "reward", metric("Reward", note, unit="mean reward"), large=True)]
        charts += [
            draw(groups, "eval_reward", metric("Evaluation reward", unit="mean reward"), evals=True),
            _make_time_chart(groups),
        ]
        charts += [draw(groups, name) for name, known_metric in run_charts.METRICS.items() if known_metric.compared]
    return {
        "groups": groups, "clocks": [make_clock([run.metrics for run in group.runs]) for group in groups],
        "headline": make_comparison_headline(groups, ranked="rewards" not in facts),
        "warnings": [(_WARNINGS[name], values) for name, values in facts.items() if name in _WARNINGS],
        "drawn": [chart for chart in charts if chart], "columns": list(dict.fromkeys(columns)),
        "baselines": [(_BASELINES[name], scores) for name, scores in baselines.items() if scores],
        "keys": find_differing_keys(groups), "facts": facts,
    }  # fmt: skip


def make_comparison_headline(groups: Sequence[Group], ranked: bool) -> str:
    """Return a sentence: which group has the highest final reward, or that the two highest are not distinguishable.

    They are distinguishable if the 95 % intervals of their means over seeds do not overlap. Without ``ranked``, or with
    fewer than two groups that have a final reward, the sentence only lists the groups.
    """
    ended = [group for group in groups if group.finals]
    if len(ended) < 2 or not ranked:
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    first, second = sorted(ended, key=lambda group: -statistics.fmean(group.finals))[:2]
    reward, other = (format_mean(group.finals, limits=group.limits) for group in (first, second))
    halves = [t_interval_half_width(group.finals) for group in (first, second)]
    gap = statistics.fmean(first.finals) - statistics.fmean(second.finals)
    if None not in halves and sum(half or 0.0 for half in halves) < gap:
        return f"{first.label} ends highest, at reward {reward}; next is {second.label} at {other}."
    counts = " and ".join(map(str, dict.fromkeys(len(group.finals) for group in (first, second))))
    highest = "The highest are not" if len(ended) > 2 else "Not"
    seeds = f"{counts} seed{'s' * (counts != '1')}"
    return f"{highest} distinguishable with {seeds}: {first.label} ends at reward {reward}, {second.label} at {other}."


def _make_time_chart(groups: Sequence[Group]) -> Chart | None:
    """Return a chart of the reward of every run over the minutes of training; None if no run has both metrics."""
    curves = []
    for group in groups:
        for metrics in (run.metrics for run in group.runs):
            if metrics.known("reward") and metrics.known("seconds/step"):
                seconds = (value or 0.0 for value in metrics.column("seconds/step"))
                timed = replace(metrics, steps=[total / 60 for total in itertools.accumulate(seconds)])
                curves.append(make_curve([timed], "reward", group.label, group.colour, group.kind, behind=False))
    return Chart("Reward by time", curves, x_name="min", y_name="mean reward") if curves else None


def find_differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return the recipe keys, except the seed, that have different values in the groups, sorted."""
    keys = sorted({key for group in groups for run in group.runs for key in run.recipe} - {"seed"})
    return [key for key in keys if len({str(group.runs[0].value(key)) for group in groups}) > 1]


def find_differing_facts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the facts, such as commit, trainer and devices, that differ between groups: name -> a text per group."""
    facts = {name: [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
             for name, read in _FACTS.items()}  # fmt: skip
    return {name: values for name, values in facts.items() if len(set(values)) > 1}
