"""List the models and datasets that a recipe reads, and find them on this machine with their commits. No torch.

A fetched asset has a record, a small JSON file under ``<CACHE_ROOT>/fetched``. The record is valid only while every
file in it exists with its full size: the hub client's offline lookup does not notice files that a purge removed.

    assets = find_assets(recipe, os.environ)
    print(assets.missing)
"""

import functools
import hashlib
import json
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.built_in import require_smoke_space
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, explain_unreachable_hub, hub_answers
from grpo_recipes.paths import cache_root, module_command, shell_path, shell_quote
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import BUILDERS
from grpo_recipes.recipe.document import as_words
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.generated import generated, has_scheme
from grpo_recipes.recipe.registry import benchmark_sources, list_reward_models
from grpo_recipes.runs.checkpoints import recording_changes
from grpo_recipes.runs.rundir import Run, load_json_mapping, read_json, write_json
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

MODEL, DATASET = "model", "dataset"
DatasetFinder = Callable[[str, str | None, str], Path | None]
_ROWS_PER_PROMPT = 2  # rows fetched from a stream per prompt, since too long prompts and duplicates are dropped
_EDGE_BYTES = 1 << 20
_RECORDED_FIELDS = ("kind", "id", "config", "split", "limit", "revision", "commit", "path", "licence")  # in run.json


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A model with its tokenizer, or one split of a dataset: its name in the recipe, and its path once it is found."""

    kind: str  # model or dataset
    id: str  # hub id, or a local file or folder
    config: str | None = None  # configuration of the dataset
    split: str | None = None
    limit: int | None = None  # only its first rows (a streamed dataset)
    revision: str | None = "main"  # requested branch, tag or commit; None for assets that do not come from the hub
    where: str = ""  # the recipe's line with the name
    code: bool = False  # whether it includes the Python files of the model's repository (trust_remote_code)
    # The fields below are set once it is found.
    commit: str = ""  # the commit in use; for local files, a fingerprint of names, sizes and small files
    path: str = ""  # for a dataset from the hub, the folder that ``Dataset.save_to_disk`` wrote; "." for generated rows
    licence: str | None = None  # the license named on the hub's page
    files: Mapping[str, int] = field(default_factory=dict)  # names and sizes in bytes of fetched files

    def __str__(self) -> str:
        """Return e.g. "dataset openai/gsm8k (main, train, first 100 rows)"."""
        rows = f"first {self.limit:,} rows" if self.limit else None
        details = ", ".join(part for part in (self.config, self.split, rows) if part)
        return f"{self.kind} {self.id}" + (f" ({details})" if details else "")

    @property
    def identity(self) -> tuple[Any, ...]:
        """The fields that identify the asset independently of its revision."""
        return self.kind, self.id, self.config, self.split, self.limit

    @property
    def from_hub(self) -> bool:
        """Whether the asset comes from the hub; local and generated assets have no revision."""
        return self.revision is not None

    @property
    def is_local(self) -> bool:
        """Whether the name is a file, a folder or a built-in asset, not a hub id."""
        is_path = has_scheme(self.id) or self.id.startswith((SMOKE_SCHEME, "/", "./", "../", "~"))
        return is_path or os.path.exists(self.id) or (self.kind == DATASET and self.id.endswith(tuple(BUILDERS)))


@dataclass(frozen=True)
class Assets:
    """All models and datasets of a run: those on this machine, and those missing from the hub."""

    present: list[Asset]
    missing: list[Asset]
    trained: str = ""  # name of the model that is trained and served

    @property
    def model(self) -> Asset | None:
        """The model that is trained and served, not its reference or its teacher; None if it is missing."""
        return self.find_model(self.trained)

    def find_model(self, name: str | None) -> Asset | None:
        """Return the model with this name, or None if it is missing."""
        return next((asset for asset in self.present if (asset.kind, asset.id) == (MODEL, name)), None)

    @property
    def lookup(self) -> DatasetFinder:
        """A function ``lookup(id, config, split)`` that returns the folder of a hub dataset in ``present``, or None."""
        datasets = [asset for asset in self.present if asset.kind != MODEL and asset.from_hub]
        paths = {(asset.id, asset.config, asset.split): Path(asset.path) for asset in datasets}
        return lambda name, config, split: paths.get((name, config, split))

    def offline_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that keep Hugging Face libraries offline during the run.

        Return no variables if assets are missing or the user set HF_HUB_OFFLINE.
        """
        if self.missing or "HF_HUB_OFFLINE" in environment:
            return {}
        return {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def notes(self, recipe: Recipe) -> list[str]:
        """Return a line for the printed plan of ``recipe`` for each downloaded and each missing asset of the hub."""
        fetched = [
            f"{asset.kind} {asset.id} at {asset.commit[:12]}, fetched" for asset in self.present if asset.from_hub
        ]
        command = format_fetch_command(recipe)
        return fetched + [f"{asset} is missing: the launch downloads it, or run {command}" for asset in self.missing]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the found assets as plain data for ``run.json`` and ``sources.json``."""
        return [{name: getattr(asset, name) for name in _RECORDED_FIELDS} for asset in self.present]


def format_fetch_command(recipe: Recipe) -> str:
    """Return the command that downloads the models and data of a recipe, with the flags that set its keys."""
    flags = {key: value for key, value in recipe.values.items() if value.source.startswith("--")}
    return " ".join(["grpo fetch", shell_path(recipe.path), *map(shell_quote, as_words(flags))])


def list_assets(recipe: Recipe, local: bool = False) -> list[Asset]:
    """Return the models and datasets that a run reads from the hub, or its local assets if ``local`` is true.

    There are no duplicates. If a dataset occurs with several row limits, the entry without a limit is returned, or else
    the entry with the largest limit.
    """
    assets: dict[tuple[Any, ...], Asset] = {}
    for asset in _iterate_recipe_assets(recipe):
        identity = replace(asset, limit=None).identity
        previous = assets.get(identity)
        if asset.id and (previous is None or (asset.limit or math.inf) > (previous.limit or math.inf)):
            assets[identity] = asset
    return [asset for asset in assets.values() if asset.is_local == local]


def _iterate_recipe_assets(recipe: Recipe) -> Iterator[Asset]:
    """Yield the models, the training and evaluation sets and the benchmarks of a recipe, possibly with duplicates.

    An asset whose key is not set has an empty id.
    """

    def dataset(key: str, name: str | None, config: str | None, split: str | None, limit: int | None = None) -> Asset:
        """Return a dataset that the recipe key ``key`` names; its id is empty without a name."""
        return Asset(kind=DATASET, id=name or "", config=config, split=split, limit=limit, where=recipe.source(key))

    model, where = recipe.model.name, recipe.source("model_name_or_path")
    code = recipe.model.trust_remote_code
    yield Asset(kind=MODEL, id=model, revision=recipe.model.revision, where=where, code=code)
    for key in ("ref_model_name_or_path", "teacher_model_name_or_path"):
        yield Asset(kind=MODEL, id=recipe[key] or "", where=recipe.source(key), code=code)
    for name in list_reward_models(recipe.rewards.funcs):
        yield Asset(kind=MODEL, id=name, where=recipe.source("reward_funcs"), code=code)
    streaming, mixture, config = recipe.data.streaming, recipe.data.mixture, recipe.data.config
    if mixture:
        for entry in mixture.get("datasets", []):
            yield dataset("dataset_mixture", entry.get("id"), entry.get("config"), entry.get("split") or "train")
    else:
        most_prompts = recipe.data.max_train_prompts if streaming else None
        limit = _ROWS_PER_PROMPT * most_prompts if most_prompts else None
        yield dataset("dataset_name", recipe.data.name, config, recipe.data.train_split, limit)
    if recipe.evaluation.strategy != "no":
        # For a stream: enough rows that the share eval_subsample of them has eval_max_prompts rows.
        limit = math.ceil(recipe.evaluation.max_prompts / recipe.evaluation.subsample) if streaming else None
        if recipe.evaluation.dataset_name:
            name, split = recipe.evaluation.dataset_name, recipe.evaluation.dataset_split
            yield dataset("eval_dataset_name", name, recipe.evaluation.dataset_config, split, limit)
        elif not mixture:
            yield dataset("dataset_name", recipe.data.name, config, recipe.data.test_split, limit)
    for list_extension_assets in parts("assets"):
        for key, name, config, split in list_extension_assets(recipe.__getitem__):
            yield dataset(key, name, config, split)
    for name, config, split in benchmark_sources(recipe.evaluation.benchmarks):
        yield dataset("benchmarks", name, config, split)


def list_hub_assets(recipe: Recipe, recorded: list[dict[str, Any]] | None = None) -> list[Asset]:
    """Return the models and datasets that a run reads from the hub.

    An asset that ``recorded`` contains has its recorded commit as the revision.
    """
    commits = {asset.identity: asset.commit for asset in _read_assets(recorded) if asset.from_hub}
    return [replace(asset, revision=commits.get(asset.identity, asset.revision)) for asset in list_assets(recipe)]


def list_local_assets(recipe: Recipe, environment: Mapping[str, str]) -> list[Asset]:
    """Return the local files, folders and built-in data that a run reads, with their fingerprints as commits.

    Raise ConfigError if a file or folder does not exist.
    """
    assets = []
    for asset in list_assets(recipe, local=True):
        if asset.id.startswith(SMOKE_SCHEME):
            path = smoke_folder(asset.id, environment)
            commit = path.name
        elif data := generated(asset.id):
            path, commit = Path(), data.fingerprint(recipe.__getitem__)
        else:
            path = Path(os.path.expanduser(asset.id)).absolute()
            if not path.exists():
                fix = "set the path of an existing file or folder, or a hub id"
                raise config_error(asset.where, f"no file or folder '{asset.id}'", fix)
            commit = fingerprint(path)
        assets.append(replace(asset, revision=None, commit=commit, path=str(path)))
    return assets


def fingerprint(path: Path) -> str:
    """Return a hash of 16 hex digits of a local file or folder, cheap for weights of any size.

    For a folder it covers names, sizes and the contents of small JSON files, except hidden files. For a file it covers
    the size and the first and last MiB.
    """
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        relative = file.relative_to(path)
        if not file.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        size = file.stat().st_size
        digest.update(f"{relative if file != path else ''} {size}\n".encode())
        if file == path or (file.suffix == ".json" and size <= _EDGE_BYTES):
            with file.open("rb") as stream:
                digest.update(stream.read(_EDGE_BYTES))
                stream.seek(max(stream.tell(), size - _EDGE_BYTES))
                digest.update(stream.read())
    return digest.hexdigest()[:16]


def find_assets(recipe: Recipe, environment: Mapping[str, str], recorded: list[dict[str, Any]] | None = None) -> Assets:
    """Find a recipe's models and datasets on this machine, and return the found and the missing assets.

    A resumed run uses the ``recorded`` commits. Nothing is downloaded. Raise ConfigError if a local file or folder is
    missing.
    """
    local, from_hub = list_local_assets(recipe, environment), list_hub_assets(recipe, recorded)
    records = [find_record(asset, environment) for asset in from_hub]
    missing = [asset for asset, record in zip(from_hub, records, strict=True) if record is None]
    return Assets([*local, *filter(None, records)], missing, recipe.model.name)


def ensure_assets(
    recipe: Recipe, environment: Mapping[str, str], recorded: list[dict[str, Any]] | None, arguments: Sequence[str],
    allow_changed: bool = False,
) -> Assets:  # fmt: skip
    """Return a run's models and datasets, after downloading the missing ones; a launch calls this first.

    ``grpo fetch`` with these ``arguments`` downloads them in another process, since a launcher lives for days and
    the hub's clients never release their memory. A resumed run uses the ``recorded`` commits. Raise ConfigError if
    the hub does not answer or the download fails, if a missing smoke task can't be written, and if local files changed
    since the record, unless ``allow_changed``. Raise SystemExit if the user interrupts the download.
    """
    assets = find_assets(recipe, environment, recorded)
    recorded_commits = {asset.identity: asset.commit for asset in _read_assets(recorded) if not asset.from_hub}
    for asset in assets.present:
        if asset.id.startswith(SMOKE_SCHEME):
            require_smoke_space(Path(asset.path))
        is_changed = recorded_commits.get(asset.identity, asset.commit) != asset.commit
        if is_changed and not (asset.from_hub or allow_changed):
            fault = f"the {asset.kind} '{asset.id}' has changed since the run started"
            raise config_error("--resume", fault, "restore it, or add --allow-changed-code")
    if not assets.missing:
        return assets
    command = f"grpo fetch {' '.join(map(shell_quote, arguments))}"
    if not hub_answers(environment):
        reason, fix = explain_unreachable_hub(environment), f"run on the login node: {command}"
        raise ConfigError(
            *(Problem(asset.where, f"{asset} is not on this machine and {reason}", fix) for asset in assets.missing)
        )
    print(f"grpo: missing: {', '.join(map(str, assets.missing))}; running {command}", flush=True)
    argv = module_command("grpo_recipes", "fetch", *arguments)
    end_with_us = functools.partial(die_with_parent, os.getpid())
    code = subprocess.run(argv, env=dict(environment), preexec_fn=end_with_us, check=False).returncode
    if code == EXIT_INTERRUPTED:
        raise SystemExit(code)
    assets = find_assets(recipe, environment, recorded)
    if code or assets.missing:
        fault = f"ended with code {code}" if code else f"did not download {assets.missing[0]}"
        raise config_error("grpo fetch", fault, f"fix the problem printed above, then run: {command}")
    return assets


def record_assets(run: Run, assets: Assets) -> None:
    """Write the assets of a run to its directory: commits to ``run.json`` once, current paths to ``sources.json``.

    The trainers read ``sources.json``.
    """
    with recording_changes(run.folder):
        if "sources" not in run.identity:
            run.identity["sources"] = assets.as_json()
            write_json(run.folder / "run.json", run.identity)
        write_json(run.folder / "sources.json", {"sources": assets.as_json()})


def find_fetched_datasets(folder: Path) -> DatasetFinder:
    """Return a function ``lookup(id, config, split)`` that finds a run's downloaded datasets by ``sources.json``.

    It returns a folder for ``datasets.load_from_disk``, or None.
    """
    return Assets(_read_assets(read_json(folder / "sources.json").get("sources")), []).lookup


def find_model_folders(folder: Path) -> dict[str, str]:
    """Return the folders of a run's models by their names in the recipe, by ``sources.json``."""
    assets = _read_assets(read_json(folder / "sources.json").get("sources"))
    return {asset.id: asset.path for asset in assets if asset.kind == MODEL and asset.path}


def _read_assets(entries: list[dict[str, Any]] | None) -> list[Asset]:
    """Return the assets in entries of ``run.json`` or ``sources.json``."""
    return [Asset(**entry) for entry in entries or []]


def write_record(asset: Asset, environment: Mapping[str, str]) -> None:
    """Write the record of a downloaded asset twice: under its requested revision and, for resumed runs, its commit."""
    content = {key: value for key, value in asdict(asset).items() if key not in ("where", "code")}
    for revision in (asset.commit, asset.revision):
        path = get_record_path(replace(asset, revision=revision), environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)


def find_record(asset: Asset, environment: Mapping[str, str]) -> Asset | None:
    """Return a downloaded asset with its recorded commit and files.

    Return None if it has no valid record, or if one of its files is missing or has another size.
    """
    path = get_record_path(asset, environment)
    content = (load_json_mapping(path.read_bytes()) if path.is_file() else None) or {}
    if not {"commit", "path", "files"} <= content.keys():
        return None  # not fetched, or damaged
    fields: dict[str, Any] = {name: content.get(name) for name in ("commit", "path", "licence", "files")}
    record = replace(asset, **fields)
    files = [(Path(record.path, name), size) for name, size in record.files.items()]
    return record if all(file.is_file() and file.stat().st_size == size for file, size in files) else None


def get_record_path(asset: Asset, environment: Mapping[str, str]) -> Path:
    """Return the path of an asset's record, ``<CACHE_ROOT>/fetched/<name>.json``.

    The name has kind, asset, revision and a hash, so that assets that differ in one of their fields have two records.
    """
    identity_hash = hashlib.sha256(json.dumps([*asset.identity, asset.revision, asset.code]).encode()).hexdigest()
    name = f"{asset.kind}--{_format_asset_name(asset)}@{quote(str(asset.revision), safe='')[:12]}-{identity_hash[:8]}"
    return cache_root(environment) / "fetched" / f"{name}.json"


def get_dataset_folder(asset: Asset, commit: str, environment: Mapping[str, str]) -> Path:
    """Return the folder of a downloaded dataset: ``<CACHE_ROOT>/datasets/<id>--<config>--<split>--<commit>``."""
    return cache_root(environment) / "datasets" / f"{_format_asset_name(asset)}--{commit[:12]}"


def _format_asset_name(asset: Asset) -> str:
    """Return an asset's id, config, split and row limit as part of a file name, with special characters quoted."""
    rows = f"first-{asset.limit}" if asset.limit else None
    parts = "--".join(part for part in (asset.id, asset.config, asset.split, rows) if part)
    return quote(parts, safe="").replace("%2F", "--")
