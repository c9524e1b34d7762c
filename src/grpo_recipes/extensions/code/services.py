"""Run Python programs on an HTTP service: Piston (``/api/v2/execute``), Sandbox Fusion (``/run_code``) or E2B.

Piston and Sandbox Fusion get a program and its input in one request, and reply with the program's output. E2B creates a
sandbox for the tests of a completion, and the sandbox's interpreter runs the programs. The service limits memory,
processes and network.
"""

import contextlib
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from grpo_recipes.extensions.code.arguments import E2B_KEY
from grpo_recipes.process.answers import MAX_BYTES, ResponseTooLarge, bounded_opener
from grpo_recipes.secrets import MASK

_E2B_URL = "https://api.e2b.app"
_E2B_PORT = 49999  # of the interpreter in a sandbox
_MOST_OVERHEAD = 2.0  # most seconds that a request may take beyond the program's time
_PART_OF_OVERHEAD = 0.15  # the same limit, as a part of the time of a completion
_BUSY = (429, 502, 503, 504)  # HTTP statuses: the request is repeated
_PART_OF_START, _PART_OF_END = 0.3, 0.04  # parts of a completion's time to create and to kill a sandbox on E2B
_FIRST_PAUSE = 0.25  # seconds before the first repetition, doubled each time
_LONGEST_ERROR = 200  # characters of a service's error that are shown
# Runs in E2B's interpreter, which has no stdin, and prints the exit code (None: time limit) and output of the program.
_RUN_IN_SANDBOX = """import json, pathlib, subprocess, sys, tempfile
with tempfile.TemporaryDirectory() as folder, open(folder + "/output", "w+b") as output:
    pathlib.Path(folder, "program.py").write_bytes({source!r})
    command = "ulimit -f 8192; echo 1000 > /proc/self/oom_score_adj; exec " + '"$0" -I "$1"'
    try:
        code = subprocess.run(
            ["sh", "-c", command, sys.executable, folder + "/program.py"], input={text!r}, stdout=output,
            stderr=subprocess.DEVNULL, timeout={seconds}, start_new_session=True,
        ).returncode
    except subprocess.TimeoutExpired:
        code = None
    output.seek(0)
    print("\\n" + json.dumps([code, output.read().decode(errors="replace")]))
"""

Run = Callable[[str, str, float], str | None]  # (program, input, seconds) -> its output, None if it failed


def run_on_piston(url: str, overhead: float, source: str, text: str, seconds: float) -> str | None:
    """Run a Python program on the Piston server at ``url``; return its output, or None if the program failed.

    ``source`` is the program and ``text`` its input. ``seconds`` limits its time, and with ``overhead`` seconds the
    time of the whole request. Raise an error if the server gives no result.
    """
    request = {
        "language": "python", "version": "*", "files": [{"content": source}], "stdin": text,
        "run_timeout": int(seconds * 1000),
    }  # fmt: skip
    run = json.loads(_send("POST", f"{url.rstrip('/')}/api/v2/execute", request, seconds + overhead))["run"]
    return str(run["stdout"]) if run["code"] == 0 else None


def run_on_sandbox_fusion(url: str, overhead: float, source: str, text: str, seconds: float) -> str | None:
    """Run a program on Sandbox Fusion, like ``run_on_piston``. Raise ValueError if its sandbox failed."""
    request = {"code": source, "language": "python", "stdin": text, "run_timeout": seconds}
    reply = json.loads(_send("POST", f"{url.rstrip('/')}/run_code", request, seconds + overhead))
    if reply["status"] == "SandboxError":
        raise ValueError(f"the sandbox failed: {reply.get('message') or 'no message'}")
    return str(reply["run_result"]["stdout"]) if reply["status"] == "Success" else None


def limit_overhead(seconds: float) -> float:
    """Return the seconds that a request may take beyond the time of its program, if a completion has ``seconds``."""
    return min(_MOST_OVERHEAD, _PART_OF_OVERHEAD * seconds)


SERVICES = {"piston": run_on_piston, "sandbox_fusion": run_on_sandbox_fusion}


@contextlib.contextmanager
def open_e2b_sandbox(url: str | None, seconds: float) -> Iterator[Run]:
    """Create a sandbox without network on E2B for a ``with`` block, and kill it at the end.

    Yield a function that runs a program in it, one at a time. It raises an error if the sandbox gives no result. The
    block has ``seconds``, and a part of them limits the start. Then E2B kills the sandbox even if this process was
    killed. ``url`` is the address of E2B's API, by default the public address.
    """
    api, api_key = (url or _E2B_URL).rstrip("/"), os.environ[E2B_KEY].strip()
    if not api_key.isprintable():  # http.client would print it
        raise ValueError(f"{E2B_KEY} has more than one line")
    login = {"X-API-Key": api_key}
    request = {
        "templateID": "code-interpreter-v1", "timeout": math.ceil(seconds + _MOST_OVERHEAD), "secure": True,
        "allow_internet_access": False,
    }  # fmt: skip
    sandbox = json.loads(_send("POST", f"{api}/sandboxes", request, _PART_OF_START * seconds, login))
    name, parts = sandbox["sandboxID"], urlsplit(api)
    headers = {
        "E2b-Sandbox-Id": name, "E2b-Sandbox-Port": str(_E2B_PORT), "X-Access-Token": sandbox.get("envdAccessToken"),
        "E2B-Traffic-Access-Token": sandbox.get("trafficAccessToken"),
    }  # fmt: skip
    host = f"{parts.scheme}://{_E2B_PORT}-{name}.{sandbox.get('domain') or parts.netloc.removeprefix('api.')}"
    try:
        overhead = limit_overhead(seconds)
        yield partial(_run_in_sandbox, host, overhead, {header: value for header, value in headers.items() if value})
    finally:
        with contextlib.suppress(OSError, HTTPException):
            _send("DELETE", f"{api}/sandboxes/{name}", None, min(_MOST_OVERHEAD, _PART_OF_END * seconds), login)


def _run_in_sandbox(
    host: str, overhead: float, headers: Mapping[str, str], source: str, text: str, seconds: float
) -> str | None:
    """Run a program in a sandbox of E2B, like ``run_on_piston``. Raise ValueError if the sandbox gives no result."""
    source_bytes, input_bytes = (part.encode(errors="replace") for part in (source, text))
    code = _RUN_IN_SANDBOX.format(source=source_bytes, text=input_bytes, seconds=seconds)
    reply = _send("POST", f"{host}/execute", {"code": code}, seconds + overhead, headers)
    events = [json.loads(line) for line in reply.splitlines()]
    if error := next((event for event in events if event["type"] == "error"), None):
        raise ValueError(f"the sandbox failed: {error.get('name')}: {error.get('value')}")
    printed = "".join(event["text"] for event in events if event["type"] == "stdout")
    if not printed:
        raise ValueError("the sandbox failed: no result")
    exit_code, output = json.loads(printed.splitlines()[-1])
    return str(output) if exit_code == 0 else None


def _send(
    method: str, address: str, content: dict[str, Any] | None, seconds: float, headers: Mapping[str, str] | None = None
) -> bytes:
    """Send a request with JSON and return the reply. Repeat it while the service is busy.

    Raise OSError or HTTPException without a reply within ``seconds``. The error has the service's message.
    """
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(
        address, data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            with bounded_opener().open(request, timeout=max(0.01, deadline - time.monotonic())) as response:
                reply: bytes = response.read(MAX_BYTES + 1)
            break
        except urllib.error.HTTPError as error:
            with error:
                if error.code not in _BUSY or time.monotonic() + pause >= deadline:
                    text = " ".join(error.read(MAX_BYTES).decode(errors="replace").split())
                    for secret in (headers or {}).values():  # before the cut, which would hide a part from the mask
                        text = text.replace(secret, MASK)
                    raise OSError(f"HTTP Error {error.code}: {text[:_LONGEST_ERROR] or error.reason}") from error
        time.sleep(pause)
        pause *= 2
    if len(reply) > MAX_BYTES:
        raise ResponseTooLarge(f"the response to {urlsplit(address).path} is larger than {MAX_BYTES >> 20} MB")
    return reply
