"""The reward ``code_tests`` with fake services over HTTP: a fake Piston and a fake Sandbox Fusion."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score

TESTS = json.dumps({"inputs": ["7", "2"], "outputs": ["49", "4"]})
RIGHT, HALF, FAILS = "print(int(input()) ** 2)", "print(49)", "raise SystemExit(1)"


def fake_piston(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer as Piston's /api/v2/execute."""
    if body.keys() != {"language", "version", "files", "stdin", "run_timeout"} or body["language"] != "python":
        return 400, {"message": f"unexpected {body}"}
    output, code = run(body["files"][0]["content"], body["stdin"])
    return 200, {"language": "python", "version": "3.12.0", "run": {"stdout": output, "code": code, "signal": None}}


def fake_sandbox_fusion(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer as Sandbox Fusion's /run_code."""
    if body.keys() != {"code", "language", "stdin", "run_timeout"} or body["language"] != "python":
        return 422, {"detail": f"unexpected {body}"}
    if "sandbox error" in body["code"]:
        return 200, {"status": "SandboxError", "message": "no runner is left", "run_result": None}
    output, code = run(body["code"], body["stdin"])
    result = {"status": "Finished", "stdout": output, "return_code": code}
    return 200, {"status": "Failed" if code else "Success", "message": "", "run_result": result}


FAKES = {"/api/v2/execute": fake_piston, "/run_code": fake_sandbox_fusion}


def run(source: str, text: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-I", "-S", "-c", source], input=text, capture_output=True, text=True)
    return done.stdout, done.returncode


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """Serve both fakes at the address that is returned."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = FAKES[self.path](body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def score(sandbox: str, address: str, *programs: str, code_score: str = "fraction") -> list[Score]:
    keys = dict(
        code_sandbox=sandbox, code_server_url=address, code_score=code_score, reward_timeout=20.0, reward_memory_gib=1.0
    )  # fmt: skip
    with RewardPool("code_tests", workers=1, timeout=20.0, keys={"code_tests": keys}) as pool:
        completions = [f"```python\n{program}\n```" for program in programs]
        return pool.score("code_tests", completions, {"answer": [TESTS] * len(programs)})


@pytest.mark.parametrize("sandbox", ["piston", "sandbox_fusion"])
def test_a_service_runs_the_programs(service: str, sandbox: str) -> None:
    scores = score(sandbox, service + "/", RIGHT, HALF, FAILS)
    assert [row.value for row in scores] == [1.0, 0.5, 0.0], scores
    assert [row.value for row in score(sandbox, service, RIGHT, HALF, code_score="all")] == [1.0, 0.0]


@pytest.mark.parametrize("sandbox", ["piston", "sandbox_fusion"])
def test_without_the_service_a_completion_is_unscored(sandbox: str) -> None:
    (unscored,) = score(sandbox, "http://127.0.0.1:9", RIGHT)
    assert unscored.value is None and str(unscored.reason).startswith("no answer from its server")


def test_a_sandbox_that_fails_leaves_the_completion_unscored(service: str) -> None:
    (unscored,) = score("sandbox_fusion", service, "# sandbox error")
    assert unscored.value is None and "the sandbox failed: no runner is left" in str(unscored.reason)
