"""Metrics and checkpoints by iteration, made from the rows of the run. A resumed run makes the same files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_recipes.extensions.offline import iterations
from grpo_recipes.paths import find_code_root
from grpo_recipes.trainers.metrics import to_json_number

from .tiny_training import train

# Four optimizer steps for each generation.
KEYS: dict[str, Any] = {
    "max_steps": 8, "beta": 0.1, "entropy_coef": 0.01, "save_strategy": "steps", "save_steps": 4, "save_total_limit": 1,
}  # fmt: skip


def trained(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Any:
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(iterations, "run_folder", lambda: folder / "run")
    trainer, _ = train(
        folder / "run", callbacks=(iterations.Iterations(),), **KEYS | {"ref_model_name_or_path": model} | keys
    )
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: str) -> tuple[Path, Any]:
    """Return the folder and the trainer of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, trained(folder, model, monkeypatch)


def contents(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "metrics").iterdir())}


def test_each_iteration_has_its_means_and_terms_that_add_up(whole: tuple[Path, Any]) -> None:
    folder, trainer = whole
    files = contents(folder)
    assert list(files) == ["train_iter_000.json", "train_iter_001.json"]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for iteration, content in enumerate(files.values()):
        steps = logged[4 * iteration : 4 * iteration + 4]
        mean = {name: sum(row[name] for row in steps) / 4 for name in ("loss", "kl", "entropy", "grad_norm")}
        assert content["iteration"] == iteration and content["steps"] == [row["step"] for row in steps]
        assert content["loss_total"] == pytest.approx(mean["loss"]) and content["grad_norm"] == pytest.approx(
            mean["grad_norm"]
        )
        assert content["loss_kl"] == pytest.approx(0.1 * mean["kl"]) and content["kl_divergence"] == pytest.approx(
            mean["kl"]
        )
        assert content["loss_entropy"] == pytest.approx(-0.01 * mean["entropy"]) != 0
        parts = content["loss_pg"] + content["loss_kl"] + content["loss_entropy"]
        assert parts == pytest.approx(content["loss_total"], abs=1e-7)  # sums of float32 terms that cancel out
        assert all(math.isfinite(value) for value in content.values() if isinstance(value, float))


def test_terms_that_do_not_add_up_are_visible(whole: tuple[Path, Any]) -> None:
    """S9: loss_pg is computed from the policy-gradient term, so that a wrong KL term breaks the sum."""
    rows = [json.loads(line) for line in (whole[0] / "run/metrics.jsonl").read_text().splitlines()]
    args = SimpleNamespace(beta=0.1, entropy_coef=0.01)
    right = iterations.compute_train_metrics(0, rows, args)
    assert right["loss_pg"] + right["loss_kl"] + right["loss_entropy"] == pytest.approx(right["loss_total"], abs=1e-6)
    wrong = iterations.compute_train_metrics(0, [{**row, "kl": row["kl"] + 1.0} for row in rows], args)
    assert wrong["loss_pg"] == right["loss_pg"]
    assert abs(wrong["loss_pg"] + wrong["loss_kl"] + wrong["loss_entropy"] - wrong["loss_total"]) > 0.05


@pytest.mark.parametrize("keys", [{}, {"trim_padding": False}])
def test_the_policy_gradient_term_is_the_loss_of_a_run_without_the_others(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    """S9: at the first step both runs have the same weights and completions, so the terms are equal."""
    base = yaml.safe_load((find_code_root() / "recipes/base/offline_grpo.yaml").read_text())
    run_keys = {"max_steps": 1, "save_strategy": "no", "loss_type": base["loss_type"], **keys}
    trained(tmp_path / "both", model, monkeypatch, **run_keys)
    trained(tmp_path / "alone", model, monkeypatch, **run_keys, beta=0.0, entropy_coef=0.0)
    both, alone = (
        json.loads((tmp_path / name / "run/metrics.jsonl").read_text().splitlines()[0]) for name in ("both", "alone")
    )
    assert both["loss"] != pytest.approx(alone["loss"], abs=1e-6)
    assert both["loss_pg"] == pytest.approx(alone["loss"], abs=1e-6) == alone["loss_pg"]


def test_a_term_that_is_off_is_zero_and_not_minus_zero() -> None:
    """M20: loss_entropy was -0.0 without an entropy bonus."""
    metrics = iterations.compute_train_metrics(
        0, [{"step": 1, "entropy": 0.5}], SimpleNamespace(beta=0.0, entropy_coef=0.0)
    )
    assert [math.copysign(1, metrics[name]) for name in ("loss_kl", "loss_entropy")] == [1.0, 1.0]
    assert math.copysign(1, to_json_number(-0.0)) == 1.0


def same_for_all(completions: list[Any], **_: Any) -> list[float]:
    """A reward that gives no completion an advantage."""
    return [1.0] * len(completions)


@pytest.mark.parametrize("keys", [{}, {"gradient_accumulation_steps": 2, "steps_per_generation": 4}])
def test_without_advantages_the_loss_is_its_other_terms(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, keys: dict[str, int]
) -> None:
    """With the base recipe's loss, the remaining loss_pg is zero for completions of any length."""
    base = yaml.safe_load((find_code_root() / "recipes/base/offline_grpo.yaml").read_text())
    monkeypatch.setattr(iterations, "run_folder", lambda: tmp_path / "run")
    run_keys = KEYS | {"ref_model_name_or_path": model, "loss_type": base["loss_type"], "learning_rate": 0.05} | keys
    train(tmp_path / "run", same_for_all, (iterations.Iterations(),), **run_keys | {"max_completion_length": 8})
    for content in contents(tmp_path).values():
        assert abs(content["loss_kl"]) > 1e-3 and abs(content["loss_entropy"]) > 1e-3
        assert content["loss_pg"] == pytest.approx(0.0, abs=1e-5)


def test_a_checkpoint_inside_an_iteration_is_no_iterations_and_a_moved_one_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = [tmp_path / f"run/checkpoints/checkpoint-{step}" for step in (1, 2, 3)]
    monkeypatch.setattr(iterations, "run_folder", lambda: tmp_path / "run")
    monkeypatch.setattr(iterations, "list_complete_checkpoints", lambda folder: complete)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/iter_000").symlink_to("../elsewhere/checkpoint-2")
    iterations.Iterations()._link_checkpoints(2)
    (link,) = (tmp_path / "checkpoints").iterdir()
    assert (link.name, link.resolve()) == ("iter_000", complete[1])


def test_checkpoints_are_linked_by_iteration_and_only_the_last_stay(whole: tuple[Path, Any]) -> None:
    folder, _ = whole
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["iter_001"]
    assert (folder / "checkpoints/iter_001").resolve() == folder / "run/checkpoints/checkpoint-8"
    assert (folder / "checkpoints/iter_001/model.safetensors").exists()


def test_a_continued_run_writes_what_an_uninterrupted_one_does(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "parts", model, monkeypatch, max_steps=6, save_steps=2, lr_scheduler_type="constant")
    assert list(contents(tmp_path / "parts")) == ["train_iter_000.json"]
    trained(tmp_path / "parts", model, monkeypatch, save_steps=2, lr_scheduler_type="constant")
    trained(tmp_path / "once", model, monkeypatch, save_steps=2, lr_scheduler_type="constant")
    assert contents(tmp_path / "parts") == contents(tmp_path / "once")


def test_an_evaluation_has_the_names_of_its_definitions() -> None:
    row = {"step": 4, "eval_reward": 0.5, "eval_pass@1": 0.25, "eval_mean@4": 0.5, "eval_runtime": 3.0, "prompts": 8}
    assert iterations.select_eval_metrics(row) == {"reward": 0.5, "pass@1": 0.25, "mean@4": 0.5, "prompts": 8}


def test_in_a_sweep_they_lie_inside_each_run(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = iterations.Iterations()  # as `grpo check --deep` makes one, without a launch
    run = tmp_path / "cells" / "seed=1"
    run.parent.mkdir()
    monkeypatch.setattr(iterations, "run_folder", lambda: run)
    train(run, callbacks=(callback,), **KEYS | {"max_steps": 4, "beta": 0.0})
    assert list(contents(run)) == ["train_iter_000.json"] and (run / "checkpoints" / "iter_000").is_symlink()
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["seed=1"]
