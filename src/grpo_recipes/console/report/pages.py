"""The page of one run, and the page that compares runs.

On the latter, runs that differ in their seed alone are one group, with an interval over the seeds.
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
from grpo_recipes.console.report.page import ENOUGH_SEEDS, SMOKE_BADGE, fragment, render, short, spread
from grpo_recipes.console.report.read import Group, RunRecord, read_rows, read_run, scored_rows
from grpo_recipes.console.report.transcripts import Transcript, transcript_of
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.endings import reward_fix
from grpo_recipes.runs.health import find_notices, finite_number, percent
from grpo_recipes.runs.rundir import Run, read_json, write_atomically
from grpo_recipes.stats import half_interval, score_names

# Status -> its mark, and how the sentence on the reward begins.
_STATUSES = {
    "completed": ("✓", ""),
    "running": ("●", "Running. "),
    "stopped": ("■", "Stopped. "),
    "requeued": ("↻", "Waiting to continue. "),
    "failed": ("✕", "Failed. "),
}
_WRITING = threading.Lock()
GOES_ON = ("running", "requeued")  # statuses of a run whose page is written again
_MOST_STEPS, _MOST_MARKUP = 24, 700_000  # whose completions are in the page, and characters of these
_SILENT_SECONDS = 900.0  # and ten usual steps, without a row: a running run may be dead
# Baseline of a benchmark -> its name on the page.
_BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a run, running or ended, and return its path: by default ``report.html`` in the directory.

    Raise ConfigError where the folder is not a run directory, OSError where the page cannot be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_atomically(path, run_page(run, path))
    return path


def report_line(folder: Path) -> str:
    """Write the report of a run, after one that another thread is at, and return a line that names its path.

    Any error becomes the line and is not raised: how the run itself ended counts.
    """
    try:
        with _WRITING:
            return f"report in {display_path(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}); try again: grpo report {shell_path(folder)}"


def run_page(run: RunRecord, path: Path) -> str:
    """Return the page as text; ``path`` is its later place, for its links."""
    kind = run.status if run.status in _STATUSES else "unknown"
    badges = [(f"{_STATUSES.get(run.status, '?')[0]} {run.status}", kind)]
    stamp = str(run.identity.get("timestamp", ""))
    totals = {name: sum(found) for name in run_charts.PHASES if (found := run.metrics.known(f"seconds/{name}"))}
    charts, same = run_charts.other_metrics(run)
    rows, written = len(run.metrics.steps), run.folder / "metrics.jsonl"
    silent = time.time() - (written if written.exists() else run.folder / "run.json").stat().st_mtime
    usual = statistics.median_high(run.metrics.known("seconds/step") or [0.0])
    was_killed = run.status == "running" and silent >= max(_SILENT_SECONDS, 10 * usual)  # most likely
    return render(
        "run.html.j2",
        run=run, title=f"{run.folder.name}: {run.status}", name=run.folder.name, headline=sentence(run), kind=kind,
        badges=[*badges, SMOKE_BADGE] if run.summary.get("smoke") else badges,
        reward_fix=reward_fix(Run(run.folder), str(run.summary.get("cause") or "")),
        folder=display_path(run.folder), silent=silent if was_killed else 0.0,
        asked=run.summary.get("exit_code") == EXIT_STOPPED, checkpoint=newest_complete(run.folder / "checkpoints"),
        started=re.sub(r"^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)\d\d$", r"\1-\2-\3 \4:\5", stamp),
        notices=notices(run), reward=run_charts.reward_chart(run), curves=run_charts.curve_charts(run),
        rows=rows, points=len(buckets(rows)), window=window_of(rows),
        others=charts, same=same, histogram=histogram(run.scored), baselines=_BASELINES, steps=_completions(run),
        phase_chart=run_charts.phase_chart(run.metrics), phases=run_charts.PHASES, totals=totals,
        files=sorted(file.name for file in run.folder.iterdir() if not file.name.startswith((".", "report."))),
        linked=path.absolute().parent == run.folder, live=run.status in GOES_ON,
        resumed=[step for step in run.summary.get("resumed_at") or () if isinstance(step, int)],
        tracked=wandb_address(run),
    )  # fmt: skip


def wandb_address(run: RunRecord) -> str:
    """Return the page of the run in W&B that its trainer noted, or an empty text."""
    address = str(read_json(run.folder / "tracked.json").get("wandb") or "")
    return address if address.startswith(("https://", "http://")) else ""


def sentence(run: RunRecord) -> str:
    """Return how a run ended, how the reward changed, and whether it was learned from samples of older weights.

    A change counts where it is more than two standard errors of the difference between the first and the last tenth of
    the steps (at least 3 each).
    """
    count, rewards = run.outcome, run.metrics.known("reward")
    ended = _STATUSES.get(run.status, ("", ""))[1]
    if count.first is None or count.last is None:
        return ended + ("No step has a reward." if count.steps else "No step was finished.")
    ends = f"from {short(count.first)} to {short(count.last)} over {plural(count.steps, 'step')}"
    ends += ", one step off-policy" if run.value("overlap_generation") else ""
    size = max(3, len(rewards) // 10)
    if len(rewards) >= 2 * size:
        before, after = rewards[:size], rewards[-size:]
        error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / size)
        if abs(sum(after) - sum(before)) / size > 2 * error:
            return f"{ended}Reward {'rose' if count.last > count.first else 'fell'} {ends}."
    return f"{ended}Reward changed little, {ends}."


def notices(run: RunRecord) -> list[str]:
    """Return what a person who knows GRPO would point at."""
    metrics = run.metrics
    found = [
        f"{notice.text[0].upper()}{notice.text[1:]}: {notice.fix}."
        for notice in find_notices(read_rows(run.folder / "metrics.jsonl"), run.value, over=run.status != "running")
        if notice.name != "not finite"  # reported for each metric, from what could not be read as a number
    ]
    for counts in [*read_rows(run.folder / "prompts.jsonl")][-1:]:  # of the last attempt
        if too_long := counts.get("too_long"):
            found.append(f"{too_long} of {counts.get('read')} prompts were dropped as longer than max_prompt_length.")
    for name, seen in metrics.odd.items():
        meant = seen["inf"] if name in run_charts.METRICS and run_charts.METRICS[name].infinite else 0
        if times := seen.total() - meant:
            found.append(f"{name} was inf or nan in {plural(times, 'step')}.")
    if metrics.unreadable:
        found.append(f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read.")
    return found


def _asked(pair: tuple[Mapping[str, Any], Transcript | None]) -> tuple[Any, ...]:
    """Return what the completions of one group share: games of several seeds may begin with one text."""
    sample, episode = pair
    return sample.get("prompt"), *((episode.environment, episode.seed) if episode else ())


def _completions(run: RunRecord) -> list[Markup]:
    """Return sampled completions of steps spread over the run, the first and the last among them if they fit."""
    last, steps = len(run.scored) - 1, []
    chosen = {round(index * last / (_MOST_STEPS - 1)) for index in range(_MOST_STEPS)}
    for place, (scored, samples) in enumerate(scored_rows(run.folder / "samples.jsonl")):
        if place in chosen and samples:
            pairs = [(one, transcript_of(one)) for one in samples]
            groups = [(asked[0], list(members)) for asked, members in groupby(pairs, _asked)]
            steps.append(fragment("completions.html.j2", "step", scored, groups, place == last))
    while len(steps) > 1 and sum(map(len, steps)) > _MOST_MARKUP:
        steps = [*steps[:-2:2], steps[-1]]
    return steps


# --- one evaluation alone

_MOST_PROMPTS, _MOST_COMPLETIONS = 60, 8  # on the page, and of each prompt


def evaluation_page(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of an evaluation as text, from its ``eval.json`` and rows of ``scores.jsonl`` with verdicts.

    Prompts are spread over the set; their number is halved until they fit the page.
    """
    last = len(rows) - 1
    places = {round(place * last / (_MOST_PROMPTS - 1)) for place in range(_MOST_PROMPTS)}
    groups = [fragment("completions.html.j2", "judged", _readable(rows[place])) for place in sorted(places)]
    while len(groups) > 1 and sum(map(len, groups)) > _MOST_MARKUP:
        groups = groups[::2]
    names = [name.split("@") for name in score_names(result)]
    kinds, ks = (list(dict.fromkeys(part)) for part in zip(*names, strict=True))
    score, limits = finite_number(result[f"pass@{ks[0]}"]), result.get(f"pass@{ks[0]}_ci")
    about = f"No score of pass@{ks[0]}" if score is None else f"pass@{ks[0]} {percent(score)}"
    about += f" ({percent(limits[0])} to {percent(limits[1])})" if limits else ""
    tiles = [(f"{kind}@{ks[-1]}", "share of prompts") for kind in kinds if kind in ("pass", "majority")]
    return render(
        "evaluation.html.j2", title=f"Evaluation of {result['model']}", badges=[("evaluation", "running")],
        name=str(result["model"]), headline=f"{about} on {plural(result['prompts'], 'prompt')}", result=result,
        kinds=kinds, ks=ks, tiles=tiles, groups=groups, rewards=", ".join(result["settings"]["reward_funcs"]),
    )  # fmt: skip


def _readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its prompt as text and few completions: of right and wrong ones as many, if there are."""
    seen, ranks = Counter[bool | None](), list[tuple[int, int]]()
    for place, one in enumerate(row["completions"]):
        ranks.append((seen[one["right"]], place))
        seen[one["right"]] += 1
    kept = sorted(place for _, place in sorted(ranks)[:_MOST_COMPLETIONS])
    prompt = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in row["prompt"])
    return {**row, "prompt": prompt, "completions": [row["completions"][place] for place in kept]}


# --- several runs side by side

_COLOURS = 7
# Keys that name a run or a place, and change nothing in what is learned.
NO_EXPERIMENT = frozenset(
    {"run_name", "run_root", "report_to", "vllm_server_port", "vllm_group_port", "main_process_port", "save_steps",
     "save_total_limit", "report_samples", "show_completion_steps", "wandb_project", "wandb_entity", "wandb_run_group"}
)  # fmt: skip


def _rewards(run: RunRecord) -> str:
    """Return names and weights of a run's rewards."""
    names = run_charts.reward_names(run.metrics).values() or run.value("reward_funcs") or ()
    weights = run.value("reward_weights")
    return ", ".join(map(str, names)) + (f" weighted {weights}" if weights else "")


# Facts beside the recipe that may differ.
_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.plan.get("batch", {}).get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
    "rewards": _rewards,
    "completions a step": lambda run: run.plan.get("batch", {}).get("completions"),
}
# What makes runs hard to compare where it differs.
_WARNINGS = {
    "rewards": "The rewards are not the same, so their totals cannot be compared.",
    "completions a step": "A step is not the same number of completions: compare by time.",
}


def group_of(label: str, runs: Sequence[RunRecord], number: int) -> Group:
    """Return the group of this number, from 0 on; its label has its number of seeds."""
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return Group(label + seeds, runs, number % _COLOURS + 1, "line" if number < _COLOURS else "line dashed")


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Return runs by all but their seed; runs that share recipe and seed are groups of their own."""
    alike: dict[str, list[RunRecord]] = {}
    for run in runs:
        given = {key: value for key, value in run.recipe.items() if key != "seed" and key not in NO_EXPERIMENT}
        signature = json.dumps([run.plan.get("task"), given], sort_keys=True, default=str)
        alike.setdefault(signature, []).append(run)
    sets = []
    for same in alike.values():
        distinct = len({str(run.value("seed")) for run in same}) == len(same)
        sets.extend([same] if distinct else [[run] for run in same])
    firsts = [members[0] for members in sets]
    # The folders' names where two run names are the same, and the folders where these are too.
    names = [run.name for run in firsts], [run.folder.name for run in firsts]
    labels = next(
        (found for found in names if len(set(found)) == len(found)), [display_path(run.folder) for run in firsts]
    )
    return [group_of(label, members, place) for place, (members, label) in enumerate(zip(sets, labels, strict=True))]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page that compares runs, and return its path; a folder named twice counts once.

    Raise ConfigError where a folder is not a run directory, OSError where the page cannot be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_atomically(path, comparison_page([read_run(folder) for folder in unique]))
    return path


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as text."""
    title = f"{len(runs)} runs"
    values = comparison(grouped(runs))
    return render("compare.html.j2", title=f"{title} compared", badges=[(title, "running")], name="", **values)


def comparison(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the values that ``compare.html.j2`` shows of the groups."""
    runs = [run for group in groups for run in group.runs]
    columns = [(name, key) for run in runs for name, scores in run.benchmarks.items()
               for key in score_names(scores) if finite_number(scores[key]) is not None]  # fmt: skip
    baselines: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in _BASELINES}
    for run in reversed(runs):  # the scores of the first run that has them
        for benchmark, result in run.benchmarks.items():
            for name in baselines.keys() & (result.get("baselines") or {}):
                baselines[name][benchmark] = result["baselines"][name]
    most = max((len(group.runs) for group in groups), default=0)
    how = "shaded: 95 % interval of the mean over seeds" if most >= ENOUGH_SEEDS else "faint: the single seeds"
    note = "Mean over the completions of a step, smoothed" + f"; {how}" * (most > 1)
    facts, charts = differing_facts(groups), []
    if groups:
        draw, metric = run_charts.metric_chart, run_charts.Metric
        charts = [draw(groups, "reward", metric("Reward", note, unit="mean reward"), large=True)]
        charts += [
            draw(groups, "eval_reward", metric("Evaluation reward", unit="mean reward"), evals=True),
            _by_time(groups),
        ]
        charts += [draw(groups, name) for name, one in run_charts.METRICS.items() if one.compared]
    return {
        "groups": groups, "headline": comparison_sentence(groups, ranked="rewards" not in facts),
        "warnings": [(_WARNINGS[name], found) for name, found in facts.items() if name in _WARNINGS],
        "drawn": [chart for chart in charts if chart], "columns": list(dict.fromkeys(columns)),
        "baselines": [(_BASELINES[name], scores) for name, scores in baselines.items() if scores],
        "keys": differing_keys(groups), "facts": facts,
    }  # fmt: skip


def comparison_sentence(groups: Sequence[Group], ranked: bool) -> str:
    """Return which group ends highest if they are ``ranked`` and the two highest have intervals that do not overlap."""
    ended = [group for group in groups if group.finals]
    if len(ended) < 2 or not ranked:
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    first, second = sorted(ended, key=lambda group: -statistics.fmean(group.finals))[:2]
    reward, other = (spread(group.finals, limits=group.limits) for group in (first, second))
    halves = [half_interval(group.finals) for group in (first, second)]
    gap = statistics.fmean(first.finals) - statistics.fmean(second.finals)
    if None not in halves and sum(half or 0.0 for half in halves) < gap:
        return f"{first.label} ends highest, at reward {reward}; next is {second.label} at {other}."
    counts = " and ".join(map(str, dict.fromkeys(len(group.finals) for group in (first, second))))
    highest = "The highest are not" if len(ended) > 2 else "Not"
    seeds = f"{counts} seed{'s' * (counts != '1')}"
    return f"{highest} distinguishable with {seeds}: {first.label} ends at reward {reward}, {second.label} at {other}."


def _by_time(groups: Sequence[Group]) -> Chart | None:
    """Return the reward of every run over its minutes in steps."""
    curves = []
    for group, metrics in ((one, run.metrics) for one in groups for run in one.runs):
        if metrics.known("reward") and metrics.known("seconds/step"):
            seconds = (value or 0.0 for value in metrics.column("seconds/step"))
            timed = replace(metrics, steps=[total / 60 for total in itertools.accumulate(seconds)])
            curves.append(curve_of([timed], "reward", group.label, group.colour, group.kind, behind=False))
    return Chart("Reward by time", curves, x_name="min", y_name="mean reward") if curves else None


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return recipe keys beside the seed whose values are not the same in all groups."""
    keys = sorted({key for group in groups for run in group.runs for key in run.recipe} - {"seed"})
    return [key for key in keys if len({str(group.runs[0].value(key)) for group in groups}) > 1]


def differing_facts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return facts that are not the same in all groups: one text for each."""
    facts = {name: [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
             for name, read in _FACTS.items()}  # fmt: skip
    return {name: found for name, found in facts.items() if len(set(found)) > 1}
