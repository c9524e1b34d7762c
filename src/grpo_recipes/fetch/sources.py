"""Which model and data a run uses: commits of what came from the hub, fingerprints of what lies here. No torch."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.assets import MODEL, Source, Wanted, assets_of, find_record, local_assets_of
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, hub_answers, why_silent
from grpo_recipes.modebench.dataset import SCHEME as MODEBENCH_SCHEME
from grpo_recipes.modebench.dataset import Settings
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.checkpoints import rewriting
from grpo_recipes.runs.rundir import Run, read_json, write_json
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

Lookup = Callable[[str, str | None, str], Path | None]
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Sources:
    """Everything a run reads: what is on this machine, and what of the hub is missing."""

    found: list[Source]
    missing: list[Wanted]

    @property
    def model(self) -> Source | None:
        """Return the model trained and served."""
        return next((source for source in self.found if source.kind == MODEL), None)

    @property
    def lookup(self) -> Lookup:
        """Return ``lookup(id, config, split)``: the folder of a fetched dataset, None for one that is not fetched."""
        fetched = [source for source in self.found if source.kind != MODEL and source.from_hub]
        paths = {(source.id, source.config, source.split): Path(source.path) for source in fetched}
        return lambda name, config, split: paths.get((name, config, split))

    def offline_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return variables that keep a run off the network once everything is here, unless the user set one."""
        if self.missing or "HF_HUB_OFFLINE" in environment:
            return {}
        return {name: "1" for name in _OFFLINE}

    def notes(self) -> list[str]:
        """Return what a plan says of them."""
        here = [f"{one.kind} {one.id} at {one.commit[:12]}, fetched" for one in self.found if one.from_hub]
        return here + [f"{asset} is not here yet: launch fetches it, or grpo fetch does" for asset in self.missing]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the sources as plain data."""
        return [asdict(source) for source in self.found]


def find_sources(
    recipe: Recipe, environment: Mapping[str, str], recorded: list[dict[str, Any]] | None = None
) -> Sources:
    """Look for everything a recipe reads on this machine; nothing is downloaded.

    Args:
        recipe: the recipe.
        environment: variables of the user, for the caches.
        recorded: sources of the run that is resumed: its commits are looked for, whatever came later.

    Raises:
        ConfigError: a local file or folder does not exist.
    """
    found, missing = local_sources(recipe, environment), []
    for asset in wanted_assets(recipe, recorded):
        record = find_record(asset, environment)
        if record is None:
            missing.append(asset)
        else:
            found.append(record.source(asset.revision))
    return Sources(found, missing)


def need_sources(
    recipe: Recipe,
    environment: Mapping[str, str],
    recorded: list[dict[str, Any]] | None,
    arguments: Sequence[str],
    allow_changed: bool = False,
) -> Sources:
    """Return everything a run reads, on this machine, before a launch starts anything.

    What is missing is fetched first where the hub answers: by `grpo fetch` in a process of its own, since the hub's
    clients stay as large as they get and a launcher lives for days.

    Args:
        recipe: the recipe.
        environment: variables of the user.
        recorded: sources of the run that is resumed; its commits are used.
        arguments: those of ``grpo fetch`` for this recipe.
        allow_changed: take a local model or dataset though it changed since the run began.

    Raises:
        ConfigError: something is missing and cannot be brought, or a resumed run's local files changed.
    """
    sources = find_sources(recipe, environment, recorded)
    changed = changed_sources(sources, recorded)
    if changed and not allow_changed:
        raise config_error("--resume", changed, "put back what it began with, or add --allow-changed-code")
    if not sources.missing:
        return sources
    command = f"grpo fetch {shlex.join(arguments)}"
    if not hub_answers(environment):
        why, fix = why_silent(environment), f"run on the login node: {command}"
        problems = [Problem(one.where, f"{one} is not on this machine and {why}", fix) for one in sources.missing]
        raise ConfigError(*problems)
    print(f"grpo: not here yet: {', '.join(map(str, sources.missing))}; running {command}", flush=True)
    _fetch(arguments, environment, command)
    sources = find_sources(recipe, environment, recorded)
    if sources.missing:
        raise config_error("grpo fetch", f"left out {sources.missing[0]}", f"run {command} and look at what it says")
    return sources


def _fetch(arguments: Sequence[str], environment: Mapping[str, str], command: str) -> None:
    argv = [sys.executable, "-m", "grpo_recipes", "fetch", *arguments]
    end_with_us = functools.partial(die_with_parent, os.getpid())
    try:
        code = subprocess.run(argv, env=dict(environment), preexec_fn=end_with_us, check=False).returncode
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        raise SystemExit(EXIT_INTERRUPTED) from None
    if code:
        raise config_error("grpo fetch", f"ended with code {code}", f"correct what it says above; then: {command}")


def wanted_assets(recipe: Recipe, recorded: list[dict[str, Any]] | None = None) -> list[Wanted]:
    """Return the assets of the hub a run reads, those that ``recorded`` names at its commits."""
    commits = {source.same: source.commit for source in _sources(recorded) if source.from_hub}
    return [replace(asset, revision=commits.get(asset.same, asset.revision)) for asset in assets_of(recipe)]


def local_sources(recipe: Recipe, environment: Mapping[str, str]) -> list[Source]:
    """Return what a run reads that lies on this machine."""
    return [_local(asset, recipe, environment) for asset in local_assets_of(recipe)]


def changed_sources(now: Sources, recorded: list[dict[str, Any]] | None) -> str | None:
    """Return which local model or dataset is not what the run began with, or None."""
    before = {source.same: source.commit for source in _sources(recorded) if not source.from_hub}
    for source in now.found:
        if not source.from_hub and before.get(source.same, source.commit) != source.commit:
            return f"the {source.kind} '{source.id}' is not what the run began with"
    return None


def record_sources(run: Run, sources: Sources) -> None:
    """Leave in the run directory which commits it uses, made once, and where its trainers find them now."""
    with rewriting(run.folder):
        if "sources" not in run.identity:
            run.identity["sources"] = sources.as_json()
            write_json(run.folder / "run.json", run.identity)
        write_json(run.folder / "sources.json", {"sources": sources.as_json()})


def fetched_sets(folder: Path) -> Lookup:
    """Return ``lookup(id, config, split)`` of a run directory: the folder to ``datasets.load_from_disk``, or None."""
    content = read_json(folder / "sources.json") or {"sources": []}
    return Sources(_sources(content["sources"]), []).lookup


def _sources(entries: list[dict[str, Any]] | None) -> list[Source]:
    return [Source(**entry) for entry in entries or []]


def _local(asset: Wanted, recipe: Recipe, environment: Mapping[str, str]) -> Source:
    if asset.id.startswith(SMOKE_SCHEME):
        path = smoke_folder(asset.id, environment)
        mark = path.name
    elif asset.id.startswith(MODEBENCH_SCHEME):
        path = Path()  # made on the spot
        mark = Settings.read(recipe.__getitem__).fingerprint(asset.id)
    else:
        path = Path(os.path.expanduser(asset.id)).absolute()
        if not path.exists():
            raise config_error(asset.where, f"no file or folder '{asset.id}'", "name an existing one, or a hub id")
        mark = fingerprint(path)
    return Source(**asset.name, revision=None, commit=mark, path=str(path))


def fingerprint(path: Path) -> str:
    """Return a short hash of a file or folder that is cheap for weights of any size.

    Of a folder and those in it, but for hidden ones: names and sizes, and the content of small JSON files
    (``config.json``, the index of the shards). Of a file: its size, and the first and last MiB.
    """
    digest = hashlib.sha256()
    files = sorted(one for one in path.rglob("*") if _counts(one, path)) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if path.is_dir() else ''} {size}\n".encode())
        if file == path or (file.suffix == ".json" and size <= _EDGE_BYTES):
            digest.update(_edges(file, size))
    return digest.hexdigest()[:16]


def _counts(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _edges(file: Path, size: int) -> bytes:
    with file.open("rb") as stream:
        head = stream.read(_EDGE_BYTES)
        stream.seek(max(len(head), size - _EDGE_BYTES))
        return head + stream.read()
