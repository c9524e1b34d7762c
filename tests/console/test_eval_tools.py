"""`grpo eval` of a recipe with tools, with a fake server: each turn is sampled, and the calls are run between them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollouts.fake_openai import FakeServer
from shop import SHOP

from grpo_recipes import smoke
from grpo_recipes.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPE = "recipes/environments/tools_smoke.yaml"
OUT = Path("evals/tools_smoke")
TOKENIZER = smoke.build_tokenizer(smoke.TOOLS)
PRICES = json.loads((REPOSITORY / "recipes/environments/prices.json").read_text())


class Shopper(FakeServer):
    """Looks a price up and multiplies. Requests with an odd first seed answer "1" without a call."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        base = super().answer(path, body)
        chat = TOKENIZER.decode(body["prompt"])
        _, question, *results = re.findall(r"<\|(?:user|system)\|>(.*?)<\|im_end\|>", chat)
        count, item = question.split(" ")
        before_item, after_item, before_a, before_b, after_b = smoke.SHOP_CALLS
        if not results:
            text = "<answer>1</answer>" if body["seed"] % 2 else f"{before_item}{item}{after_item}"
        elif len(results) == 1:
            text = f"{before_a}{count}{before_b}{results[0]}{after_b}"
        else:
            text = f"<answer>{results[1]}</answer>"
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        choice = {"text": text, "token_ids": ids, "logprobs": {"token_logprobs": [0.0] * len(ids)}}
        return {**base, "choices": [base["choices"][0] | choice]}


@pytest.fixture
def server() -> Iterator[Shopper]:
    fake = Shopper()
    yield fake
    fake.close()


@pytest.fixture
def evaluate(tmp_path: Path, server: Shopper, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``evaluate("--k", "2")``: evaluate the recipe with tools by the fake server, and return the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    address = ["--base-url", server.url, "--served-model-name", "tiny", "--wait", "0", "--limit", "5"]

    def run(*options: str) -> int:
        recipe = () if options and options[0].endswith(".yaml") else (RECIPE,)
        return main(["eval", *recipe, *options, *address, "--num-generations", "4"])

    return run


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (OUT / name).read_text().splitlines()]


def test_calls_are_run_and_their_results_are_read_and_shown(evaluate, server: Shopper) -> None:
    assert evaluate() == 0
    scored = lines("scores.jsonl")
    completions = [(row, completion) for row in scored for completion in row["completions"]]
    assert len(completions) == 20
    right = 0
    for row, completion in completions:
        count, item = row["prompt"][-1]["content"].split(" ")
        results = [message["content"] for message in completion["messages"] if message["role"] == "tool"]
        if completion["rewards"]["pure_accuracy_math"] == 1:
            right += 1
            assert results == [str(PRICES[item]), str(int(count) * PRICES[item])]
            assert f"[tool]\n{results[1]}\n\n[assistant]\n<answer>{results[1]}</answer>" in completion["text"]
        else:
            assert not results and completion["text"] == "[assistant]\n<answer>1</answer>"
        turns = [message["content"] for message in completion["messages"] if message["role"] == "assistant"]
        assert completion["tokens"] == sum(len(TOKENIZER(turn)["input_ids"]) + 1 for turn in turns)
    result = json.loads((OUT / "eval.json").read_text())
    assert result["pass@1"] == pytest.approx(right / 20) and 0 < right < 20 and result["truncated"] == 0
    firsts = [row["completions"][0]["rewards"]["pure_accuracy_math"] for row in scored]
    assert result["majority@1"] == pytest.approx(sum(firsts) / 5)
    assert len(server.asked) == 20 + 2 * right and {body["max_tokens"] for _, body in server.asked} == {12}
    assert len({body["seed"] for _, body in server.asked}) == len(server.asked)
    assert all("price multiply" in TOKENIZER.decode(body["prompt"]) for _, body in server.asked)
    assert "[tool]" in (OUT / "eval.html").read_text()


def test_a_failed_turn_fails_its_prompt_and_the_next_call_completes_the_same_file(evaluate, server: Shopper) -> None:
    assert evaluate("--out", "whole") == 0
    server.fails = [200] * 21 + [400]  # the first turns are 20 requests
    assert evaluate() == 1 and len(lines("completions.jsonl")) == 4 and not (OUT / "eval.json").exists()
    assert evaluate() == 0
    for name in ("completions.jsonl", "scores.jsonl", "eval.json"):
        assert (OUT / name).read_bytes() == Path("whole", name).read_bytes(), name


def test_calls_beyond_the_limit_end_a_completion(evaluate) -> None:
    assert evaluate("--max_tool_calls", "1") == 0
    result = json.loads((OUT / "eval.json").read_text())
    assert result["pass@1"] == 0 and 0 < result["truncated"] < 1


CLASS = f"""{SHOP}
    def reset(self, prompt, answer, **row):
        self.question = prompt[-1]["content"]

def asked(completions, prompts, environments):
    return [
        environment.calls if environment.question == prompt[-1]["content"] else -1
        for prompt, environment in zip(prompts, environments)
    ]
"""


def test_environments_of_trl_are_played_and_their_state_is_stored(evaluate, server: Shopper, tmp_path: Path) -> None:
    (own := tmp_path / "own.py").write_text(CLASS)
    text = (REPOSITORY / RECIPE).read_text().replace("../smoke", f"{REPOSITORY}/recipes/smoke")
    lines_of_recipe = [line for line in text.splitlines() if not line.startswith("tools:")]
    prices = REPOSITORY / "recipes/environments/prices.json"
    lines_of_recipe += [f"environment: {own}:Shop", f"environment_args: {{file: {prices}}}"]
    (tmp_path / "own.yaml").write_text("\n".join([*lines_of_recipe, "reward_funcs: [pure_accuracy_math]", ""]))
    names = ("pure_accuracy_math", "environment", "asked")
    words = ("own.yaml", "--out", str(OUT), "--reward", *names[:2], f"{own}:asked")
    assert evaluate(*words) == 0
    completions = [completion for row in lines("scores.jsonl") for completion in row["completions"]]
    right = [completion for completion in completions if completion["rewards"]["pure_accuracy_math"] == 1]
    assert 0 < len(right) < len(completions) == 20
    for completion in completions:
        calls = sum(message["role"] == "tool" for message in completion["messages"])
        assert calls == (2 if completion in right else 0)
        assert [completion["rewards"][name] for name in names[1:]] == [pytest.approx(calls / 10), calls]
    requests, scores = len(server.asked), lines("scores.jsonl")
    (OUT / "scores.jsonl").unlink()
    assert evaluate(*words) == 0
    assert len(server.asked) == requests and lines("scores.jsonl") == scores, "scored again from the stored state"


def test_other_code_of_a_tool_is_refused_for_the_same_file(evaluate, tmp_path: Path, capsys) -> None:
    source = (REPOSITORY / "recipes/environments/shop.py").read_text()
    source = source.replace("Path(__file__)", f"Path({str(REPOSITORY / 'recipes/environments/x')!r})")
    (own := tmp_path / "own.py").write_text(source)
    tools = ("--tools", f"{own}:price", f"{own}:multiply")
    assert evaluate(*tools) == 0
    own.write_text(source.replace("return a * b", "return a + b"))
    assert evaluate(*tools) == 2
    assert "was made with other settings" in capsys.readouterr().err
