"""R12: one run on two nodes without Slurm, which are two network namespaces of this machine."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch

from grpo_recipes.runs.rundir import read_json

SHORT = ("--prompts_per_step", "8", "--num_generations", "8", "--save_strategy", "no")
NUMBERS = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class TwoNodes:
    """Two network namespaces that share nothing but a link."""

    name: str
    launch: Callable[..., Launch]

    def start(self, rank: int, words: Sequence[str], **variables: str) -> Launch:
        """Start a command on a node; both nodes have the same working folder."""
        return self.launch(command=["ip", "netns", "exec", f"{self.name}-{rank}", *words], folder=".", **variables)

    def cut_the_link(self) -> None:
        """Drop all packets between the nodes, in both directions and without an answer."""
        ip("-n", f"{self.name}-0", "link", "set", f"{self.name}v0", "down")


@pytest.fixture
def two_nodes(launch: Callable[..., Launch]) -> Iterator[TwoNodes]:
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"g{os.getpid() % 10**6}{next(NUMBERS)}"
    spaces = [f"{name}-{rank}" for rank in (0, 1)]
    try:
        for space in spaces:
            ip("netns", "add", space)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        peers = ["type", "veth", "peer", "name", f"{name}v1", "netns", spaces[1]]
        ip("link", "add", f"{name}v0", "netns", spaces[0], *peers)
        for rank, space in enumerate(spaces):
            for address in (f"10.0.0.{rank + 1}/24", f"192.168.1.{rank + 100}/24"):
                ip("-n", space, "addr", "add", address, "dev", f"{name}v{rank}")
            for interface in ("lo", f"{name}v{rank}"):
                ip("-n", space, "link", "set", interface, "up")
        yield TwoNodes(name, launch)
    finally:
        for space in spaces:
            ip("netns", "del", space)


def output_of(run: Launch) -> str:
    return Path(run.folder / "output.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_command_per_node_trains_as_one_run(two_nodes: TwoNodes) -> None:
    """R12: the server is on node 0, trainers are on both nodes, and node 1 may start first."""
    smoke = {"my.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml")}
    first = documented("grpo launch my.yaml --nodes 2 --node-rank 0 --master-addr 10.0.0.1", smoke)
    second = documented("grpo launch my.yaml --nodes 2 --node-rank 1 --master-addr 10.0.0.1", smoke)
    node_1 = two_nodes.start(1, [*second, *SHORT, "--max_steps", "3"])
    time.sleep(5)

    node_0 = two_nodes.start(0, [*first, *SHORT, "--max_steps", "3"])

    assert node_0.wait() == 0, output_of(node_0)
    assert node_1.wait(30) == 0, output_of(node_1)
    plan = read_json(node_0.run_dir / "plan.json")
    assert [(process["role"], process["node"]) for process in plan["processes"]] == [
        ("server", 0),
        ("trainer", 0),
        ("trainer", 1),
    ]
    assert plan["nodes"] == ["10.0.0.1", "10.0.0.2"]
    ranks = [read_json(node_0.run_dir / "processes" / f"rank_{rank}.json") for rank in (0, 1)]
    assert [rank["node"] for rank in ranks] == [0, 1]
    assert [row["step"] for row in node_0.rows()] == [1, 2, 3]
    assert node_0.processes() == [] and node_1.processes() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_link_ends_the_run_on_both_nodes(two_nodes: TwoNodes) -> None:
    """R12: the other node is named within the documented 40 seconds, and nothing is left on either node."""
    places = {"python": sys.executable, "4": "1", "run_colocated_grpo.py": str(REPOSITORY / "run_colocated_grpo.py")}
    on_node_0 = "python run_colocated_grpo.py --gpus 4 --nodes 2 --node-rank 0 --master-addr 192.168.1.100"
    on_node_1 = "python run_colocated_grpo.py --gpus 4 --nodes 2 --node-rank 1 --master-addr 192.168.1.100"
    first, second = documented(on_node_0, places), documented(on_node_1, places)
    flags = [*SHORT, "--max_steps", "100000"]
    node_0 = two_nodes.start(0, [*first, *flags], ENV_DIR=sys.prefix)
    node_1 = two_nodes.start(1, [*second, *flags], ENV_DIR=sys.prefix)
    node_0.wait_for_step(2)

    two_nodes.cut_the_link()

    cut = time.monotonic()
    codes = node_0.wait(60), node_1.wait(60)
    assert time.monotonic() - cut < 40 and 0 not in codes, output_of(node_0)
    assert "node 1" in node_0.summary()["cause"], node_0.summary()
    node_0.wait_for_nothing_left()
    node_1.wait_for_nothing_left()
