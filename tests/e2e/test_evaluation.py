"""Evaluation during training, and benchmarks of the final model with the server still up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch

from grpo_recipes.runs.checkpoints import list_complete_checkpoints
from grpo_recipes.stats import pass_at_k_table

GRAPH = "modebench:graph_coloring"
SHORT = ("--max_steps", "4", "--prompts_per_step", "4", "--num_generations", "8")
EVALUATED = (
    "--eval_strategy", "steps", "--eval_steps", "2", "--eval_on_start", "--eval_dataset_name", "smoke:sums",
    "--eval_subsample", "1.0", "--eval_max_prompts", "7", "--num_generations_eval", "4",
    "--per_device_eval_batch_size", "6",
)  # fmt: skip
BENCHMARKS = ("--benchmarks", "smoke:sums", "missing.jsonl", "--benchmark_samples", "4", "--benchmark_temperature", "1")
ONE = ("--benchmarks", "smoke:sums", GRAPH, "--benchmark_temperature", "0", "--benchmark_samples", "1")
MODEBENCH = ("--modebench_prompts", "2", "--modebench_test_prompts", "3")
LONG = ("--vllm_max_model_length", "1024")  # its prompts have about 600 tokens
CALLBACK = """
from pathlib import Path
from transformers import TrainerCallback
class Note(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        with Path("noted.txt").open("a") as file:
            file.write(f"{state.global_step} {metrics['eval_reward']}\\n")
"""


@pytest.mark.slow
def test_evaluation_and_benchmarks(launch: Callable[..., Launch]) -> None:
    folder = launch("--resume", "last").folder  # makes the folder; rejected, since the folder contains no run
    (folder / "mine.py").write_text(CALLBACK)
    (folder / "missing.jsonl").write_text(json.dumps({"problem": "1+1=", "answer": ""}) + "\n")
    wandb = {"WANDB_MODE": "offline"}
    flags = (*SHORT, *EVALUATED, *BENCHMARKS, "--callbacks", "mine.py:Note", "--num_processes", "2")

    first = launch(*flags, "--report_to", "wandb", "--wandb_project", "sums", **wandb)

    # One benchmark has no answers: the run fails, and has its model, its evaluations and the other benchmark.
    assert first.wait() == 1, first.output
    assert_evaluated(first)
    assert_benchmark(first)
    assert_callback_was_called(first)
    cause = first.summary()["cause"]
    assert "benchmark missing.jsonl" in cause and "The model is saved" in cause and "\n" not in cause
    model = first.run_dir / "model" / "model.safetensors"
    assert model.exists() and first.processes() == []

    # Resumed: no step is taken. The finished benchmark is not repeated, the other is run.
    (first.run_dir / "benchmarks" / "smoke_sums.jsonl").write_text("not touched")
    rows, evaluations = first.rows(), eval_rows(first)
    (folder / "missing.jsonl").write_text(json.dumps({"problem": "1+1=", "answer": "2"}) + "\n")
    second = launch("--resume", "last", **wandb)
    assert second.wait() == 0, second.output
    assert second.run_dir == first.run_dir and second.rows() == rows and eval_rows(second) == evaluations
    assert (first.run_dir / "benchmarks" / "smoke_sums.jsonl").read_text() == "not touched"
    assert set(second.summary()["benchmarks"]) == {"smoke:sums", "missing.jsonl"}
    assert "grpo: benchmark smoke:sums: pass@1 0." in second.output
    files = {file.name for file in (first.run_dir / "wandb").glob("offline-run-*/run-*.wandb")}
    identity = json.loads((first.run_dir / "run.json").read_text())["wandb_id"]
    assert files == {f"run-{identity}.wandb"}  # both attempts are one run of W&B


def assert_evaluated(run: Launch) -> None:
    rows = eval_rows(run)
    assert [row["step"] for row in rows] == [0, 2, 4]
    for row in rows:
        assert row["prompts"] == 7 and row["seconds"] > 0
        # 7 prompts x 4 completions, although the last batch of 2 x 6 is filled up with earlier prompts.
        assert row["eval_reward"] * 28 == pytest.approx(round(row["eval_reward"] * 28), abs=1e-4)
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]
    summary = run.summary()
    assert summary["initial_eval_reward"] == pytest.approx(rows[0]["eval_reward"], abs=1e-6)
    assert summary["final_eval_reward"] == pytest.approx(rows[-1]["eval_reward"], abs=1e-6)
    assert summary["seconds"]["evaluate"] > 0


def eval_rows(run: Launch) -> list[dict]:
    return [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]


def assert_benchmark(run: Launch) -> None:
    result = run.summary()["benchmarks"]["smoke:sums"]
    rows = [json.loads(line) for line in (run.run_dir / "benchmarks" / "smoke_sums.jsonl").read_text().splitlines()]
    assert result.items() >= pass_at_k_table([row["scores"] for row in rows]).items()
    assert (result["problems"], result["samples"], result["reward"]) == (20, 4, "pure_accuracy_math")
    assert 0.2 < result["pass@1"] < result["pass@4"] <= 1
    for row in rows:
        assert len(set(row["completions"])) > 1 or row["scores"] in ([1.0] * 4, [0.0] * 4)
        assert row["scores"] == [float(f"<answer>{row['gold']}</answer>" in text) for text in row["completions"]]
    assert len({str(row["completions"]) for row in rows}) > 5


def assert_callback_was_called(run: Launch) -> None:
    events = [line.split() for line in (run.cwd / "noted.txt").read_text().splitlines()]
    assert {step for step, _ in events} == {"0", "2", "4"} and len(events) == 6  # by both processes
    assert (run.run_dir / "callbacks" / "mine.py").read_text() == CALLBACK


@pytest.mark.slow
def test_evaluation_changes_nothing_in_a_run_and_the_benchmark_is_of_its_model(launch: Callable[..., Launch]) -> None:
    alone = launch(*SHORT, *LONG, folder="alone")
    assert alone.wait() == 0, alone.output
    evaluated = launch(*SHORT, *LONG, *EVALUATED, *ONE, *MODEBENCH, folder="evaluated")
    assert evaluated.wait() == 0, evaluated.output

    for row, same in zip(untimed(evaluated), untimed(alone), strict=True):
        assert row == pytest.approx(same, rel=1e-4, abs=1e-6)
    greedy = {row["problem"]: row["completions"] for row in benchmark_rows(evaluated)}
    assert greedy == greedy_answers(evaluated.run_dir / "model", greedy)
    assert_benchmarked_before_and_after(evaluated)


def assert_benchmarked_before_and_after(run: Launch) -> None:
    """ModeBench, of the model before its first step too: with the server's weights of that time."""
    before = json.loads((run.run_dir / "benchmarks" / "untrained.json").read_text())
    assert before.keys() == {GRAPH}
    after = run.summary()["benchmarks"][GRAPH]
    assert (after["problems"], after["reward"]) == (3, "modebench")
    assert after["baselines"]["untrained"]["pass@1"] == before[GRAPH]["pass@1"]
    assert after["baselines"]["random"]["pass@1"] > 0
    assert f"grpo: benchmark {GRAPH}: pass@1" in run.output and "; random pass@1 0.0" in run.output


def untimed(run: Launch) -> list[dict]:
    """Return rows without times and log-prob comparisons. The last bits of the latter vary between servers."""
    left_out = ("seconds/", "memory/", "syncs", "tokens_per_second", "step_time", "sampling/")
    return [{key: value for key, value in row.items() if not key.startswith(left_out)} for row in run.rows()]


def benchmark_rows(run: Launch) -> list[dict]:
    return [json.loads(line) for line in (run.run_dir / "benchmarks" / "smoke_sums.jsonl").read_text().splitlines()]


def greedy_answers(model_folder: Path, problems: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the greedy answers of the saved model, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    answers = {}
    for problem in problems:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        answers[problem] = [tokenizer.decode(ids, skip_special_tokens=True)]
    return answers


@pytest.mark.slow
def test_evaluations_sample_otherwise_and_the_guard_goes_on_looking(launch: Callable[..., Launch]) -> None:
    keys = ("--eval_strategy", "steps", "--eval_steps", "1", "--eval_temperature", "0.3", "--eval_top_p", "0.9")
    run = launch(*keys, "--eval_dataset_name", "smoke:sums", "--num_generations_eval", "16", "--max_steps", "3")
    assert run.wait(400) == 0, run.output
    rows = [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in run.rows())


# The evaluation after the first step is the best, whatever the model learns.
BEST_AT_FIRST = """
def first_step(completions, answer, trainer_state, **_):
    right = [float(f"<answer>{gold}</answer>" in text[-1]["content"]) for text, gold in zip(completions, answer)]
    return [score + 10 * (trainer_state.global_step == 1) for score in right]
"""
FEW_STEPS = ("--max_steps", "6", "--prompts_per_step", "8", "--num_generations", "8", "--learning_rate", "1e-3")
BEST = (
    "--eval_strategy", "steps", "--eval_steps", "1", "--eval_dataset_name", "smoke:sums", "--num_generations_eval", "1",
    "--save_steps", "2", "--load_best_model_at_end", "--early_stopping_patience", "2",
)  # fmt: skip
GREEDY = ("--benchmarks", "smoke:sums", "--benchmark_temperature", "0", "--benchmark_samples", "1")
RULE = ("--reward_funcs", "rule.py:first_step", "--reward_isolation", "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param((), id="single"),
        *(
            pytest.param(("--num_processes", "2", "--accelerator", name), id=name)
            for name in ("ddp", "zero2", "zero3", "fsdp2")
        ),
        pytest.param(("--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear"), id="lora"),
    ],
)
def test_a_run_stops_early_with_the_best_model(launch: Callable[..., Launch], tmp_path: Path, keys: tuple) -> None:
    (tmp_path / "rule.py").write_text(BEST_AT_FIRST)
    recipe = str(REPOSITORY / "recipes/smoke/grpo.yaml")

    run = launch(recipe, *FEW_STEPS, *BEST, *GREEDY, *RULE, *keys)

    assert run.wait(900) == 0, run.output
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    evaluations = eval_rows(run)
    assert evaluations[0]["eval_reward"] >= 10 > max(row["eval_reward"] for row in evaluations[1:])
    summary = run.summary()
    assert (summary["best_step"], summary["stopped_early"], summary["steps"]) == (1, True, 3)
    assert summary["best_eval_reward"] == evaluations[0]["eval_reward"]
    assert "stopped early, 2 evaluations without improvement" in run.output
    assert "model (step 1)" in run.output and "best 10." in run.output
    assert [path.name for path in list_complete_checkpoints(run.run_dir / "checkpoints")] == [
        "checkpoint-1", "checkpoint-3",
    ]  # fmt: skip
    assert_the_model_is_the_best(run)
    report = (run.run_dir / "report.html").read_text()
    assert "at step 1, stopped early" in report


def assert_the_model_is_the_best(run: Launch) -> None:
    """Compare model/, the weights in the server, and the checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM

    greedy = {row["problem"]: row["completions"] for row in benchmark_rows(run)}
    assert greedy == greedy_answers(run.run_dir / "model", greedy)

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())

    checkpoints = run.run_dir / "checkpoints"
    is_lora = (run.run_dir / "adapter").is_dir()
    if is_lora:
        adapters = [run.run_dir / "adapter", checkpoints / "checkpoint-1", checkpoints / "checkpoint-3"]
        final, best, last = ((folder / "adapter_model.safetensors").read_bytes() for folder in adapters)
        assert final == best != last
        return
    final, best, last = map(
        weights, (run.run_dir / "model", checkpoints / "checkpoint-1", checkpoints / "checkpoint-3")
    )
    assert all(torch.equal(final[name], best[name]) for name in best)
    assert not all(torch.equal(final[name], last[name]) for name in last)
