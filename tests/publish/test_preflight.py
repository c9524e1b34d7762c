"""A run that cannot publish is refused before it starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_hub import READER, WRITER, FakeHub

from grpo_recipes.errors import ConfigError
from grpo_recipes.publish.push import need_target
from grpo_recipes.recipe import Recipe

Read = Callable[..., Recipe]


@pytest.fixture
def ask(read: Read, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path) -> Callable[..., object]:
    """``ask(token, KEY=VALUE...)``: the target of a recipe that pushes, asked by who has that token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))

    def ask_it(token: str | None = WRITER, environment: dict[str, str] | None = None, **changes: object) -> object:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        return need_target(
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
    target = ask(hub_revision="run-7", hub_strategy="end", hub_always_push=True, **changes)
    assert (target.repo, target.branch, target.strategy, target.always) == (repo, "run-7", "end", True)
    assert target.private and target.note == ""
    assert not ask(hub_private_repo=False, **changes).private


@pytest.mark.parametrize("repo", ["eve/x", "readers/x"])
def test_where_the_account_may_not_write(ask, repo: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"recipe.yaml:\d+: 'ada' may not write to '{repo}'. Fix: write hub_model_id: ada/x"
    ):
        ask(hub_model_id=repo)


def test_a_fine_grained_token_is_believed(ask, hub: FakeHub) -> None:
    hub.users[WRITER]["role"] = "fineGrained"
    assert ask(hub_model_id="sumlab/x").note == ""
    assert (
        ask(hub_model_id="eve/x").note == "whether this fine-grained token may write to eve/x shows with the first push"
    )


@pytest.mark.parametrize(
    ("token", "what"),
    [
        (None, "needs a login"),
        ("hf_" + "unknown" * 4, r"did not confirm the login \(HTTP 401\)"),
        (READER, "may only read"),
    ],
)
def test_a_login_that_may_write_is_needed(ask, token: str | None, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        ask(token)
    assert "hf_" not in str(refused.value)


@pytest.mark.parametrize("how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
def test_without_the_hub_the_way_to_publish_later_is_named(ask, how: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"push_to_hub cannot work here: .*hf upload sums <run>/model"):
        ask(environment=how)


def test_a_public_repository_is_told_of(ask, hub: FakeHub) -> None:
    hub.add("model", "ada/sums", {"README.md": b"mine"})
    assert ask().note == "ada/sums exists and is public: hub_private_repo is for repositories that are made"
    assert ask(hub_private_repo=False).note == ""
    hub.repos["model", "ada/sums"].private = True
    assert ask().note == ""


def test_a_hub_that_does_not_tell_of_the_repository_is_no_reason_to_fail(ask, hub: FakeHub) -> None:
    hub.add("model", "ada/sums", {"README.md": b"mine"})
    hub.failing = {"/api/models/ada/sums": 100}
    assert ask().note == "whether ada/sums exists and is public could not be asked (HTTP 500)"


def test_the_trainer_is_told_not_to_push(planned, option) -> None:
    assert option(planned(push_to_hub=True).process("trainer").argv, "--push_to_hub") == "false"
    assert "--push_to_hub" not in planned().process("trainer").argv
