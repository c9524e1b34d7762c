"""Prompts are prepared once in a run: a later attempt reads them, unless anything that determines them has changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_recipes import smoke
from grpo_recipes.data import Prompts, load_eval_prompts, load_prompts, prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import user_code
from grpo_recipes.recipe.configs import ScriptArguments

Attempt = Callable[..., tuple[Prompts, bool]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run with its record of sources, and a data file next to it."""
    write_rows(tmp_path / "train.jsonl", 50)
    folder = tmp_path / "run"
    folder.mkdir()
    write_sources(folder)
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
        return load_prompts(args, tokenizer or smoke.build_tokenizer(), 2, seed, kwargs, run=run), bool(reads)

    return load


def write_rows(file: Path, count: int, offset: int = 0, answer: str | None = None) -> None:
    numbers = range(offset, offset + count)
    rows = ({"problem": f"p{n}", "answer": str(n) if answer is None else answer, "level": n} for n in numbers)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sources(run: Path, commit: str = "a", revision: str = "main") -> None:
    source = {"kind": "dataset", "id": "train.jsonl", "revision": None, "commit": commit}
    source["path"] = str(run.parent / "train.jsonl")
    model = {"kind": "model", "id": "org/model", "revision": revision, "commit": commit, "path": f"/cache/{revision}"}
    (run / "sources.json").write_text(json.dumps({"sources": [model, source]}))


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


def test_a_resumed_run_that_requests_the_recorded_commit_reads_the_same_prompts(attempt: Attempt, run: Path) -> None:
    attempt()
    write_sources(run, revision="a")
    assert not attempt()[1]


def test_training_and_evaluation_have_their_own_prompts(attempt: Attempt, run: Path) -> None:
    write_rows(run.parent / "test.jsonl", 5, 100)
    keys = {"eval_dataset_name": str(run.parent / "test.jsonl")}
    args = ScriptArguments(dataset_name=str(run.parent / "train.jsonl"), **keys)
    held_out = [rows(load_eval_prompts(args, smoke.build_tokenizer(), 3, run=run)) for _ in range(2)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 5
    assert attempt(**keys)[1] and not attempt(**keys)[1]
    assert rows(load_eval_prompts(args, smoke.build_tokenizer(), 3, run=run)) == held_out[0]
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
    tokenizer = smoke.build_tokenizer()
    tokenizer.add_tokens(["p1"])
    assert attempt(tokenizer=tokenizer)[1] and not attempt(tokenizer=tokenizer)[1]
    tokenizer.backend_tokenizer.enable_truncation(5)  # as during a call
    tokenizer.backend_tokenizer.enable_padding()
    assert not attempt(tokenizer=tokenizer)[1]


@pytest.mark.parametrize("kind", ["module", "file", "copy"])
def test_a_changed_reward_has_other_prompts(
    attempt: Attempt, run: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows without a solution are kept until the reward reads it."""
    monkeypatch.syspath_prepend(str(run.parent))
    write_rows(run.parent / "train.jsonl", 50, answer="")
    file = run.parent / "stored_reward.py"
    file.write_text("def score(completions, level): ...")
    if kind == "copy":
        (run / "run.json").write_text("{}")
        (run / "rewards").mkdir()
    name = "stored_reward" if kind == "module" else str(file)
    spec = f"{name}:score"
    if kind == "copy":
        file = shutil.copy(file, user_code.copy_path(spec, run / "rewards"))
        monkeypatch.setenv("GRPO_RUN_DIR", str(run))  # as in a training process
    assert attempt(reward_funcs=[spec])[1] and not attempt(reward_funcs=[spec])[1]
    file.write_text("def score(completions, answer): ...")
    with pytest.raises(ConfigError, match="50 without a prompt or a solution dropped"):
        attempt(reward_funcs=[spec])


def test_a_file_that_is_written_again_has_other_prompts(attempt: Attempt, run: Path) -> None:
    attempt()
    text = (run.parent / "train.jsonl").read_text()
    (run.parent / "train.jsonl").write_text(text.replace("p30", "q30"))  # the size stays
    os.utime(run.parent / "train.jsonl", (1, 1))
    assert attempt()[1]


@pytest.mark.parametrize(
    "fault", ["no record", "cut record", "cut rows", "changed rows", "missing rows", "unreadable rows", "more files"]
)
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
    elif fault == "unreadable rows":
        data.unlink()
        data.mkdir()  # reading it is an OSError, also for root
    else:
        shutil.copy(data, folder / "data-2.arrow")
    loaded, is_prepared = attempt()
    assert is_prepared and rows(loaded) == expected
    assert [*(run / "prompts").iterdir()] != [folder] and not attempt()[1]


KILLED = """
import os, pathlib, signal, sys
from datasets.arrow_dataset import ArrowWriter
from grpo_recipes import smoke
from grpo_recipes.data import load_prompts, prompts, store
from grpo_recipes.recipe.configs import ScriptArguments

def kill_after(function):
    def call(*arguments, **keys):
        function(*arguments, **keys)
        os.kill(os.getpid(), signal.SIGKILL)
    return call

def store_dataset(*arguments):
    if moment == "rows":  # after the first of two batches
        ArrowWriter.write_table = kill_after(ArrowWriter.write_table)
    elif moment == "digests":
        store._compute_digests = kill_after(store._compute_digests)
    else:
        store.write_json = kill_after(store.write_json)
    store.store_dataset(*arguments)

moment, run, file = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
prompts.store_dataset = store_dataset
load_prompts(ScriptArguments(dataset_name=file), smoke.build_tokenizer(), 2, 3, run=run)
"""


@pytest.mark.parametrize("moment", ["rows", "digests", "record"])
def test_a_kill_while_writing_leaves_nothing_incomplete_that_is_read(attempt: Attempt, run: Path, moment: str) -> None:
    write_rows(run.parent / "train.jsonl", 1500)
    command = [sys.executable, "-c", KILLED, moment, str(run), str(run.parent / "train.jsonl")]
    done = subprocess.run(command, env=os.environ | {"HF_HOME": str(run.parent / "hf")}, check=False)
    (folder,) = (run / "prompts").iterdir()
    assert done.returncode == -signal.SIGKILL and list(folder.glob("*.arrow"))
    loaded, is_prepared = attempt(max_train_prompts=None)
    assert is_prepared == (moment != "record") and len(rows(loaded)) == 1500
    assert not attempt(max_train_prompts=None)[1] and len([*(run / "prompts").iterdir()]) == 1


def test_a_full_disk_does_not_end_a_run_of_one_process(
    attempt: Attempt, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = datasets.Dataset.save_to_disk

    def fill_disk(dataset: datasets.Dataset, folder: Path) -> None:
        save(dataset, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Dataset, "save_to_disk", fill_disk)
        loaded, is_prepared = attempt()
    assert is_prepared and len(rows(loaded)) == 20 and not [*(run / "prompts").iterdir()]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "stored" in line]
    assert line.startswith("grpo: note: the prompts could not be stored") and "No space left on device" in line
    assert attempt()[1] and not attempt()[1]


def test_a_missing_file_is_named_as_without_stored_prompts(attempt: Attempt, run: Path) -> None:
    attempt()
    (run.parent / "train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"the dataset cannot be read.*Fix: "):
        attempt()


def test_prompts_are_prepared_each_time_if_the_sources_are_not_recorded(attempt: Attempt, run: Path) -> None:
    (run / "sources.json").unlink()
    assert attempt()[1] and attempt()[1] and not (run / "prompts").exists()


def test_another_command_in_a_process_of_the_run_leaves_its_prompts(
    attempt: Attempt, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt()
    monkeypatch.setenv("GRPO_RUN_DIR", str(run))  # inherited by `grpo eval` and `grpo generate`
    args = ScriptArguments(
        dataset_name=str(run.parent / "train.jsonl"), eval_dataset_name=str(run.parent / "train.jsonl")
    )
    load_prompts(args, smoke.build_tokenizer(), 1, 3)
    load_eval_prompts(args, smoke.build_tokenizer(), 3)
    assert len([*(run / "prompts").iterdir()]) == 1 and not attempt()[1]
