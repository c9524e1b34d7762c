"""Imports point downwards, never in a circle, and never from the core to an extension."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from packages import ABOVE, CORE, NAMES, PACKAGE, PACKAGES, core_files_that_name, imports, modules, package

MODULES = modules()
MOST_FILES = 4  # files of the core that may name an extension


@pytest.fixture(scope="module")
def imported() -> list[tuple[str, str]]:
    """Each import of one module of the package by another; reading them all takes seconds."""
    return list(imports(MODULES))


def test_every_package_stands_in_the_list() -> None:
    assert {package(module) for module in MODULES} - {"", "extensions"} == set(PACKAGES)


def test_no_package_imports_one_above_it(imported) -> None:
    height = {name: index for index, name in enumerate(CORE)} | dict.fromkeys(ABOVE, len(CORE))
    upward = [
        f"{user} imports {used}"
        for user, used in imported
        if package(user) in height and package(used) in height and height[package(used)] > height[package(user)]
    ]
    assert upward == []


def test_extensions_and_the_console_import_only_the_core_and_themselves(imported) -> None:
    sideways = [
        f"{user} imports {used}" for user, used in imported if package(used) in ABOVE and package(user) != package(used)
    ]
    assert sideways == []


def test_few_files_of_the_core_name_an_extension() -> None:
    files = {file for extension in NAMES for file in core_files_that_name(extension)}
    assert len(files) <= MOST_FILES, sorted(files)


def test_no_module_imports_itself_by_way_of_others(imported) -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for user, used in imported:
        if not user.startswith(f"{used}."):  # a module of a package that imports the package's own names
            graph[user].add(used)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_an_import_is_seen_wherever_it_stands(imported) -> None:
    assert len(imported) > 300
    assert (f"{PACKAGE}.plan.plan", f"{PACKAGE}.recipe") in imported
