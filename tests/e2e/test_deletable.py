"""Every extension and the console can be deleted: the core works without them and names the missing part.

`make test` runs the core's own tests without them (``core_alone.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from overlay import REPOSITORY, Overlay, make_overlay

sys.path.insert(0, str(REPOSITORY / "scripts"))
from packages import ABOVE

# A recipe that needs the extension, by its keys, and how it is rejected without it.
NEEDS = {
    "extensions.atropos": "atropos_environment: arithmetic\n",
    "extensions.environments": "environment: textarena:TicTacToe-v0\n",
    "extensions.sft": "dataset_name: smoke:sums\ntask: sft\n",
    "extensions.problems": "dataset_name: modebench:countdown\nreward_funcs: [modebench]\n",
}
RECIPE = "model_name_or_path: smoke:sums\nmax_steps: 1\n"
COMMANDS = ("new", "keys", "check", "check-rewards", "plan", "fetch", "launch", "submit", "status", "logs", "stop")
SMOKE = (
    "launch", "recipes/smoke/grpo.yaml", "--max_steps", "2", "--save_steps", "2", "--eval_strategy", "no",
)  # fmt: skip


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return make_overlay(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ABOVE)
def test_the_core_works_without(overlay: Overlay, name: str) -> None:
    overlay.delete(name)
    for command in ("check", "plan"):
        answer = overlay.grpo(command, "recipes/smoke/grpo.yaml")
        assert answer.returncode == 0, answer.stderr
    usage = overlay.grpo("--help").stdout
    assert all(command in usage for command in COMMANDS)
    recipe = overlay.repository / "mine.yaml"
    recipe.write_text(RECIPE + NEEDS.get(name, "dataset_name: smoke:sums\n"))
    answer = overlay.grpo("check", str(recipe))
    if name in NEEDS:
        assert answer.returncode == 2 and "Fix:" in answer.stderr and "Traceback" not in answer.stderr, answer
    else:
        assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_the_core_trains_without_any_of_them(overlay: Overlay) -> None:
    overlay.delete(*ABOVE)
    answer = overlay.grpo(*SMOKE, timeout=500)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (run,) = (overlay.repository / "runs").iterdir()
    assert (run / "model/model.safetensors").is_file()
