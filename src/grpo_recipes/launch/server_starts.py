"""Change the command of the vLLM server for another start: its port, and the seed of its noise."""

import hashlib
from dataclasses import replace

from grpo_recipes.plan.types import Process

_PORT_FLAGS = ("--port", "--vllm_server_port")  # the server's flag and the trainers' flag
_SEED_FLAG = "--seed"
FIRST_START = (0, 1)  # the step from which the attempt trains, and the number of the server in this attempt


def with_server_port(process: Process, host: str, old_port: int, port: int) -> Process:
    """Return the process with the server's ``old_port`` in its argv replaced by ``port``.

    Only ``http://HOST:OLD_PORT`` and the values of ``--port`` and ``--vllm_server_port`` are replaced.
    """

    def move(flag: str, word: str) -> str:
        if word == f"http://{host}:{old_port}":
            return f"http://{host}:{port}"
        return str(port) if flag in _PORT_FLAGS and word == str(old_port) else word

    words = zip(["", *process.argv], process.argv, strict=False)
    return replace(process, argv=[move(flag, word) for flag, word in words])


def with_server_seed(process: Process, *start: int) -> Process:
    """Return the server with its seed replaced by a hash of the seed and ``start``, numbers that identify this start.

    vLLM draws the noise of requests without a seed from the server's seed. With an equal seed, a restarted server would
    repeat the noise of earlier steps. A run's first start has the seed of its plan. Other processes, and servers
    without a seed, are returned unchanged, too.
    """
    if process.ready != "serving" or _SEED_FLAG not in process.argv or start == FIRST_START:
        return process
    index = process.argv.index(_SEED_FLAG) + 1
    text = "/".join([process.argv[index], *map(str, start)])
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") // 2  # replicas add their number
    return replace(process, argv=[*process.argv[:index], str(seed), *process.argv[index + 1 :]])
