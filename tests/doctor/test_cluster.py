"""What Slurm shows, by a fake sinfo in the real one's format; tests/e2e asks a real one."""

from __future__ import annotations

import pytest

from grpo_recipes.doctor import devices

IDLE = "main|infinite|2|gpu:a100:4|idle|n[1-2]"


@pytest.fixture
def fake_slurm(fake_program):
    """``fake_slurm(*lines)``: what sinfo shows."""

    def make(*lines: str) -> None:
        fake_program("sinfo", "cat <<'EOF'\n{}\nEOF".format("\n".join(lines)))
        fake_program("sbatch", "echo slurm 22.05.8")

    return make


def test_no_slurm(no_program, machine):
    assert devices.slurm(machine()).value == "no Slurm here"
    assert devices.nodes(machine()).status == devices.time_limit(machine()).status == "ok"


def test_partitions_and_gpus(fake_slurm, cuda_machine):
    fake_slurm(IDLE, "cpu|1-00:00:00|8|(null)|mixed|c[1-8]")
    found = devices.slurm(cuda_machine())
    assert found.status == "ok" and found.value == "partitions cpu, main; gpu:a100:4"
    assert devices.nodes(cuda_machine()).value == "2 up"


def test_a_cluster_without_gpus_and_a_cpu_environment_on_one_with(fake_slurm, cuda_machine, monkeypatch):
    fake_slurm("cpu|infinite|8|(null)|mixed|c[1-8]")
    assert devices.slurm(cuda_machine()).status == "warning"
    fake_slurm(IDLE)
    cpu = cuda_machine()
    monkeypatch.setattr(type(cpu), "device", "cpu")
    assert "DEVICE=cuda" in devices.slurm(cpu).fix


def test_slurm_that_is_not_set_up_is_told_once(fake_program, machine):
    fake_program("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    found = devices.slurm(machine())
    assert found.status == "warning" and "Unable to contact slurm controller" in found.value
    assert devices.nodes(machine()).value == devices.time_limit(machine()).value == "not known: see slurm"


def test_sinfo_without_sbatch(no_program, tmp_path, machine):
    program = tmp_path / "no_programs/sinfo"
    program.write_text(f"#!/bin/bash\necho '{IDLE}'\n")
    program.chmod(0o755)
    assert devices.slurm(machine()).value == "sinfo is there, sbatch is not"


def test_nodes_that_are_lost(fake_slurm, machine):
    fake_slurm("main|infinite|1|gpu:a100:4|drained|n1", "main|infinite|1|gpu:a100:4|idle|n2")
    assert devices.nodes(machine()).value == "1 up, lost: n1 drained"
    fake_slurm("main|infinite|2|gpu:a100:4|down*|n[1-2]", "cpu|infinite|4|(null)|idle|c[1-4]")
    found = devices.nodes(machine())
    assert found.status == "problem" and found.value == "none is up: n[1-2] down*"


def test_time_limits_below_that_of_training_sh(fake_slurm, machine):
    fake_slurm(IDLE)
    assert devices.time_limit(machine()).status == "ok"
    fake_slurm(IDLE, "short|12:00:00|2|gpu:a100:4|idle|n[1-2]", "long|7-00:00:00|2|gpu:a100:4|idle|n[1-2]")
    found = devices.time_limit(machine())
    assert found.status == "warning" and "short ends at 12:00:00" in found.value and "long" not in found.value
    assert "sbatch --time=12:00:00" in found.fix


def test_where_we_are(machine):
    assert devices.job(machine()).value.startswith("none")
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    assert devices.job(machine(**inside)).value == "job 7 on n1"
    del inside["SLURMD_NODENAME"]
    found = devices.job(machine(**inside))
    assert found.status == "warning" and "srun --pty bash" in found.fix
