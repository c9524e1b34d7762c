"""The header of `training.sh`, and options of `sbatch` over it, as a real Slurm reads them; nothing is started."""

from __future__ import annotations

import pytest
from real_runs import REPOSITORY
from slurm_cluster import SlurmCluster


def held(slurm: SlurmCluster, *options: str, script: str = "training.sh") -> dict[str, str]:
    """Return Slurm's record of a job that is submitted and never starts."""
    job = slurm.sbatch("--hold", *options, script, cwd=REPOSITORY)
    record = slurm.job(job)
    slurm.scancel(job)
    return record


@pytest.mark.slow
@pytest.mark.parametrize("script", ["training.sh", "slurm/train.slurm"])
def test_the_header_alone(slurm: SlurmCluster, script: str) -> None:
    record = held(slurm, script=script)
    assert record["JobName"] == "grpo" and record["TimeLimit"] == "3-00:00:00" and record["Requeue"] == "1"
    for stream, end in (("StdOut", "out"), ("StdErr", "err")):
        assert record[stream] == f"{REPOSITORY}/logs/slurm_{record['JobId']}.{end}"
    assert record["NumNodes"] in ("1", "1-1") and record["NumTasks"] == "1" and record["CPUs/Task"] == "1"
    assert record["Account"] in ("(null)", "root") and "gres" not in record.get("TresPerNode", "")
    assert record["OverSubscribe"] == "OK"  # not exclusive


@pytest.mark.slow
def test_what_is_given_when_submitting_stands_over_the_header(slurm: SlurmCluster) -> None:
    record = held(
        slurm, "--job-name=mine", "--account=group", "--partition=main", "--nodes=1", "--gres=gpu:1", "--mem=100M",
        "--cpus-per-task=2", "--exclusive", "--exclude=n1", "--time=01:00:00", "--no-requeue",
        "--output=elsewhere_%j.out",
    )  # fmt: skip
    assert (record["JobName"], record["Account"], record["Partition"]) == ("mine", "group", "main")
    assert record["TimeLimit"] == "01:00:00" and record["Requeue"] == "0" and record["ExcNodeList"] == "n1"
    assert record["CPUs/Task"] == "2" and record["MinMemoryNode"] == "100M" and record["OverSubscribe"] == "NO"
    assert "gpu:1" in record["TresPerNode"] and record["StdOut"].endswith(f"elsewhere_{record['JobId']}.out")
    assert held(slurm, "--nodes=2")["NumNodes"] in ("2", "2-2")
