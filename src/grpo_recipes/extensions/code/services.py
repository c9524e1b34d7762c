"""Run Python programs on an HTTP service: Piston (``/api/v2/execute``) or Sandbox Fusion (``/run_code``).

Both get a program and its input in one request, and reply with the program's output. The service limits memory,
processes and network.
"""

import json
import urllib.request
from typing import Any

_MORE_SECONDS = 2.0  # that a request may take next to the program's time


def run_on_piston(url: str, source: str, text: str, seconds: float) -> str | None:
    """Run a Python program on the Piston server at ``url``; return its output, or None if the program failed.

    ``source`` is the program and ``text`` its input. ``seconds`` limits its time. Raise an error if the server gives no
    result.
    """
    request = {
        "language": "python", "version": "*", "files": [{"content": source}], "stdin": text,
        "run_timeout": int(seconds * 1000),
    }  # fmt: skip
    run = _post(f"{url.rstrip('/')}/api/v2/execute", request, seconds)["run"]
    return str(run["stdout"]) if run["code"] == 0 else None


def run_on_sandbox_fusion(url: str, source: str, text: str, seconds: float) -> str | None:
    """Run a program on Sandbox Fusion, like ``run_on_piston``. Raise ValueError if its sandbox failed."""
    request = {"code": source, "language": "python", "stdin": text, "run_timeout": seconds}
    reply = _post(f"{url.rstrip('/')}/run_code", request, seconds)
    if reply["status"] == "SandboxError":
        raise ValueError(f"the sandbox failed: {reply.get('message') or 'no message'}")
    return str(reply["run_result"]["stdout"]) if reply["status"] == "Success" else None


SERVICES = {"piston": run_on_piston, "sandbox_fusion": run_on_sandbox_fusion}


def _post(address: str, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Send a request and return the reply, both as JSON. Raise OSError or ValueError if that fails."""
    post = urllib.request.Request(address, json.dumps(request).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(post, timeout=seconds + _MORE_SECONDS) as response:
        reply: dict[str, Any] = json.load(response)
    return reply
