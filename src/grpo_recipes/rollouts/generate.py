"""Write completions of a dataset to a JSONL file, which an interrupted call can continue.

Each prompt has one row with the list of its completions, written once all of them are complete. The settings are in
``FILE.settings.json`` next to the file, and a call with other settings raises ConfigError. At the end, the rows are in
the order of the dataset.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.paths import display_path
from grpo_recipes.rollouts.openai import Failed, PlayedSample, Sample, SamplingParameters
from grpo_recipes.rollouts.turns import derive_seed
from grpo_recipes.runs.rundir import cut_damaged_end, load_json_mapping, remove_files, write_json

Row = dict[str, Any]
_OUT = "--out"
_MAX_LOST_ROWS = 8  # without an answer to so many consecutive prompts, the server counts as gone


@dataclass
class Generated:
    """The outcome of a call of ``generate``, in numbers of prompts."""

    before: int = 0
    """Prompts that an earlier call had completed."""
    completed: int = 0
    """Prompts that this call completed."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failed prompts by the reason of their first failure."""
    skipped: int = 0
    """Prompts that were not tried, since the server is gone."""

    @property
    def complete(self) -> bool:
        """Whether every prompt of the dataset has its completions."""
        return not self.failed and not self.skipped


class Sampler(Protocol):
    """Sample completions: a ``CompletionClient``, or an object that also runs the calls of tools."""

    def iterate_completed(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParameters, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[Sample | Failed]]]:
        """Yield the index of each prompt with its ``n`` completions, in any order; ``seeds`` has one per prompt."""


class CompletionsFile:
    """The open file of completions for a dataset's ``rows``. ``done`` contains the indices of finished prompts."""

    def __init__(self, path: Path, rows: Sequence[Row]) -> None:
        """Open the file to append rows, and create it if it is missing; read no row yet."""
        self.path, self._rows = path, rows
        self._file = path.open("a+b")
        self.done: dict[int, None] = {}  # prompt numbers in the order of the file

    def add(self, index: int, completions: Sequence[Sample]) -> None:
        """Append the row of a prompt with the texts, token ids, finish reasons and turns of its completions."""
        entries = [
            {"text": sample.text, "ids": sample.ids, "finish_reason": sample.finish_reason}
            | ({"messages": sample.messages, "tokens": sample.tokens} if isinstance(sample, PlayedSample) else {})
            | ({"columns": sample.columns} if isinstance(sample, PlayedSample) and sample.columns else {})
            for sample in completions
        ]
        self.put(index, entries)

    def put(self, index: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Append the row of a prompt with these entries as its completions, flush it, and add its index to ``done``."""
        row = {"index": index} | self._rows[index] | {"index": index, "completions": completions}
        self._file.write(json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n")
        self._file.flush()
        self.done[index] = None

    def read(self) -> None:
        """Read the indices of finished prompts into ``done``, and cut off a damaged end, which a kill can leave.

        Raise ConfigError for a line that is not a row of this dataset.
        """
        self._file.seek(0)
        whole = cut_damaged_end(self._file.read())
        self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            row = load_json_mapping(line) or {}
            index, where = row.get("index"), f"{display_path(self.path)}:{number}"
            if not isinstance(index, int) or not isinstance(row.get("completions"), list) or index in self.done:
                raise config_error(where, "is not a row of this command", "remove the line, or choose another --out")
            if index < len(self._rows) and row.get("prompt") != self._rows[index]["prompt"]:
                problem = f"prompt {index} differs from the dataset's"
                raise config_error(where, problem, "choose another --out, or remove the file")
            self.done[index] = None

    def remove(self, indices: Collection[int]) -> None:
        """Remove the rows of these prompts from the file and from ``done``, so that they count as missing."""
        if not indices:
            return
        self._file.seek(0)
        lines = dict(zip(self.done, self._file.read().splitlines(keepends=True), strict=True))
        self.done = {index: None for index in lines if index not in indices}
        self._file.truncate(0)
        self._file.write(b"".join(lines[index] for index in self.done))
        self._file.flush()

    def sort(self) -> None:
        """Rewrite the file in the order of the dataset.

        Raise ConfigError if that fails, for example on a full disk. Add no rows afterwards: they would be lost with
        the replaced file.
        """
        if list(self.done) == sorted(self.done):
            return
        self._file.seek(0)
        lines = dict(zip(self.done, self._file.read().splitlines(keepends=True), strict=True))
        temporary = self.path.with_name(f".{self.path.name}.sorted")
        with translate_errors(
            OSError, lambda error: config_error(_OUT, f"cannot be sorted ({error.strerror})", "make room")
        ):
            temporary.write_bytes(b"".join(lines[index] for index in sorted(lines)))
            temporary.replace(self.path)

    def rows(self) -> list[Row]:
        """Return the rows of ``done`` from the file, in the order of the dataset, except rows beyond its end."""
        self._file.seek(0)
        rows = {index: json.loads(line) for index, line in zip(self.done, self._file, strict=True)}
        return [rows[index] for index in sorted(rows) if index < len(self._rows)]

    def close(self) -> None:
        """Close the file, so that other processes can write it."""
        self._file.close()


@contextmanager
def open_completions(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> Iterator[CompletionsFile]:
    """Open and lock a new or existing file for a dataset's ``rows``, read its rows, and close it after the block.

    ``settings`` are written to ``<file name>.settings.json``. Raise ConfigError if the file can't be written, has
    other settings or foreign rows, or if another process writes it. A file that is still empty at the end is removed,
    together with the folders created for it.
    """
    settings_file = path.with_name(f"{path.name}.settings.json")
    new_folders = [folder for folder in path.parents if not folder.exists()]

    def unwritable(error: OSError) -> Exception:
        """Return a ConfigError for a file that can't be written."""
        return config_error(
            _OUT, f"cannot write {display_path(path)} ({error.strerror})", "choose a file that you may write"
        )

    with translate_errors(OSError, unwritable):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = CompletionsFile(path, rows)
    locked = False
    try:
        try:
            fcntl.flock(file._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it, or choose another --out"
            raise config_error(_OUT, f"another process writes {display_path(path)}", fix) from None
        locked = True
        if path.stat().st_size:
            _check_settings(path, load_json_mapping(settings_file), json.loads(json.dumps(settings)))
            file.read()
        with translate_errors(OSError, unwritable):
            write_json(settings_file, settings)
        yield file
    finally:
        file.close()
        with suppress(OSError):  # another process removed the file, or added files to the folder
            if locked and path.stat().st_size == 0:
                remove_files(path, settings_file)
                for folder in new_folders:
                    folder.rmdir()


def _check_settings(path: Path, saved: Mapping[str, Any] | None, current: Mapping[str, Any]) -> None:
    """Raise ConfigError if the ``saved`` settings of the file differ from ``current``, or are missing (None)."""
    if saved is None:
        problem = f"{display_path(path)} exists, and {path.name}.settings.json, which says how it was made, does not"
        raise config_error(_OUT, problem, "choose another file, or remove this file")
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if names:
        changes = "; ".join(f"{name} {saved.get(name)}, now {current.get(name)}" for name in names)
        fix = "choose another file, use the previous settings, or remove it"
        raise config_error(_OUT, f"{display_path(path)} was made with other settings: {changes}", fix)


def generate(
    client: Sampler, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParameters,
    file: CompletionsFile, on_progress: Callable[[Generated], None] = lambda _: None,
) -> Generated:  # fmt: skip
    """Sample ``n`` completions of each prompt that is not in the file, append the rows, and sort the file.

    Return the numbers of completed, failed and skipped prompts. A prompt with missing completions gets no row, and
    the next call tries it again. Seeds derive from ``sampling.seed``, which must not be None, and the prompt's
    index. If the server gives no answer to 8 consecutive prompts, the remaining prompts are skipped.
    ``on_progress`` is called after each prompt.
    """
    assert sampling.seed is not None
    done = set(file.done)
    missing = [index for index in range(len(prompts)) if index not in done]
    outcome, lost_rows = Generated(before=len(prompts) - len(missing)), 0
    seeds = [derive_seed(sampling.seed, index) for index in missing]
    for position, group in client.iterate_completed([prompts[index] for index in missing], n, sampling, seeds):
        failures = [completion for completion in group if isinstance(completion, Failed)]
        if failures:
            outcome.failed[failures[0].reason] += 1
        else:
            file.add(missing[position], [completion for completion in group if isinstance(completion, Sample)])
            outcome.completed += 1
        on_progress(outcome)
        lost_rows = lost_rows + 1 if any(failure.lost for failure in failures) else 0
        if lost_rows >= _MAX_LOST_ROWS:
            break
    file.sort()
    outcome.skipped = len(missing) - outcome.completed - outcome.failed.total()
    return outcome
