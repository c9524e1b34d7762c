"""Empties functions one at a time and runs the tests that claim them: `make mutants`, or with words of some promises.

A mutant of ``mutants.yaml`` that no test notices is a test to write. Each is put into a copy of the tree.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from ledgers import REPOSITORY

FILE = Path(__file__).with_suffix(".yaml")
SECONDS = 600  # for the tests of a mutant
HUNG = 124  # pytest did not answer, so no test is known to detect the mutant


@dataclass(frozen=True)
class Mutant:
    """A row: a change that breaks a promise, and the tests that must notice it.

    Attributes:
        promise: the broken promise.
        tests: ids of the tests. At least one must fail.
        function: the function to empty, ``module:function``, or "" to change a text.
        returns: the function's new result, in Python.
        file: the file to change, if ``function`` is "".
        replace: a text that the file has once.
        by: the text that replaces it.
    """

    promise: str
    tests: tuple[str, ...]
    function: str = ""
    returns: str = "None"
    file: str = ""
    replace: str = ""
    by: str = ""

    @property
    def name(self) -> str:
        """Return the broken function or file."""
        return self.function or f"{self.file}: {self.replace}"

    def path(self) -> str:
        """Return the file that is changed, as the repository has it."""
        module = self.function.partition(":")[0].replace(".", "/")
        if self.file:
            return self.file
        whole = f"src/{module}.py"
        return whole if (REPOSITORY / whole).is_file() else f"src/{module}/__init__.py"

    def of(self, text: str) -> str:
        """Return the file's text with the mutant; raise a ValueError if its place is missing."""
        if self.file:
            if text.count(self.replace) != 1:
                raise ValueError(f"{self.file} has {text.count(self.replace)} times '{self.replace}'")
            return text.replace(self.replace, self.by)
        return emptied(text, self.function.partition(":")[2].split("."), self.returns)


def emptied(text: str, path: list[str], returns: str) -> str:
    """Return a module's text in which a function, ``[Class, method]`` say, does nothing but return."""
    body, node = ast.parse(text).body, None
    for name in path:
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next((node for node in body if isinstance(node, kinds) and node.name == name), None)
        if node is None:
            raise ValueError(f"there is no {'.'.join(path)}")
        body = node.body
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    indent = " " * body[0].col_offset
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(ast.Module(body, [])))
    lines = text.splitlines()
    new = [f"{indent}return {returns}" if not yields else f"{indent}return", *([f"{indent}yield"] if yields else [])]
    return "\n".join([*lines[: first - 1], *new, *lines[last:]]) + "\n"


def rows() -> tuple[Mutant, ...]:
    """Return every mutant."""
    return tuple(
        Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in yaml.safe_load(FILE.read_text()) or ()
    )


def run(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests in a copy of the tree; return pytest's exit code and its last lines."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "-rfE", *tests]
    # In a new session, so that a mutant's signal to its process group does not end this process.
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            output, _ = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return HUNG, ""
        return child.returncode, output


def survivors(tree: Path, mutants: tuple[Mutant, ...]) -> list[str]:
    """Return the mutants that no test detects or that cannot be judged; print a line for each mutant."""
    unnoticed: list[str] = []
    whole = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    code, output = run(tree, tuple(whole)) if whole else (0, "")
    if code:
        return [f"the tests fail without a mutant:\n{output}"]
    for mutant in mutants:
        file, start = tree / mutant.path(), time.monotonic()
        text = file.read_text()
        file.write_text(mutant.of(text))
        code, output = run(tree, mutant.tests)
        file.write_text(text)
        noticed = code == 1 or (code == 2 and "error" in output.lower())  # 2: the module cannot be imported any more
        by = next(
            (line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), f"pytest ended with {code}"
        )
        print(
            f"{'noticed ' if noticed else 'SURVIVED'} {time.monotonic() - start:4.0f} s  {mutant.name}  {by}",
            flush=True,
        )
        if not noticed:
            unnoticed.append(f"{mutant.name} can be emptied: {mutant.promise}")
    return unnoticed


def copied(tree: Path) -> None:
    """Copy the tracked and untracked files, and link the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, tree / name)
    if (REPOSITORY / ".cache").is_dir():  # the smoke task's model
        (tree / ".cache").symlink_to(REPOSITORY / ".cache")
    author = ["-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "A copy"]):  # runs record their commit
        subprocess.run(["git", *command], cwd=tree, check=True)


def main(words: list[str]) -> int:
    """Return 1 when a mutant survived."""
    mutants = tuple(
        mutant for mutant in rows() if not words or any(word in f"{mutant.name} {mutant.promise}" for word in words)
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if mutants:
            copied(Path(folder))
        wrong = survivors(Path(folder), mutants)
    for line in wrong:
        print(f"mutants: {line}", file=sys.stderr)
    print(f"mutants: {len(mutants)} to try, {len(wrong)} things are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
