"""`grpo doctor` on a real Slurm cluster, and with torch, TRL and vLLM imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.slow

GRPO = str(Path(sys.executable).with_name("grpo"))
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def results(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    assert done.stdout, done.stderr
    return {result["name"]: result for result in json.loads(done.stdout)["checks"]}


@pytest.fixture
def idle(slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; its nodes and partition are reset when the test ends."""
    yield slurm
    slurm.cli("scontrol", "update", "NodeName=n1,n2", "State=RESUME")
    slurm.cli("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")


def look(cluster: SlurmCluster, *before: str) -> dict[str, dict[str, str]]:
    """Return the checks. Run them again if Slurm took longer than they wait, because of other tests."""
    for _ in range(5):
        checks = results(cluster.cli(*before, GRPO, "doctor", "--json", env=OFFLINE))
        if " within " not in checks["slurm"]["value"]:
            break
    return checks


def test_the_cluster_from_its_login_node(idle: SlurmCluster) -> None:
    checks = look(idle)
    assert checks["slurm"]["value"].startswith("partitions main; gpu:a100:4")
    assert "2 nodes up" in checks["slurm"]["value"]
    assert "12:00:00" not in checks["slurm"]["value"] and "salloc" not in checks["slurm"]["fix"]


def test_drained_nodes_and_a_short_partition(idle: SlurmCluster) -> None:
    idle.cli("scontrol", "update", "PartitionName=main", "MaxTime=12:00:00")
    slurm_check = look(idle)["slurm"]
    assert slurm_check["status"] == "warning" and "partition main has the limit 12:00:00" in slurm_check["value"]
    idle.cli("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    slurm_check = look(idle)["slurm"]
    assert slurm_check["status"] == "warning" and "1 node up, lost: n1 drained" in slurm_check["value"]
    idle.cli("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    slurm_check = look(idle)["slurm"]
    assert (
        slurm_check["status"] == "problem"
        and "0 nodes up" in slurm_check["value"]
        and "drained" in slurm_check["value"]
    )


def test_inside_a_job_and_in_the_shell_that_salloc_leaves(idle: SlurmCluster) -> None:
    inside = look(idle, "srun", "--gres=gpu:a100:2")
    assert "salloc" not in inside["slurm"]["fix"]
    assert "separate" in inside["ports"]["value"]
    outside = look(idle, "salloc", "--gres=gpu:a100:2")
    assert outside["slurm"]["status"] == "warning" and "srun --pty bash" in outside["slurm"]["fix"]


def test_a_controller_that_does_not_answer(idle: SlurmCluster, tmp_path: Path) -> None:
    """A cluster file that names a controller without a listener."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(idle.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1#"))
    done = idle.cli(GRPO, "doctor", "--json", env={**OFFLINE, "SLURM_CONF": str(conf)})
    checks = results(done)
    assert checks["slurm"]["status"] == "warning" and "sinfo" in checks["slurm"]["value"]


def test_deep_imports_torch_trl_and_vllm() -> None:
    done = subprocess.run(
        [GRPO, "doctor", "--deep", "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    checks = results(done)
    assert checks["imports"]["status"] == "ok", checks["imports"]
    for name in ("torch", "trl", "vllm", "threads"):
        assert f"{name} " in checks["imports"]["value"]
