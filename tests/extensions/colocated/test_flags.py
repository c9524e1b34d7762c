"""The co-located entry point: every flag of run_colocated_grpo.py changes the launch, or is rejected."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from grpo_recipes.cli import main
from grpo_recipes.cli.entry_points import launch_command
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.colocated import main as colocated
from grpo_recipes.extensions.colocated.main import DETAILS
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources, environment_device
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.slurm.client import SlurmJob

SMOKE = str(find_code_root() / "recipes/smoke/grpo.yaml")
MATH = "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"
OURS = ("--use_vllm", "true", "--vllm_mode", "colocate", "--num_processes")
ADDRESS = "10.1.2.3"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*environment_keys(), *READ_VARIABLES, DETAILS} - {"CACHE_ROOT", "GRPO_HOME"}:
        monkeypatch.setenv(name, "")  # undo the variables that the launch sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return ``machine(gpus, nodes)``, which sets GPUs (None: a CPU environment) and Slurm nodes."""

    def make(gpus: int | None, nodes: int = 0) -> None:
        job = SlurmJob(7, "slurm", nodes, None) if nodes else None
        names = tuple(map(str, range(gpus or 0)))
        resources = Resources("cpu" if gpus is None else "cuda", names, 8, job, ())
        monkeypatch.setattr(colocated, "find_resources", lambda _: resources)
        address = type("Address", (), {"address": ADDRESS, "family": 2})
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [address]})

    return make


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        colocated.read_launch(list(arguments))
    return [str(problem) for problem in caught.value.problems]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = colocated.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_gpus_are_training_processes_with_vllm_inside(machine, capsys) -> None:
    machine(4)
    assert colocated.read_launch([]).options.words() == [*OURS, "1"]
    assert colocated.read_launch(["--gpus", "4"]).options.words() == [*OURS, "4"]
    code, out, err = printed(capsys, "--gpus", "4", "--config", SMOKE, "--dry-run")
    assert code == 0 and "vllm       colocate" in out and "CUDA_VISIBLE_DEVICES=0,1,2,3\n" in out
    assert '"--num_processes", "4"' in out and "\nserver " not in out
    assert f"grpo: grpo launch {colocated.display_path(SMOKE)} {shlex.join((*OURS, '4'))} --dry-run\n" in out + err
    code, out, err = printed(capsys, "--gpus", "2", "--config", SMOKE, "--dry-run")
    assert code == 0 and "CUDA_VISIBLE_DEVICES=0,1\n" in out and '"--num_processes", "2"' in out


def test_a_dry_run_is_also_for_gpus_that_are_not_here_and_says_so(machine, capsys) -> None:
    machine(1)
    code, out, err = printed(capsys, "--gpus", "8", "--config", SMOKE, "--prompts_per_step", "16", "--dry-run")
    assert code == 0 and '"--num_processes", "8"' in out
    assert "1 GPUs are visible: this dry run plans for a node with 8" in out + err
    assert refused("--gpus", "8") == [
        "--gpus: 8 GPUs are requested, but only 1 are visible. Fix: use --gpus 1, or request more GPUs"
    ]
    machine(0)
    assert printed(capsys, "--gpus", "2", "--config", SMOKE, "--dry-run")[0] == 0
    code, out, err = printed(capsys, "--gpus", "2", "--config", SMOKE)
    assert code == 2 and "no GPU is visible" in err


def test_gpus_are_processes_on_cpu(machine, capsys) -> None:
    machine(None)
    code, out, err = printed(capsys, "--gpus", "4", "--dry-run")
    assert code == 0 and '"--num_processes", "4"' in out and "CUDA_VISIBLE_DEVICES=\n" in out
    assert "CPU environment: --gpus 4 means 4 trainers on 8 cores" in out + err


def test_a_dry_run_starts_nothing_and_a_wrong_recipe_is_refused(machine, capsys, tmp_path, monkeypatch) -> None:
    machine(None)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert printed(capsys, "--gpus", "2", "--dry-run")[0] == 0
    assert not (tmp_path / "runs").exists()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model_name: smoke:sums\nbatch_size: many\nsync_frequency: never\nseeed: 1\n")
    code, out, err = printed(capsys, "--config", str(wrong), "--dry-run")
    assert (code, "\ntrainer " in out) == (2, False)
    where = colocated.display_path(wrong)
    assert [f"{where}:{line}: " in err for line in (2, 3, 4)] == [True] * 3


def test_the_port_is_that_of_the_rendezvous(machine, capsys) -> None:
    machine(None)
    code, out, _ = printed(capsys, "--master-port", "30123", "--dry-run")
    assert code == 0 and '"--main_process_port", "30123"' in out
    code, out, err = printed(capsys, "--master-port", "99999", "--dry-run")
    assert code == 2 and "grpo: --master-port: main_process_port: expected at most 65535, got 99999" in err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, err = printed(capsys, "--master-port", str(port))
    assert code == 2 and err.endswith(
        f"grpo: --master-port: port {port} is in use by another process (pid {os.getpid()}). "
        "Fix: free it, or remove --master-port and let the launcher choose\n"
    )


def test_the_log_level_is_that_of_every_process_and_debug_is_torchs_too(machine, monkeypatch, capsys) -> None:
    machine(1)
    for level in colocated.LEVELS:
        door = colocated.read_launch(["--log-level", level])
        assert door.options.words()[6:] == ["--log_level", level.lower(), "--log_level_replica", level.lower()]
        assert door.variables == ({DETAILS: "DETAIL"} if level == "DEBUG" else {})
    assert colocated.read_launch([]).options.words()[6:] == [] and colocated.read_launch([]).variables == {}
    machine(None)
    code, out, err = printed(capsys, "--log-level", "debug", "--dry-run")
    assert code == 0 and f"{DETAILS}=INFO grpo launch" in out + err
    assert os.environ[DETAILS] == "INFO"  # the processes inherit it
    monkeypatch.setenv(DETAILS, "OFF")  # set by the user
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert colocated.read_launch(["--log-level", "DEBUG"]).variables == {}
    assert printed(capsys, "--log-level", "DEBUG", "--dry-run")[0] == 0
    assert (os.environ[DETAILS], os.environ["NCCL_DEBUG"]) == ("OFF", "WARN")


def test_the_recipe_is_the_named_one_that_of_config_the_usual_file_or_the_default(
    machine, monkeypatch, tmp_path
) -> None:
    machine(None)
    monkeypatch.chdir(tmp_path)

    def recipe(*arguments: str) -> str | None:
        return colocated.read_launch(list(arguments)).options.recipe

    assert recipe() == SMOKE
    machine(1)
    assert recipe() == str(find_code_root() / MATH)
    assert recipe("--task", "maxent") == str(find_code_root() / MATH.replace("/grpo/", "/maxent/"))
    usual = tmp_path / colocated.USUAL
    usual.parent.mkdir()
    usual.touch()
    assert recipe() == colocated.USUAL
    (tmp_path / "mine.yaml").touch()
    monkeypatch.setenv("CONFIG", "mine.yaml")
    assert recipe() == "mine.yaml"
    assert recipe("--config", SMOKE) == SMOKE
    assert refused("--config", "none.yaml") == [
        "--config: recipe 'none.yaml' not found. Fix: name a .yaml file in the current folder or under recipes/"
    ]


def test_any_key_is_a_flag_and_what_our_flags_decide_is_not(machine) -> None:
    machine(None)
    assert colocated.read_launch(["--max_steps", "3"]).options.words() == [*OURS, "1", "--max_steps", "3"]
    assert refused("--num_processes", "3") == [
        "--num_processes: --gpus already sets num_processes. Fix: keep only --gpus"
    ]
    (message,) = refused("--vllm-mode", "server")
    assert message == "--vllm-mode: run_colocated_grpo.py already sets vllm_mode. Fix: remove it, or use grpo launch"
    assert refused("--no_use_vllm")[0].startswith("--no_use_vllm: ")
    assert refused("--master-port", "1", "--main_process_port=2")[0].endswith("Fix: keep only --master-port")
    assert refused("--gpu", "4") == ["--gpu: is not an option of run_colocated_grpo.py. Fix: use --gpus"]
    assert refused("my.yaml") == ["'my.yaml': is not a flag. Fix: use --config my.yaml for a recipe"]
    assert refused("--gpus", "0", "--nodes", "-1") == [
        "--gpus: expected 1 or more, got 0. Fix: use --gpus 1",
        "--nodes: expected 1 to 10000, got -1. Fix: use --nodes 1 or more",
    ]  # fmt: skip


def test_options_of_launch_are_handed_on(machine) -> None:
    machine(None)
    switches = ("--dry-run", "--benchmark", "--allow-changed-code", "--update-rewards")
    options = colocated.read_launch(list(switches)).options
    assert options.dry_run and options.benchmark and options.allow_changed_code and options.update_rewards
    assert set(switches) <= set(launch_command(options, {}).split())


def test_a_resumed_run_goes_on_as_it_began(machine) -> None:
    machine(None)
    door = colocated.read_launch(["--resume", "last"])
    assert (door.options.resume, door.options.recipe, door.options.words(), door.notes) == ("last", None, [], [])
    assert colocated.read_launch(["--resume", "last", "--gpus", "2"]).options.words() == ["--num_processes", "2"]


NODES = ("--gpus", "4", "--nodes", "2", "--node-rank", "0", "--master-addr", ADDRESS)


def test_outside_slurm_the_user_starts_each_node(machine) -> None:
    """R12: the documented commands, one per node, are accepted as with torchrun."""
    machine(4)
    first = colocated.read_launch([*NODES, "--max_steps", "9"])
    assert first.options.meeting == Meeting(nodes=2, rank=0, address=ADDRESS, port=29500)
    assert first.options.words() == [*OURS, "8", "--max_steps", "9"] and first.variables == {}
    second = ["--node-rank", "1", "--master-addr", "10.9.9.9", "--master-port", "30123"]
    second = colocated.read_launch(["--gpus", "4", "--nodes", "2", *second])
    assert second.options.meeting == Meeting(nodes=2, rank=1, address="10.9.9.9", port=30123)
    words = launch_command(second.options, {})
    assert words.endswith("--nodes 2 --node-rank 1 --master-addr 10.9.9.9 --master-port 30123")


def test_a_dry_run_of_several_nodes_shows_all_of_them(machine, capsys) -> None:
    machine(4)
    code, out, err = printed(capsys, *NODES, "--config", SMOKE, "--prompts_per_step", "16", "--dry-run")
    assert code == 0 and "nodes      2: ADDRESS_OF_NODE_0, ADDRESS_OF_NODE_1" in out, err
    assert out.count('"--machine_rank"') == 2


def test_several_nodes_of_a_job_are_one_launch(machine, monkeypatch) -> None:
    machine(4, nodes=2)
    door = colocated.read_launch(list(NODES))
    assert door.options.words() == [*OURS, "8"] and door.variables == {"NETWORK_INTERFACE": "ib0"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")  # the same value
    assert colocated.read_launch(list(NODES)).variables == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert refused(*NODES)[0].startswith(
        "NCCL_SOCKET_IFNAME: is eth0, but --master-addr is on ib0. Fix: unset it, or set it to ib0"
    )


@pytest.mark.parametrize(
    ("nodes", "changed", "message"),
    [
        (2, {"--node-rank": None}, "--node-rank: is missing. Fix: add --node-rank 0 on the first node"),
        (2, {"--node-rank": "2"}, "--node-rank: is 2, with --nodes 2. Fix: use a number from 0 to 1, or more"),
        (0, {"--node-rank": "1", "--master-addr": None}, "--master-addr: is missing. Fix: use the address of node 0"),
        (0, {"--node-rank": "1", "--master-addr": "localhost"}, "--master-addr: 'localhost' is the loopback"),
        (0, {"--node-timeout": "0"}, "--node-timeout: expected seconds above 0, got 0. Fix: use --node-timeout 600"),
        (0, {"--master-port": "80"}, "--master-port: expected 1024 to 65535, got 80. Fix: use --master-port 29500"),
        (2, {"--node-rank": "-1"}, "--node-rank: is -1, with --nodes 2. Fix: use a number from 0 to 1, or more"),
        (2, {"--node-rank": "1"}, "--node-rank: the launch on node 0 also starts the processes of node 1."),
        (2, {"--master-addr": None}, f"--master-addr: is missing. Fix: use an address of this node ({ADDRESS})"),
        (2, {"--master-addr": "localhost"}, "--master-addr: 'localhost' is the loopback, which other"),
        (2, {"--master-addr": "10.9.9.9"}, "--master-addr: '10.9.9.9' is not an address of this node, which is"),
        (2, {"--master-addr": "a" * 70}, "--master-addr: 'aaa"),
        (1, {"--nodes": "1"}, "--master-addr: is '10.1.2.3', but the processes of one node meet at its"),
        (3, {}, "--nodes: is 2, but the Slurm job has 3. Fix: use --nodes 3 --node-rank 0 --master-addr"),
        (1, {}, "--nodes: is 2, but the Slurm job has 1. Fix: use --nodes 1"),
    ],
)  # fmt: skip
def test_wrong_flags_of_nodes_are_refused(machine, nodes: int, changed: dict, message: str) -> None:
    machine(4, nodes=nodes)
    flags = {**dict(zip(NODES[::2], NODES[1::2], strict=True)), **changed}
    arguments = [f"{name}={value}" for name, value in flags.items() if value is not None]
    assert [line.startswith(message) for line in refused(*arguments)].count(True) == 1


def test_torchrun_is_told_what_to_run_instead(machine, monkeypatch, capsys) -> None:
    """R12: torchrun starts the command several times, and each would start the whole run."""
    machine(4)
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    message = "torchrun: has started this command in 4 processes, but the launch starts the training processes itself."
    code, _, err = printed(capsys, "--config", SMOKE)
    assert code == 2 and err == f"grpo: {message} Fix: run without torchrun: python run_colocated_grpo.py --gpus 4\n"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "1")
    fix = "--gpus 4 --nodes 2 --node-rank 1 --master-addr ADDRESS_OF_NODE_0"
    assert refused() == [f"{message} Fix: run without torchrun: python run_colocated_grpo.py {fix}"]
    assert main(["launch", SMOKE, "--dry-run"]) == 2
    assert "run without torchrun: grpo launch RECIPE --num_processes 4" in capsys.readouterr().err


def test_help_names_every_flag(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        colocated.main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "docs/migrate.md" in told
    flags = ["--gpus", "--nodes", "--node-rank", "--master-addr", "--master-port", "--config", "--log-level"]
    flags += ["--node-timeout", "--redirect-output", "--dry-run"]
    assert all(f"{flag} " in told for flag in flags)
    assert re.findall(r"^\| `(--[\w-]+)` \|", (find_code_root() / "docs/migrate.md").read_text(), re.MULTILINE) == flags


def test_a_misspelt_level_is_refused_with_the_levels(capsys) -> None:
    code, _, err = printed(capsys, "--log-level", "loud")
    assert code == 2 and "--log-level" in err and "'DEBUG', 'INFO'" in err


def door(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script in the repository's root with the Python of these tests."""
    command = [sys.executable, str(find_code_root() / "run_colocated_grpo.py"), *arguments]
    environment = {**os.environ, "ENV_DIR": sys.prefix, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(environment_device() != "cpu", reason="needs GPUs in a CUDA environment")
def test_output_goes_to_a_file_and_the_exit_code_stays(tmp_path: Path) -> None:
    file = tmp_path / "training.log"
    file.write_text("before\n")
    done = door("--config", SMOKE, "--gpus", "2", "--dry-run", "--redirect-output", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"grpo: the output goes to {file}\n", "")
    text = file.read_text()
    assert text.startswith("before\ngrpo: grpo launch ") and '"--num_processes", "2"' in text
    done = door("--config", SMOKE, "--max_steps", "none", "--redirect-output", str(file))
    assert (done.returncode, done.stderr) == (2, f"grpo: exit code 2, see {file}\n")
    assert "grpo: --max_steps: " in file.read_text()
    done = door("--config", SMOKE, "--redirect-output", str(tmp_path / "no/file"))
    assert done.returncode == 2 and "can't write" in done.stderr and "--redirect-output" in done.stderr
