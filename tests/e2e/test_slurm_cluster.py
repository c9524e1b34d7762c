"""The Slurm cluster of the end-to-end tests behaves as they assume."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, SlurmError, unavailable


def test_nodes_are_idle_and_have_gpus(slurm: SlurmCluster) -> None:
    lines = slurm.cli("sinfo", "--noheader", "--Node", "--format=%N %t %c %G").stdout.split("\n")
    assert [line for line in lines if line] == [f"{node} idle 2 gpu:a100:4" for node in NODES]


def test_plain_job_runs_in_the_callers_environment(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = _script(tmp_path, "echo home=$HOME given=$GIVEN conf=$SLURM_CONF; pwd")
    job_id = slurm.sbatch(script, cwd=tmp_path, env={"GIVEN": "yes"})
    record = slurm.wait(job_id, "COMPLETED", timeout=20)
    assert record["ExitCode"] == "0:0"
    output = Path(record["StdOut"])
    assert output == tmp_path / f"slurm-{job_id}.out"
    assert output.read_text() == f"home={slurm.env['HOME']} given=yes conf={slurm.conf}\n{tmp_path}\n"


def test_signal_reaches_the_batch_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    body = "trap 'touch caught; exit 0' USR1\ntouch ready\nwhile true; do sleep 0.1; done"
    job_id = slurm.sbatch(_script(tmp_path, body), cwd=tmp_path)
    _appears(tmp_path / "ready")
    slurm.scancel(job_id, "--signal=USR1", "--batch")
    slurm.wait(job_id, "COMPLETED", timeout=20)
    assert (tmp_path / "caught").exists()


def test_exit_code_is_reported(slurm: SlurmCluster, tmp_path: Path) -> None:
    job_id = slurm.sbatch(_script(tmp_path, "echo the last words; exit 3"), cwd=tmp_path)
    assert slurm.wait(job_id, "FAILED", timeout=20)["ExitCode"] == "3:0"
    with pytest.raises(SlurmError, match=r"is FAILED, not COMPLETED(?s:.*)the last words(?s:.*)slurmctld.log"):
        slurm.wait(job_id, "COMPLETED", timeout=20)


def test_srun_starts_a_task_on_each_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    body = "srun bash -c 'echo $SLURM_NODEID $SLURMD_NODENAME $SLURM_GPUS_ON_NODE'"
    job_id = slurm.sbatch("--nodes=2", "--gres=gpu:a100:4", _script(tmp_path, body), cwd=tmp_path)
    record = slurm.wait(job_id, "COMPLETED", timeout=20)
    assert sorted(Path(record["StdOut"]).read_text().splitlines()) == ["0 n1 4", "1 n2 4"]


def test_requeued_job_starts_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    body = '[ -n "$SLURM_RESTART_COUNT" ] && exit 0\ntouch ready\nsleep 300'
    job_id = slurm.sbatch("--requeue", _script(tmp_path, body), cwd=tmp_path)
    _appears(tmp_path / "ready")
    assert slurm.cli("scontrol", "requeue", str(job_id)).returncode == 0
    slurm.start_requeued(job_id)
    assert slurm.wait(job_id, "COMPLETED", timeout=20)["Restarts"] == "1"


def test_refused_job_and_unknown_job_are_errors(slurm: SlurmCluster, tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match=r"Requested node configuration is not available"):
        slurm.sbatch("--gres=gpu:a100:5", _script(tmp_path, "true"), cwd=tmp_path)
    with pytest.raises(SlurmError, match=r"Invalid job id"):
        slurm.job(4000)


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    """Neither daemons nor step managers nor a job's orphan that ignores the signals of a shutdown."""
    if reason := unavailable():
        pytest.skip(reason)
    orphan = (
        "(trap '' TERM HUP INT; echo $BASHPID > orphan.part; mv orphan.part orphan; while true; do sleep 0.5; done)"
    )
    body = f"setsid bash -c {shlex.quote(orphan)} &\nsrun sleep 300"
    with SlurmCluster(tmp_path / "cluster") as cluster:
        job_id = cluster.sbatch("--nodes=2", _script(tmp_path, body), cwd=tmp_path)
        _appears(tmp_path / "orphan")
        cluster.wait(job_id, "RUNNING", timeout=20)
        started = cluster.pids()
        daemons = {process.pid for process in cluster.daemons.values()}
        left_by_job = int((tmp_path / "orphan").read_text())
    assert daemons | {left_by_job} < started
    assert cluster.pids() == set()
    assert [pid for pid in started if _alive(pid)] == []
    cluster.close()


def test_failed_start_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    monkeypatch.setattr("slurm_cluster.SLURM_CONF", "NoSuchKey=1\n")
    cluster = SlurmCluster(tmp_path)
    with pytest.raises(SlurmError, match=r"ended daemons: {'slurm(?s:.*)NoSuchKey"), cluster:
        pass
    assert cluster.daemons
    assert cluster.pids() == set()


def _script(directory: Path, body: str) -> str:
    path = directory / "job.sh"
    path.write_text(f"#!/bin/bash\n{body}\n")
    return str(path)


def _appears(path: Path, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path} in {timeout} s"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
