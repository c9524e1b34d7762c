"""The page of one run, the page that compares runs, and the page of an evaluation.

A comparison groups runs that differ only in their seed, and shows an interval over the seeds.
"""

import itertools
import json
import math
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_recipes.console.report import run_charts
from grpo_recipes.console.report.chart import Chart, buckets, curve_of, histogram, window_of
from grpo_recipes.console.report.page import ENOUGH_SEEDS, SMOKE_BADGE, fragment, render, short, spread_text
from grpo_recipes.console.report.read import Group, RunRecord, read_rows, read_run, scored_rows
from grpo_recipes.console.report.transcripts import Transcript, transcript_of
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.endings import reward_fix
from grpo_recipes.runs.health import find_notices, finite_number, percent
from grpo_recipes.runs.metric import Metric
from grpo_recipes.runs.rundir import Run, read_json, write_atomically
from grpo_recipes.stats import half_interval, score_names

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
_MAX_STEPS, _MAX_MARKUP = 24, 700_000  # limits of the completions on a page: number of steps, and characters
_SILENT_SECONDS = 900.0  # a run that is silent for this time and for ten usual steps was probably killed
# Baseline of a benchmark -> its title on the page.
_BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a running or ended run, by default to ``report.html`` in its directory; return the path.

    Raises a ConfigError if the folder is not a run directory, and an OSError if the page can't be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_atomically(path, run_page(run, path))
    return path


def report_line(folder: Path) -> str:
    """Write the report of a run and return a line with its path; only one thread writes at a time.

    An error is returned as the line and not raised, so that it does not change the exit code of the run.
    """
    try:
        with _WRITING:
            return f"report in {display_path(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}). Try again with: grpo report {shell_path(folder)}"


def run_page(run: RunRecord, path: Path) -> str:
    """Return the report of a run as HTML; ``path`` is the file to which it will be written, for its links."""
    kind = run.status if run.status in _STATUSES else "unknown"
    badges = [(f"{_STATUSES.get(run.status, '?')[0]} {run.status}", kind)]
    stamp = str(run.identity.get("timestamp", ""))
    totals = {name: sum(seconds) for name in run_charts.PHASES if (seconds := run.metrics.known(f"seconds/{name}"))}
    charts, same = run_charts.other_metrics(run)
    rows, newest_file = len(run.metrics.steps), run.folder / "metrics.jsonl"
    if not newest_file.exists():
        newest_file = run.folder / "run.json"
    silent = time.time() - newest_file.stat().st_mtime
    usual = statistics.median_high(run.metrics.known("seconds/step") or [0.0])
    probably_killed = run.status == "running" and silent >= max(_SILENT_SECONDS, 10 * usual)
    return render(
        "run.html.j2",
        run=run, title=f"{run.folder.name}: {run.status}", name=run.folder.name, headline=sentence(run), kind=kind,
        badges=[*badges, SMOKE_BADGE] if run.summary.get("smoke") else badges,
        reward_fix=reward_fix(Run(run.folder), str(run.summary.get("cause") or "")),
        folder=display_path(run.folder), silent=silent if probably_killed else 0.0,
        stop_requested=run.summary.get("exit_code") == EXIT_STOPPED,
        checkpoint=find_newest_complete(run.folder / "checkpoints"),
        started=re.sub(r"^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)\d\d$", r"\1-\2-\3 \4:\5", stamp),
        notices=notices(run), reward=run_charts.reward_chart(run), curves=run_charts.curve_charts(run),
        rows=rows, points=len(buckets(rows)), window=window_of(rows),
        others=charts, same=same, histogram=histogram(run.scored), baselines=_BASELINES, steps=_completions(run),
        phase_chart=run_charts.phase_chart(run.metrics), phases=run_charts.PHASES, totals=totals,
        files=sorted(file.name for file in run.folder.iterdir() if not file.name.startswith((".", "report."))),
        linked=path.absolute().parent == run.folder, live=run.status in UNFINISHED,
        resumed=[step for step in run.summary.get("resumed_at") or () if isinstance(step, int)],
        tracked=wandb_address(run),
    )  # fmt: skip


def wandb_address(run: RunRecord) -> str:
    """Return the address of the run in W&B, or "" if the trainer recorded none."""
    address = str(read_json(run.folder / "tracked.json").get("wandb") or "")
    return address if address.startswith(("https://", "http://")) else ""


def sentence(run: RunRecord) -> str:
    """Return the headline: how the run ended, how the reward changed, and whether samples were off-policy.

    A change counts if it exceeds two standard errors of the difference between the first and the last tenth of the
    steps (at least 3 steps each).
    """
    outcome, rewards = run.outcome, run.metrics.known("reward")
    status = _STATUSES.get(run.status, ("", ""))[1]
    if outcome.first is None or outcome.last is None:
        return status + ("No step has a reward." if outcome.steps else "No step was finished.")
    change = f"from {short(outcome.first)} to {short(outcome.last)} over {plural(outcome.steps, 'step')}"
    change += ", one step off-policy" if run.value("overlap_generation") else ""
    size = max(3, len(rewards) // 10)
    if len(rewards) >= 2 * size:
        first, last = rewards[:size], rewards[-size:]
        error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
        if abs(sum(last) - sum(first)) / size > 2 * error:
            return f"{status}Reward {'rose' if outcome.last > outcome.first else 'fell'} {change}."
    return f"{status}Reward changed little, {change}."


def notices(run: RunRecord) -> list[str]:
    """Return sentences about problems of the training.

    They come from the health rules, dropped prompts, values that are inf or nan, and lines that can't be read.
    """
    metrics = run.metrics
    sentences = [
        f"{notice.text[0].upper()}{notice.text[1:]}: {notice.fix}."
        for notice in find_notices(read_rows(run.folder / "metrics.jsonl"), run.value, over=run.status != "running")
        if notice.name != "not finite"  # reported below, for each metric
    ]
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


def _group_key(pair: tuple[Mapping[str, Any], Transcript | None]) -> tuple[Any, ...]:
    """Return the key of a sample's group: the prompt, and for episodes the seed, since prompts may be equal."""
    sample, episode = pair
    return sample.get("prompt"), *((episode.environment, episode.seed) if episode else ())


def _completions(run: RunRecord) -> list[Markup]:
    """Return the HTML of sampled completions, at up to 24 steps spread over the run.

    Of fewer steps if it is too long.
    """
    last, steps = len(run.scored) - 1, []
    chosen = {round(index * last / (_MAX_STEPS - 1)) for index in range(_MAX_STEPS)}
    for index, (scored, samples) in enumerate(scored_rows(run.folder / "samples.jsonl")):
        if index in chosen and samples:
            pairs = [(sample, transcript_of(sample)) for sample in samples]
            groups = [(key[0], list(members)) for key, members in groupby(pairs, _group_key)]
            steps.append(fragment("completions.html.j2", "step", scored, groups, index == last))
    while len(steps) > 1 and sum(map(len, steps)) > _MAX_MARKUP:
        steps = [*steps[:-2:2], steps[-1]]
    return steps


# --- an evaluation

_MAX_PROMPTS, _MAX_COMPLETIONS = 60, 8  # limits of prompts on the page, and of completions per prompt


def evaluation_page(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of an evaluation as text, from its ``eval.json`` and scored rows of ``scores.jsonl``.

    Prompts are spread over the dataset; their number is halved until they fit the page.
    """
    last = len(rows) - 1
    chosen = {round(number * last / (_MAX_PROMPTS - 1)) for number in range(_MAX_PROMPTS)}
    groups = [fragment("completions.html.j2", "judged", _select_completions(rows[index])) for index in sorted(chosen)]
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
    """Return a row with its prompt as text and at most 8 completions, as many right as wrong ones if possible."""
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


def _rewards(run: RunRecord) -> str:
    """Return the names and weights of a run's rewards as text."""
    names = run_charts.reward_names(run.metrics).values() or run.value("reward_funcs") or ()
    weights = run.value("reward_weights")
    return ", ".join(map(str, names)) + (f" weighted {weights}" if weights else "")


# Facts that are not in the recipe and may differ between runs.
_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.plan.get("batch", {}).get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
    "rewards": _rewards,
    "completions per step": lambda run: run.plan.get("batch", {}).get("completions"),
}
# Facts that make runs hard to compare if they differ.
_WARNINGS = {
    "rewards": "The runs have different rewards, so their totals can't be compared.",
    "completions per step": "The runs have different numbers of completions per step: compare by time.",
}


def group_of(label: str, runs: Sequence[RunRecord], number: int) -> Group:
    """Return group ``number`` (from 0) of a comparison: its color and line style follow from the number.

    The label also names the number of seeds if there are several runs.
    """
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return Group(label + seeds, runs, number % _COLOURS + 1, "line" if number < _COLOURS else "line dashed")


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Group runs that differ only in their seed; runs with equal recipe and seed become separate groups."""
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
    return [group_of(label, members, number) for number, (members, label) in enumerate(zip(sets, labels, strict=True))]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page that compares runs, and return its path; a repeated folder counts once.

    Raises a ConfigError if a folder is not a run directory, and an OSError if the page can't be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_atomically(path, comparison_page([read_run(folder) for folder in unique]))
    return path


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page that compares runs as HTML; runs that differ only in their seed form a group."""
    title = f"{len(runs)} runs"
    values = comparison(group_runs(runs))
    return render("compare.html.j2", title=f"{title} compared", badges=[(title, "running")], name="", **values)


def comparison(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the values of ``compare.html.j2`` for these groups: headline, charts, scores and differences."""
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
    facts, charts = differing_facts(groups), []
    if groups:
        draw, metric = run_charts.metric_chart, Metric
        charts = [draw(groups, "reward", metric("Reward", note, unit="mean reward"), large=True)]
        charts += [
            draw(groups, "eval_reward", metric("Evaluation reward", unit="mean reward"), evals=True),
            _chart_by_time(groups),
        ]
        charts += [draw(groups, name) for name, known_metric in run_charts.METRICS.items() if known_metric.compared]
    return {
        "groups": groups, "headline": comparison_sentence(groups, ranked="rewards" not in facts),
        "warnings": [(_WARNINGS[name], values) for name, values in facts.items() if name in _WARNINGS],
        "drawn": [chart for chart in charts if chart], "columns": list(dict.fromkeys(columns)),
        "baselines": [(_BASELINES[name], scores) for name, scores in baselines.items() if scores],
        "keys": differing_keys(groups), "facts": facts,
    }  # fmt: skip


def comparison_sentence(groups: Sequence[Group], ranked: bool) -> str:
    """Return the headline: which group ends highest, or that the two highest are not distinguishable.

    Without ``ranked``, or with fewer than two groups that have a final reward, it only lists the groups.
    """
    ended = [group for group in groups if group.finals]
    if len(ended) < 2 or not ranked:
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    first, second = sorted(ended, key=lambda group: -statistics.fmean(group.finals))[:2]
    reward, other = (spread_text(group.finals, limits=group.limits) for group in (first, second))
    halves = [half_interval(group.finals) for group in (first, second)]
    gap = statistics.fmean(first.finals) - statistics.fmean(second.finals)
    if None not in halves and sum(half or 0.0 for half in halves) < gap:
        return f"{first.label} ends highest, at reward {reward}; next is {second.label} at {other}."
    counts = " and ".join(map(str, dict.fromkeys(len(group.finals) for group in (first, second))))
    highest = "The highest are not" if len(ended) > 2 else "Not"
    seeds = f"{counts} seed{'s' * (counts != '1')}"
    return f"{highest} distinguishable with {seeds}: {first.label} ends at reward {reward}, {second.label} at {other}."


def _chart_by_time(groups: Sequence[Group]) -> Chart | None:
    """Return the chart of every run's reward over the minutes of its steps; None if no run has both."""
    curves = []
    for group in groups:
        for metrics in (run.metrics for run in group.runs):
            if metrics.known("reward") and metrics.known("seconds/step"):
                seconds = (value or 0.0 for value in metrics.column("seconds/step"))
                timed = replace(metrics, steps=[total / 60 for total in itertools.accumulate(seconds)])
                curves.append(curve_of([timed], "reward", group.label, group.colour, group.kind, behind=False))
    return Chart("Reward by time", curves, x_name="min", y_name="mean reward") if curves else None


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return the recipe keys, except the seed, that have different values in the groups, sorted."""
    keys = sorted({key for group in groups for run in group.runs for key in run.recipe} - {"seed"})
    return [key for key in keys if len({str(group.runs[0].value(key)) for group in groups}) > 1]


def differing_facts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the facts that differ between groups: name -> one text per group."""
    facts = {name: [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
             for name, read in _FACTS.items()}  # fmt: skip
    return {name: values for name, values in facts.items() if len(set(values)) > 1}
