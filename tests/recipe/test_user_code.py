"""The user's code: checked from its source before a job, and loaded in the job from the run's copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.user_code import copy_source, load_object, source_file, spec_problem


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


CODE = """
import json as j
from pathlib import Path
first, (second, third) = 1, (2, 3)
def function(): return HELP
class Class:
    def method(self): inner = 1
try:
    import missing_package
except ImportError:
    HELP = "no help"
if True:
    def conditional(): pass
"""


@pytest.mark.parametrize(
    "name", ["function", "Class", "first", "second", "third", "j", "Path", "HELP", "conditional", "missing_package"]
)
def test_names_of_a_file_are_found_without_running_it(folder: Path, name: str) -> None:
    (folder / "mine.py").write_text(CODE + "raise SystemExit('ran')\n")
    assert spec_problem(f"mine.py:{name}", "recipe.yaml:3") is None


@pytest.mark.parametrize(
    ("spec", "message", "fix"),
    [
        ("mine.py:inner", "'mine.py' has no 'inner'", "write one of Class, function"),
        ("mine.py:method", "has no 'method'", "write one of"),
        ("mine.py", "names no function or class", "write module:name or file.py:name"),
        ("mine.py:", "names no function or class", "write module:name"),
        ("mine.py:not a name", "names no function or class", "write module:name"),
        (":name", "names no function or class", "write module:name"),
        ("other.py:name", "no file 'other.py'", "name an existing file"),
        ("no_such_module:name", "no module 'no_such_module'", "install it"),
        ("json.nothing:name", "no module 'json.nothing'", "install it"),
        ("broken.py:name", "'broken.py:2' is not valid Python", "correct it there"),
    ],
)
def test_what_cannot_be_loaded_is_told(folder: Path, spec: str, message: str, fix: str) -> None:
    (folder / "mine.py").write_text(CODE)
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    problem = spec_problem(spec, "recipe.yaml:3")
    assert problem is not None and problem.where == "recipe.yaml:3"
    assert message in problem.what and fix in problem.fix


def test_a_module_is_found_without_importing_its_parents(folder: Path) -> None:
    package = folder / "pack" / "deep"
    package.mkdir(parents=True)
    for where in (folder / "pack", package):
        (where / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "mod.py").write_text("def reward(): pass\n")
    assert spec_problem("pack.deep.mod:reward", "x") is None
    assert source_file("pack.deep.mod:reward") == package / "mod.py"


def test_a_file_is_loaded_with_the_modules_beside_it(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside_it.py").write_text("VALUE = 5\n")
    (folder / "sub" / "mine.py").write_text("from beside_it import VALUE\ndef function(): return VALUE\n")
    assert load_object("sub/mine.py:function")() == 5
    assert load_object("json:dumps") is json.dumps


def test_a_module_of_the_working_folder_does_not_take_pythons_place(folder: Path) -> None:
    (folder / "colorsys.py").write_text("mine = 1\n")
    (folder / "my_own_module.py").write_text("mine = 2\n")
    assert load_object("my_own_module:mine") == 2
    with pytest.raises(ConfigError, match="'colorsys' has no 'mine'"):
        load_object("colorsys:mine")


def test_the_copy_of_the_run_is_what_runs(folder: Path) -> None:
    (folder / "mine.py").write_text("def function(): return 'first'\n")
    copies = folder / "run" / "rewards"
    copies.parent.mkdir()
    assert copy_source("mine.py:function", copies).read_text() == (folder / "mine.py").read_text()

    (folder / "mine.py").write_text("def function(): return 'changed'\n")
    copy_source("mine.py:function", copies)

    assert load_object("mine.py:function", copies)() == "first"


def test_files_of_one_name_in_two_folders_have_two_copies(folder: Path) -> None:
    for place in ("a", "b"):
        (folder / place).mkdir()
        (folder / place / "mine.py").write_text(f"name = '{place}'\n")
    copies = {copy_source(f"{place}/mine.py:name", folder / "copies") for place in ("a", "b")}
    assert len(copies) == 2
    assert [load_object(f"{place}/mine.py:name", folder / "copies") for place in ("a", "b")] == ["a", "b"]


def test_errors_of_the_users_code_are_the_users(folder: Path) -> None:
    (folder / "mine.py").write_text("raise LookupError('mine')\n")
    for _ in range(2):  # a module that failed is not left half loaded
        with pytest.raises(LookupError, match="mine"):
            load_object("mine.py:name")
    with pytest.raises(ConfigError, match=r"no file 'other\.py'"):
        load_object("other.py:name")


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, grpo_recipes.recipe.user_code; print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = " + "-" * 100_000 + "1\n", "'mine.py' is not valid Python (too deeply nested)"),
        ("x = (1\n", "'mine.py:1' is not valid Python ('(' was never closed)"),
        ("x = 1\0\n", "'mine.py' is not valid Python (source code string cannot contain null bytes)"),
    ],
    ids=["deep", "open", "null"],
)
def test_a_file_that_python_cannot_parse_is_told(folder: Path, content: str, message: str) -> None:
    (folder / "mine.py").write_text(content)
    problem = spec_problem("mine.py:f", "recipe.yaml:3")
    assert problem is not None and message in problem.what


def test_a_file_that_cannot_be_read_is_not_called_wrong_python(folder: Path) -> None:
    (folder / "mine.py").symlink_to("/proc/self/mem")  # root may not read its start either
    problem = spec_problem("mine.py:f", "recipe.yaml:3")
    assert problem is not None and problem.what.endswith("mine.py' cannot be read (Input/output error)")


def test_a_name_too_long_for_a_file_is_no_file(folder: Path) -> None:
    problem = spec_problem("a" * 300 + ".py:f", "recipe.yaml:3")
    assert problem is not None and problem.what.startswith("no file 'aaa")


def test_files_of_alike_names_are_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a").mkdir()
    for file in ("a/b.py", "a_b.py", "a-b.py"):
        (folder / file).write_text(f"name = '{file}'\n")
    assert [load_object(f"{file}:name") for file in ("a/b.py", "a_b.py", "a-b.py")] == ["a/b.py", "a_b.py", "a-b.py"]
    monkeypatch.chdir(folder / "a")
    (folder / "a" / "a_b.py").write_text("name = 'another folder'\n")
    assert load_object("a_b.py:name") == "another folder"


def test_a_file_in_the_folder_above_has_a_copy_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "below").mkdir()
    (folder / "mine.py").write_text("name = 'above'\n")
    (folder / "below" / "mine.py").write_text("name = 'below'\n")
    monkeypatch.chdir(folder / "below")
    specs = ["mine.py:name", "../mine.py:name", "./mine.py:name"]
    copies = [copy_source(spec, folder / "copies") for spec in specs]
    assert [copy.read_text() for copy in copies] == ["name = 'below'\n", "name = 'above'\n", "name = 'below'\n"]


@pytest.mark.parametrize("line", [
    b"from os.path import*", b"from os import  *", b"import os; from os import *", b"if True: from os import *",
    b"from os \\\nimport *",
])  # fmt: skip
def test_a_star_import_may_bring_any_name(tmp_path, line):
    (tmp_path / "mine.py").write_bytes(line + b"\n")
    assert spec_problem(f"{tmp_path / 'mine.py'}:f", "recipe.yaml:1") is None


def test_a_docstring_imports_nothing(tmp_path):
    (tmp_path / "mine.py").write_text('''"""Use it so:\n    from helpers import *\n"""\nf = 1\n''')
    assert spec_problem(f"{tmp_path / 'mine.py'}:g", "recipe.yaml:1") is not None


def test_a_comment_that_is_not_utf_8_is_as_good_as_python_takes_it(tmp_path):
    (tmp_path / "mine.py").write_bytes(b"f = len  # caf\xe9\n")
    assert spec_problem(f"{tmp_path / 'mine.py'}:f", "recipe.yaml:1") is None


def test_a_traceback_names_the_users_file_while_it_is_what_runs(tmp_path):
    file, copies = tmp_path / "traced.py", tmp_path / "copies"
    file.write_text("def f():\n    raise KeyError('lost')\n")
    copy_source(f"{file}:f", copies)
    for line in ("", "# edited meanwhile\n"):
        file.write_text(line + file.read_text())
        sys.modules.pop(next((name for name in sys.modules if name.startswith("grpo_user_traced_")), ""), None)
        with pytest.raises(KeyError) as raised:
            load_object(f"{file}:f", copies)()
        assert (raised.traceback[-1].path == file) == (not line)
