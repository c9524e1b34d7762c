"""A launch without its model or data downloads them first, or stops within a second if the hub does not answer."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from fake_hub import FakeHub
from no_network import without_network

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import ensure_assets, record_assets
from grpo_recipes.fetch.hub import hub_answers
from grpo_recipes.recipe import read_recipe
from grpo_recipes.runs.rundir import Run, read_json

from .conftest import GRPO, Shell, jsonl

ROOT = Path(__file__).parents[2]
Variables = Callable[[], dict[str, str]]


@pytest.mark.parametrize("why", ["cut off", "told offline"])
def test_without_fetch_a_launch_is_refused_naming_the_command(shell: Shell, why: str) -> None:
    shell.recipe()
    launch = ["launch", "recipe.yaml", "--seed", "3"]
    began = time.monotonic()
    if why == "cut off":
        refused = shell.run(*without_network(GRPO, *launch))
    else:
        refused = shell.grpo(*launch, HF_HUB_OFFLINE="1")
    assert refused.returncode == 2 and time.monotonic() - began < 20
    reason = f"{shell.environment['HF_ENDPOINT']} does not answer" if why == "cut off" else "HF_HUB_OFFLINE is set"
    first, second = refused.stderr.splitlines()
    assert first == (
        f"grpo: recipe.yaml:6: model ada/sums is not on this machine and {reason}. "
        "Fix: run on the login node: grpo fetch recipe.yaml --seed 3"
    )
    assert second.startswith("grpo: recipe.yaml:2: dataset ada/rows (train) is not on this machine")
    assert not (shell.folder / "runs").exists() and not (shell.folder / "logs").exists()


@pytest.mark.parametrize("command", [["plan"], ["launch", "--dry-run"], ["check"]])
def test_looking_never_downloads(shell: Shell, hub: FakeHub, command: list[str]) -> None:
    name, *options = command
    looked = shell.grpo(name, shell.recipe(), *options)
    assert looked.returncode == 0, looked.stderr
    assert hub.requests == [] and not shell.cache.exists()


def test_what_is_missing_is_brought_first(shell: Shell, variables: Variables, monkeypatch, capfd) -> None:
    monkeypatch.chdir(shell.folder)
    recipe = read_recipe(Path(shell.recipe()))
    sources = ensure_assets(recipe, variables(), None, ["recipe.yaml"])
    assert [source.id for source in sources.present] == ["ada/sums", "ada/rows"] and not sources.missing
    told = capfd.readouterr().out
    assert told.startswith("grpo: missing: model ada/sums, dataset ada/rows (train); running grpo fetch recipe.yaml\n")
    assert "everything that recipe.yaml needs is on this machine" in told

    offline = {**variables(), "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert ensure_assets(recipe, offline, None, ["recipe.yaml"]).present == sources.present
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_fetch_that_fails_refuses_the_launch(shell: Shell, hub: FakeHub, variables: Variables, monkeypatch) -> None:
    monkeypatch.chdir(shell.folder)
    del hub.repos["dataset", "ada/rows"]
    with pytest.raises(
        ConfigError, match=r"grpo fetch: ended with code 2\. Fix: fix the problem printed above, then run: grpo fetch"
    ):
        ensure_assets(read_recipe(Path(shell.recipe())), variables(), None, ["recipe.yaml"])


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (130, SystemExit, "130"),
        (0, ConfigError, r"grpo fetch: did not download model ada/sums\. Fix: .*grpo fetch recipe.yaml"),
    ],
)
def test_a_fetch_that_ends_early_ends_the_launch(
    shell: Shell, variables: Variables, monkeypatch, code: int, error: type[BaseException], message: str
) -> None:
    monkeypatch.chdir(shell.folder)
    recipe = read_recipe(Path(shell.recipe()))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
    with pytest.raises(error, match=message):
        ensure_assets(recipe, variables(), None, ["recipe.yaml"])


def test_local_data_that_changed_stops_a_resume(shell: Shell, variables: Variables, tiny_model, monkeypatch) -> None:
    monkeypatch.chdir(shell.folder)
    rows = shell.folder / "rows.jsonl"
    rows.write_bytes(jsonl([{"problem": "1", "answer": "1"}]))
    recipe = read_recipe(Path(shell.recipe(model_name_or_path=str(tiny_model), dataset_name="rows.jsonl")))
    recorded = ensure_assets(recipe, variables(), None, []).as_json()
    rows.write_bytes(jsonl([{"problem": "2", "answer": "1"}]))
    with pytest.raises(ConfigError, match=r"--resume: the dataset 'rows\.jsonl' has changed since the run started"):
        ensure_assets(recipe, variables(), recorded, [])
    assert ensure_assets(recipe, variables(), recorded, [], allow_changed=True).present


@pytest.mark.slow
def test_a_resumed_run_gets_its_own_commits_back(shell: Shell, hub: FakeHub, variables: Variables, monkeypatch) -> None:
    monkeypatch.chdir(shell.folder)
    recipe = read_recipe(Path(shell.recipe()))
    began_with = ensure_assets(recipe, variables(), None, ["recipe.yaml"])
    run = shell.folder / "runs" / "offline-1"
    run.mkdir(parents=True)
    record_assets(Run(run), began_with)
    (run / "recipe.yaml").write_text(recipe.as_yaml())
    model = hub.repos["model", "ada/sums"]
    model.commit({**model.files(), "notes.txt": b"later"}, "later")
    shutil.rmtree(shell.cache)

    recorded = read_json(run / "run.json")["sources"]
    with pytest.raises(ConfigError, match=f"grpo fetch --resume {run}"):
        ensure_assets(recipe, {**variables(), "HF_HUB_OFFLINE": "1"}, recorded, ["--resume", str(run)])
    shown = "grpo fetch --resume runs/qwen2.5-1.5b-math-20260101-120000"
    brought = shell.run(*documented(shown, {shown.split()[-1]: str(run)}, fake="the hub"))
    assert brought.returncode == 0, brought.stderr
    resumed = ensure_assets(recipe, variables(), recorded, ["--resume", str(run)])
    assert [source.commit for source in resumed.present] == [source.commit for source in began_with.present]
    assert not (Path(resumed.model.path) / "notes.txt").exists()


def test_a_hub_that_cannot_be_looked_up_is_given_up_on(monkeypatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60) and [])  # no name server answers
    began = time.monotonic()
    assert not hub_answers({"HF_ENDPOINT": "https://hub.example"}, timeout=0.5)
    assert time.monotonic() - began < 5
    over.set()


@pytest.mark.parametrize("reason", ["Not a directory", "Permission denied", "File too large"])
def test_a_smoke_model_that_cannot_be_written_is_told_before_the_run(shell: Shell, reason: str) -> None:
    """A limit of file sizes stands for a full disk or quota. Root loses the right to write everywhere."""
    (shell.folder / "recipe.yaml").write_text((ROOT / "recipes/smoke/grpo.yaml").read_text())
    folder, prefix = shell.folder / "models", []
    if reason == "Not a directory":
        folder.write_text("")
    elif reason == "File too large":
        prefix = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "bash"]
    else:
        (folder / "smoke").mkdir(parents=True)
        (folder / "smoke").chmod(0o500)
        rights = "-dac_override,-dac_read_search"
        prefix = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.getuid() == 0 else []
    launch = shell.run(*prefix, GRPO, "launch", "recipe.yaml", CACHE_ROOT=str(folder))
    assert launch.returncode == 2
    assert launch.stderr.splitlines() == [
        f"grpo: CACHE_ROOT: cannot write the smoke model to models/smoke ({reason}). "
        "Fix: set CACHE_ROOT to a folder that you may write to, with 8 MB free"
    ]
    assert not (shell.folder / "runs").exists()
