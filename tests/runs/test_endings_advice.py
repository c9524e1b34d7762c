"""The line of advice at the end of a failed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.rewards.load import copy_reward_files
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.endings import advice, ending, find_reward_fix
from grpo_recipes.runs.rundir import Run, write_json


@pytest.mark.parametrize(
    ("cause", "expected_advice"),
    [
        ("rank 0: OSError: [Errno 28] No space left on device", "free space"),
        ("the vLLM server died before it was ready", "grpo check --deep recipe.yaml"),
        ("the vLLM server was not ready after 600 s (vllm_server_timeout)", "raise vllm_server_timeout"),
        (
            "port 8000 was taken by another process (pid 5) while the server started",
            "launch again to use another port (grpo launch ",
        ),
        ("rank 0: TooManyWithoutVerdict: 60% of the completions", "grpo check-rewards recipe.yaml"),
        (
            "rank 0: TooManyWithoutVerdict: 60% are unscored. Reward 'environment' gave no score for 9 of 9",
            "fix the environment and add --update-rewards to the resume",
        ),
        ("rank 0: BadAnswer: the vLLM server at http://x answered 500: {} (in /pause; log: s.log)", "the server's log"),
        ("the vLLM engine process EngineCore (pid 7) died or was killed", "server_restarts"),
        ("run-api died before it was ready", "to start it without a run: python -m atroposlib.cli.run_api"),
        ("run-api was not ready after 300 s", "read its log to see why it is slow"),
        ("run-api (pid 7) was killed by signal 9", "server_restarts: N restarts it and the trainers up to N times"),
        (
            "port 8001 was taken by another process (pid 5) while run-api started",
            "launch again to use another port (grpo launch ",
        ),
        ("environment sums (pid 7) exited with code 2", "fix the error in its log, then grpo launch my.yaml --seed 7"),
        ("environment sums (pid 7) exited with code 1; no step was completed since", "resume with --update-rewards"),
        ("rank 1 (pid 7) was killed by signal 9", "if dmesg shows that memory ran out, request more memory, or"),
        ("rank 0: WeightsDiffer: weights did not reach the server", "Weights page"),
        ("rank 0: ZeroDivisionError: division by zero", "grpo doctor --run"),
    ],
)
def test_a_cause_has_its_advice(make_run, cause, expected_advice):
    assert expected_advice in advice(make_run(cause=cause), cause)


@pytest.mark.parametrize(
    "cause",
    [
        "the vLLM server died before it was ready",
        "the vLLM engine process EngineCore (pid 7) died or was killed",
        "the vLLM engine process EngineCore (pid 7) died or was killed; it is not started again",
    ],
)
def test_the_log_of_a_lost_server_decides_the_advice(make_run, cause):
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
    run = make_run(cause=cause, logs={"server": memory})
    assert advice(run, cause).startswith("lower vllm_gpu_memory_utilization (now ")
    run = make_run(cause=cause, logs={"server": "CUDA error: an illegal memory access was encountered"})
    assert "CUDA_LAUNCH_BLOCKING=1" in advice(run, cause)


def test_a_known_cause_reads_no_file_of_the_run(make_run):
    run = make_run(cause="the vLLM server died before it was ready")
    (run.folder / "recipe.yaml").write_text("a: [")
    assert "grpo check --deep recipe.yaml" in advice(Run(run.folder), run.cause)
    (run.folder / "plan.json").write_text("{")
    (run.folder / "run.json").write_text("{")
    assert f"(grpo launch runs/{run.folder.name}/recipe.yaml)" in advice(Run(run.folder), "port 5 was taken")
    (run.folder / "recipe.yaml").unlink()
    assert "(grpo launch RECIPE)" in advice(Run(run.folder), "port 5 was taken")


def test_a_command_of_the_advice_has_the_recipe_that_the_user_edits(make_run, tmp_path):
    run = make_run(cause="the vLLM server died before it was ready")
    write_json(run.folder / "plan.json", {**run.plan, "recipe": str(tmp_path / "my recipe.yaml")})
    (tmp_path / "my recipe.yaml").write_text("")
    assert "grpo check --deep 'my recipe.yaml' loads" in advice(Run(run.folder), run.cause)


def test_one_of_several_recipes_is_not_started_from_the_first(make_run):
    run = make_run()
    write_json(run.folder / "run.json", {**run.identity, "command": "grpo launch sft.yaml grpo.yaml"})
    assert f"(grpo launch --resume runs/{run.folder.name})" in advice(Run(run.folder), "port 5 was taken")


def test_why_an_environment_or_run_api_ended_is_looked_for_in_its_own_log(make_run):
    for role, cause in (
        ("run-api", "run-api died before it was ready"),
        ("environment-sums", "environment sums (pid 7) exited with code 1"),
    ):
        run = make_run(cause=cause)
        plan = {
            **run.plan,
            "processes": [
                *run.plan["processes"],
                {"role": role, "log": f"logs/{role}.log", "title": role.replace("environment-", "environment ")},
            ],
        }
        write_json(run.folder / "plan.json", plan)
        Path(f"logs/{role}.log").write_text("ModuleNotFoundError: No module named 'polars'\n")
        assert advice(Run(run.folder), cause) == "run make setup; grpo doctor shows it under versions"


RAISED = "rank 0: RewardFailed: reward 'own.py:score' raised ValueError: no"


@pytest.fixture
def failed(make_run, tmp_path):
    """Return ``failed(cause, saved=True)``, which builds a run with a copy of own.py that ended with this cause."""

    def make(cause, saved=True):
        (tmp_path / "own.py").write_text("def score(completions): return [0.0]\n")
        run = make_run(cause=cause, reward_funcs=["own.py:score"])
        copy_reward_files(["own.py:score"], run.folder)
        if saved:
            staged = run.folder / "checkpoints/partial/checkpoint-5"
            staged.mkdir(parents=True)
            publish_checkpoint(staged, run.folder / "checkpoints", 5, 1)
        return run

    return make


def test_after_a_reward_failed_a_resume_takes_the_edited_file(failed, tmp_path):
    run = failed(RAISED)
    resume = f"then copy it again and resume: grpo launch --resume runs/{run.folder.name} --update-rewards"
    test = "with grpo check-rewards recipe.yaml"
    assert advice(run, run.cause) == f"fix own.py (not the run's copy) and test it {test}, {resume}"
    assert ending(run).fix == advice(run, run.cause), "doctor says it too"
    pairs = find_reward_fix(run, run.cause)
    assert "".join(text + command for text, command in pairs) == advice(run, run.cause), "the report shows it too"
    commands = ["grpo check-rewards recipe.yaml", f"grpo launch --resume runs/{run.folder.name} --update-rewards"]
    assert [command for _, command in pairs] == commands
    (tmp_path / "own.py").write_text("def score(completions): return [1.0]\n")
    assert advice(run, run.cause) == f"test own.py, which has changed since this run's copy, {test}, {resume}"


def test_without_a_checkpoint_a_new_launch_is_advised(failed):
    run = failed(RAISED, saved=False)
    again = "which copies it again, since there is no checkpoint: grpo launch my.yaml --seed 7"
    assert advice(run, run.cause).endswith(f"grpo check-rewards recipe.yaml, then start a new run, {again}")
    assert "--resume" not in advice(run, run.cause)


def test_a_missing_variable_is_set_in_the_test_and_in_the_new_run(failed):
    cause = "KeyError: 'KEY'; it runs isolated, without this variable: set reward_environment: [KEY] (9)"
    run = failed(f"rank 0: RewardFailed: Reward 'own.py:score' gave no score; {cause}", saved=False)
    flag = "--reward_environment KEY"
    assert f"with grpo check-rewards recipe.yaml {flag}, then start a new run" in advice(run, run.cause)
    assert advice(run, run.cause).endswith(f": grpo launch my.yaml --seed 7 {flag}")


@pytest.mark.parametrize(
    ("causes", "expected_advice"),
    [
        ("most often: time limit (9)", "or raise reward_timeout (--reward_timeout N), then"),
        ("most often: no answer from its server (URLError: <urlopen error [Errno 111] Connection refused>) (9)",
         "start the server that own.py calls, or correct its address, and test it with "
         "grpo check-rewards recipe.yaml, then resume: grpo launch --resume RUN"),
        ("KeyError: 'KEY'; it runs isolated, without this variable: set reward_environment: [KEY] (9)",
         "export KEY before the launch and test the reward with "
         "grpo check-rewards recipe.yaml --reward_environment KEY, "
         "then resume: grpo launch --resume RUN --reward_environment KEY"),
    ],
)  # fmt: skip
def test_what_ended_most_calls_decides_the_advice(failed, causes, expected_advice):
    run = failed(
        f"rank 0: TooManyWithoutVerdict: 60% are unscored. Reward 'own.py:score' gave no score for 9 of 9; {causes}"
    )
    assert expected_advice.replace("RUN", f"runs/{run.folder.name}") in advice(run, run.cause)


def test_of_a_module_there_is_no_copy_to_update(make_run):
    run = make_run(cause=RAISED.replace("own.py:score", "json:dumps"), reward_funcs=["json:dumps"])
    start = "fix json and test it with grpo check-rewards recipe.yaml, then start a new run, since"
    assert advice(run, run.cause).startswith(start)


def test_the_cause_counts_before_what_stands_in_a_log(make_run):
    run = make_run(
        cause="rank 0: OSError: [Errno 28] No space left on device", logs={"server": "Address already in use"}
    )
    assert "free space" in advice(run, run.cause)
    run = make_run(cause="rank 0: RuntimeError", logs={"server": "Address already in use"})
    assert "remove the port" in advice(run, run.cause)
