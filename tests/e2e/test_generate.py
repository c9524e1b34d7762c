"""`grpo generate` and `grpo chat` with a real vLLM server: tokens, repetition, continuation, and no leftovers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from documented import documented
from real_runs import REPOSITORY, clean_environment, marked_processes, smoke_model

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.serve import serving
from grpo_recipes.recipe import Recipe, read_recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.rollouts.openai import CompletionClient, Sample, SamplingParameters
from grpo_recipes.runs.rundir import write_json

RECIPE = REPOSITORY / "recipes/smoke/grpo.yaml"
LIMIT = 72  # so many that the command can be interrupted on a busy machine


def patient() -> Recipe:
    """The smoke recipe with a long time limit for the server, for a busy machine."""
    return read_recipe(RECIPE).with_value("vllm_server_timeout", Value(400.0, "test"))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def heed_interrupts() -> None:
    """Let Ctrl-C end this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(argv: list[str], out: Path, environment: dict[str, str]) -> int:
    """Press Ctrl-C after three rows; the exit code.

    The command is halted when the rows are seen: on a busy machine it could write the others before the key comes.
    """
    for _ in range(5):
        out.unlink(missing_ok=True)
        # A shell starts its background commands, maybe these tests, with this signal ignored.
        process = subprocess.Popen(argv, env=environment, cwd=out.parent, preexec_fn=heed_interrupts)
        deadline = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b"\n") < 3:
            assert process.poll() in (None, 0) and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        if out.read_bytes().count(b"\n") <= LIMIT // 2:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            return process.wait(30)
        process.kill()
        process.wait(30)
    raise AssertionError("the command is always done before it can be interrupted")


def assert_ids_and_text_agree(url: str, token: str, generated: list[dict[str, Any]]) -> None:
    """Assert that ids and texts agree, and that the server gives equal answers to messages and to token ids."""
    tokenizer = smoke.build_tokenizer()
    for row in generated:
        for completion in row["completions"]:
            assert tokenizer.decode(completion["ids"], skip_special_tokens=True) == completion["text"]
            assert (completion["ids"][-1] == tokenizer.eos_token_id) == (completion["finish_reason"] == "stop")
    client = CompletionClient(url, token=token)
    chats, greedy = [row["prompt"] for row in generated], SamplingParameters(max_tokens=8, temperature=0.0)
    ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    drawn, same = client.sample(ids, 1, greedy), client.sample(chats, 1, greedy)
    assert [row[0].ids for row in drawn if isinstance(row[0], Sample)] == [row[0].ids for row in same]
    assert len(drawn) == LIMIT and all(logp <= 0 for (row,) in drawn for logp in row.logprobs)


@pytest.mark.slow
def test_a_dataset_is_completed_continued_and_repeated(tmp_path: Path) -> None:
    mark = f"generate-{tmp_path.name}"
    with serving(patient(), smoke_model(), clean_environment(tmp_path, mark)) as server:
        url, token = server.url, server.token
        environment = clean_environment(tmp_path, mark, OPENAI_API_KEY=token)

        def command(out: str, *flags: str) -> list[str]:
            places = {"my.yaml": str(RECIPE), "completions.jsonl": out, "http://localhost:8000": url}
            shown = "grpo generate my.yaml --out completions.jsonl --base-url http://localhost:8000 --num-generations 4"
            return [*documented(shown, places), "--limit", str(LIMIT), *flags]

        def generate(out: str, *flags: str) -> Path:
            done = subprocess.run(
                command(out, *flags), env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert f"{LIMIT} prompts x 4 completions in {out}" in done.stdout
            return tmp_path / out

        whole = generate("whole.jsonl")
        generated = rows(whole)
        assert [row["index"] for row in generated] == list(range(LIMIT))
        assert all(len(row["completions"]) == 4 for row in generated)
        assert len({completion["text"] for row in generated for completion in row["completions"]}) > 5
        assert_ids_and_text_agree(url, token, generated)

        cut = tmp_path / "cut.jsonl"
        assert interrupted(command("cut.jsonl", "--batch-size", "1"), cut, environment) == 130
        assert 3 <= len(rows(cut)) < LIMIT
        assert generate("cut.jsonl").read_bytes() == whole.read_bytes()

        greedy = generate("greedy.jsonl", "--temperature", "0")
        assert generate("again.jsonl", "--temperature", "0", "--batch-size", "3").read_bytes() == greedy.read_bytes()
        assert all(len({completion["text"] for completion in row["completions"]}) == 1 for row in rows(greedy))
        problems = CompletionClient(url, token="another")
        with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
            problems.ready(5)

        words = documented("grpo chat http://localhost:8000", {"http://localhost:8000": url})
        chat = subprocess.run(
            [*words, "--temperature", "0", "--max-tokens", "8"], input="1+2=\n", env=environment, cwd=tmp_path,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert chat.returncode == 0, chat.stderr
        assert "\n> 1+2=\n<answer>3</answer>\n" in chat.stdout
    assert marked_processes(mark) == []


@pytest.mark.slow
def test_a_run_is_talked_to_and_its_server_ends_with_the_conversation(tmp_path: Path) -> None:
    mark, run = f"chat-{tmp_path.name}", tmp_path / "runs" / "sums-20261120-101500"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(patient().as_yaml())
    (run / "model").symlink_to(smoke_model())
    write_json(run / "run.json", {"run_name": "sums"})
    write_json(run / "summary.json", {"status": "completed"})
    environment = clean_environment(tmp_path, mark)
    words = [*documented("grpo chat last"), "--temperature", "0"]
    lines = "1+2=\n3+4=\n/reset\n1+2=\n/system Say the sum.\n/system\n"
    done = subprocess.run(
        words, input=lines, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines_printed = done.stdout.splitlines()
    assert lines_printed.count("> 1+2=") == 2 and lines_printed.count("<answer>3</answer>") == 2
    assert lines_printed[-3:-1] == ["> /system", "grpo: system prompt: Say the sum."]
    assert marked_processes(mark) == []


@pytest.mark.slow
def test_the_server_of_a_conversation_ends_though_the_command_is_killed(tmp_path: Path) -> None:
    mark = f"killed-{tmp_path.name}"
    words = [str(Path(sys.executable).with_name("grpo")), "chat", smoke_model()]
    environment = clean_environment(tmp_path, mark)
    talk = subprocess.Popen(
        words, env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr
    )
    assert talk.stdout is not None
    for line in talk.stdout:
        if b" is ready; " in line:
            break
    assert len(marked_processes(mark)) > 2
    talk.kill()  # nothing of the command can end its server now
    talk.wait()
    deadline = time.monotonic() + 30
    while marked_processes(mark):
        assert time.monotonic() < deadline, marked_processes(mark)
        time.sleep(0.1)
