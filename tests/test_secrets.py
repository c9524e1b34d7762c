"""Secrets are recognized and masked."""

from __future__ import annotations

import pytest

from grpo_recipes.secrets import MASK, contains_secret, is_secret_name, mask_environment, mask_secrets

SECRETS = [
    "hf_" + "a1B2" * 8,
    "ghp_" + "a1B2" * 9,
    "sk-" + "a1B2-_" * 6,
    "wandb_v1_" + "a1B2" * 8,
    "AKIA" + "A1B2" * 4,
    "xoxb-" + "1234-abcd-" * 2,
]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("my_secret", True),
        ("DB_PASSWORD", True),
        ("AWS_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("GRPO_TOKEN_FILE", False),
        ("PATH", False),
    ],
)
def test_names_that_hold_secrets(name, secret):
    assert is_secret_name(name) is secret


@pytest.mark.parametrize("secret", SECRETS)
def test_a_token_is_recognised_and_masked_inside_a_text(secret):
    assert contains_secret(f"before {secret} after")
    assert mask_secrets(f"before {secret} after") == f"before {MASK} after"


@pytest.mark.parametrize("login", ["user:pass", ":pass", "user:pa:ss"])
def test_the_password_of_a_url_is_masked(login):
    assert contains_secret(f"https://{login}@host/x")
    assert mask_secrets(f"see https://{login}@host/x") == f"see https://{MASK}@host/x"


@pytest.mark.parametrize(
    "text", ["hf_model", "Qwen/Qwen2.5-1.5B-Instruct", "a task-oriented text", "https://host:80/x", "", "mail@host"]
)
def test_ordinary_text_is_left_alone(text):
    assert not contains_secret(text)
    assert mask_secrets(text) == text


@pytest.mark.parametrize("value", [None, 7, 1.5, True])
def test_values_that_are_no_text_are_no_secret(value):
    assert contains_secret(value) is False


def test_an_environment_is_masked_by_name_and_by_value():
    shown = mask_environment({"HF_TOKEN": "short", "NOTE": f"my {SECRETS[0]}", "HOME": "/home/me"})
    assert shown == {"HF_TOKEN": MASK, "NOTE": f"my {MASK}", "HOME": "/home/me"}
