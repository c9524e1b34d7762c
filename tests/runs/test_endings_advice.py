"""The line of advice at the end of a failed run."""

from __future__ import annotations

import pytest

from grpo_recipes.runs.endings import advice
from grpo_recipes.runs.rundir import Run


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("rank 0: OSError: [Errno 28] No space left on device", "make room"),
        ("the vLLM server died before it was ready", "grpo check --deep RECIPE"),
        ("the vLLM server was not ready after 600 s (vllm_server_timeout)", "raise vllm_server_timeout"),
        ("port 8000 was taken by another process (pid 5) while the server started", "launch again"),
        ("rank 0: TooManyWithoutVerdict: 60% of the completions", "grpo check-rewards RECIPE"),
        ("the vLLM engine process EngineCore (pid 7) died or was killed", "server_restarts"),
        ("rank 1 (pid 7) was killed by signal 9", "ask for more (sbatch --mem=128G)"),
        ("rank 0: WeightsDiffer: weights did not reach the server", "Weights page"),
        ("rank 0: ZeroDivisionError: division by zero", "grpo doctor --run"),
    ],
)
def test_a_cause_has_its_advice(make_run, cause, said):
    assert said in advice(make_run(cause=cause), cause)


def test_a_known_cause_reads_no_file_of_the_run(make_run):
    run = make_run(cause="the vLLM server died before it was ready")
    (run.folder / "recipe.yaml").write_text("a: [")
    assert "grpo check --deep RECIPE" in advice(Run(run.folder), run.cause)


def test_the_cause_counts_before_what_stands_in_a_log(make_run):
    run = make_run(
        cause="rank 0: OSError: [Errno 28] No space left on device", logs={"server": "Address already in use"}
    )
    assert "make room" in advice(run, run.cause)
    run = make_run(cause="rank 0: RuntimeError", logs={"server": "Address already in use"})
    assert "remove the port" in advice(run, run.cause)
