"""Three steps on real problems through the same path, on a machine with awkward neighbours."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch

GSM8K = REPOSITORY.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


class FakeForeignServer(http.server.BaseHTTPRequestHandler):
    """Another user's server: it answers 200 to everything, /health and /v1/models included."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "somebody-elses-model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def foreign_port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeForeignServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def dead_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.exists(), reason=f"no {GSM8K.name} of GSM8K beside the repository")
def test_gsm8k_is_rendered_filtered_counted_and_scored_behind_a_dead_proxy(launch: Callable[..., Launch]) -> None:
    proxy = f"http://127.0.0.1:{dead_port()}"
    run = launch(
        *("--dataset_name", str(GSM8K)),
        *("--dataset_prompt_column", "question", "--dataset_solution_column", "answer"),
        *("--dataset_solution_marker", "####", "--system_prompt", "Answer in <answer></answer>."),
        *("--max_prompt_length", "250", "--vllm_max_model_length", "512", "--max_completion_length", "32"),
        *("--reward_funcs", "pure_accuracy_math", "format_tags", "--reward_weights", "1", "0.5"),
        *("--max_steps", "3", "--prompts_per_step", "4", "--num_generations", "4", "--report_to", "tensorboard"),
        *("--log_completions", "--run_name", "gsm8k"),
        http_proxy=proxy,
        HTTP_PROXY=proxy,
        https_proxy=proxy,
    )

    assert run.wait() == 0, run.output

    trainer_log = run.log("trainer")
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    (prompt_count,) = [
        int(line.split()[1]) for line in trainer_log.splitlines() if f" prompts ({len(rows)} read" in line
    ]
    assert f"({len(rows)} read, {len(rows) - prompt_count} dropped as longer than max_prompt_length)" in trainer_log
    assert 0 < prompt_count < len(rows)
    assert "<|system|>Answer in <answer></answer>.<|im_end|><|user|>" in trainer_log
    metrics = run.rows()
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        assert 0 <= row["rewards/pure_accuracy_math/mean"] <= 1
        assert 0 <= row["rewards/format_tags/mean"] <= 1
        weighted = row["rewards/pure_accuracy_math/mean"] + 0.5 * row["rewards/format_tags/mean"]
        assert abs(row["reward"] - weighted) < 1e-5
        assert row["completions/mean_length"] > 0
    assert list((run.run_dir / "tensorboard").rglob("events.out.tfevents.*"))
    import pandas

    tables = sorted((run.run_dir / "checkpoints" / "completions").glob("*.parquet"))
    assert len(tables) == 3 and len(pandas.read_parquet(tables[0])) == 16


def test_a_foreign_server_on_a_port_of_ours_is_refused_before_anything_starts(
    launch: Callable[..., Launch], foreign_port: int
) -> None:
    run = launch("--vllm_server_port", str(foreign_port))

    assert run.wait(20) == 2

    assert f"--vllm_server_port: port {foreign_port} is in use by another process" in run.output
    assert run.output.count("\n") == 1
    assert not (run.folder / "runs").exists()


@pytest.mark.slow
def test_a_server_that_is_not_this_runs_is_not_taken_for_it(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """The port is taken after it was looked at: while our server starts."""
    port = dead_port()
    run = launch("--vllm_server_port", str(port), "--run_name", "late")
    run.wait_for(lambda: run.has_run_dir() and len(run.processes()) >= 2, "the server's process")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), FakeForeignServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert run.wait(60) != 0
    finally:
        server.shutdown()

    assert f"port {port} was taken by another process" in run.output
    assert run.processes() == []


@pytest.mark.slow
def test_prompts_that_exceed_one_batch_of_the_server(launch: Callable[..., Launch]) -> None:
    # 16 prompts of more than 300 tokens at once, each with a seed: more than vLLM's scheduler takes in a batch (2048).
    long = ("--system_prompt", "Add the two numbers. " * 15, "--max_prompt_length", "400")
    run = launch("--max_steps", "1", *long, "--vllm_max_model_length", "512", "--run_name", "long")
    assert run.wait() == 0, run.output
    (row,) = run.rows()
    assert row["sampling/sampling_logp_difference/mean"] < 1e-4
    assert row["num_tokens"] > 16 * 16 * 300


@pytest.mark.slow
def test_without_a_server_the_model_itself_generates(launch: Callable[..., Launch]) -> None:
    run = launch(
        *("--use_vllm", "false", "--max_steps", "2", "--prompts_per_step", "2", "--num_generations", "4"),
        *("--report_to", "wandb", "--run_name", "plain"),
        WANDB_MODE="offline",
    )

    assert run.wait() == 0, run.output

    assert [process["role"] for process in json.loads((run.run_dir / "plan.json").read_text())["processes"]] == [
        "trainer"
    ]
    assert len(run.rows()) == 2
    identity = json.loads((run.run_dir / "run.json").read_text())
    assert list((run.run_dir / "wandb").glob(f"offline-run-*-{identity['wandb_id']}"))
