"""GPUs from a fake nvidia-smi that prints the real format, partitions and nodes from a fake sinfo."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest

from grpo_recipes.console.doctor import hardware
from grpo_recipes.console.doctor.examine import Machine, NoAnswer
from grpo_recipes.plan import preflight

UUIDS = ["GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"]
NAME = "NVIDIA A100-SXM4-80GB"


def row(index: int, driver="580.95.05", used="3") -> str:
    return f"{index}, {UUIDS[index]}, {NAME}, {driver}, 81920, {used}"


@pytest.fixture
def fake_nvidia_smi(fake_program):
    """``fake_nvidia_smi(*rows)``: set the GPUs that the driver lists."""

    def make(*rows: str) -> None:
        listing = "\n".join(f"GPU {index}: {NAME} (UUID: {UUIDS[index]})" for index in range(len(rows)))
        table = "\n".join(rows)
        fake_program("nvidia-smi", f"case $1 in\n-L) echo '{listing}';;\n--query-gpu=*) echo '{table}';;\nesac")

    return make


@pytest.fixture(autouse=True)
def fake_cuda_torch(monkeypatch):
    monkeypatch.setattr(preflight, "read_torch_cuda", lambda: "13.0")


def test_a_new_driver_is_right(fake_nvidia_smi, cuda_machine):
    fake_nvidia_smi(row(0), row(1))
    finding = hardware.gpus(cuda_machine())
    assert finding.status == "ok"
    assert finding.value == f"2 visible of 2: {NAME}, 80 GiB; driver 580.95.05, torch for CUDA 13.0"


@pytest.mark.parametrize(("cuda", "driver", "status"), [
    ("13.0", "575.57.08", "problem"), ("13.0", "580.65.06", "ok"), ("12.8", "525.60.13", "ok"),
    ("12.8", "520.61.05", "problem"), ("14.0", "580.65.06", "ok"),
])  # fmt: skip
def test_the_driver_must_be_of_the_branch_that_torchs_cuda_needs(
    fake_nvidia_smi, cuda_machine, monkeypatch, cuda, driver, status
):
    monkeypatch.setattr(preflight, "read_torch_cuda", lambda: cuda)
    fake_nvidia_smi(row(0, driver=driver))
    finding = hardware.gpus(cuda_machine())
    assert finding.status == status and ("cuda-compat" in finding.fix) == (status == "problem")


def test_a_driver_that_fails_is_a_problem(fake_program, cuda_machine):
    fake_program("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    finding = hardware.gpus(cuda_machine())
    assert finding.status == "problem" and "version mismatch" in finding.value


def test_a_driver_that_hangs_is_a_problem(fake_program):
    fake_program("nvidia-smi", "exec sleep 30")
    assert "did not answer within" in hardware.gpus(Machine({}, timeout=0.3)).value


def test_no_driver(no_program, machine, cuda_machine):
    assert hardware.gpus(machine()).value == "none, none needed (CPU environment)"
    assert hardware.gpus(cuda_machine()).status == "problem"
    assert "--gres" in hardware.gpus(cuda_machine()).fix


def test_no_driver_is_usual_on_a_login_node(no_program, fake_program, cuda_machine):
    fake_program("sinfo", "echo slurm 22.05.8")
    assert hardware.gpus(cuda_machine()).status == "warning"
    assert hardware.gpus(cuda_machine(SLURM_JOB_ID="7")).status == "problem"


def test_cuda_visible_devices_cuts_the_gpus_down(fake_nvidia_smi, cuda_machine):
    fake_nvidia_smi(row(0), row(1))
    visible = hardware.gpus(cuda_machine(CUDA_VISIBLE_DEVICES="1"))
    assert visible.status == "ok" and visible.value.startswith("1 visible of 2 (CUDA_VISIBLE_DEVICES=1)")
    assert hardware.gpus(cuda_machine(CUDA_VISIBLE_DEVICES="")).status == "problem"
    fake_nvidia_smi(row(0, driver="450.1"), row(1))
    finding = hardware.gpus(cuda_machine(CUDA_VISIBLE_DEVICES="5"))
    assert finding.status == "problem" and "this machine has no GPU '5'" in finding.value
    assert "driver 450.1" in finding.value, "an error hides no other"


def test_a_job_without_gpus_is_a_problem(no_program, cuda_machine):
    finding = hardware.gpus(cuda_machine(SLURM_JOB_ID="7"))
    assert finding.status == "problem" and "sbatch --gres" in finding.fix


def test_slurm_and_the_driver_disagree(fake_nvidia_smi, cuda_machine):
    fake_nvidia_smi(row(0), row(1))
    finding = hardware.gpus(cuda_machine(SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="4"))
    assert finding.status == "warning" and "Slurm granted 4" in finding.value
    assert hardware.gpus(cuda_machine(SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="2")).status == "ok"


def test_gpus_that_a_cpu_environment_leaves_idle(fake_nvidia_smi, cuda_machine, monkeypatch):
    fake_nvidia_smi(row(0))
    cpu = cuda_machine()
    monkeypatch.setattr(type(cpu), "device", "cpu")
    finding = hardware.gpus(cpu)
    assert finding.status == "warning" and "DEVICE=cuda" in finding.fix


def test_memory_in_use_by_others_is_a_warning(fake_nvidia_smi, cuda_machine):
    fake_nvidia_smi(row(0, used="40960"), row(1))
    finding = hardware.gpus(cuda_machine())
    assert finding.status == "warning" and finding.value == "GPU 0: 40.0 of 80 GiB are in use"
    assert hardware.gpus(cuda_machine(CUDA_VISIBLE_DEVICES="1")).status == "ok"


def test_gpus_without_torch_or_without_a_figure_of_memory(fake_nvidia_smi, cuda_machine, monkeypatch):
    fake_nvidia_smi(row(0, driver="450.1").replace("81920", "[N/A]"))
    without = cuda_machine()
    monkeypatch.setattr(type(without), "device", None)
    assert hardware.gpus(without).value == f"1 visible of 1: {NAME}"


@pytest.mark.parametrize(("text", "cuda"), [
    ("debug = False\ncuda: Optional[str] = '13.0'\ngit_version = 'x'\n", "13.0"), ("cuda = '12.8'\n", "12.8"),
    ("cuda: Optional[str] = None\nhip: Optional[str] = '6.0'\n", None),
])  # fmt: skip
def test_the_cuda_version_is_read_from_torchs_own_file(monkeypatch, tmp_path, text, cuda):
    monkeypatch.undo()
    (tmp_path / "version.py").write_text(text)
    fake_spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake_spec)
    assert preflight.read_torch_cuda() == cuda


def test_the_installed_torch_has_such_a_file(monkeypatch):
    monkeypatch.undo()
    cpu = importlib.metadata.version("torch").endswith("+cpu")
    assert (preflight.read_torch_cuda() is None) == cpu


IDLE = "main|infinite|2|gpu:a100:4|idle|n[1-2]"


@pytest.fixture
def fake_slurm(fake_program):
    """``fake_slurm(*lines)``: set the lines that sinfo prints."""

    def make(*lines: str) -> None:
        fake_program("sinfo", "cat <<'EOF'\n{}\nEOF".format("\n".join(lines)))
        fake_program("sbatch", "echo slurm 22.05.8")

    return make


def test_no_slurm(no_program, machine):
    assert hardware.slurm(machine()).value == "no Slurm here"


def test_partitions_and_gpus(fake_slurm, cuda_machine):
    fake_slurm(IDLE, "cpu|1-00:00:00|8|(null)|mixed|c[1-8]")
    finding = hardware.slurm(cuda_machine())
    assert finding.status == "ok" and finding.value == "partitions cpu, main; gpu:a100:4; 2 nodes up"


def test_a_cluster_without_gpus_and_a_cpu_environment_on_one_with(fake_slurm, cuda_machine, monkeypatch):
    fake_slurm("cpu|infinite|8|(null)|mixed|c[1-8]")
    assert hardware.slurm(cuda_machine()).status == "warning"
    fake_slurm(IDLE)
    cpu = cuda_machine()
    monkeypatch.setattr(type(cpu), "device", "cpu")
    assert "DEVICE=cuda" in hardware.slurm(cpu).fix


def test_slurm_that_is_not_set_up(fake_program, machine):
    fake_program("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(NoAnswer, match=r"sinfo fails: .*Unable to contact slurm controller") as error:
        hardware.slurm(machine())
    assert "sbatch will fail too" in error.value.fix


def test_sinfo_without_sbatch(no_program, tmp_path, machine):
    program = tmp_path / "no_programs/sinfo"
    program.write_text(f"#!/bin/bash\necho '{IDLE}'\n")
    program.chmod(0o755)
    assert hardware.slurm(machine()).value == "sinfo exists, but sbatch does not"


def test_nodes_that_are_lost(fake_slurm, cuda_machine):
    fake_slurm("main|infinite|1|gpu:a100:4|drained|n1", "main|infinite|1|gpu:a100:4|idle|n2")
    assert hardware.slurm(cuda_machine()).value == "partitions main; gpu:a100:4; 1 node up, lost: n1 drained"
    fake_slurm("main|12:00:00|1|gpu:a100:4|drained|n1", "main|12:00:00|1|gpu:a100:4|idle|n2")
    finding = hardware.slurm(cuda_machine())
    assert finding.status == "warning" and finding.value.endswith("; 1 node up, lost: n1 drained")
    fake_slurm("main|infinite|2|gpu:a100:4|down*|n[1-2]", "cpu|infinite|4|(null)|idle|c[1-4]")
    finding = hardware.slurm(cuda_machine())
    assert finding.status == "problem" and finding.value == "0 nodes up, lost: n[1-2] down*"


def test_time_limits_below_that_of_training_sh(fake_slurm, cuda_machine):
    fake_slurm(IDLE)
    assert hardware.slurm(cuda_machine()).status == "ok"
    fake_slurm(IDLE, "short|12:00:00|2|gpu:a100:4|idle|n[1-2]", "long|7-00:00:00|2|gpu:a100:4|idle|n[1-2]")
    finding = hardware.slurm(cuda_machine())
    assert (
        finding.status == "warning" and "short has the limit 12:00:00" in finding.value and "long" not in finding.value
    )
    assert "sbatch --time=12:00:00" in finding.fix


def test_sinfo_that_shows_nothing_is_not_a_problem(fake_program, cuda_machine):
    fake_program("sinfo", "true")
    fake_program("sbatch", "true")
    assert hardware.slurm(cuda_machine()).status == "warning"


def test_the_login_node_is_no_node_of_the_job(no_program, machine):
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    assert hardware.slurm(machine(**inside)).status == "ok"
    del inside["SLURMD_NODENAME"]
    finding = hardware.slurm(machine(**inside))
    assert finding.status == "warning" and "job 7, but" in finding.value and "srun --pty bash" in finding.fix


@pytest.mark.parametrize(("cores", "memory", "told"), [(15, 4e9, True), (64, 256e9, False)])
def test_cores_and_memory_of_a_job_are_judged_by_its_gpus_as_a_launch_does(
    fake_program, cuda_machine, monkeypatch, cores, memory, told
):
    fake_program("nvidia-smi", 'for n in 0 1 2 3 4 5 6 7; do echo "GPU $n: X (UUID: GPU-$n)"; done')
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(preflight, "cgroup_cores", lambda: float("inf"))
    monkeypatch.setattr(preflight, "cgroup_memory", lambda: (memory, 0.0))
    monkeypatch.setattr(preflight, "measure_free_memory", lambda: memory)
    finding = hardware.cores_and_memory(cuda_machine())
    assert ("15 cores for 8 GPUs" in finding.value) == ("--cpus-per-task=64" in finding.fix) == told
    assert ("4.0 GB of memory for 8 GPUs" in finding.value) == ("sbatch --mem=256G" in finding.fix) == told
