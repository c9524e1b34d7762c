"""Test ``environment_python``: environments run with the Python of another virtual environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments.environment_python import fingerprint_packages
from grpo_recipes.extensions.environments.stage import PLAY, hash_turn, parse_turn
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.trainers.deep_check import check_deeply

from .played_episodes import FILE, generation, make_trainer

KEYS = {
    "model_name_or_path": "smoke:sums", "dtype": "float32", "bf16": False, "vllm_max_model_length": None,
    "max_completion_length": 32, "dataset_name": None, "reward_funcs": ["environment"], "environment_max_turns": 2,
}  # fmt: skip
LENT = {"packaging", "psutil", "yaml"}
Read = Callable[..., Recipe]


def make_venv(folder: Path) -> Path:
    """Make a virtual environment without any package; return its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    return packages


def install_fakes(packages: Path) -> None:
    """Install the fake library in version 0.3.99, and our NumPy."""
    for path in Path(numpy.__file__).parents[1].glob("numpy*"):
        (packages / path.name).symlink_to(path)
    (packages / "verifiers").mkdir()
    shutil.copyfile(Path(__file__).with_name("fake_verifiers.py"), packages / "verifiers/__init__.py")
    (packages / "verifiers-0.3.99.dist-info").mkdir()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a virtual environment with the fake library, and without our packages."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    install_fakes(make_venv(folder))
    return folder


def play(pool: RewardPool, spec: str, actions: list[str], last_turn: str = "") -> str:
    """Play one turn of an episode; return its JSON."""
    columns = {
        "environment": [spec], "arguments": ["{}"], "seed": [4], "episode": ["g/0"], "last_digest": [""],
    }  # fmt: skip
    if last_turn:
        columns["last_digest"] = [hash_turn(last_turn)]
    (score,) = pool.score(PLAY, [actions], columns, names=["g/0"])
    assert score.reason is None, score.reason
    return str(score.value)


def start_pool(folder: Path) -> RewardPool:
    return RewardPool(
        PLAY, workers=1, timeout=20.0, network=False, valid=lambda text: isinstance(text, str),
        python=folder / "bin/python",
    )  # fmt: skip


def test_a_child_imports_only_small_packages_of_ours(other: Path, tmp_path: Path) -> None:
    """It could not import TRL or torch: they need packages that the other environment does not have."""
    file = tmp_path / "spy.py"
    file.write_text(
        "import importlib.util, sys\n"
        "class Spy:\n"
        "    def reset(self, seed):\n"
        "        files = [getattr(module, '__file__', None) or '' for module in list(sys.modules.values())]\n"
        "        names = {file.partition('/site-packages/')[2].partition('/')[0] for file in files}\n"
        "        found = [name for name in ('torch', 'trl', 'openai') if importlib.util.find_spec(name)]\n"
        "        return repr((sys.prefix, sorted(names - {''}), found))\n"
        "    def step(self, action):\n"
        "        raise AssertionError\n"
    )
    with start_pool(other) as pool:
        text = parse_turn(play(pool, f"{file}:Spy", [])).messages[0]["content"]
    prefix, packages, found = eval(text)
    assert prefix == str(other) and found == [] and LENT < set(packages) <= LENT | {"numpy"}


def test_a_later_version_of_a_library_is_played_and_replayed(other: Path) -> None:
    with start_pool(other) as pool:
        first = play(pool, "verifiers:two-sums", [])
        answer = str(int(parse_turn(first).messages[0]["content"].partition("+")[0]) + 1)
        second = play(pool, "verifiers:two-sums", [answer], first)
    with start_pool(other) as pool:  # as after a resume: the episode is played again from its seed
        last = parse_turn(play(pool, "verifiers:two-sums", [answer, "7"], second))
    assert last.done and last.reward == 0.5 and last.info == {"right": 1.0, "stop": "two sums", "turns": 2.0}


def test_the_deep_check_plays_it_and_prints_the_version(other: Path, read: Read, tmp_path: Path) -> None:
    keys = KEYS | {"environment": "verifiers:two-sums"}
    lines = "\n".join(check_deeply(read(**keys, environment_python=str(other)), {"CACHE_ROOT": str(tmp_path)}))
    assert f"python     {other}/bin/python verifiers-0.3.99" in lines
    assert "episode    verifiers:two-sums: " in lines and "ended after 2 turns" in lines
    with pytest.raises(ConfigError, match=r"two-sums|not installed"):
        check_deeply(read(**keys), {"CACHE_ROOT": str(tmp_path)})


def test_a_python_or_library_that_is_missing(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "games"
    keys = KEYS | {"environment": "verifiers:two-sums", "environment_python": str(folder)}
    (problem,) = check(read(**keys), {})
    assert problem.what == f"environment_python: no Python at '{folder}'"
    assert problem.fix == f"make it with: python3 -m venv {folder}"
    folder.mkdir()
    (problem,) = check(read(**keys), {})
    assert problem.what.endswith("games/bin/python'") and problem.fix == f"make it with: python3 -m venv {folder}"
    packages = make_venv(folder)
    (problem,) = check(read(**keys), {})
    assert problem.what == "'verifiers' is not installed in environment_python"
    assert problem.fix == f"install it with: uv pip install --python {folder}/bin/python 'verifiers<0.4'"
    newer = packages / "verifiers-0.4.0.dist-info"
    newer.mkdir()
    (problem,) = check(read(**keys), {})
    what = "verifiers-0.4.0 in environment_python has only tasksets and harnesses (supported: 0.1.10 to 0.3)"
    assert problem.what == what
    assert problem.fix == f"install it with: uv pip install --python {folder}/bin/python 'verifiers<0.4'"
    newer.rmdir()
    install_fakes(packages)
    assert check(read(**keys), {}) == []
    assert check(read(**keys | {"environment_python": str(folder / "bin/python")}), {}) == []


def test_the_users_class_may_import_packages_of_the_other_environment(
    other: Path, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import no_such_package\nclass Game:\n    def reset(self, seed): pass\n    def step(self, action): pass\n"
    )
    keys = KEYS | {"environment": "mine.py:Game"}
    (problem,) = check(read(**keys), {})
    assert "imports 'no_such_package', which is not installed" in problem.what
    assert check(read(**keys, environment_python=str(other)), {}) == []
    keys["environment"] = "package_of_the_other:Game"
    (problem,) = check(read(**keys), {})
    assert "package_of_the_other" in problem.what
    assert check(read(**keys, environment_python=str(other)), {}) == []


def test_a_batch_equals_the_batch_of_our_python_and_a_resume_needs_the_same_packages(
    other: Path, read: Read, tmp_path: Path, model: str
) -> None:
    batches = []
    for name, keys in (("ours", {}), ("run", {"environment_python": str(other)})):
        trainer = make_trainer(tmp_path / name, model, **keys)
        batches.append(generation(trainer))
        trainer.source.close()
    ours, others = batches
    assert all(torch.equal(ours[name], others[name]) for name in ("completion_ids", "completion_mask", "advantages"))
    assert not (tmp_path / "ours/rewards/environment_packages.json").exists()
    record = tmp_path / "run/rewards/environment_packages.json"
    assert any(name.startswith("verifiers-0.3.99 ") for name in json.loads(record.read_text()))
    (tmp_path / "rewards").mkdir()
    record = shutil.copyfile(record, tmp_path / "rewards/environment_packages.json")
    recipe: dict[str, Any] = {**KEYS, "environment": f"{FILE}:Sums", "environment_python": str(other)}
    new_run = read(**recipe)
    resumed = replace(new_run, frozen=True)
    assert check(resumed, {}) == []
    changed = other / "lib" / next((other / "lib").iterdir()).name / "site-packages/verifiers-0.3.100.dist-info"
    changed.mkdir()
    try:
        (problem,) = check(resumed, {})
        message = (
            "versions or files of packages in environment_python changed since the run started (verifiers-0.3.100)"
        )
        assert problem.what == message and problem.fix.startswith("install the earlier packages, or delete ")
        assert check(new_run, {}) == [], "a new run may use other packages"
        record.unlink()
        assert check(resumed, {}) == []
    finally:
        changed.rmdir()


def test_packages_are_compared_by_version_and_files(tmp_path: Path) -> None:
    packages = make_venv(tmp_path / "venv")
    (package := packages / "games-1.0.dist-info").mkdir()
    python, record = tmp_path / "venv/bin/python", package / "RECORD"
    record.write_text("games.py,sha256=a,9\ngames-1.0.dist-info/INSTALLER,sha256=b,3\n../../../bin/games,sha256=c,9\n")
    (first,) = fingerprint_packages(python)
    record.write_text("../../../bin/games,sha256=d,9\n__pycache__/games.cpython-311.pyc,,\ngames.py,sha256=a,9\n")
    assert fingerprint_packages(python) == [first], "another installer"
    record.write_text("games.py,sha256=e,9\n")
    (other,) = fingerprint_packages(python)
    assert other != first and other.startswith("games-1.0 ")
