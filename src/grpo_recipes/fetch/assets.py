"""Which models and datasets a recipe reads, which of them are on this machine, and at which commits. No torch.

A fetched asset has a record, one small JSON file under ``<CACHE_ROOT>/fetched``, which counts only while every file it
lists is there in its full size: the hub client's own offline lookup does not notice a file that a purge removed.
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
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, hub_answers, unreachable_reason
from grpo_recipes.paths import cache_root, python_module, shell_quote
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import BUILDERS
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.generated import generated, has_scheme
from grpo_recipes.recipe.registry import benchmark_sources
from grpo_recipes.runs.checkpoints import recording_changes
from grpo_recipes.runs.rundir import Run, json_mapping, read_json, write_json
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

MODEL, DATASET = "model", "dataset"
Lookup = Callable[[str, str | None, str], Path | None]
_SPARE = 2  # rows of a stream for each prompt kept: some are dropped as too long, or seen before
_EDGE_BYTES = 1 << 20
_OF_A_RUN = ("kind", "id", "config", "split", "limit", "revision", "commit", "path", "licence")  # kept in run.json


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A model with its tokenizer, or one split of a dataset: as a recipe names it, and its place once it is found."""

    kind: str  # model or dataset
    id: str  # hub id, or a local file or folder
    config: str | None = None  # configuration of the dataset
    split: str | None = None
    limit: int | None = None  # only its first rows (a streamed dataset)
    revision: str | None = "main"  # branch, tag or commit asked for; None for what does not come from the hub
    where: str = ""  # the recipe's line that names it
    code: bool = False  # whether Python files of the model's repository belong to it (trust_remote_code)
    # Known once it is found; of a dataset from the hub the path is what ``Dataset.save_to_disk`` wrote.
    commit: str = ""  # the commit in use; of local files a fingerprint of names, sizes and small files
    path: str = ""  # the current folder for rows that are made on the spot
    licence: str | None = None  # as the hub's page names it
    files: Mapping[str, int] = field(default_factory=dict)  # of a fetched one, with their sizes in bytes

    def __str__(self) -> str:
        rows = f"first {self.limit:,} rows" if self.limit else None
        inside = ", ".join(part for part in (self.config, self.split, rows) if part)
        return f"{self.kind} {self.id}" + (f" ({inside})" if inside else "")

    @property
    def same(self) -> tuple[Any, ...]:
        """What makes it the same asset at another revision."""
        return self.kind, self.id, self.config, self.split, self.limit

    @property
    def from_hub(self) -> bool:
        """Whether it came from the hub."""
        return self.revision is not None

    @property
    def is_local(self) -> bool:
        """Whether the name is a file, a folder or built in, not a hub id."""
        is_path = has_scheme(self.id) or self.id.startswith((SMOKE_SCHEME, "/", "./", "../", "~"))
        return is_path or os.path.exists(self.id) or (self.kind == DATASET and self.id.endswith(tuple(BUILDERS)))


@dataclass(frozen=True)
class Assets:
    """Everything a run reads: what is on this machine, and what of the hub is missing."""

    found: list[Asset]
    missing: list[Asset]

    @property
    def model(self) -> Asset | None:
        """The model trained and served."""
        return next((asset for asset in self.found if asset.kind == MODEL), None)

    @property
    def lookup(self) -> Lookup:
        """``lookup(id, config, split)`` returns the folder of a fetched dataset, None for one that is not fetched."""
        fetched = [asset for asset in self.found if asset.kind != MODEL and asset.from_hub]
        paths = {(asset.id, asset.config, asset.split): Path(asset.path) for asset in fetched}
        return lambda name, config, split: paths.get((name, config, split))

    def offline_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables that keep a run off the network once everything is here, unless the user set one."""
        is_free = self.missing or "HF_HUB_OFFLINE" in environment
        return {} if is_free else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def notes(self) -> list[str]:
        """Return a line for each fetched and each missing asset, for a plan."""
        here = [f"{one.kind} {one.id} at {one.commit[:12]}, fetched" for one in self.found if one.from_hub]
        return here + [f"{asset} is not here yet: launch fetches it, or grpo fetch does" for asset in self.missing]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the assets that were found as plain data."""
        return [{name: getattr(asset, name) for name in _OF_A_RUN} for asset in self.found]


def list_assets(recipe: Recipe, local: bool = False) -> list[Asset]:
    """Return every asset of the hub that a run reads, or every ``local`` one, each once and with the most rows."""
    found: dict[tuple[Any, ...], Asset] = {}
    for asset in _named(recipe):
        name = replace(asset, limit=None).same
        known = found.get(name)
        if asset.id and (known is None or (asset.limit or math.inf) > (known.limit or math.inf)):
            found[name] = asset
    return [asset for asset in found.values() if asset.is_local == local]


def _named(recipe: Recipe) -> Iterator[Asset]:
    """Yield the model, the training and evaluation sets and the benchmarks of a recipe, as often as it names them."""

    def dataset(key: str, name: str | None, config: str | None, split: str | None, limit: int | None = None) -> Asset:
        return Asset(kind=DATASET, id=name or "", config=config, split=split, limit=limit, where=recipe.source(key))

    model, where = recipe["model_name_or_path"] or "", recipe.source("model_name_or_path")
    code = bool(recipe["trust_remote_code"])
    yield Asset(kind=MODEL, id=model, revision=recipe["model_revision"], where=where, code=code)
    if reference := recipe["ref_model_name_or_path"]:
        yield Asset(kind=MODEL, id=reference, where=recipe.source("ref_model_name_or_path"), code=code)
    streaming, mixture, config = recipe["dataset_streaming"], recipe["dataset_mixture"], recipe["dataset_config"]
    if mixture:
        for entry in mixture.get("datasets", []):
            yield dataset("dataset_mixture", entry.get("id"), entry.get("config"), entry.get("split") or "train")
    else:
        most = recipe["max_train_prompts"] if streaming else None
        limit = _SPARE * most if most else None
        yield dataset("dataset_name", recipe["dataset_name"], config, recipe["dataset_train_split"], limit)
    if recipe["eval_strategy"] != "no":
        # Of a stream, as many rows as a draw of eval_subsample needs to reach eval_max_prompts.
        limit = math.ceil(recipe["eval_max_prompts"] / recipe["eval_subsample"]) if streaming else None
        if recipe["eval_dataset_name"]:
            name, split = recipe["eval_dataset_name"], recipe["eval_dataset_split"]
            yield dataset("eval_dataset_name", name, recipe["eval_dataset_config"], split, limit)
        elif not mixture:
            yield dataset("dataset_name", recipe["dataset_name"], config, recipe["dataset_test_split"], limit)
    for key, name, config, split in (named for names in parts("assets") for named in names(recipe.__getitem__)):
        yield dataset(key, name, config, split)
    for name, config, split in benchmark_sources(recipe["benchmarks"] or ()):
        yield dataset("benchmarks", name, config, split)


def wanted_assets(recipe: Recipe, recorded: list[dict[str, Any]] | None = None) -> list[Asset]:
    """Return the assets of the hub a run reads, those that ``recorded`` names at its commits."""
    commits = {asset.same: asset.commit for asset in _read(recorded) if asset.from_hub}
    return [replace(asset, revision=commits.get(asset.same, asset.revision)) for asset in list_assets(recipe)]


def local_assets(recipe: Recipe, environment: Mapping[str, str]) -> list[Asset]:
    """Return the files, folders and built-in data of this machine that a run reads, with their fingerprints."""
    found = []
    for asset in list_assets(recipe, local=True):
        if asset.id.startswith(SMOKE_SCHEME):
            path = smoke_folder(asset.id, environment)
            mark = path.name
        elif data := generated(asset.id):
            path, mark = Path(), data.fingerprint(recipe.__getitem__)
        else:
            path = Path(os.path.expanduser(asset.id)).absolute()
            if not path.exists():
                raise config_error(asset.where, f"no file or folder '{asset.id}'", "name an existing one, or a hub id")
            mark = fingerprint(path)
        found.append(replace(asset, revision=None, commit=mark, path=str(path)))
    return found


def fingerprint(path: Path) -> str:
    """Return a short hash of a file or folder that is cheap for weights of any size.

    Of a folder: names, sizes, and small JSON files, but for hidden ones. Of a file: its size, first and last MiB.
    """
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        inside = file.relative_to(path)
        if not file.is_file() or any(part.startswith(".") for part in inside.parts):
            continue
        size = file.stat().st_size
        digest.update(f"{inside if file != path else ''} {size}\n".encode())
        if file == path or (file.suffix == ".json" and size <= _EDGE_BYTES):
            with file.open("rb") as stream:
                digest.update(stream.read(_EDGE_BYTES))
                stream.seek(max(stream.tell(), size - _EDGE_BYTES))
                digest.update(stream.read())
    return digest.hexdigest()[:16]


def find_assets(recipe: Recipe, environment: Mapping[str, str], recorded: list[dict[str, Any]] | None = None) -> Assets:
    """Look for everything a recipe reads on this machine, of a resumed run at the ``recorded`` commits.

    A local file or folder that does not exist is a ConfigError.
    """
    local, wanted = local_assets(recipe, environment), wanted_assets(recipe, recorded)
    records = [find_record(asset, environment) for asset in wanted]
    missing = [asset for asset, record in zip(wanted, records, strict=True) if record is None]
    return Assets([*local, *filter(None, records)], missing)


def ensure_assets(
    recipe: Recipe, environment: Mapping[str, str], recorded: list[dict[str, Any]] | None, arguments: Sequence[str],
    allow_changed: bool = False,
) -> Assets:  # fmt: skip
    """Return everything a run reads, on this machine, before a launch starts anything.

    What is missing is fetched by ``grpo fetch`` with these ``arguments`` in its own process: the hub's clients stay
    as large as they get, and a launcher lives for days. Of a resumed run the ``recorded`` commits are used, and local
    files that changed since are refused unless ``allow_changed``.
    """
    assets = find_assets(recipe, environment, recorded)
    before = {asset.same: asset.commit for asset in _read(recorded) if not asset.from_hub}
    for asset in assets.found:
        if not (asset.from_hub or allow_changed) and before.get(asset.same, asset.commit) != asset.commit:
            what = f"the {asset.kind} '{asset.id}' is not what the run began with"
            raise config_error("--resume", what, "put back what it began with, or add --allow-changed-code")
    if not assets.missing:
        return assets
    command = f"grpo fetch {' '.join(map(shell_quote, arguments))}"
    if not hub_answers(environment):
        why, fix = unreachable_reason(environment), f"run on the login node: {command}"
        problems = [Problem(one.where, f"{one} is not on this machine and {why}", fix) for one in assets.missing]
        raise ConfigError(*problems)
    print(f"grpo: not here yet: {', '.join(map(str, assets.missing))}; running {command}", flush=True)
    argv = python_module("grpo_recipes", "fetch", *arguments)
    end_with_us = functools.partial(die_with_parent, os.getpid())
    code = subprocess.run(argv, env=dict(environment), preexec_fn=end_with_us, check=False).returncode
    if code == EXIT_INTERRUPTED:
        raise SystemExit(code)
    assets = find_assets(recipe, environment, recorded)
    if code or assets.missing:
        what = f"ended with code {code}" if code else f"left out {assets.missing[0]}"
        raise config_error("grpo fetch", what, f"correct what it says above; then: {command}")
    return assets


def record_assets(run: Run, assets: Assets) -> None:
    """Write into the run directory which commits it uses, made once, and where its trainers find them now."""
    with recording_changes(run.folder):
        if "sources" not in run.identity:
            run.identity["sources"] = assets.as_json()
            write_json(run.folder / "run.json", run.identity)
        write_json(run.folder / "sources.json", {"sources": assets.as_json()})


def fetched_datasets(folder: Path) -> Lookup:
    """Return ``lookup(id, config, split)`` of a run directory: the folder to ``datasets.load_from_disk``, or None."""
    return Assets(_read(read_json(folder / "sources.json").get("sources")), []).lookup


def _read(entries: list[dict[str, Any]] | None) -> list[Asset]:
    return [Asset(**entry) for entry in entries or []]


def write_record(asset: Asset, environment: Mapping[str, str]) -> None:
    """Record a fetched asset under the revision asked for and under its commit, which a resumed run asks for."""
    content = {key: value for key, value in asdict(asset).items() if key not in ("where", "code")}
    for revision in (asset.commit, asset.revision):
        path = record_file(replace(asset, revision=revision), environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)


def find_record(asset: Asset, environment: Mapping[str, str]) -> Asset | None:
    """Return a fetched asset as it was recorded, None where it is not here or not whole."""
    path = record_file(asset, environment)
    content = (json_mapping(path.read_bytes()) if path.is_file() else None) or {}
    if not {"commit", "path", "files"} <= content.keys():
        return None  # not fetched, or damaged
    known: dict[str, Any] = {name: content.get(name) for name in ("commit", "path", "licence", "files")}
    record = replace(asset, **known)
    files = [(Path(record.path, name), size) for name, size in record.files.items()]
    return record if all(file.is_file() and file.stat().st_size == size for file, size in files) else None


def record_file(asset: Asset, environment: Mapping[str, str]) -> Path:
    """Return the file of an asset's record."""
    exact = hashlib.sha256(json.dumps([*asset.same, asset.revision, asset.code]).encode()).hexdigest()
    name = f"{asset.kind}--{_slug(asset)}@{quote(str(asset.revision), safe='')[:12]}-{exact[:8]}"
    return cache_root(environment) / "fetched" / f"{name}.json"


def dataset_folder(asset: Asset, commit: str, environment: Mapping[str, str]) -> Path:
    """Return where a fetched dataset is saved: ``<CACHE_ROOT>/datasets/<id>--<config>--<split>--<commit>``."""
    return cache_root(environment) / "datasets" / f"{_slug(asset)}--{commit[:12]}"


def _slug(asset: Asset) -> str:
    """Return an asset as part of a file name; splits like ``train[:10%]`` and ``train[:10]`` stay apart."""
    rows = f"first-{asset.limit}" if asset.limit else None
    parts = "--".join(part for part in (asset.id, asset.config, asset.split, rows) if part)
    return quote(parts, safe="").replace("%2F", "--")
