"""Two processes train on a mixture with the recipe's template, and are evaluated on the held-out part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import Launch

from grpo_recipes import smoke


@pytest.mark.slow
def test_a_mixture_is_prepared_once_trained_on_and_evaluated(launch: Callable[..., Launch], tmp_path: Path) -> None:
    train, test = smoke.split_sums()
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    (tmp_path / "more.csv").write_text("q,a\n" + "".join(f"{row['problem']},{row['answer']}\n" for row in test))
    mixture = {
        "seed": 3,
        "test_split_size": 10,
        "datasets": [{"id": "sums.jsonl", "weight": 0.5}, {"id": "more.csv", "columns": ["q", "a"]}],
    }
    template = smoke.CHAT_TEMPLATE + "{# ours #}"

    run = launch(
        *("--dataset_name", "null", "--dataset_mixture", json.dumps(mixture), "--chat_template", template),
        *("--eval_strategy", "steps", "--eval_steps", "2", "--eval_subsample", "1.0"),
        *("--num_processes", "2", "--accelerator", "ddp", "--max_steps", "2", "--run_name", "mixture"),
        *("--prompts_per_step", "4", "--num_generations", "4", "--max_completion_length", "8"),
    )

    assert run.wait() == 0, run.output

    for log in (run.log("trainer"), run.output):
        assert "grpo: 50 prompts (60 read, 0 dropped as longer than max_prompt_length)" in log
        assert "grpo: evaluating on 10 of 10 rows (eval_max_prompts 1000) (60 read" in log
    folders = sorted(path.name.partition("-")[0] for path in (run.run_dir / "prompts").iterdir())
    assert folders == ["eval", "train"]
    assert [row["step"] for row in run.rows()] == [1, 2]
    assert 0 <= json.loads((run.run_dir / "eval.jsonl").read_text().splitlines()[-1])["eval_reward"] <= 1
    assert (run.run_dir / "model" / "chat_template.jinja").read_text() == template
