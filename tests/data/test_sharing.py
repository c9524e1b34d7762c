"""Two ranks: one reads, both get the same."""

from __future__ import annotations

import json

import pytest
from rank_processes import run_ranks

TEMPLATE = "{{ messages[-1]['content'] }}!"
ATTEMPTS = {
    "right": {"max_train_prompts": 10, "chat_template": TEMPLATE},
    "resumed": {"max_train_prompts": 10, "chat_template": TEMPLATE},
    "again": {"max_train_prompts": 20},
    "refused": {"dataset_prompt_column": "question"},
    "failed": {"chat_template": "{{ 1 // 0 }}"},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """Return the records of the two ranks for each attempt."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "run").mkdir()
    for name in ("train", "test"):
        rows = [{"problem": f"p{n}", "answer": str(n)} for n in range(50)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {name: str(folder / f"{name}.jsonl") for name in ("train", "test")}
    sources = [{"kind": "dataset", "id": path, "revision": None, "path": path} for path in names.values()]
    (folder / "run" / "sources.json").write_text(json.dumps({"sources": sources}))
    files = {"dataset_name": names["train"], "eval_dataset_name": names["test"]}
    attempts = json.dumps([{**files, **keys} for keys in ATTEMPTS.values()])
    run_ranks("data.shared_by_ranks", str(folder), attempts)
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2))
    return dict(zip(ATTEMPTS, zip(first, second, strict=True), strict=True))


@pytest.mark.slow
def test_one_rank_reads_and_both_get_the_same(outcomes):
    first, second = outcomes["right"]
    assert first["opened"] == ["train", "test"] and second["opened"] == []
    assert first["train"] == second["train"] and first["eval"] == second["eval"]
    assert len(first["train"]["rows"]) == 10 and first["train"]["example"].endswith("!")
    assert first["eval"]["said"].startswith("evaluating on 50 of 50 rows (eval_max_prompts 1000)")
    assert first["template"] == second["template"] == TEMPLATE


def test_a_later_attempt_reads_nothing_and_gets_the_same(outcomes):
    for before, resumed in zip(outcomes["right"], outcomes["resumed"], strict=True):
        assert resumed["opened"] == []
        assert [resumed[name] for name in ("train", "eval", "template")] == [
            before[name] for name in ("train", "eval", "template")
        ]


def test_another_attempt_leaves_nothing_of_those_before(outcomes):
    (before, _), (first, second) = outcomes["right"], outcomes["again"]
    assert len(first["train"]["rows"]) == len(second["train"]["rows"]) == 20
    assert first["left"] == sorted([first["train"]["folder"], first["eval"]["folder"]])
    assert before["train"]["folder"] not in first["left"]


def test_what_one_rank_refuses_all_do(outcomes):
    first, second = outcomes["refused"]
    assert first["error"] == second["error"]
    assert first["error"][0] == "ConfigError" and "no column 'question'" in first["error"][1]


def test_another_failure_reaches_all_too(outcomes):
    first, second = outcomes["failed"]
    assert first["error"][0] == "ZeroDivisionError" and second["error"][0] == "RuntimeError"
    assert "rank 0 could not prepare the prompts: ZeroDivisionError" in second["error"][1]
