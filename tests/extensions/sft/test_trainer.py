"""Supervised fine-tuning in this process: completion-only loss, metrics, checkpoints, a stop and an exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from safetensors.torch import load_file
from trainers.tiny_training import ON_CPU, SUMS, as_dataset, save_random_model
from transformers import TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.data import load_prompts
from grpo_recipes.data.problems import Counts
from grpo_recipes.data.prompts import Prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.sft.trainer import SFTTrainer, make_config, make_rows
from grpo_recipes.launch.attempt import describe_rewards
from grpo_recipes.recipe.configs import RowsConfig, ScriptArguments
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.progress import Progress
from grpo_recipes.runs.rundir import finish_summary, stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest, StopRequest

from . import sft_ranks
from .sft_ranks import StopAfter

STEPS = 5


def make_trainer(
    folder: Path, callbacks: tuple[TrainerCallback, ...] = (), prompts: Prompts | None = None, **options: Any
) -> SFTTrainer:
    """Build a trainer of a random model on 13 sums, one of them longer. An epoch ends with a small step."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    args = RowsConfig(
        output_dir=str(folder / "checkpoints"), max_steps=STEPS, learning_rate=1e-2, per_device_train_batch_size=5,
        gradient_accumulation_steps=1, **ON_CPU,
    )  # fmt: skip
    prompts = prompts or Prompts(as_dataset([*SUMS, (9, 9)]), Counts(), "")
    return SFTTrainer(
        model=smoke.build_model(tokenizer), args=make_config(args), train_dataset=make_rows(prompts, None),
        processing_class=tokenizer, callbacks=list(callbacks), run_dir=folder, stop=StopRequest(folder), **options,
    )  # fmt: skip


def test_the_loss_counts_the_solution_and_its_end(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    row = trainer.train_dataset[0]
    learned = [token for token in row["labels"] if token != -100]
    answer = trainer.processing_class.decode(learned)
    assert answer.endswith(smoke.END) and answer.removesuffix(smoke.END).isdecimal()
    assert row["labels"][-len(learned) :] == learned  # the prompt before it has no loss
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and rows[-1]["loss"] < rows[0]["loss"]
    assert rows[0]["seconds/update"] > 0 and rows[0]["tokens_per_second"] > 0
    summary = finish_summary(tmp_path)
    mean_loss = pytest.approx(sum(row["loss"] for row in rows) / 5, abs=1e-5)
    assert summary["initial_reward"] is None and summary["final_loss"] == summary["initial_loss"] == mean_loss
    assert describe_rewards(summary) == f"{summary['final_loss']:.3f}, mean of 5 steps"
    assert f"loss {rows[0]['loss']:.4g}" in Progress(tmp_path).line(rows[0])


def test_a_stopped_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    stopped = tmp_path / "stopped"
    trainer = make_trainer(stopped, (StopAfter(3, stop_file(stopped)),))
    with pytest.raises(StoppedOnRequest, match="after step 3, state saved"):
        trainer.train()
    stop_file(stopped).unlink()
    checkpoint = find_newest_complete(stopped / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    resumed = make_trainer(stopped)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    weights, again = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_resumed_run_uses_the_stored_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "rows.jsonl", tmp_path / "run"
    file.write_text("".join(json.dumps({"problem": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(20)))
    source = {"kind": "dataset", "id": str(file), "revision": None, "path": str(file)}
    run.mkdir()
    (run / "sources.json").write_text(json.dumps({"sources": [source]}))
    weights, files = [], []
    for attempt in range(3):
        prompts = load_prompts(ScriptArguments(dataset_name=str(file)), smoke.build_tokenizer(), 5, run=run)
        assert ("using the prompts in prompts/train-" in capsys.readouterr().out) == (attempt > 0)
        trainer = make_trainer(tmp_path / str(attempt), prompts=prompts, max_length=100)
        trainer.train()
        weights.append(trainer.model.state_dict())
        files.append(sorted(path for path in run.rglob("*") if path.is_file()))
    assert {path.name for path in files[1]} - {path.name for path in files[0]}  # caches, which several ranks share
    assert files[1] == files[2]
    assert all(torch.equal(weights[0][name], later[name]) for later in weights[1:] for name in later)


def test_long_rows_are_dropped(tmp_path: Path) -> None:
    lengths = sorted(len(row["input_ids"]) for row in make_trainer(tmp_path).train_dataset)
    shortest = lengths[0]
    assert shortest < lengths[-1]
    assert len(make_trainer(tmp_path, max_length=shortest).train_dataset) == lengths.count(shortest)
    with pytest.raises(ConfigError, match=f"Fix: set sft_max_length: {shortest}, or more"):
        make_trainer(tmp_path, max_length=shortest - 1)


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["zero3", "fsdp2", "zero2"])
def test_ranks_that_share_a_model_stop_and_resume(tmp_path: Path, accelerator: str) -> None:
    model = str(save_random_model(tmp_path / "random"))
    sft_ranks.train(tmp_path / "one", model, ranks=1)
    for step, is_stopped in ((2, True), (0, False)):
        outputs = run_ranks(
            "extensions.sft.sft_ranks", str(tmp_path / "two"), model, str(step), accelerator=accelerator, seconds=540
        )
        assert all(("after step 2, state saved" in output) == is_stopped for output in outputs)
        stop_file(tmp_path / "two").unlink(missing_ok=True)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [row["step"] for row in two] == [1, 2, 3, 4]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-3)
    weights, initial = (load_file(Path(path) / "model.safetensors") for path in (tmp_path / "two/model", model))
    assert weights.keys() == initial.keys()
    assert all(weight.shape == initial[name].shape for name, weight in weights.items())
    assert any(not torch.equal(weight, initial[name]) for name, weight in weights.items())
