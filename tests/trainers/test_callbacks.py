"""The user's callbacks are called in training, from the run's copy; W&B gets the run's names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.user_code import copy_source
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.trainers.entry import load_callbacks

from .tiny_training import STEPS, train

MINE = """
from pathlib import Path
from transformers import TrainerCallback

class Counts(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        Path("steps.txt").write_text(f"{self.steps} of {state.global_step}")

class Wants(TrainerCallback):
    def __init__(self, argument):
        pass

class Other:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("grpo_user_")]:
        del sys.modules[name]


def test_a_callback_is_called_from_the_copy(folder: Path) -> None:
    (folder / "run").mkdir()
    copy_source("mine.py:Counts", folder / "run" / "callbacks")
    (folder / "mine.py").write_text("raise SystemExit('the original ran')")

    train(folder / "run", callbacks=tuple(load_callbacks(["mine.py:Counts"], folder / "run" / "callbacks")))

    assert (folder / "steps.txt").read_text() == "6 of 6"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py:Other", "not a subclass of transformers.TrainerCallback"),
        ("mine.py:Path", "not a subclass"),
        ("mine.py:Wants", r"can't be created \(.*'argument'\)"),
        ("mine.py:Nothing", "has no 'Nothing'"),
    ],
)
def test_what_is_no_callback_is_told(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callbacks([spec])
    assert len(load_callbacks(["mine.py:Counts"])) == 1


class Ends(TrainerCallback):
    """End the training after the second step, in the given event."""

    def __init__(self, event: str):
        setattr(self, event, self._end)

    def _end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_evaluate", "on_save"])
def test_a_run_that_a_callback_ended_is_finished(tmp_path: Path, event: str) -> None:
    keys = {"eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "per_device_eval_batch_size": 4}
    keys |= {"save_strategy": "steps", "save_steps": 2 if event == "on_save" else 100}
    first, _ = train(tmp_path, callbacks=(Ends(event),), **keys)
    assert first.state.global_step == 2
    assert find_newest_complete(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "checkpoint-2"
    rows = (tmp_path / "metrics.jsonl").read_text()

    repeated, stopped = train(tmp_path, callbacks=(Ends(event),), **keys)

    assert repeated.state.global_step == 2 and stopped is None
    assert (tmp_path / "metrics.jsonl").read_text() == rows
    for weight, other in zip(first.model.parameters(), repeated.model.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_a_stop_request_does_not_finish_a_run(tmp_path: Path) -> None:
    class Requests(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                stop_file(tmp_path).touch()

    first, stopped = train(tmp_path, callbacks=(Requests(),))
    assert stopped is not None and first.state.global_step == 2
    stop_file(tmp_path).unlink()
    assert train(tmp_path)[0].state.global_step == STEPS


@pytest.mark.slow
def test_wandb_gets_the_names_and_the_id_of_the_run(folder: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += "from pathlib import Path; from tiny_training import train; train(Path('run'), report_to='wandb')"
    names = {"WANDB_PROJECT": "maths", "WANDB_RUN_GROUP": "ablation", "WANDB_ENTITY": "lab"}
    identity = {"WANDB_RUN_ID": "cafe1234", "WANDB_RESUME": "allow", "WANDB_DIR": str(folder)}
    environment = {**os.environ, "WANDB_MODE": "offline", **names, **identity}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, timeout=300, check=True)

    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.name == "run-cafe1234.wandb"
    content = file.read_bytes()
    assert [
        word for word in (b"maths", b"ablation", b"lab", b"rewards/different_characters/mean") if word not in content
    ] == []
