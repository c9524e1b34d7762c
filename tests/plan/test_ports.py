"""Ports: planned by arithmetic, then checked on the machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from other_user import needs_root, other_user

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan import ports as ours
from grpo_recipes.plan.ports import Ports, choose_free_ports, is_port_free, plan_ports
from grpo_recipes.process.listeners import has_closing_connections
from grpo_recipes.slurm.client import SlurmJob

LOOPBACK = "127.0.0.1"
EPHEMERAL_RANGE_BEGINS = 32768
RETURNED: set[int] = set()


@contextmanager
def listening(port: int = 0, address: str = LOOPBACK) -> Iterator[int]:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, port))
        holder.listen()
        yield holder.getsockname()[1]


def unused() -> int:
    """Return a free port that no earlier call returned, because the kernel may choose a port twice."""
    with listening() as port:
        is_new = port not in RETURNED
    RETURNED.add(port)
    return port if is_new else unused()


def job(number: int) -> SlurmJob:
    return SlurmJob(number, "cluster", 1, None)


def all_of(ports: Ports) -> set[int]:
    return {ports.server, ports.group, ports.main_process, ports.vllm_internal}


def test_outside_slurm_the_guides_numbers(read):
    assert plan_ports(read(), None) == Ports(8000, 51216, 29525, None)


@pytest.mark.parametrize("number", [1, 7, 1199, 1200, 123456, 4294967295])
def test_inside_slurm_ports_come_from_the_job_id(read, number):
    ports = plan_ports(read(), job(number))
    assert len(all_of(ports)) == 4
    assert all(1024 <= port < EPHEMERAL_RANGE_BEGINS for port in all_of(ports))
    assert ports == plan_ports(read(), job(number))


def test_neighbouring_jobs_share_no_port(read):
    used: set[int] = set()
    for number in range(5000, 5200):
        ports = all_of(plan_ports(read(), job(number)))
        assert not ports & used
        used |= ports


def test_ports_the_user_gave_are_literal_in_slurm_too(read):
    recipe = read(vllm_server_port=9000, vllm_group_port=9001, main_process_port=9002)
    for slurm in (None, job(7)):
        ports = plan_ports(recipe, slurm)
        assert (ports.server, ports.group, ports.main_process) == (9000, 9001, 9002)


@pytest.mark.parametrize("address", [LOOPBACK, "0.0.0.0"])
def test_a_port_is_free_until_someone_listens(address):
    with listening(address=address) as port:
        assert not is_port_free(LOOPBACK, port)
    assert is_port_free(LOOPBACK, port)


def test_a_busy_port_of_our_choosing_is_replaced_with_a_note(read):
    with listening() as busy:
        ports, notes = choose_free_ports(read(), Ports(busy, unused(), unused(), None), LOOPBACK)
        assert ports.server != busy
        assert is_port_free(LOOPBACK, ports.server)
    assert notes == [f"port {busy} (vllm_server_port) is in use by another process; using {ports.server}"]


def test_ports_that_rank_0_opens_on_another_node_are_asked_for_there(read):
    requested, checked = Ports(unused(), 51216, 29525, None), []
    ports, notes = choose_free_ports(read(), requested, LOOPBACK, lambda port: checked.append(port) or port != 29525)
    assert ports.server == requested.server and ports.group == 51216 and ports.main_process == 29535
    assert checked == [51216, 29525, 29535] and len(notes) == 1


def test_ports_of_a_server_that_there_is_not_are_not_looked_at(read):
    with listening() as busy, listening() as other:
        requested = Ports(busy, other, unused(), None)
        assert choose_free_ports(read(vllm_server_port=busy), requested, LOOPBACK, server=False) == (requested, [])


def test_free_ports_are_kept_without_a_note(read):
    ports = Ports(unused(), unused(), unused(), 777)
    assert choose_free_ports(read(), ports, LOOPBACK) == (ports, [])


@pytest.mark.parametrize(
    ("key", "name"),
    [("vllm_server_port", "server"), ("vllm_group_port", "group"), ("main_process_port", "main_process")],
)
def test_a_busy_port_the_user_gave_is_refused(read, key, name):
    free = {"server": unused(), "group": unused(), "main_process": unused()}
    with listening() as busy, pytest.raises(ConfigError) as refused:
        choose_free_ports(read(**{key: busy}), Ports(**{**free, name: busy}, vllm_internal=None), LOOPBACK)
    (problem,) = refused.value.problems
    assert "recipe.yaml:" in problem.where and str(busy) in problem.what and key in problem.fix


@pytest.mark.parametrize("test", ["first", "second"])
def test_a_test_keeps_no_port_from_the_runs_of_the_next(read, test):
    assert ours._RESERVED == {}
    ports, _ = choose_free_ports(read(), Ports(unused(), unused(), unused(), None), LOOPBACK)
    assert set(ours._RESERVED) == {ports.server, ports.group, ports.main_process}


def test_two_ports_of_ours_are_never_the_same(read):
    port = unused()
    ports, _ = choose_free_ports(read(), Ports(port, port, port, None), LOOPBACK)
    assert len({ports.server, ports.group, ports.main_process}) == 3


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_refused_and_not_searched_for_ever(read, host):
    outcome: list[object] = []

    def look() -> None:
        try:
            outcome.append(choose_free_ports(read(), Ports(8000, 51216, 29525, None), host))
        except ConfigError as refused:
            outcome.append(refused.problems[0])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(10)
    assert outcome, "still looking for a port after 10 s"
    assert "vllm_server_host" in str(outcome[0])


CHOOSES = """
import sys
from pathlib import Path
from grpo_recipes.plan.ports import Ports, choose_free_ports
from grpo_recipes.recipe import read_recipe

sys.stdin.readline()
wanted = Ports(*map(int, sys.argv[1:4]), None)
print(choose_free_ports(read_recipe(Path(sys.argv[4])), wanted, "127.0.0.1")[0].server, flush=True)
sys.stdin.readline()
"""


def test_launches_of_the_same_moment_choose_different_ports(read):
    recipe = read()
    requested = [str(unused()) for _ in range(3)]
    command = [sys.executable, "-c", CHOOSES, *requested, str(recipe.path)]
    launches = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for launch in launches:
        launch.stdin.write("choose\n")
        launch.stdin.flush()
    chosen = [launch.stdout.readline() for launch in launches]
    for launch in launches:
        launch.communicate("end\n")

    assert len(set(chosen)) == 4 and f"{requested[0]}\n" in chosen
    assert choose_free_ports(recipe, Ports(*map(int, requested), None), LOOPBACK)[1] == []  # their ends freed all


KEEPS = """
import sys
from grpo_recipes.plan.ports import reserve_port

print(reserve_port(int(sys.argv[1])), flush=True)
sys.stdin.readline()
"""


def test_a_port_the_user_gave_that_another_launch_keeps_is_refused(read):
    port = unused()
    command = [sys.executable, "-c", KEEPS, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        with pytest.raises(ConfigError, match=str(port)):
            choose_free_ports(read(vllm_server_port=port), Ports(port, unused(), unused(), None), LOOPBACK)
        other.communicate("end\n")
    choose_free_ports(read(vllm_server_port=port), Ports(port, unused(), unused(), None), LOOPBACK)


def test_a_process_of_the_run_can_listen_on_a_port_that_is_kept():
    port = unused()
    assert ours.reserve_port(port) and ours.reserve_port(port)
    with listening(port):
        assert not is_port_free(LOOPBACK, port)
    assert is_port_free(LOOPBACK, port)


def test_connections_that_an_earlier_run_closed_are_not_in_the_way():
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection((LOOPBACK, port))
        accepted, _ = listener.accept()
        accepted.close()
        client.close()
    assert has_closing_connections(port) and ours.reserve_port(port)


def test_a_machine_without_a_free_port_is_told_at_once(read, monkeypatch):
    """R5: the search for a port ends."""
    checked = []
    monkeypatch.setattr(ours, "is_port_free", lambda host, port: checked.append(port))
    with pytest.raises(ConfigError) as refused:
        choose_free_ports(read(), Ports(8000, 51216, 29525, None), LOOPBACK)
    assert 10 < len(checked) < 1000
    assert "no free port found: 100 ports from 8000 on are in use" in str(refused.value)
    assert "Fix: set vllm_server_port to a free port" in str(refused.value)
    with pytest.raises(ConfigError, match="no free port found"):
        ours.reserve_other_port(LOOPBACK, 8000)


def test_a_machine_without_a_free_port_for_replicas_is_told_at_once(read, monkeypatch):
    monkeypatch.setattr(ours, "is_port_free", lambda host, port: port < 29000)
    replicas = Ports(8000, 8001, 8002, None, replicas=29550)
    with pytest.raises(ConfigError) as refused:
        choose_free_ports(read(), replicas, LOOPBACK)
    message = "port of the replicas: no free port found: 100 ports from 29550 on are in use by other processes. "
    assert str(refused.value) == f"{message}Fix: end processes that use them (ss -ltn lists the ports in use)"
    monkeypatch.undo()
    with listening() as busy:
        ports, notes = choose_free_ports(read(), replace(replicas, server=unused(), replicas=busy), LOOPBACK)
    assert ports.replicas not in (busy, None) and len(notes) <= 2


BINDS_NAMES = """
import os, socket, sys
os.setuid(65534)
held = []
for port in map(int, sys.argv[1:]):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind(f"\\0grpo-recipes-port-{port}")
print("bound", flush=True)
sys.stdin.readline()
"""


@needs_root
def test_names_that_another_user_takes_do_not_hang_a_launch(read):
    """R5: another user binds the abstract sockets of all ports that a launch would try."""
    requested = unused()
    tried = [str(requested + 10 * index) for index in range(50)]
    command = [sys.executable, "-S", "-c", BINDS_NAMES, *tried]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as other:
        assert other.stdout.readline() == "bound\n"
        ports, notes = choose_free_ports(read(), Ports(requested, unused(), unused(), None), LOOPBACK)
        other.communicate("end\n")
    assert ports.server == requested and notes == []


@needs_root
def test_a_port_on_which_another_user_listens_is_replaced(read, tmp_path):
    """R5: only the kernel's own table of ports counts."""
    requested = unused()
    with other_user(requested, tmp_path / "received") as user:
        user.wait()
        ports, notes = choose_free_ports(read(), Ports(requested, unused(), unused(), None), LOOPBACK)
    assert ports.server != requested and len(notes) == 1 and not user.received
