#!/usr/bin/env python3
"""A srun that starts the tasks of all nodes here, each with its SLURM_NODEID, and carries lines as Slurm does."""

import json
import os
import subprocess
import sys
import threading

lock = threading.Lock()
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(options) :]
with open(os.environ["FAKE_SRUN_ARGV"], "w") as file:
    json.dump(sys.argv[1:], file)
count = int(next(option for option in options if option.startswith("--nodes=")).partition("=")[2])
tasks = [
    subprocess.Popen(
        command,
        env={**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"n{node + 1}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for node in range(count)
]


def carry(task):
    for line in task.stdout:
        with lock:  # a line of Slurm's is at most 1024 bytes long
            print(line[:1023].rstrip("\n"), flush=True)


def kill_on_bad_exit(task):
    if task.wait() != 0:
        for other in tasks:
            other.kill()
        os._exit(137)


for task in tasks:
    threading.Thread(target=kill_on_bad_exit, args=(task,), daemon=True).start()
readers = [threading.Thread(target=carry, args=(task,)) for task in tasks]
for reader in readers:
    reader.start()
for line in sys.stdin:
    for task in tasks:
        task.stdin.write(line)
        task.stdin.flush()
for task in tasks:
    task.stdin.close()
for reader in readers:
    reader.join()
sys.exit(max(task.wait() for task in tasks))
