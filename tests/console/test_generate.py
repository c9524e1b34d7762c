"""`grpo generate`, with a fake server: rows, settings, continuation, failures, publishing and rejected options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_hub import WRITER, FakeHub
from rollouts.fake_openai import END, FakeServer

from grpo_recipes import smoke
from grpo_recipes.cli import main
from grpo_recipes.rollouts import generate as module

Rows = list[dict[str, Any]]
TOKENIZER = smoke.build_tokenizer()
PROBLEMS = [f"{number}+1=" for number in range(6)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with a recipe and six problems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
    rows = [{"problem": text, "answer": str(index + 1), "level": index} for index, text in enumerate(PROBLEMS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("my.yaml").write_text(
        "model_name_or_path: smoke:sums\ndataset_name: rows.jsonl\nreward_funcs: [pure_accuracy_math]\n"
        "system_prompt: Add.\nmax_completion_length: 9\nbf16: false\ntemperature: 0.9\n"
    )
    return tmp_path


@pytest.fixture
def generate(server: FakeServer) -> Callable[..., int]:
    """``generate("--limit", "2")``: run the command with out.jsonl and the fake server and return its exit code."""

    def run(*options: str) -> int:
        return main(["generate", "my.yaml", "--out", "out.jsonl", "--base-url", server.url, "--wait", "0", *options])

    return run


def read(name: str = "out.jsonl") -> Rows:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def rendered(problem: str) -> list[int]:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": problem}]
    return TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def test_each_prompt_becomes_a_row_with_its_completions(generate, server: FakeServer, capsys) -> None:
    assert generate("--num-generations", "2", "--top_k", "5", "--vllm_importance_sampling_correction", "false") == 0
    rows = read()
    assert [row["index"] for row in rows] == list(range(6)) and [row["level"] for row in rows] == list(range(6))
    assert rows[2]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+1="}]
    assert rows[2]["answer"] == "3"
    (first, second) = rows[2]["completions"]
    length = len(rendered("2+1="))
    assert first == {"text": f"said {length}", "ids": [length, first["ids"][1], END], "finish_reason": "stop"}
    assert second["ids"][1] != first["ids"][1]
    sent = [body for _, body in server.asked]
    assert sorted(body["prompt"] for body in sent) == sorted(
        rendered(problem) for problem in PROBLEMS for _ in range(2)
    )
    expected = {"temperature": 0.9, "top_k": 5, "top_p": 1.0, "max_tokens": 9, "model": "tiny"}
    assert all(expected.items() <= body.items() for body in sent) and len({body["seed"] for body in sent}) == 12
    assert "grpo: 6 prompts x 2 completions in out.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["", "\0\0\0\n", "\0" * 500])
def test_a_file_that_was_cut_off_is_continued_and_equals_a_whole_one(generate, server: FakeServer, capsys, end) -> None:
    """R9: also if a power loss left NUL bytes."""
    assert generate() == 0
    whole = Path("out.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    Path("out.jsonl").write_bytes(lines[4] + lines[1] + lines[0][:20] + end.encode())
    server.asked.clear()
    assert generate() == 0
    assert Path("out.jsonl").read_bytes() == whole and len(server.asked) == 4
    assert "(2 already done)" in capsys.readouterr().out
    server.asked.clear()
    assert generate() == 0 and not server.asked
    assert sorted(path.name for path in Path().iterdir()) == [
        "my.yaml", "out.jsonl", "out.jsonl.settings.json", "rows.jsonl",
    ]  # fmt: skip


def test_a_larger_limit_adds_rows(generate, server: FakeServer) -> None:
    assert generate("--limit", "2") == 0 and len(read()) == 2
    assert generate() == 0 and len(server.asked) == 6
    rows = read()
    Path("out.jsonl").unlink()
    assert generate() == 0 and read() == rows
    assert generate("--limit", "2") == 0 and read() == rows


def test_what_failed_has_no_row_and_the_next_call_tries_it_again(generate, server: FakeServer, capsys) -> None:
    server.fails = [400, 400]
    assert generate("--batch-size", "1") == 1
    assert [row["index"] for row in read()] == [2, 3, 4, 5]
    captured = capsys.readouterr()
    assert "grpo: 4 prompts in out.jsonl" in captured.out
    assert "2 prompts failed: BadRequestError: Error code: 400 - told to answer 400" in captured.err
    assert "run the same command again" in captured.err
    assert generate() == 0 and [row["index"] for row in read()] == list(range(6))


def test_one_failed_completion_of_several_keeps_the_row_out(generate, server: FakeServer) -> None:
    server.fails = [200, 400]
    assert generate("--batch-size", "1", "--num-generations", "2") == 1
    assert [row["index"] for row in read()] == [1, 2, 3, 4, 5]


def test_a_server_that_is_gone_ends_the_command(generate, server: FakeServer, monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "_MAX_LOST_ROWS", 2)
    server.fails = [200, *[500] * 20]
    assert generate("--batch-size", "1", "--attempts", "1") == 1
    assert len(read()) == 1 and len(server.asked) <= 5
    assert "the server is gone, and 3 prompts were not tried" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_there(generate, server: FakeServer, monkeypatch, capsys) -> None:
    add = module.CompletionsFile.add

    def interrupt(self: Any, index: int, completions: Any) -> None:
        add(self, index, completions)
        if len(self.done) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.CompletionsFile, "add", interrupt)
    assert generate() == 130 and len(read()) == 3
    assert "3 of 6 prompts done" in capsys.readouterr().out
    monkeypatch.setattr(module.CompletionsFile, "add", add)
    assert generate() == 0 and [row["index"] for row in read()] == list(range(6))


@pytest.mark.parametrize(
    "change",
    [
        ["--temperature", "0"],
        ["--num-generations", "2"],
        ["--seed", "7"],
        ["--max_completion_length", "10"],
        ["--system_prompt", "Subtract."],
        ["--backend", "sglang_server"],
    ],
)
def test_a_file_of_other_settings_is_refused(generate, change: list[str], capsys) -> None:
    assert generate("--limit", "1") == 0
    before = Path("out.jsonl").read_bytes()
    assert generate(*change) == 2
    assert "grpo: --out: out.jsonl was made with other settings: " in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == before


def test_a_file_of_another_kind_is_refused(generate, capsys) -> None:
    assert generate("--limit", "2") == 0
    Path("out.jsonl.settings.json").rename("kept.json")
    assert generate() == 2 and "says how it was made, does not" in capsys.readouterr().err
    Path("kept.json").rename("out.jsonl.settings.json")
    Path("out.jsonl").write_text('{"index": 0}\n')
    assert generate() == 2 and "out.jsonl:1: is not a row of this command" in capsys.readouterr().err
    Path("out.jsonl").write_text('{"index": 0, "prompt": [], "completions": []}\n')
    assert generate() == 2 and "prompt 0 differs from the dataset" in capsys.readouterr().err


def test_two_at_a_time_do_not_mix(generate, capsys) -> None:
    with module.open_completions(Path("out.jsonl"), [], {}):
        assert generate() == 2
    assert "another process writes out.jsonl" in capsys.readouterr().err


def refused(words: list[str], capsys) -> str:
    assert main(["generate", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my.yaml"], "--out: is missing"),
        (["my.yaml", "--out", "o", "--num-generations", "0"], "--num-generations: expected 1 or more, got 0"),
        (["my.yaml", "--out", "o", "--limit", "0"], "--limit: expected 1 or more, got 0"),
        (["my.yaml", "--out", "o", "--temperature", "-1"], "--temperature: expected 0 or more, got -1"),
        (["my.yaml", "--out", "o", "--timeout", "nan"], "--timeout: expected 1 or more, got nan"),
        (["my.yaml", "--out", "o", "--public"], "--public: does nothing without --push"),
        (["my.yaml", "--out", "o", "--backend", "hf"], "invalid choice: 'hf'"),
        (["my.yaml", "--out", "o", "--base-url", "localhost"], "--base-url: 'localhost' is not an address"),
        (["my.yaml", "--out", "o", "--base-url", "http://127.0.0.1:9", "--wait", "0"], "--base-url: no server answers"),
        (["my.yaml", "--out", "o", "--outt", "x"], "--outt"),
        (["none.yaml", "--out", "o"], "recipe 'none.yaml' not found"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], message: str, capsys) -> None:
    assert message in refused(words, capsys)
    assert not Path("o").exists()


def test_prompts_must_come_from_a_dataset_with_one_split(tmp_path: Path, capsys) -> None:
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "recipes").symlink_to(root / "recipes")
    example = "recipes/examples/two_sums.yaml"
    assert "without the recipe's environment or tools" in refused([example, "--out", "o"], capsys)
    text = Path("my.yaml").read_text().replace("dataset_name: rows.jsonl", "")
    Path("mixed.yaml").write_text(f"{text}dataset_mixture: {{datasets: [{{id: rows.jsonl}}]}}\n")
    assert "--split" in refused(["mixed.yaml", "--out", "o", "--split", "test"], capsys)


def test_another_model_is_refused(generate, server: FakeServer, capsys) -> None:
    assert generate("--model", "large") == 2
    assert f"--base-url: {server.url} serves 'tiny', not 'large'" in capsys.readouterr().err


def test_the_key_comes_from_the_environment(generate, server: FakeServer, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    server.token = "the-key"
    assert generate() == 0
    assert set(server.authorized) == {"Bearer the-key"}
    assert "the-key" not in Path("out.jsonl.settings.json").read_text()


def test_a_complete_file_is_published(generate, server: FakeServer, monkeypatch, tmp_path, capsys) -> None:
    with FakeHub().running() as hub:
        for name, value in {**hub.environment(WRITER), "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # the tester's own, or of another test
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        server.fails = [400]
        assert generate("--push", "sums", "--batch-size", "1") == 1
        assert ("dataset", "ada/sums") not in hub.repos
        assert generate("--push", "sums") == 0
        repo = hub.repos["dataset", "ada/sums"]
        assert repo.private and repo.files()["out.jsonl"] == Path("out.jsonl").read_bytes()
        assert f"{hub.url}/datasets/ada/sums" in capsys.readouterr().out
        assert generate("--push", "others/sums") == 2
        assert "--push: 'ada' may not write to 'others/sums'. Fix: use --push ada/sums" in capsys.readouterr().err
