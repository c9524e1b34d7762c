"""The reward ``code_tests`` with fake services over HTTP: a fake Piston, Sandbox Fusion and E2B."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score

TESTS = json.dumps({"inputs": ["7", "2"], "outputs": ["49", "4"]})
MOST_SECONDS = 20  # of a program on Piston
RIGHT, HALF, FAILS = "print(int(input()) ** 2)", "print(49)", "raise SystemExit(1)"


def fake_piston(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer as Piston's /api/v2/execute."""
    if body.keys() != {"language", "version", "files", "stdin", "run_timeout"} or body["language"] != "python":
        return 400, {"message": f"unexpected {body}"}
    if body["run_timeout"] > MOST_SECONDS * 1000:
        return 400, {"message": f"run_timeout cannot exceed the configured limit of {MOST_SECONDS * 1000}"}
    if "# busy" in body["files"][0]["content"]:
        time.sleep(0.8)
        return 503, {"message": "no worker is free"}
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


class FakeE2B(BaseHTTPRequestHandler):
    """Answer as E2B: its API at api.e2b.test, and the interpreters of sandboxes. As a proxy, it sees the hosts."""

    protocol_version = "HTTP/1.1"
    busy = 0  # number of requests to answer with 429
    delay = 0.0  # seconds before the answer about a new sandbox
    created: ClassVar[list[dict[str, Any]]] = []
    open: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FakeE2B.busy:
            FakeE2B.busy -= 1
            self.answer(429, {"code": 429, "message": "too many sandboxes"})
        elif self.path == "http://api.e2b.test/sandboxes":
            if self.headers["X-API-Key"] != KEY:
                return self.answer(401, {"code": 401, "message": f"invalid key {self.headers['X-API-Key']}"})
            self.created.append(body)
            name = f"i{len(self.created)}"
            self.open.add(name)
            time.sleep(self.delay)
            sandbox = {"sandboxID": name, "templateID": body["templateID"], "clientID": "c", "envdVersion": "0.2.0"}
            self.answer(201, sandbox | {"envdAccessToken": f"token of {name}", "domain": None})
        elif match := re.fullmatch(r"http://49999-(i\d+)\.e2b\.test/execute", self.path):
            assert match[1] in self.open and self.headers["X-Access-Token"] == f"token of {match[1]}"
            assert (self.headers["E2b-Sandbox-Id"], self.headers["E2b-Sandbox-Port"]) == (match[1], "49999")
            assert "X-API-Key" not in self.headers
            self.answer(200, *interpret(body["code"]))
        else:
            self.answer(404, {"code": 404, "message": f"no {self.path}"})

    def do_DELETE(self) -> None:
        assert self.headers["X-API-Key"] == KEY and "Content-Length" not in self.headers
        self.open.remove(self.path.removeprefix("http://api.e2b.test/sandboxes/"))
        self.answer(204)

    def answer(self, status: int, *lines: dict[str, Any]) -> None:
        """Send a status and lines of JSON."""
        content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def interpret(code: str) -> list[dict[str, Any]]:
    """Run code as an interpreter of E2B and return the lines of its stream."""
    lines: list[dict[str, Any]] = [{"type": "number_of_executions", "execution_count": 1}, {"type": "keepalive"}]
    if "interpreter dies" in code:
        error = {"type": "error", "name": "ContextRestarting", "value": "Context was restarted", "traceback": ""}
        return [*lines, error, {"type": "end_of_execution"}]
    printed, exit_code = run(code, "")
    assert exit_code == 0
    lines += [{"type": "stdout", "text": part, "timestamp": "now"} for part in (printed[:3], printed[3:])]
    return [*lines, {"type": "stderr", "text": "a warning", "timestamp": "now"}, {"type": "end_of_execution"}]


KEY = "e2b_0123456789"
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


@pytest.fixture
def e2b(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a fake E2B for rewards that get the variables in ``score``."""
    FakeE2B.busy, FakeE2B.delay = 0, 0.0
    FakeE2B.created.clear()
    FakeE2B.open.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeE2B) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("E2B_API_KEY", KEY)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
        yield "http://api.e2b.test"
        server.shutdown()


def score(
    sandbox: str, address: str, *programs: str, code_score: str = "fraction", timeout: float = 20.0
) -> list[Score]:
    keys = dict(
        code_sandbox=sandbox, code_server_url=address, code_score=code_score, reward_timeout=timeout,
        reward_memory_gib=1.0,
    )  # fmt: skip
    variables = ["E2B_API_KEY", "http_proxy"] if sandbox == "e2b" else []
    with RewardPool("code_tests", workers=1, timeout=timeout, keys={"code_tests": keys}, environment=variables) as pool:
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


def test_the_reason_has_the_error_of_the_service(service: str) -> None:
    (unscored,) = score("piston", service, RIGHT, timeout=50.0)
    assert unscored.value is None
    assert '400: {"message": "run_timeout cannot exceed the configured limit of 20000"}' in str(unscored.reason)


def test_a_sandbox_that_fails_leaves_the_completion_unscored(service: str) -> None:
    (unscored,) = score("sandbox_fusion", service, "# sandbox error")
    assert unscored.value is None and "the sandbox failed: no runner is left" in str(unscored.reason)


def test_a_sandbox_of_e2b_runs_the_tests_of_a_completion(e2b: str) -> None:
    lone = "print(int(input()) ** 2 if True else '\\ud800{}')"
    scores = score("e2b", e2b + "/", RIGHT, HALF, FAILS, lone, "no input = {'")
    assert [row.value for row in scores] == [1.0, 0.5, 0.0, 1.0, 0.0], scores
    assert len(FakeE2B.created) == 5 and not FakeE2B.open
    assert FakeE2B.created[0] == {
        "templateID": "code-interpreter-v1", "timeout": 22, "secure": True, "allow_internet_access": False,
    }  # fmt: skip
    assert [row.value for row in score("e2b", e2b, RIGHT, HALF, code_score="all")] == [1.0, 0.0]


def test_limits_of_a_program_on_e2b_fail_its_tests(e2b: str) -> None:
    scores = score("e2b", e2b, "while True: pass", "while True: print('x' * 999_999)", RIGHT, timeout=6.0)
    assert [row.value for row in scores] == [0.0, 0.0, 1.0], scores
    assert max(row.seconds for row in scores) < 6.0 and not FakeE2B.open


def test_a_busy_e2b_is_asked_again(e2b: str) -> None:
    FakeE2B.busy = 2
    assert [row.value for row in score("e2b", e2b, RIGHT)] == [1.0]
    FakeE2B.busy = 99
    (unscored,) = score("e2b", e2b, RIGHT, timeout=4.0)
    assert unscored.value is None and "HTTP Error 429" in str(unscored.reason)


def test_a_failure_of_e2b_leaves_the_completion_unscored(e2b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (unscored,) = score("e2b", e2b, "# interpreter dies")
    assert unscored.value is None and str(unscored.reason).endswith(
        "the sandbox failed: ContextRestarting: Context was restarted"
    )
    assert len(FakeE2B.created) == 1 and not FakeE2B.open
    FakeE2B.delay = 3.0
    (unscored,) = score("e2b", e2b, RIGHT, timeout=4.0)
    assert unscored.value is None and unscored.seconds < 4.0, "a slow start must not fail the tests"
    FakeE2B.delay = 0.0
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
    (unscored,) = score("e2b", e2b, RIGHT)
    assert unscored.value is None and "HTTP Error 401" in str(unscored.reason)
    assert "e2b_wrong" not in str(unscored.reason)
    monkeypatch.setenv("E2B_API_KEY", "e2b_first\ne2b_second")
    (unscored,) = score("e2b", e2b, RIGHT)
    assert unscored.value is None and str(unscored.reason).endswith("E2B_API_KEY has more than one line")


def test_a_service_that_stays_busy_is_named_before_the_time_of_a_reward_is_over(service: str) -> None:
    (unscored,) = score("piston", service, "# busy", timeout=4.0)
    assert unscored.value is None and not unscored.by_limit and unscored.seconds < 4.0, unscored
