"""A tokenizer with a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes import smoke


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return smoke.build_tokenizer()
