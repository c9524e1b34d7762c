"""Pushes with the real client to the fake hub, and the check for publishing before a run starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fake_hub import READER, WRITER, FakeHub

from grpo_recipes.console.publish.push import Target, check_push_target, choose_repository_name, list_model_files
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.rundir import read_json, write_json

from .conftest import MODEL, write


@pytest.fixture
def push(tmp_path: Path, logged_in: dict[str, str]):
    """``push(waits=..., KEY=VALUE...)``: push ``model`` to the target with other keys.

    Return the exit code, the output of the process, and the result file.
    """

    def push_it(waits: tuple[float, ...] = (0.0, 0.0), **changes: Any) -> tuple[int, str, dict[str, Any]]:
        target = replace(Target("ada/sums", True, "main"), **changes)
        result = tmp_path / "result.json"
        content = {"target": asdict(target), "model": tmp_path / "model", "result": result, "waits": waits}
        write_json(tmp_path / "job.json", content)
        command = [sys.executable, "-m", "grpo_recipes.console.publish.push", str(tmp_path / "job.json")]
        done = subprocess.run(command, env=logged_in, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr, read_json(result)

    return push_it


def test_a_private_repository_gets_everything_in_one_commit(push, hub: FakeHub, tmp_path: Path) -> None:
    write(tmp_path / "model", MODEL)
    write(tmp_path / "model" / "additional_chat_templates", {"tool_use.jinja": b"tools"})
    code, _, result = push()
    repo = hub.repos["model", "ada/sums"]
    assert code == 0 and repo.private and repo.messages == ["initial commit", "Final model"]
    assert result == {
        "repo": "ada/sums", "revision": "main", "commit": repo.at("main"), "url": f"{hub.url}/ada/sums/tree/main"
    }  # fmt: skip
    pushed = {name: content for name, content in MODEL.items() if name != "training_args.bin"}
    assert repo.files() == {".gitattributes": b"", **pushed, "additional_chat_templates/tool_use.jinja": b"tools"}


SHARDS = {"model-00001-of-00002.safetensors": b"new", "model.safetensors.index.json": b"{}"}


@pytest.mark.parametrize(
    ("existing", "new", "removed"),
    [
        (["model.safetensors", "a.md"], SHARDS, ["model.safetensors"]),
        (["model.safetensors"], {"model.safetensors": b"new"}, []),
        (["adapter_model.safetensors", "adapter_config.json"], SHARDS,
         ["adapter_model.safetensors", "adapter_config.json"]),
        (["sub/model.safetensors", "pytorch_model.bin"], SHARDS, ["pytorch_model.bin"]),
        (["additional_chat_templates/old.jinja", "last-checkpoint/x"], SHARDS, ["additional_chat_templates/old.jinja"]),
    ],
)  # fmt: skip
def test_what_would_be_read_together_with_the_new_files_goes(
    push, hub: FakeHub, tmp_path: Path, existing: list[str], new: dict[str, bytes], removed: list[str]
) -> None:
    hub.add("model", "ada/sums", dict.fromkeys(existing, b"old"))
    for name, content in new.items():
        write((tmp_path / "model" / name).parent, {Path(name).name: content})
    assert push()[0] == 0
    remaining = {name: b"old" for name in existing if name not in removed}
    assert hub.repos["model", "ada/sums"].files() == {**remaining, **new}


def test_a_branch_is_made_and_the_main_one_left_alone(push, hub: FakeHub, tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write(tmp_path / "model", {**MODEL, "config.json": content})
        code, output, _ = push(branch="run-7")
        assert code == 0, output
    repo = hub.repos["model", "ada/sums"]
    assert repo.files("main") == {".gitattributes": b""} and repo.files("run-7")["config.json"] == b"second"


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 1)])
def test_it_is_tried_three_times(push, hub: FakeHub, tmp_path: Path, failures: int, code: int) -> None:
    write(tmp_path / "model", MODEL)
    hub.failing = {"/commit/": failures}
    ended, output, result = push()
    assert ended == code and hub.asked("/commit/") == 3
    assert output.count("grpo: push to ada/sums failed: HfHubHTTPError: Server error '500") == failures
    assert ("error" in result) is bool(code) and (not code or "(3 attempts)" in result["error"])
    assert WRITER not in output


def test_a_login_that_has_gone_bad_is_reported(push, hub: FakeHub, tmp_path: Path) -> None:
    write(tmp_path / "model", MODEL)
    del hub.users[WRITER]
    code, output, result = push(waits=())
    assert code == 1 and "401" in result["error"] and WRITER not in output


def test_the_model_is_pushed_without_the_state_of_training(tmp_path: Path) -> None:
    names = ["order_of_data.json", "controllers.json", "zero_to_fp32.py", "trainer_state.json", "optimizer.pt"]
    write(tmp_path, {**MODEL, **dict.fromkeys(names, b"")})
    assert {path.name for path in list_model_files(tmp_path)} == {"config.json", "model.safetensors", "tokenizer.json"}


def test_shards_of_fsdp_are_not_a_model(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": b"{}", "pytorch_model_fsdp.bin": b"shard"})
    assert list_model_files(tmp_path) == []


# --- before a run starts -------------------------------------------------------------------------------------------


Read = Callable[..., Recipe]


@pytest.fixture
def ask(read: Read, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path) -> Callable[..., object]:
    """``ask(token, KEY=VALUE...)``: check the target of a recipe that pushes with this token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))

    def ask_it(token: str | None = WRITER, environment: dict[str, str] | None = None, **changes: object) -> object:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        return check_push_target(
            read(**{"push_to_hub": True, **changes}), {"HF_ENDPOINT": hub.url, **(environment or {})}, "sums"
        )

    return ask_it


def test_nothing_is_asked_without_push_to_hub(ask, hub: FakeHub) -> None:
    assert ask(push_to_hub=False) is None
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "repo"), [(None, "ada/sums"), ("mine", "ada/mine"), ("ada/x", "ada/x"), ("sumlab/x", "sumlab/x")]
)
def test_the_target_is_the_users_or_of_an_organisation(ask, name: str | None, repo: str) -> None:
    changes = {"hub_model_id": name} if name else {}
    target = ask(hub_revision="run-7", **changes)
    assert (target.repo, target.branch) == (repo, "run-7")
    assert target.private and target.note == ""
    assert not ask(hub_private_repo=False, **changes).private


@pytest.mark.parametrize("repo", ["eve/x", "readers/x"])
def test_where_the_account_may_not_write(ask, repo: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"recipe.yaml:\d+: 'ada' may not write to '{repo}'. Fix: set hub_model_id: ada/x"
    ):
        ask(hub_model_id=repo)


def test_a_fine_grained_token_is_believed(ask, hub: FakeHub) -> None:
    hub.users[WRITER]["role"] = "fineGrained"
    assert ask(hub_model_id="sumlab/x").note == ""
    assert (
        ask(hub_model_id="eve/x").note == "only the push will show whether this fine-grained token may write to eve/x"
    )


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, r"push_to_hub needs a login, which the hub did not confirm \(Token is required"),
        ("hf_" + "unknown" * 4, r"push_to_hub needs a login, which the hub did not confirm \(Invalid user token"),
        (READER, "the token is read-only"),
    ],
)
def test_a_login_that_may_write_is_needed(ask, token: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        ask(token)
    assert "hf_" not in str(refused.value)


def test_a_hub_that_is_down_may_be_asked_again(ask, hub: FakeHub) -> None:
    hub.failing = {"/api/whoami-v2": 100}
    with pytest.raises(
        ConfigError, match=r"Server error '500.* with a token that may write, or run hf auth login, or try again"
    ):
        ask()


@pytest.mark.parametrize("how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
def test_without_the_hub_the_way_to_publish_later_is_named(ask, how: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"push_to_hub can't work here: .*hf upload sums <run>/model"):
        ask(environment=how)


def test_a_public_repository_is_reported(ask, hub: FakeHub) -> None:
    hub.add("model", "ada/sums", {"README.md": b"mine"})
    assert ask().note == "ada/sums exists and is public: hub_private_repo changes only new repositories"
    assert ask(hub_private_repo=False).note == ""
    hub.repos["model", "ada/sums"].private = True
    assert ask().note == ""


def test_a_hub_that_does_not_describe_the_repository_stops_nothing(ask, hub: FakeHub) -> None:
    hub.add("model", "ada/sums", {"README.md": b"mine"})
    hub.failing = {"/api/models/ada/sums": 100}
    note = ask().note
    assert note.startswith("can't find out whether ada/sums exists and is public (Server error '500")


def test_the_trainer_does_not_push(planned, option) -> None:
    assert option(planned(push_to_hub=True).process("trainer").argv, "--push_to_hub") == "false"
    assert "--push_to_hub" not in planned().process("trainer").argv


@pytest.mark.parametrize(("run", "name"), [("qwen2.5-math", "qwen2.5-math"), ("a  b//c--d", "a-b-c-d"), ("-x.", "x")])
def test_without_a_name_the_run_names_it(read: Callable[..., Recipe], run: str, name: str) -> None:
    assert choose_repository_name(read(push_to_hub=True), run) == name
    assert choose_repository_name(read(push_to_hub=True, hub_model_id="ada/sums"), run) == "ada/sums"
