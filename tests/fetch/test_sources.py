"""What a run uses: commits, fingerprints, and what its processes are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import assets_of, make_record, write_record
from grpo_recipes.fetch.sources import changed_sources, fetched_sets, find_sources, fingerprint, record_sources
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.rundir import Run, read_json, write_json

Read = Callable[..., Recipe]
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"CACHE_ROOT": str(tmp_path / "cache")}


def fetch(recipe: Recipe, environment: dict[str, str], commit: str, kind: str = "") -> None:
    for asset in assets_of(recipe):
        if asset.kind.startswith(kind):
            folder = Path(environment["CACHE_ROOT"]) / f"{asset.kind}-{commit[:2]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "file").write_bytes(b"1234")
            licence = "apache-2.0" if asset.kind == "model" else None
            write_record(make_record(asset, commit, folder, {"file": 4}, licence), asset, environment)


def plan(recipe: Recipe, environment: dict[str, str], sources: object) -> tuple[str, list[dict[str, str]], list[str]]:
    names = Names(Path("runs/a-b"), "a", "a-1", "b")
    made = make_plan(recipe, Resources("cuda", ("0", "1"), 8), environment, names, sources=sources)  # type: ignore[arg-type]
    servers = [process.argv[process.argv.index("--model") + 1] for process in made.processes[:1]]
    trainers = [process.argv[process.argv.index("--model_name_or_path") + 1] for process in made.processes[1:]]
    assert servers == trainers == [made.model]
    return made.model, [process.environment for process in made.processes], made.notes


def test_server_and_trainer_use_one_folder_and_stay_offline(read: Read, environment: dict[str, str]) -> None:
    recipe = read()
    fetch(recipe, environment, OLD)
    sources = find_sources(recipe, environment)
    assert sources.missing == []
    model, variables, notes = plan(recipe, environment, sources)
    assert model == f"{environment['CACHE_ROOT']}/model-aa"
    assert all(one["HF_HUB_OFFLINE"] == one["HF_DATASETS_OFFLINE"] == "1" for one in variables)
    assert notes == [
        f"model Qwen/Qwen2.5-1.5B-Instruct at {OLD[:12]}, fetched",
        f"dataset openai/gsm8k at {OLD[:12]}, fetched",
    ]
    _, told_otherwise, _ = plan(recipe, {**environment, "HF_HUB_OFFLINE": "0"}, sources)
    assert all("HF_HUB_OFFLINE" not in one and "HF_DATASETS_OFFLINE" not in one for one in told_otherwise)


def test_what_is_missing_is_named_and_nothing_is_told_to_stay_offline(read: Read, environment: dict[str, str]) -> None:
    recipe = read()
    fetch(recipe, environment, OLD, "dataset")
    sources = find_sources(recipe, environment)
    assert [asset.id for asset in sources.missing] == ["Qwen/Qwen2.5-1.5B-Instruct"]
    model, variables, notes = plan(recipe, environment, sources)
    assert model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert all("HF_HUB_OFFLINE" not in one for one in variables)
    assert "model Qwen/Qwen2.5-1.5B-Instruct is not here yet: launch fetches it, or grpo fetch does" in notes


def test_a_resumed_run_uses_its_commits_whatever_was_fetched_later(
    read: Read, environment: dict[str, str], tmp_path: Path
) -> None:
    recipe = read()
    fetch(recipe, environment, OLD)
    run = Run(tmp_path, {"run_name": "a"})
    record_sources(run, find_sources(recipe, environment))
    fetch(recipe, environment, NEW)
    recorded = read_json(tmp_path / "run.json")["sources"]
    assert [(one["id"], one["commit"], one["licence"]) for one in recorded] == [
        ("Qwen/Qwen2.5-1.5B-Instruct", OLD, "apache-2.0"),
        ("openai/gsm8k", OLD, None),
    ]
    assert {source.commit for source in find_sources(recipe, environment).found} == {NEW}
    assert {source.commit for source in find_sources(recipe, environment, recorded).found} == {OLD}

    (Path(environment["CACHE_ROOT"]) / "model-aa" / "file").unlink()
    gone = find_sources(recipe, environment, recorded)
    assert [(asset.kind, asset.revision) for asset in gone.missing] == [("model", OLD)]


def test_identity_is_made_once_and_places_each_time(read: Read, environment: dict[str, str], tmp_path: Path) -> None:
    recipe = read()
    fetch(recipe, environment, OLD)
    run = Run(tmp_path, {"run_name": "a"})
    record_sources(run, find_sources(recipe, environment))
    made = (tmp_path / "run.json").read_text()
    fetch(recipe, environment, NEW)
    record_sources(run, find_sources(recipe, environment))
    assert (tmp_path / "run.json").read_text() == made
    assert fetched_sets(tmp_path)("openai/gsm8k", None, "train") == Path(environment["CACHE_ROOT"]) / "dataset-bb"


def test_only_fetched_datasets_are_looked_up(tmp_path: Path, read: Read, environment: dict[str, str]) -> None:
    assert fetched_sets(tmp_path)("ada/rows", None, "train") is None
    (tmp_path / "rows.jsonl").write_text('{"problem": 1, "answer": 2}\n')
    recipe = read(dataset_name=str(tmp_path / "rows.jsonl"))
    fetch(recipe, environment, OLD)
    record_sources(Run(tmp_path, {}), find_sources(recipe, environment))
    lookup = fetched_sets(tmp_path)
    assert lookup(str(tmp_path / "rows.jsonl"), None, "train") is None
    assert lookup("Qwen/Qwen2.5-1.5B-Instruct", None, "train") is None


def test_a_local_model_that_changed_is_noticed(read: Read, environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", {"hidden_size": 8})
    recipe = read(model_name_or_path=str(folder))
    fetch(recipe, environment, OLD)
    recorded = find_sources(recipe, environment).as_json()
    assert changed_sources(find_sources(recipe, environment), recorded) is None
    write_json(folder / "config.json", {"hidden_size": 9})
    told = changed_sources(find_sources(recipe, environment), recorded)
    assert told == f"the model '{folder}' is not what the run began with"
    assert changed_sources(find_sources(recipe, environment), None) is None


def test_a_local_file_that_is_not_there_is_refused(read: Read, environment: dict[str, str]) -> None:
    recipe = read(dataset_mixture={"datasets": [{"id": "./none.jsonl"}]}, without="dataset_name")
    with pytest.raises(ConfigError, match=r"recipe.yaml:\d+: no file or folder './none.jsonl'"):
        find_sources(recipe, environment)


def test_the_fingerprint_sees_sizes_small_json_and_both_ends_of_a_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "rows.jsonl"
    folder.mkdir()
    seen = [fingerprint(folder)]
    (folder / "config.json").write_text("{}")
    seen.append(fingerprint(folder))
    (folder / "config.json").write_text("[]")
    seen.append(fingerprint(folder))
    (folder / "model.safetensors").write_bytes(b"1")
    seen.append(fingerprint(folder))
    for content in (b"a" * 3_000_000, b"b" + b"a" * 2_999_999, b"a" * 2_999_999 + b"b", b"a" * 3_000_001):
        file.write_bytes(content)
        seen.append(fingerprint(file))
    assert len(set(seen)) == len(seen)
    assert fingerprint(file) == fingerprint(file)


def test_the_fingerprint_of_a_folder_sees_the_folders_in_it(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    seen = []
    for count in (1, 200):
        DatasetDict({"train": Dataset.from_dict({"problem": ["1+1="] * count})}).save_to_disk(str(tmp_path / "saved"))
        seen.append(fingerprint(tmp_path / "saved"))
    (tmp_path / "saved" / ".cache").mkdir()
    (tmp_path / "saved" / ".cache" / "left by a tool").touch()
    seen.append(fingerprint(tmp_path / "saved"))
    assert seen[0] != seen[1] == seen[2]
