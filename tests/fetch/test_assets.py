"""Assets of a recipe, records of downloads, and the commits, fingerprints and variables of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import (
    Asset,
    ensure_assets,
    find_assets,
    find_fetched_datasets,
    find_record,
    fingerprint,
    get_dataset_folder,
    get_record_path,
    list_assets,
    record_assets,
    write_record,
)
from grpo_recipes.paths import shell_path
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.rundir import Run, read_json, write_json

Read = Callable[..., Recipe]
COMMIT = "0123456789abcdef" * 2 + "01234567"
OLD, NEW = "a" * 40, "b" * 40
ROWS = Asset(kind="dataset", id="ada/rows", where="recipe.yaml:3", config="main", split="train")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"CACHE_ROOT": str(tmp_path / "cache")}


def names(assets: list[Asset]) -> list[tuple[object, ...]]:
    return [(asset.id, asset.config, asset.split, asset.limit) for asset in assets]


def test_model_and_training_set_with_their_lines(read: Read) -> None:
    model, dataset = list_assets(read(model_revision="v2", dataset_config="main"))
    assert (model.kind, model.id, model.revision) == ("model", "Qwen/Qwen2.5-1.5B-Instruct", "v2")
    assert (dataset.kind, dataset.id, dataset.config, dataset.split) == ("dataset", "openai/gsm8k", "main", "train")
    assert "/recipe.yaml:" in model.where and model.where != dataset.where
    assert str(dataset) == "dataset openai/gsm8k (main, train)"


def test_a_teacher_is_an_asset_and_not_the_model(read: Read, environment: dict[str, str], tmp_path: Path) -> None:
    assert names(list_assets(read(teacher_model_name_or_path="acme/teacher")))[1][0] == "acme/teacher"
    (tmp_path / "teacher").mkdir()
    assets = find_assets(read(teacher_model_name_or_path=str(tmp_path / "teacher")), environment)
    teacher = assets.find_model(str(tmp_path / "teacher"))
    assert teacher is not None and teacher.path == str(tmp_path / "teacher") and assets.model is None


def test_a_reward_model_is_an_asset_once(read: Read) -> None:
    listed = list_assets(read(reward_funcs=["math_verify", "acme/judge", "acme/judge"]))
    assert [asset.id for asset in listed if asset.kind == "model"][1:] == ["acme/judge"]


def test_the_evaluation_set_when_there_is_evaluation(read: Read) -> None:
    assert len(list_assets(read(eval_dataset_name="ada/held"))) == 2
    named = read(eval_dataset_name="ada/held", eval_dataset_config="hard", eval_strategy="steps", eval_steps=5)
    assert names(list_assets(named))[2:] == [("ada/held", "hard", "test", None)]
    named_split = read(eval_strategy="steps", eval_steps=5, dataset_test_split="validation")
    assert names(list_assets(named_split))[2:] == [("openai/gsm8k", None, "validation", None)]


def test_every_dataset_of_a_mixture(read: Read) -> None:
    entries = [{"id": "ada/one"}, {"id": "ada/two", "config": "main", "split": "rest"}, {"id": "./three.jsonl"}]
    recipe = read(without="dataset_name", dataset_mixture={"datasets": entries})
    assert names(list_assets(recipe))[1:] == [("ada/one", None, "train", None), ("ada/two", "main", "rest", None)]
    assert names(list_assets(recipe, local=True)) == [("./three.jsonl", None, "train", None)]


def test_benchmarks_that_are_on_the_hub(read: Read) -> None:
    recipe = read(benchmarks=["math_500", "smoke:sums"])
    assert names(list_assets(recipe))[2:] == [("HuggingFaceH4/MATH-500", None, "test", None)]


def test_a_stream_is_limited_with_rows_to_spare(read: Read) -> None:
    stream = read(dataset_streaming=True, max_train_prompts=50, eval_strategy="steps", eval_steps=5)
    assert names(list_assets(stream))[1:] == [
        ("openai/gsm8k", None, "train", 100),
        ("openai/gsm8k", None, "test", 1_000),
    ]


def test_one_dataset_used_twice_is_one_asset_with_the_most_rows(read: Read) -> None:
    twice = read(
        dataset_streaming=True,
        max_train_prompts=50,
        eval_strategy="steps",
        eval_steps=5,
        eval_dataset_name="openai/gsm8k",
        eval_dataset_split="train",
    )
    assert names(list_assets(twice))[1:] == [("openai/gsm8k", None, "train", 1_000)]


@pytest.mark.parametrize("name", ["smoke:sums", "/data/rows", "~/rows", "rows.jsonl", "sub/rows.parquet"])
def test_what_is_local_is_not_of_the_hub(read: Read, name: str) -> None:
    assert [asset.id for asset in list_assets(read(dataset_name=name))] == ["Qwen/Qwen2.5-1.5B-Instruct"]


def test_a_folder_named_like_a_hub_id_is_the_folder(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = read(model_name_or_path="ada/sums")
    assert [asset.id for asset in list_assets(recipe)] == ["ada/sums", "openai/gsm8k"]
    (tmp_path / "ada" / "sums").mkdir(parents=True)
    assert [asset.id for asset in list_assets(recipe, local=True)] == ["ada/sums"]


def fetched(folder: Path, environment: dict[str, str], asset: Asset = ROWS) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "data.arrow").write_bytes(b"rows")
    downloaded = replace(asset, commit=COMMIT, path=str(folder), files={"data.arrow": 4})
    write_record(downloaded, environment)


def test_a_record_is_found_under_its_revision_and_its_commit(tmp_path: Path, environment: dict[str, str]) -> None:
    assert find_record(ROWS, environment) is None
    fetched(tmp_path / "rows", environment)
    for revision in ("main", COMMIT):
        record = find_record(replace(ROWS, revision=revision), environment)
        assert record is not None
        assert (record.commit, record.path, record.files) == (COMMIT, str(tmp_path / "rows"), {"data.arrow": 4})
    for other in (replace(ROWS, revision="v2"), replace(ROWS, split="test"), replace(ROWS, config=None)):
        assert find_record(other, environment) is None


@pytest.mark.parametrize("damage", ["missing", "short", "folder"])
def test_a_record_counts_only_while_its_files_are_whole(
    tmp_path: Path, environment: dict[str, str], damage: str
) -> None:
    fetched(tmp_path / "rows", environment)
    file = tmp_path / "rows" / "data.arrow"
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(b"ro")
    else:
        (tmp_path / "rows").rename(tmp_path / "elsewhere")
    assert find_record(ROWS, environment) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"kind": "dataset"}', '{"of": "another version"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, environment: dict[str, str], content: str) -> None:
    fetched(tmp_path / "rows", environment)
    get_record_path(ROWS, environment).write_text(content)
    assert find_record(ROWS, environment) is None


def test_datasets_have_folders_of_their_own(environment: dict[str, str], tmp_path: Path) -> None:
    datasets = tmp_path / "cache" / "datasets"
    assert get_dataset_folder(ROWS, COMMIT, environment) == datasets / "ada--rows--main--train--0123456789ab"
    assets = [
        *(replace(ROWS, split=split) for split in ("train", "test", "train[:10]", "train[:10%]", "train[10:]")),
        replace(ROWS, limit=10),
        replace(ROWS, config=None),
    ]
    assert len({get_dataset_folder(asset, COMMIT, environment) for asset in assets}) == len(assets)
    assert len({get_record_path(asset, environment) for asset in assets}) == len(assets)


def fetch(recipe: Recipe, environment: dict[str, str], commit: str, kind: str = "") -> None:
    for asset in list_assets(recipe):
        if asset.kind.startswith(kind):
            folder = Path(environment["CACHE_ROOT"]) / f"{asset.kind}-{commit[:2]}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "file").write_bytes(b"1234")
            licence = "apache-2.0" if asset.kind == "model" else None
            downloaded = replace(asset, commit=commit, path=str(folder), licence=licence, files={"file": 4})
            write_record(downloaded, environment)


def plan(recipe: Recipe, environment: dict[str, str], sources: object) -> tuple[str, list[dict[str, str]], list[str]]:
    names = Names(Path("runs/a-b"), "a", "a-1", "b")
    launch_plan = make_plan(recipe, Resources("cuda", ("0", "1"), 8), environment, names, sources=sources)  # type: ignore[arg-type]
    servers = [process.argv[process.argv.index("--model") + 1] for process in launch_plan.processes[:1]]
    trainers = [process.argv[process.argv.index("--model_name_or_path") + 1] for process in launch_plan.processes[1:]]
    assert servers == trainers == [launch_plan.model]
    return launch_plan.model, [process.environment for process in launch_plan.processes], launch_plan.notes


def test_server_and_trainer_use_one_folder_and_stay_offline(read: Read, environment: dict[str, str]) -> None:
    recipe = read()
    fetch(recipe, environment, OLD)
    sources = find_assets(recipe, environment)
    assert sources.missing == []
    model, variables, notes = plan(recipe, environment, sources)
    assert model == f"{environment['CACHE_ROOT']}/model-aa"
    assert all(
        process_variables["HF_HUB_OFFLINE"] == process_variables["HF_DATASETS_OFFLINE"] == "1"
        for process_variables in variables
    )
    assert notes == [
        f"model Qwen/Qwen2.5-1.5B-Instruct at {OLD[:12]}, fetched",
        f"dataset openai/gsm8k at {OLD[:12]}, fetched",
    ]
    _, told_otherwise, _ = plan(recipe, {**environment, "HF_HUB_OFFLINE": "0"}, sources)
    assert all(
        "HF_HUB_OFFLINE" not in process_variables and "HF_DATASETS_OFFLINE" not in process_variables
        for process_variables in told_otherwise
    )


def test_what_is_missing_is_named_and_nothing_is_told_to_stay_offline(read: Read, environment: dict[str, str]) -> None:
    recipe = read()
    fetch(recipe, environment, OLD, "dataset")
    sources = find_assets(recipe, environment)
    assert [asset.id for asset in sources.missing] == ["Qwen/Qwen2.5-1.5B-Instruct"]
    model, variables, notes = plan(recipe, environment, sources)
    assert model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert all("HF_HUB_OFFLINE" not in process_variables for process_variables in variables)
    (line,) = [line for line in notes if "is missing" in line]
    assert line.startswith("model Qwen/Qwen2.5-1.5B-Instruct is missing: the launch downloads it, or run grpo fetch ")
    assert shell_path(recipe.path) in line


def test_a_resumed_run_uses_its_commits_whatever_was_fetched_later(
    read: Read, environment: dict[str, str], tmp_path: Path
) -> None:
    recipe = read()
    fetch(recipe, environment, OLD)
    run = Run(tmp_path)
    record_assets(run, find_assets(recipe, environment))
    fetch(recipe, environment, NEW)
    recorded = read_json(tmp_path / "run.json")["sources"]
    assert [(source["id"], source["commit"], source["licence"]) for source in recorded] == [
        ("Qwen/Qwen2.5-1.5B-Instruct", OLD, "apache-2.0"),
        ("openai/gsm8k", OLD, None),
    ]
    assert {source.commit for source in find_assets(recipe, environment).present} == {NEW}
    assert {source.commit for source in find_assets(recipe, environment, recorded).present} == {OLD}

    (Path(environment["CACHE_ROOT"]) / "model-aa" / "file").unlink()
    gone = find_assets(recipe, environment, recorded)
    assert [(asset.kind, asset.revision) for asset in gone.missing] == [("model", OLD)]


def test_identity_is_made_once_and_places_each_time(read: Read, environment: dict[str, str], tmp_path: Path) -> None:
    recipe = read()
    fetch(recipe, environment, OLD)
    run = Run(tmp_path)
    record_assets(run, find_assets(recipe, environment))
    recorded = (tmp_path / "run.json").read_text()
    fetch(recipe, environment, NEW)
    record_assets(run, find_assets(recipe, environment))
    assert (tmp_path / "run.json").read_text() == recorded
    assert (
        find_fetched_datasets(tmp_path)("openai/gsm8k", None, "train") == Path(environment["CACHE_ROOT"]) / "dataset-bb"
    )


def test_only_fetched_datasets_are_looked_up(tmp_path: Path, read: Read, environment: dict[str, str]) -> None:
    assert find_fetched_datasets(tmp_path)("ada/rows", None, "train") is None
    (tmp_path / "rows.jsonl").write_text('{"problem": 1, "answer": 2}\n')
    recipe = read(dataset_name=str(tmp_path / "rows.jsonl"))
    fetch(recipe, environment, OLD)
    record_assets(Run(tmp_path), find_assets(recipe, environment))
    lookup = find_fetched_datasets(tmp_path)
    assert lookup(str(tmp_path / "rows.jsonl"), None, "train") is None
    assert lookup("Qwen/Qwen2.5-1.5B-Instruct", None, "train") is None


def test_a_local_model_that_changed_is_noticed(read: Read, environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", {"hidden_size": 8})
    recipe = read(model_name_or_path=str(folder))
    fetch(recipe, environment, OLD)
    recorded = find_assets(recipe, environment).as_json()
    assert ensure_assets(recipe, environment, recorded, []).present
    write_json(folder / "config.json", {"hidden_size": 9})
    with pytest.raises(ConfigError, match=f"the model '{folder}' has changed since the run started"):
        ensure_assets(recipe, environment, recorded, [])
    assert ensure_assets(recipe, environment, None, []).present


def test_a_local_file_that_is_not_there_is_refused(read: Read, environment: dict[str, str]) -> None:
    recipe = read(dataset_mixture={"datasets": [{"id": "./none.jsonl"}]}, without="dataset_name")
    with pytest.raises(ConfigError, match=r"recipe.yaml:\d+: no file or folder './none.jsonl'"):
        find_assets(recipe, environment)


def test_the_fingerprint_sees_sizes_small_json_and_both_ends_of_a_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "rows.jsonl"
    folder.mkdir()
    fingerprints = [fingerprint(folder)]
    (folder / "config.json").write_text("{}")
    fingerprints.append(fingerprint(folder))
    (folder / "config.json").write_text("[]")
    fingerprints.append(fingerprint(folder))
    (folder / "model.safetensors").write_bytes(b"1")
    fingerprints.append(fingerprint(folder))
    for content in (b"a" * 3_000_000, b"b" + b"a" * 2_999_999, b"a" * 2_999_999 + b"b", b"a" * 3_000_001):
        file.write_bytes(content)
        fingerprints.append(fingerprint(file))
    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprint(file) == fingerprint(file)


def test_the_fingerprint_of_a_folder_sees_the_folders_in_it(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    fingerprints = []
    for count in (1, 200):
        DatasetDict({"train": Dataset.from_dict({"problem": ["1+1="] * count})}).save_to_disk(str(tmp_path / "saved"))
        fingerprints.append(fingerprint(tmp_path / "saved"))
    (tmp_path / "saved" / ".cache").mkdir()
    (tmp_path / "saved" / ".cache" / "left by a tool").touch()
    fingerprints.append(fingerprint(tmp_path / "saved"))
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]
