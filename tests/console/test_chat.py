"""`grpo chat` with a fake server: the conversation that is sent, its commands, failures and servers."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rollouts.fake_openai import FakeServer

from grpo_recipes.cli import main
from grpo_recipes.console import chat as module
from grpo_recipes.launch.serve import Server, ServerFailed
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.runs.rundir import write_json


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(module, "_WAIT", 0.0)
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a completed run with its own system prompt and temperature."""
    folder = tmp_path / "runs" / "sums-20261120-101500"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text('{"max_position_embeddings": 512}')
    (folder / "recipe.yaml").write_text(
        "# a.yaml:1\nmodel_name_or_path: a/b\n# a.yaml:2\nsystem_prompt: Add.\n# a.yaml:3\ntemperature: 0.9\n"
        "# a.yaml:4\nmax_completion_length: 33\n# a.yaml:5\nchat_template_kwargs: {enable_thinking: false}\n"
        "# a.yaml:6\nmodel_revision: abc\n"
    )
    write_json(folder / "run.json", {"run_name": "sums"})
    write_json(folder / "summary.json", {"status": "completed"})
    return folder


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """``talk(words, "line", ...)``: return the exit code and the printed lines."""

    def run_chat(words: list[str], *lines: str) -> tuple[int, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", *words])
        captured = capsys.readouterr()
        return code, (captured.err if code == 2 else captured.out).splitlines()

    return run_chat


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


REPLY = {"role": "assistant", "content": "hello"}


def test_a_conversation_is_sent_whole_until_it_is_reset(talk, server: FakeServer) -> None:
    code, output = talk(
        [server.url], "hi", "", "how?", "/reset", "again", "/system Be kind.", "now", "/system", "/what"
    )
    assert code == 0
    assert output[0].startswith("grpo: tiny is ready; /reset starts")
    assert output[1:5] == ["> hi", "hello", "> ", "> how?"]
    assert [body["messages"] for _, body in server.asked] == [
        [user("hi")],
        [user("hi"), REPLY, user("how?")],
        [user("again")],
        [{"role": "system", "content": "Be kind."}, user("now")],
    ]
    assert "grpo: system prompt: Be kind." in output and output[-2].startswith("grpo: /reset starts")
    assert all(path == "/v1/chat/completions" and body["temperature"] == 1.0 for path, body in server.asked)


def test_options_say_how_replies_are_drawn(talk, server: FakeServer) -> None:
    words = [server.url, "--temperature", "0", "--max-tokens", "5", "--seed", "3", "--system", "Add."]
    talk(words, "hi", "hi")
    talk(words, "hi")
    first, second, repeated = (body for _, body in server.asked)
    assert {"temperature": 0.0, "max_tokens": 5}.items() <= first.items() and first["messages"][0]["content"] == "Add."
    assert first["seed"] == repeated["seed"] != second["seed"]


def test_a_run_gives_prompt_and_sampling_to_a_server_that_runs(talk, server: FakeServer, run: Path) -> None:
    for which in ("last", "sums-20261120-101500", str(run)):
        assert talk([which, "--base-url", server.url], "hi")[0] == 0
    for _, body in server.asked:
        assert body["messages"] == [{"role": "system", "content": "Add."}, user("hi")]
        assert {"temperature": 0.9, "max_tokens": 33, "chat_template_kwargs": {"enable_thinking": False}}.items() <= (
            body.items()
        )
    talk(["last", "--base-url", server.url, "--system", ""], "hi")
    assert server.asked[-1][1]["messages"] == [user("hi")]


def test_a_reply_that_fails_is_forgotten_and_counts(talk, server: FakeServer) -> None:
    server.fails = [400]
    code, output = talk([server.url], "hi", "there")
    assert code == 1 and "grpo: no reply: BadRequestError: Error code: 400 - told to answer 400" in output
    assert server.asked[1][1]["messages"] == [user("there")] and "hello" in output


def test_ctrl_c_in_a_reply_cuts_it_off_and_at_the_prompt_ends(talk, server: FakeServer, monkeypatch) -> None:
    interrupts = iter([True, False])

    def show(text: str) -> str:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr(module, "strip_control_codes", show)
    code, output = talk([server.url], "hi", "there")
    assert code == 0 and "grpo: reply interrupted and dropped" in output
    assert server.asked[1][1]["messages"] == [user("there")]

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert talk([server.url])[0] == 130


def subject(which: str) -> tuple[Any, str]:
    return module._find_recipe_and_model(which, needs_model=True)


def test_a_run_is_served_from_its_model_with_room_for_a_conversation(run: Path) -> None:
    recipe, model = subject("last")
    assert model == str(run / "model")
    assert recipe["vllm_max_model_length"] == 512 and recipe["model_revision"] == "main"
    (run / "model" / "config.json").write_text('{"text_config": {"max_position_embeddings": 131072}}')
    assert subject("last")[0]["vllm_max_model_length"] == 8192


def test_a_model_is_a_folder_or_a_hub_id(run: Path, folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").write_text("{}")
    assert subject("mine")[1] == str(folder / "mine")
    assert subject("mine")[0]["vllm_max_model_length"] == 8192
    assert subject("Qwen/Qwen3-4B")[1] == "Qwen/Qwen3-4B"


def test_the_server_of_a_run_is_started_and_ended(talk, server: FakeServer, run: Path, monkeypatch) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def fake_serving(recipe: Any, model: str, environment: Any) -> Iterator[Server]:
        events.append(model)
        owner = OwnListener("127.0.0.1", urlsplit(server.url).port or 0, os.getpid)  # the process of the fake server
        yield Server(server.url, "tiny", "the-token", owner)
        events.append("ended")

    monkeypatch.setattr(module, "serving", fake_serving)
    server.token = "the-token"
    code, output = talk(["last"], "hi")
    assert code == 0 and events == [str(run / "model"), "ended"]
    assert output[0] == "grpo: starting a server for runs/sums-20261120-101500/model"
    assert set(server.authorized) == {"Bearer the-token"}

    @contextlib.contextmanager
    def failing(*_: Any) -> Iterator[Server]:
        raise ServerFailed("it died")
        yield

    monkeypatch.setattr(module, "serving", failing)
    assert talk(["last"], "hi")[0] == 1


def test_what_is_wrong_is_named(talk, server: FakeServer, run: Path) -> None:
    assert "grpo: nothing: is not a run directory" in talk(["nothing"])[1][0]
    assert "the URL of a server" in talk(["nothing"])[1][0]
    (run / "model" / "config.json").unlink()
    assert "has no model/: a run writes it at its end, and this run is completed" in talk(["last"])[1][0]
    assert "--temperature: expected 0 or more, got -1" in talk([server.url, "--temperature", "-1"])[1][0]
    assert "--max-tokens: expected 1 or more, got 0" in talk([server.url, "--max-tokens", "0"])[1][0]
    assert "--model: needs --base-url" in talk(["last", "--model", "x"])[1][0]
    assert "serves 'tiny', not 'large'" in talk([server.url, "--model", "large"])[1][0]
    assert "--base-url: no server answers" in talk([server.url.replace("127.0.0.1", "127.0.0.9")])[1][0]
