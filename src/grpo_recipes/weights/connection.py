"""Send requests to the run's vLLM server; errors name the request and the server's log.

``ServerConnection`` extends TRL's client. Its subclass ``client.BridgeClient`` adds weight transfers, restarts of the
server and sampling.
"""

import contextlib
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from grpo_recipes.errors import translate_errors
from grpo_recipes.runs.rundir import Run, load_json_mapping
from grpo_recipes.server.wire import WORKERS_PATH
from grpo_recipes.weights.transport import QUICK_SECONDS, Answer, BadAnswer, ServerError

_ATTEMPTS, _RETRY_SECONDS = 3, 0.5  # attempts after bad answers; the pause grows by this much each time
_MAX_TEXT = 200  # characters of an answer quoted in a message


class ServerConnection(VLLMClient):
    """Send requests to the vLLM server of the run in ``_run_dir``, and raise BadAnswer for unusable answers."""

    base_url: str
    session: requests.Session
    _run_dir: Path
    _replicas = 1  # engines of the server

    def served_names(self) -> list[str] | None:
        """Return the names of the served models, or None if no vLLM server answers. Raise nothing.

        If the server rejects the token, the list has one text that says so.
        """
        with contextlib.suppress(ServerError, LookupError, TypeError, ValueError):  # another program may answer
            answer = self.session.get(f"{self.base_url}/v1/models", timeout=QUICK_SECONDS)
            if answer.status_code == 401:
                return ["(a server that refuses this run's token)"]
            if answer.ok:
                return [model["id"] for model in answer.json()["data"]]
        return None

    def call_workers(self, method: str, **kwargs: Any) -> list[list[Any]]:
        """Call a method of every worker; return a list for each replica, with the result of each of its workers.

        Raise BadAnswer if the results of a replica are missing, or if replicas have different numbers of workers.
        """
        answer = self._post(f"{self.base_url}{WORKERS_PATH}", json={"method": method, "kwargs": kwargs})
        results = answer.get("results")
        replicas: list[Any] = results if isinstance(results, list) else []
        counts = [len(replica) if isinstance(replica, list) else 0 for replica in replicas]
        if len(counts) != self._replicas or 0 in counts or len({*counts}) > 1:
            expected = "one or more workers" if self._replicas == 1 else f"all workers of {self._replicas} replicas"
            problem = f"gave {counts} results of {method}, expected a result of {expected}"
            raise self._make_bad_answer(WORKERS_PATH, problem)
        return replicas

    def request_config(self) -> dict[str, Any]:
        """Return the workers' configuration (``grpo_config``). Raise BadAnswer if two workers have different ones."""
        config, *others = chain.from_iterable(self.call_workers("grpo_config"))
        if not isinstance(config, dict) or any(other != config for other in others):
            raise self._make_bad_answer(WORKERS_PATH, "has workers with different configurations")
        return config

    def _request_reports(self) -> list[list[dict[str, Any]]]:
        """Return the reports of each replica's workers (``grpo_weights``); raise BadAnswer for a malformed report."""
        replicas = self.call_workers("grpo_weights")
        with self._translate_parse_errors(WORKERS_PATH):
            for report in chain.from_iterable(replicas):
                parameters, _, _ = report["parameters"], dict(report["packed"]), int(report["sync"])
                if not all(type(value) is int and hasattr(torch, dtype) for value, dtype, *_ in parameters.values()):
                    raise ValueError("a parameter without fingerprint and dtype")
                if parameters.keys() != replicas[0][0]["parameters"].keys():
                    raise ValueError("workers that hold different parameters")
        return replicas

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Send a POST request, and return the JSON object of the answer. Raise BadAnswer for any other answer."""
        return self._parse_answer(url, self.session.post(url, **kwargs))

    def _parse_answer(self, url: str, answer: requests.Response) -> dict[str, Any]:
        """Return the JSON object of an answer. Raise BadAnswer for a status other than 200, or other content."""
        content = load_json_mapping(answer.content)
        if answer.status_code != 200 or content is None:
            raise self._make_rejected_error(url.removeprefix(self.base_url), answer)
        return content

    def _make_rejected_error(self, path: str, answer: requests.Response) -> BadAnswer:
        """Return a BadAnswer for a rejection or an answer without a JSON object: its status and the start of its text.

        ``path`` is the URL path of the request.
        """
        text = " ".join(answer.text[:_MAX_TEXT].split()) or "nothing"
        return self._make_bad_answer(path, f"answered {answer.status_code}: {text}")

    def _make_bad_answer(self, path: str, problem: str) -> BadAnswer:
        """Return a BadAnswer for an unusable answer to a request of the URL path ``path``.

        ``problem`` continues the sentence "the vLLM server at URL ...", for example "sent no JSON". The message
        also names the server's log.
        """
        processes = Run(self._run_dir).plan.get("processes", [])
        logs = [process["log"] for process in processes if process.get("role") == "server" and "log" in process]
        return BadAnswer(
            f"the vLLM server at {self.base_url} {problem} (in {path}; log: {logs[0] if logs else 'its own'})"
        )

    def _translate_parse_errors(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that turns errors of parsing an answer, such as KeyError, into BadAnswer."""
        kinds = (LookupError, TypeError, ValueError, AttributeError)

        def bad_answer(error: Exception) -> BadAnswer:
            """Return BadAnswer with the text of the error."""
            text = str(error) if type(error) is ValueError else repr(error)
            return self._make_bad_answer(path, f"gave no usable answer: {text[:_MAX_TEXT]}")

        return translate_errors(kinds, bad_answer)

    def _retry(self, request: Callable[[], Answer]) -> Answer:
        """Call ``request`` up to 3 times, with growing pauses after a BadAnswer; raise the last BadAnswer."""
        for attempt in range(1, _ATTEMPTS):
            with contextlib.suppress(BadAnswer):
                return request()
            time.sleep(_RETRY_SECONDS * attempt)
        return request()

    def pause(self, mode: str, timeout: float | None = None) -> None:
        """Pause the engine. ``mode`` is "keep" or "abort" for its running requests, or "wait" until they have ended.

        New requests are queued. The call may take ``timeout`` seconds; None is the session's limit.
        """
        self._post(f"{self.base_url}/pause", params={"mode": mode}, timeout=timeout)

    def resume(self, timeout: float | None = None) -> None:
        """Let a paused engine continue with its queued requests. ``timeout`` is the same as for ``pause``."""
        self._post(f"{self.base_url}/resume", timeout=timeout)
