"""A model that knows some sums."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes import smoke


@pytest.fixture(scope="session")
def known_sums(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the weights of the smoke model after a short training, with some right answers."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("known") / "smoke"
    smoke.make_smoke_task(folder, phases=(smoke.Phase(60, 1, 0.0, 3e-3, 0.1),))
    return AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
