"""Benchmarks of a recipe with tools: each turn is sampled, and calls run between the turns, as in training."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes import smoke
from grpo_recipes.evaluate import turns
from grpo_recipes.evaluate.benchmarks import run_benchmarks
from grpo_recipes.evaluate.turns import play_completions, render_chats, sample_shared_turns
from grpo_recipes.extensions.environments.tool_episodes import ToolEpisodes
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import Prompt, Sampling
from grpo_recipes.runs.rundir import read_json

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
from tiny_training import train

RECIPE = Path(__file__).parents[2] / "recipes/environments/tools_smoke.yaml"
SHOP = RECIPE.with_name("shop.py")
PRICES = json.loads(RECIPE.with_name("prices.json").read_text())
QUESTIONS = [f"{count} {item}" for count, item in zip(range(2, 6), PRICES, strict=False)]


def answer(chat: str, seed: int) -> str:
    """Look the price up and multiply, or answer "1" without a call if the first turn has an odd seed."""
    _, question, *results = re.findall(r"<\|(?:user|system)\|>(.*?)<\|im_end\|>", chat)
    count, item = question.split(" ")
    before_item, after_item, before_a, before_b, after_b = smoke.SHOP_CALLS
    if not results:
        return "<answer>1</answer>" if seed % 2 else f"{before_item}{item}{after_item}"
    return (
        f"{before_a}{count}{before_b}{results[0]}{after_b}" if len(results) == 1 else f"<answer>{results[1]}</answer>"
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tiny trainer after training, with the tokenizer and the chat template of the recipe."""
    trainer, _ = train(tmp_path_factory.mktemp("trained"), max_steps=1, max_completion_length=48)
    tokenizer = smoke.build_tokenizer(smoke.TOOLS)
    tokenizer.chat_template = read_recipe(RECIPE).model.chat_template
    trainer.processing_class = tokenizer
    return trainer


@pytest.fixture
def asked(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sampling]]:
    """Let ``answer`` write the turns; return the list that gets each chat with its sampling."""
    chats: list[tuple[str, Sampling]] = []
    tokenizer = trainer.processing_class

    def sample(prompts: list[Prompt], sampling: Sampling) -> list[list[list[int]]]:
        texts = [tokenizer.decode(prompt.ids) for prompt in prompts]
        chats.extend((text, sampling) for text in texts)
        replies = [answer(text, prompt.seed) for text, prompt in zip(texts, prompts, strict=True)]
        return [[[*tokenizer(reply)["input_ids"], tokenizer.eos_token_id]] for reply in replies]

    monkeypatch.setattr(trainer.rollouts, "sample", sample)
    return chats


@pytest.fixture
def open_tools(trainer: Any, tmp_path: Path) -> Iterator[Callable[..., ScriptArguments]]:
    """``open_tools(max_tool_calls=1)``: give the trainer the recipe's tools, and return the keys of a benchmark."""
    sources: list[ToolEpisodes] = []
    (tmp_path / "shop.jsonl").write_text(
        "".join(
            json.dumps({"problem": text, "answer": str(int(text.split()[0]) * PRICES[text.split()[1]])}) + "\n"
            for text in QUESTIONS
        )
    )

    def make(**keys: Any) -> ScriptArguments:
        defaults = {
            "dataset_name": "x", "benchmarks": [str(tmp_path / "shop.jsonl")], "benchmark_samples": 4,
            "benchmark_temperature": 1.0, "reward_funcs": ["different_characters"], "environment_workers": 1,
            "tools": [f"{SHOP}:price", f"{SHOP}:multiply"], "max_tool_calls": 2, "environment_turn_length": 12,
        }  # fmt: skip
        args = ScriptArguments(**defaults | keys)
        trainer.args.chat_template_kwargs = None
        sources.append(ToolEpisodes(args, trainer.args, tmp_path))
        trainer.chat_template_kwargs = trainer.args.chat_template_kwargs
        trainer.source = sources[-1]
        trainer.source.attach(trainer)
        return args

    yield make
    trainer.source = None
    for source in sources:
        source.close()


def test_a_benchmark_runs_the_calls_and_is_run_again_with_other_tools(
    trainer: Any, open_tools: Any, asked: list[Any], tmp_path: Path
) -> None:
    run_benchmarks(trainer, args := open_tools(), tmp_path, lambda: False)
    (result,) = read_json(tmp_path / "benchmarks.json").values()
    (file,) = (tmp_path / "benchmarks").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["problem"] for row in rows] == QUESTIONS and result["reward"] == "pure_accuracy_math"
    right = 0
    for row in rows:
        for text, score, length in zip(row["completions"], row["scores"], row["lengths"], strict=True):
            right += score == 1
            called = f"[tool]\n{row['gold']}\n\n[assistant]\n<answer>{row['gold']}</answer>" in text
            assert called == (score == 1) and called != (text == "[assistant]\n<answer>1</answer>")
            turns_of_policy = re.findall(r"\[assistant\]\n(.*?)(?:\n\n|$)", text)
            tokenizer = trainer.processing_class
            assert length == sum(len(tokenizer(turn)["input_ids"]) + 1 for turn in turns_of_policy)
    assert 0 < right < 16 and result["pass@1"] == pytest.approx(right / 16) and result["truncated"] == 0
    assert all("price multiply" in chat for chat, _ in asked), "the prompts show the tools"
    assert {(sampling.samples, sampling.max_tokens) for _, sampling in asked} == {(1, 12)}

    count = len(asked)
    run_benchmarks(trainer, args, tmp_path, lambda: False)
    assert len(asked) == count == 16 + 2 * right, "a finished benchmark is not run again"
    run_benchmarks(trainer, open_tools(max_tool_calls=1), tmp_path, lambda: False)
    (limited,) = read_json(tmp_path / "benchmarks.json").values()
    assert limited["pass@1"] == 0 and limited["truncated"] == pytest.approx(right / 16)


def test_all_ranks_sample_the_turns_that_rank_0_plays(
    trainer: Any, open_tools: Any, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tools()
    sent: list[Any] = []
    monkeypatch.setattr(turns, "broadcast_object_list", lambda objects, from_process: sent.extend(objects) or objects)
    ids = render_chats(trainer, [[{"role": "user", "content": text}] for text in QUESTIONS])
    prompts = [Prompt(tokens, seed) for seed, tokens in enumerate(ids)]
    played = play_completions(trainer.source, trainer, prompts, Sampling(3, 1.0, 48))
    assert [len(completions) for completions in played] == [3] * 4 and sent[-1] is None
    main_chats = list(asked)
    asked.clear()
    monkeypatch.setattr(turns, "broadcast_object_list", lambda objects, from_process: [sent.pop(0)])
    sample_shared_turns(trainer.source, trainer, Sampling(3, 1.0, 48))
    assert asked == main_chats and not sent
