"""Imports point downwards, and never in a circle."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from rooms import PACKAGE, ROOMS, imports, modules, room

MODULES = modules()
IMPORTS = list(imports(MODULES))


def test_every_room_stands_in_the_list() -> None:
    assert {room(module) for module in MODULES} - {""} == set(ROOMS)


def test_no_room_imports_one_above_it() -> None:
    height = {name: index for index, name in enumerate(ROOMS)}
    upward = [
        f"{user} imports {used}"
        for user, used in IMPORTS
        if room(user) and room(used) and height[room(used)] > height[room(user)]
    ]
    assert upward == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for user, used in IMPORTS:
        if not user.startswith(f"{used}."):  # a module of a package that imports the package's own names
            graph[user].add(used)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_an_import_is_seen_wherever_it_stands() -> None:
    assert len(IMPORTS) > 300
    assert (f"{PACKAGE}.plan.plan", f"{PACKAGE}.recipe") in IMPORTS
