"""The first test to read: the whole product, as a new user runs it."""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, SECRET, Launch

from grpo_recipes.server.middleware import SYNCED_PATH
from grpo_recipes.server.wire import COMPLETIONS_PATH, WORKERS_PATH


@pytest.mark.slow
def test_training_sh_trains_the_smoke_recipe(launch: Callable[..., Launch]) -> None:
    words = documented("bash training.sh", {"training.sh": str(REPOSITORY / "training.sh")})
    run = launch(command=words, ENV_DIR=sys.prefix)

    run.wait_for_step(1)
    assert_no_secret_in_command_lines(run)
    assert_vllm_is_imported_once(run)
    assert run.wait() == 0, run.output

    assert_reward_went_up(run)
    assert_one_weight_load_per_generation(run)
    assert_model_answers_sums_never_trained_on(run)
    assert_report_shows_the_run(run)
    assert_nothing_secret_was_written(run)
    assert run.processes() == []
    lines = run.output.splitlines()
    labels = [line for line in lines if "smoke test on CPU, not an experiment" in line]
    assert len(labels) == 2 and lines[-4] == labels[1]
    assert [line[6:13] for line in lines[-4:]] == ["status ", "reward ", "model  ", "next   "]


def assert_reward_went_up(run: Launch) -> None:
    summary, rows = run.summary(), run.rows()
    assert summary["status"] == "completed" and summary["exit_code"] == 0 and summary["smoke"] is True
    assert 60 <= summary["steps"] == len(rows) <= 100
    rewards = [row["reward"] for row in rows]
    assert abs(summary["initial_reward"] - sum(rewards[:5]) / 5) < 1e-5
    assert abs(summary["final_reward"] - sum(rewards[-5:]) / 5) < 1e-5
    assert summary["initial_reward"] <= 0.7
    assert summary["final_reward"] >= 0.85
    assert re.search(r"step 60/\d+  reward 0\.\d+  length \d+  entropy [\d.]+  [\d.]+ s  left ", run.output)
    lines = run.output.splitlines()
    assert max(len(line) for line in lines if line.startswith(("step ", "  | ", "  > "))) <= 80
    assert next(line for line in lines if line.startswith("completion of step ")).startswith("completion of step 1, ")
    # The trainers import their packages at the same time, so a fast machine may skip one of the next phases.
    starts = ("grpo: now starting the server", "grpo: server ready after ", "grpo: now ")
    phases = [line for line in lines if line.startswith(starts)]
    assert phases[0] == starts[0] and phases[1].startswith(starts[1]) and "(starting the server took " in phases[2]
    logged = (run.run_dir / "launch.log").read_text().splitlines()
    assert logged[0].startswith("grpo: 20") and [line for line in lines if line in logged][-1] == lines[-1]
    assert {line for line in lines if line.startswith("step ")} <= set(logged)


def assert_vllm_is_imported_once(run: Launch) -> None:
    """Fork the engine and its worker from the server: they have vLLM at the same address. The trainer has no vLLM."""
    maps = {process.pid: Path(f"/proc/{process.pid}/maps").read_text() for process in run.processes()}
    addresses = {pid: re.findall(r"^([0-9a-f]+)-.*/vllm/_C\S*$", text, re.MULTILINE)[:1] for pid, text in maps.items()}
    at_server = addresses[run.pid_of("server")]
    assert len(at_server) == 1
    assert [address for address in addresses.values() if address] == [at_server] * 3


def assert_report_shows_the_run(run: Launch) -> None:
    page = (run.run_dir / "report.html").read_text()
    for text in ("✓ completed", "smoke test, not an experiment", "Reward rose from", "First against last"):
        assert text in page
    samples = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    for row, sample in zip(run.rows(), samples, strict=True):
        assert row["step"] == sample["step"] and len(sample["rewards"]) == 256
        assert abs(sum(sample["rewards"]) / 256 - row["reward"]) < 1e-6
    assert f"Step {len(samples)}</b>" in page and "&lt;answer&gt;" in page


def assert_one_weight_load_per_generation(run: Launch) -> None:
    requests = re.findall(rf'"POST ({WORKERS_PATH}|{COMPLETIONS_PATH}|{SYNCED_PATH}) HTTP', run.log("server"))
    loads, steps = run.log("server").count("grpo: weights loaded"), len(run.rows())
    assert loads == steps
    # One request per prompt, 16 prompts per step. Each request follows the weight load of its step.
    assert requests.count(COMPLETIONS_PATH) == 16 * steps
    assert requests.count(SYNCED_PATH) == steps
    assert requests.index(SYNCED_PATH) < requests.index(COMPLETIONS_PATH)


def assert_model_answers_sums_never_trained_on(run: Launch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train_file = Path(json.loads((run.run_dir / "plan.json").read_text())["dataset"])
    tests = [json.loads(line) for line in train_file.with_name("test.jsonl").read_text().splitlines()]
    trained = {json.loads(line)["problem"] for line in train_file.read_text().splitlines()}
    model_folder = run.run_dir / "model"
    assert len(tests) == 20 and not trained & {row["problem"] for row in tests}
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    right = 0
    for row in tests:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["problem"]}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        right += f"<answer>{row['answer']}</answer>" in tokenizer.decode(ids)
    assert right >= 16, f"{right} of 20 right"


def assert_no_secret_in_command_lines(run: Launch) -> None:
    (token_file,) = {
        value for process in run.processes() for name, value in process.environ().items() if name == "GRPO_TOKEN_FILE"
    }
    token = Path(token_file).read_text()
    assert stat.S_IMODE(Path(token_file).stat().st_mode) == 0o600
    assert len(token) == 32
    for process in run.processes():
        assert token not in " ".join(process.cmdline()) and SECRET not in " ".join(process.cmdline())


def assert_nothing_secret_was_written(run: Launch) -> None:
    assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o700
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    files += [run.log_path("server"), run.log_path("trainer")]
    assert len(files) > 20
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
