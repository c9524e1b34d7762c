"""Node workers on two nodes, which are this machine twice, under a fake srun."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from dead_scratch import dead_scratch

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch import addresses, channels, nodes
from grpo_recipes.launch.addresses import resolve_node_address
from grpo_recipes.launch.channels import srun_command
from grpo_recipes.launch.nodes import NodeWorkers, RemoteChild, preflight_nodes
from grpo_recipes.launch.processes import Ending, Group, Rank, State, wait_for_ending
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.types import Process
from grpo_recipes.process.tree import is_alive, is_stopped
from grpo_recipes.runs.rundir import stop_file

RANK = """
import json, os, signal, sys, time
folder = os.path.join(os.environ["GRPO_RUN_DIR"], "processes")
signal.signal(signal.SIGUSR2, lambda *_: open(os.path.join(folder, "stacks"), "w").close())
record = {"rank": 1, "pid": os.getpid(), "node": 1, "tmp": os.environ["TMPDIR"], "sync": os.environ["GRPO_SYNC_DIR"]}
record["token"] = open(os.environ["GRPO_TOKEN_FILE"]).read()
record["extra"] = os.environ["EXTRA"]
with open(os.path.join(folder, "rank_1.json"), "w") as file:
    json.dump(record, file)
"""
# Acts like accelerate for a rank: starts it, reports how it died, and fails.
STARTER = (
    f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {RANK + 'time.sleep(300)'!r}])\n"
    "code = child.wait()\nprint(f'exitcode  : {code} (pid: {child.pid})', flush=True)\nsys.exit(1)"
)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """``job(NodeAddr of each node)``: the environment of a batch script on two nodes, fake srun and scontrol in it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "fake_srun.py").read_text())

    def job_it(*addresses: str, **variables: str) -> dict[str, str]:
        known = dict(zip(("n1", "n2"), addresses or ("127.0.0.1", "127.0.0.1"), strict=True))
        answers = "".join(
            f'[ "$3" = {name} ] && echo "NodeName={name} NodeAddr={at} X=1"\n' for name, at in known.items()
        )
        (programs / "scontrol").write_text(f"#!/bin/sh\n{answers}true\n")
        for program in programs.iterdir():
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SRUN_ARGV": str(tmp_path / "argv.json"),
            "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_JOB_CPUS_PER_NODE": "64,32(x3)", **variables,
        }  # fmt: skip
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return dict(os.environ)

    return job_it


@pytest.fixture
def workers() -> Iterator[NodeWorkers]:
    with closing(NodeWorkers(2)) as both:
        yield both


def two_nodes() -> Resources:
    return Resources("cpu", (), 2).on_nodes(2)


def begun(workers: NodeWorkers, environment: dict[str, str], run_dir: Path) -> None:
    (run_dir / "processes").mkdir(parents=True)
    preflight_nodes(workers, two_nodes(), environment)
    workers.begin(run_dir, "mark", "the-token", {"EXTRA": "here"})


def remote(workers: NodeWorkers, tmp_path: Path, code: str) -> RemoteChild:
    argv = [sys.executable, "-c", code]
    return RemoteChild(workers, Process("trainer", argv, {}, (), str(tmp_path / "node1.log"), 1))


def until(condition: Callable[[], object], event: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {event}"
        time.sleep(0.05)


def srun_process() -> psutil.Process:
    living = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a child of an earlier test has just ended
            if child.status() != psutil.STATUS_ZOMBIE and "srun" in " ".join(child.cmdline()):
                living.append(child)
    (srun,) = living
    return srun


def ranks_of(child: RemoteChild) -> Sequence[Rank]:
    until(lambda: child.state().ranks, "record of the rank")
    return child.state().ranks


def test_one_srun_covers_the_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert srun_command(4, {"SLURM_JOB_CPUS_PER_NODE": "64,32(x3)"}) == [
        "srun", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--overlap", "--cpus-per-task=32",
        "--kill-on-bad-exit=1", "--mpi=none", "--input=all", "--export=ALL", f"--chdir={tmp_path}",
        sys.executable, "-P", "-m", "grpo_recipes.launch.nodes",
    ]  # fmt: skip


def test_options_of_the_profile_reach_srun():
    options = {"GRPO_SRUN_OPTIONS": "--container-image=a.sqsh '--container-mounts=/a b'"}
    assert srun_command(2, options)[-6:-4] == ["--container-image=a.sqsh", "--container-mounts=/a b"]


@pytest.mark.parametrize("name", ["SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK"])
def test_options_that_hide_gpus_do_not_reach_srun(job, tmp_path, monkeypatch, name):
    """sbatch exports them, e.g. for --gpus-per-task=1, and srun would give its only task of a node one GPU."""
    environment = job()
    for variable in (name, "SLURM_JOB_ID"):
        monkeypatch.setenv(variable, "1")
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    with closing(NodeWorkers(2)) as workers:
        workers.start(environment)
        until(lambda: not workers.alive(), "end of srun")
    names = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert "SLURM_JOB_ID" in names and name not in names


def test_on_one_node_nothing_is_started(job, workers):
    alone = Resources("cpu", (), 2)
    assert preflight_nodes(workers, alone, job()) is alone
    assert not workers.alive()


def test_the_nodes_are_as_they_say_and_reach_each_other(job, workers, tmp_path):
    resources = preflight_nodes(workers, two_nodes(), job())
    assert [(node.address, node.name, node.interface) for node in resources.nodes] == [
        ("127.0.0.1", "n1", "lo"),
        ("127.0.0.1", "n2", "lo"),
    ]
    assert all(node.cores == len(os.sched_getaffinity(0)) for node in resources.nodes[1:])
    assert "--nodes=2" in json.loads((tmp_path / "argv.json").read_text())


def test_the_first_node_opens_as_many_files_as_the_others(job, workers):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        preflight_nodes(workers, two_nodes(), job())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > hard // 2, "its processes are the launcher's own"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("variable", ["NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_is_named_gives_the_addresses(job, workers, variable):
    resources = preflight_nodes(workers, two_nodes(), job("192.0.2.1", "192.0.2.2", **{variable: "lo"}))
    assert [node.address for node in resources.nodes] == ["127.0.0.1", "127.0.0.1"]


def test_a_name_that_means_the_loopback_on_the_first_node_is_not_its_address(job, workers, monkeypatch):
    monkeypatch.setattr(addresses, "resolve_node_address", {"n1": "127.0.1.1", "n2": "127.0.0.1"}.__getitem__)
    resources = preflight_nodes(workers, two_nodes(), job())
    assert [node.address for node in resources.nodes] == ["127.0.0.1", "127.0.0.1"]


@pytest.mark.parametrize(
    ("addresses", "variables", "message"),
    [
        (
            (),
            {"NETWORK_INTERFACE": "=ib9,lo"},
            r"NETWORK_INTERFACE: node n1 has no address on interface 'ib9' \(it has lo",
        ),
        ((), {"NETWORK_INTERFACE": "ib9"}, r"NETWORK_INTERFACE: node n1 has no address on interface 'ib9' \(it has lo"),
        (("127.0.0.1", "192.0.2.7"), {}, "node n2 cannot listen on 192.0.2.7"),
        (("name.invalid", "name.invalid"), {}, "Slurm's address name.invalid of node n1: "),
        ((), {"SLURM_NODEID": "1"}, "launched once, on its first node"),
        ((), {"PATH": "/nowhere"}, "srun: is not installed here"),
    ],
)
def test_nodes_that_cannot_work_together_are_refused(job, workers, addresses, variables, message):
    with pytest.raises(ConfigError, match=message):
        preflight_nodes(workers, two_nodes(), job(*addresses, **variables))


def test_a_node_without_an_address_in_slurm_is_refused(job):
    job()
    with pytest.raises(ConfigError, match="scontrol shows no address of node n9"):
        resolve_node_address("n9")


def test_the_pair_that_does_not_reach_each_other_is_named(job, workers, monkeypatch):
    ask = workers.ask

    def nobody_listens(order: str, *arguments: object, **facts: object) -> list[dict]:
        if order == "connect":
            facts["peers"][1][1] = 1  # type: ignore[index]
        return ask(order, *arguments, **facts)

    monkeypatch.setattr(workers, "ask", nobody_listens)
    message = r"node n1 \(127.0.0.1\) can't reach node n2 \(127.0.0.1\): Connection refused"
    with pytest.raises(ConfigError, match=message):
        preflight_nodes(workers, two_nodes(), job())


@pytest.mark.parametrize(("answer", "message"), [(b"7\n", "another program answered there"), (b"", "timed out")])
def test_an_address_where_another_program_listens_is_not_the_node(job, workers, monkeypatch, answer, message):
    monkeypatch.setattr(nodes, "_CONNECT_SECONDS", 0.5)
    other = socket.create_server(("127.0.0.1", 0))
    ask, answered = workers.ask, []

    def answer_both() -> None:
        for _ in range(2):
            answered.append(other.accept()[0])
            answered[-1].sendall(answer)

    def other_listens(order: str, *arguments: object, **facts: object) -> list[dict]:
        if order == "connect":
            facts["peers"][1][1] = other.getsockname()[1]  # type: ignore[index]
        return ask(order, *arguments, **facts)

    answering = threading.Thread(target=answer_both, daemon=True)
    answering.start()
    monkeypatch.setattr(workers, "ask", other_listens)
    with pytest.raises(ConfigError, match=rf"can't reach node n2 \(127.0.0.1\): {message}") as refused:
        preflight_nodes(workers, two_nodes(), job())
    assert "firewall" in str(refused.value)
    answering.join()
    for connection in [other, *answered]:
        connection.close()


def test_a_silent_node_is_named(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    with pytest.raises(ConfigError, match="node 1 did not answer within 1 s"):
        workers.ask("stop", [1], 1.0)


def test_other_output_of_a_node_does_no_harm(job, workers, tmp_path):
    environment = job()
    srun = tmp_path / "bin" / "srun"
    prologue = "import sys\nsys.stdout.buffer.write(b'Gr\\xfc\\xdfe\\n')\nsys.stdout.flush()\n"
    srun.write_text(srun.read_text().replace("import json\n", prologue + "import json\n", 1))
    assert len(preflight_nodes(workers, two_nodes(), environment).nodes) == 2


def test_an_srun_that_does_not_end_is_killed(job, tmp_path, monkeypatch):
    monkeypatch.setattr(channels, "END_SECONDS", 0.5)
    environment = job()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 0.1; done\n")
    with closing(NodeWorkers(2)) as workers:
        workers.start(environment)
        srun = srun_process()
        time.sleep(0.3)
    assert not is_alive(srun.pid)


def test_options_of_srun_that_do_not_parse_are_refused():
    with pytest.raises(ConfigError, match=r"GRPO_SRUN_OPTIONS: .*No closing quotation"):
        srun_command(2, {"GRPO_SRUN_OPTIONS": "--comment='a"})


def test_what_a_node_refuses_is_said_in_a_line(tmp_path):
    (tmp_path / "trl-0.0.1.dist-info").mkdir()
    (tmp_path / "trl-0.0.1.dist-info/METADATA").write_text("Name: trl\nVersion: 0.0.1\n")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_recipes.launch.nodes"], input='{"order": "describe", "to": [1]}\n',
        env={**os.environ, "SLURM_NODEID": "1", "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("grpo: node 1: environment: trl 0.0.1 is installed") and done.stderr.count("\n") == 1


def test_srun_that_fails_is_named(job, workers, tmp_path):
    environment = job()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(ConfigError, match="exited with code 7"):
        preflight_nodes(workers, two_nodes(), environment)


def test_a_report_longer_than_a_line_of_slurm_arrives_whole(job, workers):
    preflight_nodes(workers, two_nodes(), job(SLURMD_NODENAME="n1"))
    (report,) = workers.ask("connect", [1], 20.0, peers=[["127.0.0.1", 1]] * 200, limit=1)
    assert report["errors"] == ["Connection refused"] * 200


@pytest.mark.slow
def test_a_process_of_another_node_has_that_nodes_own_scratch(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    child = remote(workers, tmp_path, STARTER)
    (rank,) = ranks_of(child)
    assert rank.record["token"] == "the-token" and rank.record["extra"] == "here" and not rank.gone
    scratch = [Path(rank.record["tmp"]), Path(rank.record["sync"])]
    assert all(folder.is_dir() for folder in scratch)
    state = child.state()
    assert state.alive and state.lost is None and state.exit is None
    workers.close()
    assert not is_alive(rank.record["pid"]) and not any(folder.exists() for folder in scratch)


def test_each_node_removes_what_dead_runs_left_there(job, workers, tmp_path, capsys):
    (tmp_path / "shm").mkdir()
    with tempfile.TemporaryDirectory() as node:  # a short path: a run's sockets are below it
        scratch = dead_scratch(Path(node), tmp_path / "shm")
        begun(workers, job(SLURM_TMPDIR=node), tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if scratch.disk.name in line]
    assert line.startswith("grpo: node 1: removed scratch of ") and not scratch.disk.exists()
    assert scratch.memory.exists(), "no folder that a launch of that node uses"


def test_what_a_node_lacks_is_told_with_its_name_before_anything_starts(job, workers, tmp_path):
    job(SLURM_TMPDIR=str(tmp_path))
    (tmp_path / ("long" * 30)).mkdir()
    environment = job(SLURM_TMPDIR=str(tmp_path / ("long" * 30)))
    with pytest.raises(ConfigError) as told:
        preflight_nodes(workers, two_nodes(), environment)
    assert [problem.where for problem in told.value.problems] == ["node n1, TMPDIR", "node n2, TMPDIR"]


def test_a_port_of_another_node_is_asked_there(job, workers):
    preflight_nodes(workers, two_nodes(), job())
    free = workers.make_port_checker(1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not free(listener.getsockname()[1])
        number = listener.getsockname()[1]
    assert free(number) and workers.make_port_checker(0) is None


def test_a_killed_rank_of_another_node_is_named(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    child = remote(workers, tmp_path, STARTER)
    pid = ranks_of(child)[0].record["pid"]
    os.kill(pid, signal.SIGKILL)
    ending = wait_for_ending([Group([child])], lambda: None)
    assert (ending.code, ending.failed_rank) == (137, 1)
    assert ending.cause == f"rank 1 (pid {pid} on node 1) was killed by signal 9"
    assert ending.log == tmp_path / "node1.log"


def test_a_command_of_another_node_that_fails_is_named_with_its_code(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    ending = wait_for_ending([Group([remote(workers, tmp_path, "import sys; sys.exit(3)")])], lambda: None)
    assert ending.code == 3 and "accelerate launch on node 1" in ending.cause


def test_a_process_can_be_ended_and_started_again(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    first = remote(workers, tmp_path, STARTER)
    pid = ranks_of(first)[0].record["pid"]
    first.end()
    assert not is_alive(pid)
    second = remote(workers, tmp_path, STARTER)
    (rank,) = ranks_of(second)
    assert rank.record["pid"] != pid and not rank.gone and second.state().lost is None
    assert first.state() == State(), "a report about its successor must not count"


def test_requests_reach_the_other_nodes(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    ranks_of(remote(workers, tmp_path, STARTER))
    workers.send("stop")
    until(stop_file(tmp_path / "run").exists, "touch by the other node")


# Acts like vLLM on a further node: a command and its engine. Each writes its stacks to a file.
SERVER = """
import faulthandler, os, signal, subprocess, sys, time
name, folder = sys.argv[1], os.path.join(os.environ["GRPO_RUN_DIR"], "processes")
faulthandler.register(signal.SIGUSR2, file=open(os.path.join(folder, f"{name}.txt"), "a"))
if name == "command":
    subprocess.Popen([sys.executable, __file__, "engine"])
with open(os.path.join(folder, f"{name}.pid"), "w") as file:
    file.write(str(os.getpid()))
while True:
    time.sleep(0.01)
"""


def test_a_server_on_another_node_writes_its_stacks_and_its_stopped_engine_is_named(job, workers, tmp_path):
    folder, script = tmp_path / "run/processes", tmp_path / "server.py"
    begun(workers, job(), tmp_path / "run")
    rank = ranks_of(remote(workers, tmp_path, STARTER))[0].record
    script.write_text(SERVER)
    argv = [sys.executable, str(script), "command"]
    RemoteChild(workers, Process("server", argv, {}, (), str(tmp_path / "log"), 1, ready="serving"))
    until(lambda: (folder / "engine.pid").is_file() and (folder / "engine.pid").read_text(), "engine")
    engine = psutil.Process(int((folder / "engine.pid").read_text()))
    engine.suspend()
    until(lambda: is_stopped(engine.pid), "stopped engine")

    assert workers.request_stacks(with_ranks=False) == [f"{engine.pid} on node 1"]
    until(lambda: "most recent call first" in (folder / "command.txt").read_text(), "stacks of the command")
    assert not (folder / "stacks").exists() and is_alive(rank["pid"])

    engine.resume()
    until(lambda: "most recent call first" in (folder / "engine.txt").read_text(), "stacks of the engine")
    assert workers.request_stacks(with_ranks=True) == []
    until((folder / "stacks").exists, "SIGUSR2 at the rank")


@pytest.mark.slow
def test_nothing_is_left_when_srun_is_killed(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    child = remote(workers, tmp_path, STARTER)
    rank = ranks_of(child)[0].record
    srun = srun_process()
    srun.kill()
    ending = wait_for_ending([Group([child])], lambda: None)
    assert "srun, which runs the node workers, exited with code -9" in ending.cause
    until(lambda: not is_alive(rank["pid"]) and not Path(rank["tmp"]).exists(), "end of the rank and its scratch")


class FakeNews:
    """A process of a node. It reports only the items of ``states`` about its ranks, one after the other."""

    process, log = Process("trainer", [], {}, (), "log"), Path("log")

    def __init__(self, *states: State):
        self.states = list(states)

    def state(self) -> State:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def test_a_rank_that_was_killed_is_to_blame_though_the_news_of_its_node_come_last():
    error = {"rank": 0, "pid": 5, "exit": 1, "cause": "RuntimeError: connection reset", "time": 1.0}
    killed = {"rank": 1, "pid": 7, "node": 1}
    local = FakeNews(State(ranks=[Rank(error, "log")]))
    remote = FakeNews(State(ranks=[Rank(killed, "log")]), State(ranks=[Rank(killed, "log", True, -9)]))
    ending = wait_for_ending([Group([local, remote])], lambda: None)
    assert ending.cause == "rank 1 (pid 7 on node 1) was killed by signal 9"


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ({8: -signal.SIGABRT}, "rank 3: OutOfMemoryError"),  # NCCL aborts ranks that lost rank 3
        ({0: -signal.SIGABRT, 5: -signal.SIGKILL}, "rank 5 (pid 5) was killed by signal 9"),
        ({0: -signal.SIGTERM, 5: -signal.SIGABRT}, "rank 5 (pid 5) was killed by signal 6"),
    ],
)
def test_a_rank_that_nccl_aborted_is_blamed_after_the_rank_that_failed(codes, blamed):
    ranks = [Rank({"rank": rank, "pid": rank}, "log", True, code) for rank, code in codes.items()]
    if "rank 3" in blamed:
        error = {"rank": 3, "pid": 3, "exit": 1, "cause": "OutOfMemoryError", "time": 1.0}
        ranks.append(Rank(error, "log"))
    ending = wait_for_ending([Group([FakeNews(State(ranks=ranks))])], lambda: None)
    assert ending.cause == blamed


class FakeChild:
    process = Process("trainer", [], {}, (), "log")

    def __init__(self, exit_code: int | None):
        self.log, self.code, self.ended = Path("log"), exit_code, False

    def state(self) -> State:
        lost = None if self.code is None else Ending(self.code, "accelerate launch")
        return State(self.code is None, 1, self.code, lost)

    def end(self) -> None:
        self.ended = True


@pytest.mark.slow
def test_a_node_worker_that_is_killed_ends_the_run_and_leaves_nothing(job, workers, tmp_path):
    begun(workers, job(), tmp_path / "run")
    child = remote(workers, tmp_path, STARTER)
    rank = ranks_of(child)[0].record
    worker = next(
        parent for parent in psutil.Process(rank["pid"]).parents() if "grpo_recipes.launch.nodes" in parent.cmdline()
    )
    worker.kill()
    ending = wait_for_ending([Group([child])], lambda: None)
    assert "srun, which runs the node workers, exited with code 137" in ending.cause
    until(lambda: not is_alive(rank["pid"]) and not Path(rank["tmp"]).exists(), "end of the rank and its scratch")
    assert not (tmp_path / "run/summary.json").exists(), "the launcher lives, and says how the run ended"


LAUNCHER = """
import os, sys, time
from pathlib import Path
from grpo_recipes.launch import addresses, channels, nodes
from grpo_recipes.launch.addresses import resolve_node_address
from grpo_recipes.plan.types import Process
from grpo_recipes.launch.nodes import NodeWorkers, RemoteChild
from grpo_recipes.plan.devices import Resources
from grpo_recipes.launch.nodes import preflight_nodes
workers, run_dir = NodeWorkers(2), Path(sys.argv[1])
preflight_nodes(workers, Resources("cpu", (), 2).on_nodes(2), os.environ)
workers.begin(run_dir, "mark", "token", {"EXTRA": "here"})
child = RemoteChild(workers, Process("trainer", [sys.executable, "-c", sys.argv[2]], {}, (), "node1.log", 1))
while not child.state().ranks:
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_nothing_is_left_on_the_other_node_when_the_launcher_is_killed(job, tmp_path):
    environment = job()
    (tmp_path / "run/processes").mkdir(parents=True)
    argv = [sys.executable, "-c", LAUNCHER, str(tmp_path / "run"), STARTER]
    assert subprocess.run(argv, env=environment, cwd=tmp_path, timeout=60, check=False).returncode == -9
    rank = json.loads((tmp_path / "run/processes/rank_1.json").read_text())
    until(lambda: not is_alive(rank["pid"]) and not Path(rank["tmp"]).exists(), "end of the rank and its scratch")
    assert not (tmp_path / "run/summary.json").exists(), "the first node's process guard says how the run ended"


def test_trainers_of_two_nodes_end_as_one():
    done, running, failed = FakeChild(0), FakeChild(None), FakeChild(3)
    one_runs, both_done, one_failed = (
        Group(pair).state() for pair in ([done, running], [done, done], [running, failed])
    )
    assert one_runs.lost is None and one_runs.alive
    assert both_done.lost.code == 0 and both_done.exit == 0
    assert one_failed.lost.code == 3 and one_failed.exit is None
    assert Group([done, failed]).state().exit == 3
    Group([done, running]).end()
    assert done.ended and running.ended


def test_trainers_of_two_nodes_are_ended_side_by_side():
    both = threading.Barrier(2)

    class Slow(FakeChild):
        def end(self) -> None:
            both.wait(5)
            super().end()

    pair = [Slow(None), Slow(None)]
    Group(pair).end()
    assert all(child.ended for child in pair)
