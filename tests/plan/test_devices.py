"""The devices of a machine and of a job."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan import devices
from grpo_recipes.plan.devices import environment_device, find_resources, find_visible_gpus, select_gpus
from grpo_recipes.slurm.client import SlurmJob, read_slurm_job

UUIDS = ["GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002"]
MIG = "MIG-33333333-aaaa-bbbb-cccc-000000000003"
LISTING = f"""GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[0]})
  MIG 1g.10gb     Device  0: (UUID: {MIG})
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[1]})
"""


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ("0", "1")),
        ("1", ("1",)),
        ("1,0", ("1", "0")),
        (" 0 , 1 ", ("0", "1")),
        ("", ()),
        (UUIDS[1], (UUIDS[1],)),
        ("GPU-2222", (UUIDS[1],)),  # NVML accepts only complete UUIDs
        (MIG[:12], (MIG,)),
        (MIG, (MIG,)),
        (f"0,{UUIDS[1]}", ("0", UUIDS[1])),
    ],
)
def test_gpus_are_those_of_the_driver_cut_down_to_cuda_visible_devices(visible, gpus):
    assert select_gpus(LISTING, visible) == gpus


@pytest.mark.parametrize("visible", ["2", "0,5", "GPU-9999", "MIG-9999", "all"])
def test_a_gpu_the_driver_does_not_list_is_refused(visible):
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        select_gpus(LISTING, visible)


@pytest.mark.parametrize(("visible", "once"), [("0,0", "0"), ("1,0,1", "1,0"), (f"0,{UUIDS[0]}", "0")])
def test_a_gpu_that_is_listed_twice_is_rejected(visible, once):
    """G3: 0,0 is not two GPUs; with DDP it would be two NCCL ranks on one."""
    with pytest.raises(ConfigError, match=rf"is listed twice.*Fix: set CUDA_VISIBLE_DEVICES={once}; vllm_gpu: shared"):
        select_gpus(LISTING, visible)
    assert select_gpus(LISTING, once) == tuple(once.split(","))


def test_a_driver_without_gpus_lists_none():
    assert select_gpus("No devices found.\n", None) == ()


@pytest.fixture
def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a script that lists GPUs as nvidia-smi -L does."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\ncat <<'EOF'\n{LISTING}EOF\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    return fake


@pytest.mark.parametrize(("environment", "gpus"), [({}, ("0", "1")), ({"CUDA_VISIBLE_DEVICES": "1"}, ("1",))])
def test_the_driver_is_asked_for_gpus(fake_nvidia_smi, environment, gpus):
    assert find_visible_gpus(environment) == gpus


def test_slurms_own_count_makes_no_gpu(fake_nvidia_smi):
    assert find_visible_gpus({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}) == ("0",)


def test_a_driver_that_hangs_is_reported_as_such(fake_nvidia_smi, monkeypatch):
    monkeypatch.setattr(devices, "_DRIVER_SECONDS", 0.2)
    fake_nvidia_smi.write_text("#!/bin/sh\nexec sleep 5\n")
    with pytest.raises(ConfigError, match=r"nvidia-smi did not answer within 0.2 seconds. Fix: exclude this node"):
        find_visible_gpus({})


def test_a_machine_without_a_driver_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_visible_gpus({"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}) == ()


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": ""}, None),
        ({"SLURM_JOB_ID": "7"}, SlurmJob(7, "slurm", 1, None)),
        (
            {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"},
            SlurmJob(7, "c", 2, 4),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "a100:4"}, SlurmJob(7, "slurm", 1, None)),
    ],
)
def test_the_slurm_job_is_read_from_its_variables(environment, job):
    assert read_slurm_job(environment) == job


def test_the_device_is_that_of_the_installed_torch():
    assert environment_device() == ("cpu" if importlib.metadata.version("torch").endswith("+cpu") else "cuda")


@pytest.mark.parametrize(("torch", "device"), [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+cu130", "cuda")])
def test_a_torch_without_cpu_in_its_version_is_for_cuda(monkeypatch, torch, device):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: torch if name == "torch" else real(name))
    assert environment_device() == device


def test_another_trl_than_the_catalogues_is_refused(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15.0" if name == "trl" else real(name))
    with pytest.raises(ConfigError, match=r"trl 1\.15\.0 is installed"):
        environment_device()


def test_an_environment_without_torch_is_refused(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="torch is not installed"):
        environment_device()


def test_cores_are_those_this_process_may_use():
    assert find_resources({}).cores == len(os.sched_getaffinity(0))


def test_a_requeued_job_knows_how_often():
    assert read_slurm_job({"SLURM_JOB_ID": "7"}).restarts == 0
    assert read_slurm_job({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}).restarts == 2


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT"])
def test_a_variable_in_which_slurm_puts_a_number_is_one(name):
    with pytest.raises(ConfigError, match=f"{name}: expected a number from Slurm, got 'abc'"):
        read_slurm_job({"SLURM_JOB_ID": "7", name: "abc"})
