"""`grpo eval` with a real vLLM server: it agrees with the training, continues after a kill, and leaves no process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, marked_processes

from grpo_recipes import smoke
from grpo_recipes.launch.serve import serving
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.document import Value

RECIPE = REPOSITORY / "recipes/smoke/grpo.yaml"
# With top_k 1 sampling is greedy; three tokens are enough for an answer of one digit, not of two.
GREEDY = ("--top_k", "1", "--vllm_importance_sampling_correction", "false", "--max_completion_length", "3")
EVALUATED = (
    "--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name", "smoke:sums", "--eval_subsample", "0.9",
    "--num_generations_eval", "4",
)  # fmt: skip
SHORT = ("--max_steps", "2", "--save_steps", "1", "--prompts_per_step", "4", "--num_generations", "8")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def done(argv: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)


def killed(argv: list[str], folder: Path, environment: dict[str, str], completions: Path) -> None:
    """Kill the command after three rows; its server ends by itself."""
    process = subprocess.Popen(argv, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not completions.exists() or completions.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    while marked_processes(environment["GRPO_TEST"]):
        assert time.monotonic() < deadline, marked_processes(environment["GRPO_TEST"])
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a training, and a server four times
def test_an_evaluation_alone_agrees_with_the_training_and_goes_on_after_a_kill(launch: Callable[..., Launch]) -> None:
    run = launch(*SHORT, *EVALUATED, *GREEDY)
    assert run.wait() == 0, run.output
    trained = rows(run.run_dir / "eval.jsonl")[-1]
    mark = f"eval-{run.folder.name}-{os.getpid()}"
    environment = clean_environment(run.folder, mark)

    alone = done(documented("grpo eval last"), run.folder, environment)

    assert alone.returncode == 0, alone.stderr
    out = run.folder / "evals" / run.run_dir.name
    result = json.loads((out / "eval.json").read_text())
    names = [name for name in result if "@" in name] + ["reward", "reward_std", "rewards/pure_accuracy_math/mean"]
    assert len(names) == 27 and 0.1 < result["pass@1"] < 0.9
    for name in names:
        assert result[name] == pytest.approx(trained[f"eval_{name}"]), name
    assert result["prompts"] == trained["prompts"] == 18
    assert result["mean_length"] == pytest.approx(trained["eval_completions/mean_length"])
    assert result["truncated"] == pytest.approx(trained["eval_completions/clipped_ratio"]) and result["truncated"] > 0.1
    assert f"pass@4      {result['pass@4']:>8.3f}" in alone.stdout and "<html" in (out / "eval.html").read_text()
    assert marked_processes(mark) == []

    place = {"runs/my-run/checkpoints/checkpoint-200": str(run.run_dir / "checkpoints" / "checkpoint-1")}
    command = documented("grpo eval runs/my-run/checkpoints/checkpoint-200", place)
    command += ["--top_k", "0", "--max_completion_length", "8", "--num-generations", "16"]
    whole, cut = run.folder / "whole", run.folder / "evals" / f"{run.run_dir.name}-checkpoint-1"
    killed([*command, "--batch-size", "2"], run.folder, environment, cut / "completions.jsonl")
    assert 3 <= len(rows(cut / "completions.jsonl")) < 18 and not (cut / "eval.json").exists()
    for flags in ((), ("--out", "whole")):
        completed = done([*command, *flags], run.folder, environment)
        assert completed.returncode == 0, completed.stderr
    for name in ("completions.jsonl", "scores.jsonl", "eval.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
    assert 0 < json.loads((cut / "eval.json").read_text())["pass@1"] < 1
    assert marked_processes(mark) == []


@pytest.mark.slow
def test_a_recipe_and_a_model_are_evaluated_on_a_server_that_runs(tmp_path: Path) -> None:
    folder, command = smoke.smoke_command("smoke:sums", os.environ)
    if not (folder / "COMPLETE").exists():
        subprocess.run(command, check=True, timeout=300)
    model, mark = str(folder / "model"), f"eval-{tmp_path.name}"
    (tmp_path / "my.yaml").write_text(f"{RECIPE.read_text()}\neval_dataset_name: smoke:sums\neval_subsample: 1.0\n")
    problems = [{"problem": f"{number}+1=", "answer": str(number + 1)} for number in range(1, 8)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    patient = read_recipe(RECIPE).with_value("vllm_server_timeout", Value(400.0, "test"))
    with serving(patient, model, clean_environment(tmp_path, mark)) as server:
        environment = clean_environment(tmp_path, mark, OPENAI_API_KEY=server.token)
        before = len(marked_processes(mark))
        shown = "grpo eval my.yaml --base-url http://localhost:8000 --served-model-name my-model"
        places = {"http://localhost:8000": server.url, "my-model": server.name}
        recipe = done(documented(shown, places), tmp_path, environment)
        assert recipe.returncode == 0, recipe.stderr
        result = json.loads((tmp_path / "evals/my/eval.json").read_text())
        assert (result["prompts"], result["samples"]) == (20, 16) and 0 < result["pass@1"] < result["pass@16"] <= 1
        assert result["mean@16"] == pytest.approx(result["pass@1"]) and result["majority@16"] > result["majority@1"]

        bare_model = "grpo eval Qwen/Qwen2.5-0.5B-Instruct --dataset test.jsonl --reward math_verify"
        bare_words = documented(bare_model, {"Qwen/Qwen2.5-0.5B-Instruct": model})
        bare_words += ["--base-url", server.url, "--max_completion_length", "8"]  # the server's model is this folder
        bare = done([*bare_words, "--temperature", "0"], tmp_path, environment)
        assert bare.returncode == 0, bare.stderr
        result = json.loads((tmp_path / "evals/model/eval.json").read_text())
        assert (result["prompts"], result["samples"], result["model"]) == (7, 1, model) and result["pass@1"] > 0.5

        with_rates = (
            "grpo eval my.yaml --dataset train.jsonl --limit 100000 --num-generations 8 --write-filtered medium.jsonl "
            "--keep 0.1..0.9"
        )
        words = [*documented(with_rates, {"train.jsonl": "test.jsonl"}), "--base-url", server.url, "--out", "rates"]
        filtered = done([*words, "--served-model-name", server.name], tmp_path, environment)
        assert filtered.returncode == 0, filtered.stderr
        rates = [row["pass_rate"] for row in rows(tmp_path / "medium.jsonl")]
        assert f"{len(rates)} of 7 prompts written to medium.jsonl" in filtered.stdout
        assert all(0.1 <= rate <= 0.9 for rate in rates) and rates
        assert len(marked_processes(mark)) == before  # it started no server and left no reward process

        other = done([*bare_words, "--model", "x"], tmp_path, environment)
        assert other.returncode == 2 and "Traceback" not in other.stderr
    assert marked_processes(mark) == []
