"""Each variable of the guide that a CPU server can take, in the real server's own account of itself."""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Callable

import psutil
import pytest
from real_runs import Launch

SMALL_GROUPS = ("--prompts_per_step", "64", "--num_generations", "4")  # some have four equal rewards


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listeners(run: Launch, port: int) -> list[int]:
    """Return the run's own processes that listen on a port."""
    return [
        process.pid
        for process in run.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]


@pytest.mark.slow
def test_the_guides_variables_are_what_the_real_server_and_trainer_run_with(launch: Callable[..., Launch]) -> None:
    port = free_port()
    run = launch(
        *("--max_steps", "2", "--save_strategy", "no"),
        *("--vllm_args", "{max_num_batched_tokens: 1024, enable_prefix_caching: false, speculative_config: "
          "{method: ngram, num_speculative_tokens: 2, prompt_lookup_max: 3}}"),
        *("--dynamic_sampling", "true", "--dynamic_sampling_max_rounds", "20", *SMALL_GROUPS),
        VLLM_PORT=str(port), VLLM_MAX_LEN="77", VLLM_MODEL="smoke:sums",
        RUN_NAME="knobs", VLLM_MODE="server",
    )  # fmt: skip
    run.wait_for(lambda: run.has_run_dir() and run.rows(), "a step", timeout=400)  # the smoke model may have to be made
    assert listeners(run, port)
    assert run.wait() == 0

    (told,) = re.findall(r"non-default args: (\{.*\})", run.log("server"))
    server = ast.literal_eval(told)
    assert (server["port"], server["host"], server["max_model_len"]) == (port, "127.0.0.1", 77)
    # P1: all completions of a generation at the same time, where vLLM's default on CPU is 128.
    assert server["max_num_seqs"] == 256
    assert (server["logprobs_mode"], server["max_logprobs"], server["dtype"]) == ("processed_logprobs", -1, "float32")
    assert server["served_model_name"][0].startswith("knobs-") and "smoke/sums" in server["model"]
    assert (server["max_num_batched_tokens"], server["enable_prefix_caching"]) == (1024, False)  # vllm_args
    assert server["speculative_config"]["method"] == "ngram"
    engine = next(line for line in run.log("server").splitlines() if "Initializing a V1 LLM engine" in line)
    assert "max_seq_len=77" in engine and "dtype=torch.float32" in engine and "tensor_parallel_size=1" in engine
    assert "enable_prefix_caching=False" in engine and "SpeculativeConfig(method='ngram'" in engine
    # Every group with equal rewards is replaced, and the guard compares the log-probs of the final generation.
    for row in run.rows():
        assert row["dynamic_sampling/rounds"] > 0 and row["dynamic_sampling/groups_equal"] == 0
        assert row["frac_reward_zero_std"] == 0 and row["sampling/sampling_logp_difference/mean"] < 1e-4
    assert run.run_dir.name.startswith("knobs-") and run.log_path("server").name.startswith("liv_vllm_knobs_")
