"""A bounded copy of a run's sampled completions, so that a report of a long run does not read all of them again."""

import contextlib
from pathlib import Path

from grpo_recipes.runs.rundir import write_atomically

_FILE = "samples.jsonl"
_LONG_BYTES = 50_000_000  # a longer file is copied in part
_COPY_BYTES = 20_000_000


class BoundedCopy:
    """A folder with links to the files of a run, and with evenly spread rows of a long ``samples.jsonl``.

    It is below ``copies``, and has the name of the run directory ``folder``. Each row of the file is read once, except
    after a resume, which replaces the file.
    """

    def __init__(self, folder: Path, copies: Path):
        self._folder, self._copy = folder, copies / folder.name
        self._rows = _SpreadRows(folder / _FILE)

    def update(self) -> Path:
        """Return the run directory; if its ``samples.jsonl`` is longer than 50 MB, update its copy and return that."""
        if _measure_file(self._folder / _FILE) <= _LONG_BYTES:
            return self._folder
        self._copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            link = self._copy / path.name
            if path.name != _FILE and not link.is_symlink():
                with contextlib.suppress(FileExistsError):
                    link.symlink_to(path)
        write_atomically(self._copy / _FILE, self._rows.read_new().decode(errors="replace"))
        return self._copy


class _SpreadRows:
    """Rows of a growing file with distances of 1, 2, 4, ... rows, and its last row."""

    def __init__(self, path: Path):
        self._path = path
        self._start_again()

    def _start_again(self) -> None:
        """Forget all rows, so that the file is read from its beginning."""
        self._inode, self._offset, self._count, self._distance = 0, 0, 0, 1
        self._rows: list[tuple[int, bytes]] = []  # with the index of each row
        self._bytes = 0

    def read_new(self) -> bytes:
        """Read the rows since the last call, and return the kept rows of the whole file as text, at most 20 MB.

        The first and the last row are always kept, so the text may be longer. A replaced file is read again.
        """
        with self._path.open("rb") as file:
            state = self._path.stat()
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._start_again()
                self._inode = state.st_ino
            file.seek(self._offset)
            for row in file:
                if not row.endswith(b"\n"):
                    break
                self._add(row)
        return b"".join(row for _, row in self._rows)

    def _add(self, row: bytes) -> None:
        """Count a row of the file and keep it. An earlier row stays if its index is a multiple of the distance.

        While the kept rows are longer than 20 MB together, the distance is doubled.
        """
        if self._rows and self._rows[-1][0] % self._distance:  # it was only kept as the last row
            self._bytes -= len(self._rows.pop()[1])
        self._rows.append((self._count, row))
        self._bytes += len(row)
        self._count += 1
        self._offset += len(row)
        while self._bytes > _COPY_BYTES and len(self._rows) > 2:
            self._distance *= 2
            *earlier_rows, last = self._rows
            self._rows = [*(entry for entry in earlier_rows if entry[0] % self._distance == 0), last]
            self._bytes = sum(len(text) for _, text in self._rows)


def _measure_file(path: Path) -> int:
    """Return the bytes of a file, 0 if it does not exist."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
