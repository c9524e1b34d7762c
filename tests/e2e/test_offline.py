"""Whole runs with the network cut off, and runs that publish: everything real but the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_hub import WRITER, FakeHub
from no_network import without_network
from real_runs import REPOSITORY, SECRET, Launch

from grpo_recipes.smoke import smoke_command

pytestmark = pytest.mark.slow
GRPO = str(Path(sys.executable).with_name("grpo"))
SMOKE = REPOSITORY / "recipes" / "smoke" / "grpo.yaml"
SHORT = ("--max_steps", "2", "--save_steps", "100")


@pytest.fixture(scope="module")
def smoke_task() -> Path:
    """The smoke model and data, made if no test made them before."""
    folder, command = smoke_command("smoke:sums", os.environ)
    if not (folder / "COMPLETE").exists():
        subprocess.run(command, check=True)
    return folder


@pytest.fixture
def hub(smoke_task: Path) -> Iterator[FakeHub]:
    with FakeHub().running() as fake:
        fake.add("model", "ada/sums", smoke_task / "model", license="apache-2.0")
        rows = {name: (smoke_task / f"{name}.jsonl").read_bytes() for name in ("train", "test")}
        fake.add("dataset", "ada/rows", {f"data/{name}.jsonl": content for name, content in rows.items()})
        fake.add("dataset", "HuggingFaceH4/MATH-500", {"test.jsonl": rows["test"]})
        yield fake


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., str]:
    """``recipe(KEY=VALUE, ...)``: the smoke recipe on the hub's model and data, with keys changed."""

    def write(**changes: Any) -> str:
        keys = {**yaml.safe_load(SMOKE.read_text()), "model_name_or_path": "ada/sums", "dataset_name": "ada/rows"}
        path = tmp_path / "sums.yaml"
        path.write_text(yaml.safe_dump({**keys, **changes}))
        return str(path)

    return write


def test_the_smoke_recipe_trains_with_the_network_cut_off(launch: Callable[..., Launch], smoke_task: Path) -> None:
    run = launch(command=without_network(GRPO, "launch", str(SMOKE), *SHORT))
    assert run.wait() == 0, run.output
    assert run.summary()["status"] == "completed" and len(run.rows()) == 2


def test_a_fetched_recipe_trains_with_the_network_cut_off(
    launch: Callable[..., Launch], recipe: Callable[..., str], hub: FakeHub, tmp_path: Path
) -> None:
    path = recipe(eval_strategy="steps", eval_steps=1, benchmarks=["math_500"])
    variables = {**hub.environment(), "CACHE_ROOT": str(tmp_path / "cache")}
    without = launch(command=without_network(GRPO, "launch", path, *SHORT), folder="without", **variables)
    assert without.wait(60) == 2, without.output
    assert f"grpo fetch {path} --max_steps 2 --save_steps 100" in without.output
    assert not (without.folder / "runs").exists()

    fetch = launch(command=[GRPO, "fetch", path], folder="fetch", **variables)
    assert fetch.wait(60) == 0, fetch.output
    requests_before = len(hub.requests)
    run = launch(command=without_network(GRPO, "launch", path, *SHORT), folder="with", **variables)
    run.cwd = run.folder
    assert run.wait() == 0, run.output
    assert len(hub.requests) == requests_before and len(run.rows()) == 2

    commits = {name: repo.at("main") for (_, name), repo in hub.repos.items()}
    identity = json.loads((run.run_dir / "run.json").read_text())
    assert {source["id"]: source["commit"] for source in identity["sources"]} == commits
    snapshot = f"snapshots/{commits['ada/sums']}"
    processes = json.loads((run.run_dir / "plan.json").read_text())["processes"]
    for role in ("server", "trainer"):
        (plan,) = [process for process in processes if process["role"] == role]
        assert any(word.endswith(snapshot) for word in plan["argv"]) and plan["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "80 prompts (80 read" in run.log("trainer")
    assert "evaluating on 20 of 20 rows" in run.log("trainer") and "final_eval_reward" in run.summary()
    assert run.summary()["benchmarks"]["math_500"]


def test_a_run_publishes_its_model_once(
    launch: Callable[..., Launch], recipe: Callable[..., str], hub: FakeHub, tmp_path: Path
) -> None:
    path = recipe(push_to_hub=True, hub_model_id="sumlab/sums")
    flags = ("--use_vllm", "false", "--max_steps", "4", "--save_steps", "2")
    variables = {**hub.environment(WRITER), "CACHE_ROOT": str(tmp_path / "cache")}
    run = launch(path, *flags, **variables)
    assert run.wait() == 0, run.output

    repo = hub.repos["model", "sumlab/sums"]
    model = {file.name for file in (run.run_dir / "model").iterdir()} - {"training_args.bin"}
    root = {name for name in repo.files() if "/" not in name} - {".gitattributes"}
    assert repo.private and root == model and "README.md" in root
    final = (run.run_dir / "model" / "model.safetensors").read_bytes()
    assert repo.files()["model.safetensors"] == final
    assert repo.messages == ["initial commit", "Final model"]
    published = run.summary()["published"]
    assert published["commit"] == repo.at("main") and f"published in {published['url']}" in run.output
    _, head, card = repo.files()["README.md"].decode().split("---\n", 2)
    named = yaml.safe_load(head)
    assert (named["base_model"], named["license"]) == ("ada/sums", "apache-2.0") and "4 optimizer steps" in card
    for name, content in repo.files().items():
        assert WRITER.encode() not in content and SECRET.encode() not in content, name
    assert all(WRITER.encode() not in file.read_bytes() for file in run.folder.rglob("*") if file.is_file())


def test_a_run_whose_push_fails_ends_well_and_keeps_its_model(
    launch: Callable[..., Launch], recipe: Callable[..., str], hub: FakeHub, tmp_path: Path
) -> None:
    hub.failing = {"/commit/": 3}
    path = recipe(push_to_hub=True, run_name="unlucky")
    variables = {**hub.environment(WRITER), "CACHE_ROOT": str(tmp_path / "cache")}
    run = launch(path, *SHORT, "--use_vllm", "false", **variables)
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["status"] == "completed" and "(3 attempts)" in summary["published"]["error"]
    assert "NOT published" in run.output and "Publish it with: hf upload ada/unlucky " in run.output
    assert (run.run_dir / "model" / "model.safetensors").is_file()
