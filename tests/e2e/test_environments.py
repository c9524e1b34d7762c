"""Episodes of several turns in whole runs: the example of the docs, through the server and inside the trainers."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, override, same_rows, stop_and_resume, weights_hash
from slurm_cluster import SlurmCluster
from test_preemptions import wait_until

pytestmark = pytest.mark.slow
# Each launch of a test has its own folder, so the environment is given by its absolute path.
GAME = ("--environment", f"{REPOSITORY / 'recipes/examples/two_sums.py'}:TwoSums")
MAFIA = (
    str(REPOSITORY / "recipes/environments/secret_mafia_smoke.yaml"), "--environment_eval_episodes", "8",
    "--eval_on_start", "false", "--eval_steps", "4",
)  # fmt: skip
SHORT = ("--max_steps", "4", "--prompts_per_step", "4", "--save_steps", "2", "--per_device_train_batch_size", "64")


@pytest.fixture
def example(tmp_path: Path) -> dict[str, str]:
    """A user's copy of the examples, in the folder of a launch."""
    copy = shutil.copytree(REPOSITORY / "recipes/examples", tmp_path / "recipes/examples")
    return {"recipes/examples/two_sums.yaml": str(copy / "two_sums.yaml")}


def test_the_page_shows_the_example() -> None:
    page = (REPOSITORY / "docs/environments.md").read_text()
    code, recipe = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)[:2]
    assert (REPOSITORY / "recipes/examples/two_sums.py").read_text().endswith(code)
    assert (REPOSITORY / "recipes/examples/two_sums.yaml").read_text().endswith(recipe)


def test_the_example_learns_both_turns(launch: Callable[..., Launch], example: dict[str, str]) -> None:
    # With a server, which the next test has, it takes twice the time.
    words = documented("grpo launch recipes/examples/two_sums.yaml", example)[2:]
    run = launch(*words, "--vllm_mode", "colocate", "--max_steps", "22")
    assert run.wait(900) == 0, run.output
    rows, summary = run.rows(), run.summary()
    rewards = [row["reward"] for row in rows]
    assert summary["initial_reward"] < 0.45, rewards
    assert summary["final_reward"] >= summary["initial_reward"] + 0.1, rewards  # seen in 16 steps: 0.33 to 0.44
    assert all(row["episodes/turns"] == 2 and row["episodes/unscored"] == 0 for row in rows)
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4


STOPPED = {"server": (GAME, "server"), "colocate": (GAME, "colocate"), "SecretMafia": (MAFIA, "server")}


@pytest.mark.timeout(2000)  # the smoke model of SecretMafia is made first, which takes minutes
@pytest.mark.parametrize(("game", "mode"), STOPPED.values(), ids=STOPPED)
def test_a_stopped_run_continues_bit_for_bit(
    launch: Callable[..., Launch], example: dict[str, str], game: tuple[str, ...], mode: str
) -> None:
    """The user's environment, and a library's game with random opponents."""
    if game == MAFIA:
        pytest.importorskip("textarena")
    recipe = [] if game == MAFIA else [example["recipes/examples/two_sums.yaml"]]
    sizes = override(SHORT, per_device_train_batch_size=32) if game == MAFIA else SHORT
    flags = (*recipe, *game, "--vllm_mode", mode, "--environment_credit", "per_turn", *sizes)
    whole = launch(*flags, folder="whole")
    assert whole.wait(1300) == 0, whole.output
    assert max(row["sampling/sampling_logp_difference/mean"] for row in whole.rows()) < 1e-4
    assert max(row["episodes/turns"] for row in whole.rows()) > 1

    resumed = stop_and_resume(launch, *flags)
    assert same_rows(resumed, whole) and weights_hash(resumed) == weights_hash(whole)


def test_two_processes_play_as_one(launch: Callable[..., Launch], example: dict[str, str]) -> None:
    recipe, runs = example["recipes/examples/two_sums.yaml"], []
    for processes in ("1", "2"):
        size = str(64 // int(processes))
        flags = (*GAME, *SHORT[:-1], size, "--num_processes", processes)
        runs.append(launch(recipe, *flags, folder=processes, by_exec=processes == "2"))
        assert runs[-1].wait() == 0, runs[-1].output
    single, double = (run.rows() for run in runs)
    assert [row["reward"] for row in double] == pytest.approx([row["reward"] for row in single], abs=1e-6)
    assert [row["grad_norm"] for row in double] == pytest.approx([row["grad_norm"] for row in single], rel=1e-3)


@pytest.mark.timeout(900)
def test_a_job_that_slurm_preempts_ends_as_the_one_left_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    flags = ("recipes/examples/two_sums.yaml", "--environment_credit", "per_turn", "--num_processes", "2", *SHORT[2:-1])
    runs = []
    for name in "preempted", "alone":
        (tmp_path / name).mkdir()
        environment = clean_environment(tmp_path / name, f"episodes-{name}", ENV_DIR=sys.prefix)
        job = slurm.sbatch("training.sh", *flags, "32", "--max_steps", "12", cwd=REPOSITORY, env=environment)
        runs.append(Launch(None, tmp_path / name, REPOSITORY, f"episodes-{name}"))  # type: ignore[arg-type]
        if name == "preempted":
            wait_until(lambda: runs[0].has_run_dir() and len(runs[0].rows()) >= 3, "third step")
            slurm.scancel(job, "--signal=USR1", "--batch")
            slurm.start_requeued(job, timeout=60)
        slurm.wait(job, "COMPLETED", timeout=300)
    preempted, alone = runs
    assert (preempted.summary()["restarts"], alone.summary()["restarts"]) == (1, 0)
    assert len(alone.rows()) == 12
    assert same_rows(preempted, alone) and weights_hash(preempted) == weights_hash(alone)


OPPONENTS = {
    "self": ("policy", ()),
    "adapter": ("base", ("--use_peft", "--weight_sync", "lora", "--learning_rate", "2e-3")),
}


@pytest.mark.parametrize(("opponents", "flags"), OPPONENTS.values(), ids=OPPONENTS)
def test_models_play_the_other_seats(
    launch: Callable[..., Launch], tmp_path: Path, opponents: str, flags: tuple[str, ...]
) -> None:
    """Two runs from one seed are equal, and the server's log-probs are the trainer's."""
    pytest.importorskip("textarena")
    recipe = tmp_path / "game.yaml"
    recipe.write_text(
        f"base: {REPOSITORY / 'recipes/smoke/grpo.yaml'}\n"
        "dataset_name: null\nreward_funcs: [environment]\nenvironment: textarena:TicTacToe-v0\n"
        f"environment_args: {{opponents: {opponents}, player: seed, legal_reward: 0.1}}\n"
        "environment_max_turns: 5\nenvironment_turn_length: 6\nmax_prompt_length: 900\nmax_completion_length: 1000\n"
        "vllm_max_model_length: 2048\nnum_generations: 4\n"
    )
    sizes = ("--max_steps", "2", "--prompts_per_step", "4", "--per_device_train_batch_size", "16")
    runs = [launch(str(recipe), *sizes, *flags, folder="one")]
    assert runs[0].wait(600) == 0, runs[0].output
    runs.append(launch(str(recipe), *sizes, *flags, folder="two", by_exec=True))
    assert runs[1].wait(600) == 0, runs[1].output
    assert same_rows(*runs) and weights_hash(runs[0]) == weights_hash(runs[1])
    for row in runs[0].rows():
        assert row["sampling/sampling_logp_difference/mean"] < 1e-4 and row["episodes/unscored"] == 0
        assert 0 <= row["episodes/opponent_legal"] <= 1
