"""Prompts are prepared once in a run: a later attempt reads them, unless anything that determines them has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes import smoke
from grpo_recipes.data import Prompts, load_eval_prompts, load_prompts, prompts, store
from grpo_recipes.recipe.configs import ScriptArguments

Attempt = Callable[..., tuple[Prompts, bool]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a run with its record of sources, and a data file next to it."""
    write_rows(tmp_path / "train.jsonl", 50)
    folder = tmp_path / "run"
    folder.mkdir()
    write_sources(folder)
    monkeypatch.setenv("GRPO_RUN_DIR", str(folder))
    return folder


@pytest.fixture
def attempt(run: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """``attempt(KEY=VALUE, ...)``: the prompts of an attempt of the run, and whether it prepared them."""
    reads: list[str] = []
    load_rows = prompts.load_rows

    def count_reads(source: Any, *arguments: Any) -> Any:
        reads.append(source.id)
        return load_rows(source, *arguments)

    monkeypatch.setattr(prompts, "load_rows", count_reads)

    def load(seed: int = 3, kwargs: dict[str, Any] | None = None, tokenizer: Any = None, **keys: Any) -> Any:
        reads.clear()
        args = ScriptArguments(**{"dataset_name": str(run.parent / "train.jsonl"), "max_train_prompts": 20, **keys})
        return load_prompts(args, tokenizer or smoke.build_tokenizer(), 2, seed, kwargs), bool(reads)

    return load


def write_rows(file: Path, count: int, offset: int = 0) -> None:
    rows = ({"problem": f"p{n + offset}", "answer": str(n + offset), "level": n} for n in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sources(run: Path, commit: str = "a") -> None:
    source = {"kind": "dataset", "id": "train.jsonl", "revision": None, "commit": commit}
    source["path"] = str(run.parent / "train.jsonl")
    (run / "sources.json").write_text(json.dumps({"sources": [source]}))


def rows(loaded: Prompts) -> list[dict[str, Any]]:
    return loaded.dataset.to_list()


def test_a_later_attempt_reads_the_prompts_of_the_first(attempt: Attempt, run: Path) -> None:
    keys = {"dataset_filter": "level in 5..40", "max_prompt_length": 100}
    first, is_prepared = attempt(**keys)
    second, is_prepared_again = attempt(**keys)
    assert is_prepared and not is_prepared_again
    assert rows(first) == rows(second) and first.dataset.features == second.dataset.features
    assert (str(first), first.example, first.title) == (str(second), second.example, second.title)
    assert json.dumps(vars(first.counts)) == json.dumps(vars(second.counts))


def test_training_and_evaluation_have_their_own_prompts(attempt: Attempt, run: Path) -> None:
    write_rows(run.parent / "test.jsonl", 5, 100)
    keys = {"eval_dataset_name": str(run.parent / "test.jsonl")}
    args = ScriptArguments(dataset_name=str(run.parent / "train.jsonl"), **keys)
    held_out = [rows(load_eval_prompts(args, smoke.build_tokenizer(), 3)) for _ in range(2)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 5
    assert attempt(**keys)[1] and not attempt(**keys)[1]
    assert rows(load_eval_prompts(args, smoke.build_tokenizer(), 3)) == held_out[0]
    assert len([*(run / "prompts").iterdir()]) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"max_train_prompts": 10},
        {"seed": 4},
        {"kwargs": {"name": 1}},
        {"chat_template": "{{ messages[0]['content'] }}"},
    ],
    ids=str,
)
def test_other_values_have_other_prompts(attempt: Attempt, run: Path, changes: dict[str, Any]) -> None:
    attempt()
    assert attempt(**changes)[1] and not attempt(**changes)[1]
    assert len([*(run / "prompts").iterdir()]) == 1  # the earlier ones are deleted


def test_a_changed_file_tokenizer_reward_or_record_has_other_prompts(attempt: Attempt, run: Path) -> None:
    attempt()
    write_rows(run.parent / "train.jsonl", 50, 10)
    loaded, is_prepared = attempt()
    assert is_prepared and {row["prompt"][-1]["content"] for row in rows(loaded)} <= {f"p{n}" for n in range(10, 60)}
    write_sources(run, "b")
    assert attempt()[1]
    (run / "rewards").mkdir()
    (run / "rewards" / "mine.py").write_text("def score(completions, answer): ...")
    assert attempt()[1]
    tokenizer = smoke.build_tokenizer()
    tokenizer.add_tokens(["p1"])
    assert attempt(tokenizer=tokenizer)[1] and not attempt(tokenizer=tokenizer)[1]


def test_a_file_that_is_written_again_has_other_prompts(attempt: Attempt, run: Path) -> None:
    attempt()
    text = (run.parent / "train.jsonl").read_text()
    (run.parent / "train.jsonl").write_text(text.replace("p30", "q30"))  # the size stays
    os.utime(run.parent / "train.jsonl", (1, 1))
    assert attempt()[1]


@pytest.mark.parametrize("fault", ["no record", "cut record", "cut rows", "changed rows", "missing rows", "more files"])
def test_incomplete_and_damaged_prompts_are_prepared_again(attempt: Attempt, run: Path, fault: str) -> None:
    first, _ = attempt()
    (folder,) = (run / "prompts").iterdir()
    record, (data,) = folder / "prompts.json", folder.glob("*.arrow")
    content = data.read_bytes()
    expected = rows(first)
    del first
    data.unlink()  # a process may map it
    data.write_bytes(content)
    if fault == "no record":  # a kill before the last write
        record.unlink()
    elif fault == "cut record":
        record.write_text(record.read_text()[:50])
    elif fault == "cut rows":  # a power loss
        data.write_bytes(content[:-100])
    elif fault == "changed rows":
        data.write_bytes(content.replace(b"p1", b"p2"))
    elif fault == "missing rows":
        data.unlink()
    else:
        shutil.copy(data, folder / "data-2.arrow")
    loaded, is_prepared = attempt()
    assert is_prepared and rows(loaded) == expected
    assert [*(run / "prompts").iterdir()] != [folder] and not attempt()[1]


def test_a_kill_while_writing_leaves_nothing_that_is_read(
    attempt: Attempt, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(path: Path, content: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "write_json", kill)
        attempt()
    assert len([*(run / "prompts").iterdir()]) == 1
    assert attempt()[1] and not attempt()[1] and len([*(run / "prompts").iterdir()]) == 1


def test_prompts_are_prepared_each_time_if_the_sources_are_not_recorded(attempt: Attempt, run: Path) -> None:
    (run / "sources.json").unlink()
    assert attempt()[1] and attempt()[1] and len([*(run / "prompts").iterdir()]) == 1


def test_nothing_is_written_outside_of_a_run(attempt: Attempt, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_RUN_DIR")
    assert attempt()[1] and attempt()[1] and not (run / "prompts").exists()
