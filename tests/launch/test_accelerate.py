"""The trainers' rendezvous listens at their own address, as the launcher's `accelerate launch` starts it."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.launch import accelerate
from grpo_recipes.paths import module_command

SCRIPT = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps([os.getpid(), dict(os.environ), sys.argv, sys.path[0], __name__, main.__file__]))
sys.exit(7)
"""


def test_the_rendezvous_listens_at_its_own_address_alone(monkeypatch) -> None:
    from accelerate.commands import launch
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as torchs

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plain, values, stores = torchs.TCPStore, [], []

    def fake_launch() -> None:
        def store(is_master: bool) -> Any:
            return torchs.TCPStore("127.0.0.1", port, 1, is_master, datetime.timedelta(seconds=20), multi_tenant=True)

        stores.extend([store(True), store(False)])
        stores[0].set("key", "value")
        values.append(stores[1].get("key"))

    monkeypatch.setattr(launch, "main", fake_launch)
    accelerate.main()
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    assert values == [b"value"] and torchs.TCPStore is plain


def test_a_single_process_runs_the_script_as_accelerate_would_in_another_process(tmp_path: Path) -> None:
    """With another OMP_NUM_THREADS, which torch has read by then, accelerate itself starts the script."""
    script = tmp_path / "entry.py"
    script.write_text(SCRIPT)
    flags = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    flags += ["--num_cpu_threads_per_process", "2"]
    argv = module_command("grpo_recipes.launch.accelerate", *flags, str(script), "--max_steps", "1")
    facts, processes = [], []
    for threads in ("2", "1"):
        variables = {**os.environ, "OMP_NUM_THREADS": threads}
        with subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launch:
            output, errors = launch.communicate(timeout=120)
        pid, *rest = json.loads(output.splitlines()[-1])
        facts.append(rest)
        processes.append((pid == launch.pid, launch.returncode))
    assert processes == [(True, 7), (False, 1)], errors
    assert facts[0] == facts[1]
    assert facts[0][0]["OMP_NUM_THREADS"] == "2" and facts[0][1] == [str(script), "--max_steps", "1"]
