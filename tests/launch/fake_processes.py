"""Stand-ins for the vLLM server and the trainers: `python fake_processes.py server|trainer ...`.

The server answers the launcher's requests. A late server starts to answer once a file ``go`` exists. With a file
``hang`` in the run directory, its counters do not change and a request is open. The trainer makes a step, a row and a
checkpoint each 0.1 s. It obeys the stop request, and waits while its server is not ready, like a trainer that
reconnects. With a file ``benchmarks`` it continues after its last step.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import time
from pathlib import Path

RUN = Path(os.environ["GRPO_RUN_DIR"])


class Server(http.server.BaseHTTPRequestHandler):
    """Answer the requests that the launcher sends to vLLM."""

    def do_GET(self) -> None:
        hangs = (RUN / "hang").exists()
        if self.path == "/metrics":
            body = f'vllm:generation_tokens_total{{engine="0"}} {7 if hangs else time.time()}\n'.encode()
        elif self.path == "/v1/models":
            body = json.dumps({"data": [{"id": sys.argv[4]}]}).encode()
        else:
            body = json.dumps({"requests": int(hangs), "completions": 0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def write(name: str, content: object) -> None:
    path = RUN / "processes" / name
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").replace(path)


def checkpoint(step: int) -> None:
    folder = RUN / "checkpoints" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").write_text(json.dumps({"step": step, "world_size": 1, "files": {}}))


def train(steps: int, phase: str) -> None:
    """Take ``steps`` steps. With another ``phase`` than sample, stay in that phase and take no step."""
    record = {"rank": 0, "pid": os.getpid()}
    write("rank_0.json", record)
    saved = sorted(int(path.name.rpartition("-")[2]) for path in RUN.glob("checkpoints/checkpoint-*[0-9]"))
    step = saved[-1] if saved else 0
    write("phase_0.json", {"phase": phase, "since": time.time(), "step": step})
    while step < steps:
        time.sleep(0.1)
        state = json.loads((RUN / "processes/server_state.json").read_text())
        if (RUN / "stop").exists() and phase != "start":
            write("rank_0.json", {**record, "exit": 75, "cause": "stopped on request", "time": time.time()})
            os._exit(75)
        if phase != "sample" or state["state"] != "ready" or (RUN / "hang").exists():
            continue
        step += 1
        with (RUN / "metrics.jsonl").open("a") as file:
            times = {f"seconds/{name}": 0.1 for name in ("sample", "score", "update", "sync", "step")}
            row = {"step": step, "max_steps": steps, "reward": 0.5, "tokens_per_second": 1.0, **times}
            file.write(json.dumps(row) + "\n")
        checkpoint(step)
        write("phase_0.json", {"phase": phase, "since": time.time(), "step": step})
    write("phase_0.json", {"phase": "end", "since": time.time(), "step": step})
    while (RUN / "benchmarks").exists():
        time.sleep(0.05)
    write("rank_0.json", {**record, "exit": 0, "cause": "", "time": time.time()})


def serve(port: int, late: bool = False) -> None:
    while late and not (RUN / "go").exists():
        time.sleep(0.05)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Server).serve_forever()


if __name__ == "__main__":
    {
        "server": lambda: serve(int(sys.argv[3])),
        "late-server": lambda: serve(int(sys.argv[3]), late=True),
        "trainer": lambda: train(int(sys.argv[2]), sys.argv[3]),
    }[sys.argv[1]]()
