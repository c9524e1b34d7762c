"""Tools in a real trainer: calls run in child processes, and their results are read but not trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import chat_template_utils

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments.tool_episodes import ToolEpisodes
from grpo_recipes.extensions.environments.tools import Call, CallParser, describe_tools
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.rollouts.renderer import Renderer
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.trainers.grpo import GRPOTrainer

from .fixed_completions import rows_of
from .tiny_training import DESCENT, GROUP, SUMS, as_dataset

TOOLS = Path(__file__).parents[1] / "rollouts/tool_functions.py"
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<tool_call><|im_end|>"
    "{% endif %}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
Script = Callable[[int, int], str]  # (row, turn) -> the policy's text


def written(tool: str, /, **arguments: Any) -> str:
    return json.dumps({"name": tool, "arguments": arguments}).join(("<tool_call>", "</tool_call>"))


def last_texts(completions: list[Any], **columns: Any) -> list[float]:
    """Score the number of characters of the last message. Columns of episodes must not reach a reward."""
    assert not any(name.startswith("episode") for name in columns)
    assert all(messages[-1]["role"] == "assistant" for messages in completions)
    return [len(messages[-1]["content"]) / 10 for messages in completions]


Make = Callable[..., GRPOTrainer]


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Describe the tools once, because it imports transformers in another process."""
    tools = ScriptArguments(tools=[f"{TOOLS}:{name}" for name in ("price", "multiply", "misbehave")])
    return describe_tools(tools.__getattribute__, tmp_path_factory.mktemp("copies"))


@pytest.fixture
def make(tmp_path: Path, model: str, schemas: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a trainer with tools whose policy follows a script."""
    sources: list[ToolEpisodes] = []
    monkeypatch.setattr("grpo_recipes.extensions.environments.tool_episodes.describe_tools", lambda *_: schemas)

    def make_it(script: Script, cut: bool = False, folder: str = "run", **keys: Any) -> GRPOTrainer:
        run = tmp_path / folder
        run.mkdir(exist_ok=True)
        names = ("tools", "max_tool_calls", "environment_")
        script_keys = {key: keys.pop(key) for key in list(keys) if key.startswith(names)}
        args = GRPOConfig(output_dir=str(run / "checkpoints"), **DESCENT | {"max_completion_length": 600} | keys)
        defaults = {"tools": list(schemas), "environment_workers": 1}
        source = ToolEpisodes(ScriptArguments(**defaults | script_keys), args, run)
        sources.append(source)
        tokenizer = smoke.build_tokenizer()
        tokenizer.chat_template = TEMPLATE
        trainer = GRPOTrainer(
            model=model, reward_funcs=[last_texts], args=args, train_dataset=as_dataset(SUMS),
            processing_class=tokenizer, run_dir=run, source=source,
        )  # fmt: skip
        follow_script(trainer, script, cut)
        return trainer

    yield make_it
    for source in sources:
        source.close()


def follow_script(trainer: GRPOTrainer, script: Script, cut: bool = False) -> None:
    """Let the policy write ``script(row, turn)`` in each turn, without an end token if it is ``cut``."""
    tokenizer: Any = trainer.processing_class
    requests: list[Any] = []

    def named(name: str, rows: list[int]) -> Any:
        requests[:] = [int(name.rpartition("/turn")[2]), rows]
        return trainer.rollouts.resending_weights()

    def from_script(prompt_ids: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        turn, rows = requests
        end = [] if cut else [tokenizer.eos_token_id]
        return [[*tokenizer(script(row, turn)).input_ids, *end] for row in rows], None

    trainer.rollouts.named_generation = named
    trainer._generate_single_turn = from_script


def generate(trainer: GRPOTrainer, prompts: int = 1) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [dict(trainer.train_dataset[prompt]) for prompt in range(prompts) for _ in range(GROUP)]
    return trainer._generate_and_score_completions(rows)


def test_calls_are_run_and_their_results_are_masked(make: Make, tmp_path: Path) -> None:
    calls = ["2 calls " + written("price", item="pear") + written("multiply", a=3), "6"]
    trainer = make(lambda row, turn: calls[turn], report_samples=1)
    output = generate(trainer)
    tokenizer, episode = trainer.processing_class, trainer.source.played[0]
    prompt, (question,) = tokenizer.decode(episode.prompt_ids), episode.opening
    tools = "price multiply misbehave <tool_call>"
    assert prompt == f"<|system|>{tools}<|im_end|><|user|>{question['content']}<|im_end|><|assistant|>"
    between = "<|tool|>3<|im_end|><|tool|>6<|im_end|><|assistant|>"
    whole = f"{calls[0]}<|im_end|>{between}6<|im_end|>"
    ids, mask = output["completion_ids"][0].tolist(), output["tool_mask"][0].tolist()
    assert tokenizer.decode(ids[: sum(output["completion_mask"][0])]) == whole
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert tokenizer.decode(trained).startswith(f"{calls[0]}<|im_end|>6<|im_end|>")
    metrics = trainer._metrics["train"]
    assert (metrics["episodes/tool_calls"], metrics["episodes/tool_failures"]) == ([2.0], [0.0])
    assert metrics["episodes/turns"] == [2.0] and metrics["rewards/last_texts/mean"] == [pytest.approx(0.1)]
    (row,) = rows_of(tmp_path / "run", "samples.jsonl")
    (turn, _) = row["samples"][0]["episode"]["turns"]
    assert [message["content"] for message in turn["messages"]] == ["3", "6"]
    assert "[tool]\n3" in row["samples"][0]["completion"]


FAILURES = {
    '<tool_call>{"name": "price", </tool_call>': "Error: malformed call: json parser could not parse region",
    "<tool_call>[3]</tool_call>": "Error: malformed call: expected name and arguments",
    '<tool_call>{"name": "price", "arguments": [1]}</tool_call>': "Error: malformed call: arguments must be a mapping",
    '<tool_call>{"name": "price"': "Error: malformed call: ",
    written("cook", item="fig"): "Error: unknown tool 'cook'; the tools are price, multiply, misbehave",
    written("price", item="plum"): "Error: KeyError: 'plum'",
    written("price", name="fig"): "Error: TypeError: price() got an unexpected keyword argument 'name'",
    written("misbehave", how="sleep"): "Error: time limit",
    written("misbehave", how="die"): "Error: its process exited (code 3)",
    written("misbehave", how="eat"): "Error: memory limit",
    written("misbehave", how="talk"): "Error: ValueError: a result of 300,000 characters, more than 200,000",
    written("misbehave", how="connect"): "Error: PermissionError: this process has no network",
}


def test_each_failure_is_a_result_that_the_policy_reads(make: Make) -> None:
    texts = list(FAILURES)
    trainer = make(lambda row, turn: "done" if turn else texts[row], environment_timeout=5.0, environment_memory_gib=1)
    generate(trainer, prompts=len(texts) // GROUP)
    for text, episode in zip(texts, trainer.source.played, strict=True):
        (message,) = episode.turns[1].messages
        assert message["role"] == "tool" and message["content"].startswith(FAILURES[text])
        assert episode.done and not episode.failed and episode.actions == [text, "done"]
    assert trainer._metrics["train"]["episodes/tool_failures"] == [1.0]


def test_a_tool_that_fails_leaves_the_others_of_its_turn(make: Make) -> None:
    calls = written("price", item="plum") + written("price", item="fig")
    trainer = make(lambda row, turn: "done" if turn else calls)
    generate(trainer)
    assert [message["content"] for message in trainer.source.played[0].turns[1].messages] == [
        "Error: KeyError: 'plum'",
        "4",
    ]
    metrics = trainer._metrics["train"]
    assert (metrics["episodes/tool_calls"], metrics["episodes/tool_failures"]) == ([2.0], [1.0])


@pytest.mark.parametrize(("limit", "turns"), [(3, 2), (4, 3)])
def test_the_call_after_the_last_one_ends_an_episode(make: Make, limit: int, turns: int) -> None:
    calls = written("price", item="pear") + written("price", item="fig")
    trainer = make(lambda row, turn: calls, max_tool_calls=limit, max_completion_length=1000)
    generate(trainer)
    assert all(episode.unfinished == "max_tool_calls" for episode in trainer.source.played)
    assert {len(episode.actions) for episode in trainer.source.played} == {turns}
    assert trainer._metrics["train"]["episodes/tool_calls"] == [2.0 * (turns - 1)]
    assert trainer._metrics["train"]["episodes/unfinished"] == [1.0]


def test_an_episode_without_room_for_a_turn_is_rewarded_for_the_policys_last_text(make: Make) -> None:
    call = written("price", item="pear")
    trainer = make(lambda row, turn: call, max_completion_length=80, environment_turn_length=78)
    generate(trainer)
    assert {episode.unfinished for episode in trainer.source.played} == {"max_completion_length"}
    assert trainer._metrics["train"]["rewards/last_texts/mean"] == [pytest.approx(len(call) / 10)]


def test_a_turn_is_at_most_half_of_the_completion_unless_the_recipe_says(make: Make) -> None:
    assert make(lambda row, turn: "x").source.turn_tokens == 300
    assert make(lambda row, turn: "x", environment_turn_length=50).source.turn_tokens == 50


def test_results_have_no_gradient(make: Make) -> None:
    """Replacing tokens of results changes no bit of the gradient. Replacing the policy's does."""
    call = written("price", item="pear")
    trainer = make(lambda row, turn: "x" * (1 + row) if turn else call * (1 + row % 2), beta=0.1)
    trainer.args.trim_padding = False
    output = generate(trainer)
    read = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    trained, present = output["tool_mask"].bool(), output["completion_mask"].bool()

    def gradient(changed_BT: torch.Tensor) -> torch.Tensor:
        ids = torch.where(changed_BT, (output["completion_ids"] + 1) % 64, output["completion_ids"])
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, {**output, "completion_ids": ids}).backward()
        gradients = [parameter.grad for parameter in trainer.model.parameters()]
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    assert (~trained & present).sum() > 8
    trainer.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "input_ids": read}), with_kwargs=True
    )
    plain = gradient(trained & False)
    assert plain.abs().max() > 0
    assert torch.equal(gradient(~trained), plain) and not torch.allclose(gradient(trained & present), plain)


def test_a_time_limit_is_repeated_by_a_resumed_run(make: Make) -> None:
    calls = [written("price", item="pear"), written("misbehave", how="sleep")]  # the first call has 10 s more

    def script(row: int, turn: int) -> str:
        return "done" if turn or row > 1 else calls[row]

    first = make(script, environment_timeout=0.5)
    generate(first)
    first.source.close()
    again = make(script, environment_timeout=0.5)
    repeated: list[Any] = []
    score = again.source._pool.score
    again.source._pool.score = lambda *given, **how: repeated.extend(given[1]) or score(*given, **how)  # type: ignore[method-assign]
    generate(again)
    assert len(repeated) == 1 and "price" in repeated[0]
    assert again.source.played[1].turns[1].messages == first.source.played[1].turns[1].messages


def test_tools_that_cannot_be_described_are_refused(tmp_path: Path) -> None:
    for tools, told in (
        ([f"{TOOLS}:vague"], "can't be described"),
        ([f"{TOOLS}:PRICES"], "can't be described"),
        ([f"{TOOLS}:price", f"{TOOLS.parent}/../rollouts/tool_functions.py:price"], "two tools have the name 'price'"),
    ):
        with pytest.raises(ConfigError, match=told):
            describe_tools(ScriptArguments(tools=tools).__getattribute__, tmp_path)


def test_a_time_out_of_the_description_names_the_seconds(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("grpo_recipes.extensions.environments.tools._DESCRIBE_SECONDS", 0.5)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(9)\ndef slow(): pass\n")
    with pytest.raises(ConfigError, match=r"slow' was not imported and described within 0\.5 s.*less busy machine"):
        describe_tools(ScriptArguments(tools=[f"{tmp_path}/slow.py:slow"]).__getattribute__, tmp_path)


def test_a_template_without_tools_or_without_a_known_format_is_refused(make: Make, monkeypatch: Any) -> None:
    for template, told in (
        (smoke.CHAT_TEMPLATE, "leaves out the tools"),
        (TEMPLATE.replace("<tool_call>", ""), "does not show how the model calls tools"),
    ):
        monkeypatch.setattr(f"{__name__}.TEMPLATE", template)
        with pytest.raises(ConfigError, match=told):
            make(lambda row, turn: "x")


F = Call("f", {"a": 1})
QWEN = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
FORMATS: dict[str, tuple[str, str, dict[str, list[Call]]]] = {
    "Qwen2.5": (chat_template_utils.qwen2_5_chat_template, "<|im_end|>", {f"so {QWEN}\n{QWEN}": [F, F]}),
    "Qwen3": (chat_template_utils.qwen3_chat_template, "<|im_end|>", {f"<think>\nso\n</think>\n\n{QWEN}": [F]}),
    "Llama 3.1": (chat_template_utils.llama3_1_chat_template, "<|eot_id|>", {LLAMA: [F]}),
    "Llama 3.2": (chat_template_utils.llama3_2_chat_template, "<|eot_id|>", {LLAMA: [F]}),
    "like Hermes": (TEMPLATE, "<|im_end|>", {f"so {QWEN}": [F]}),
    "like Llama": (
        TEMPLATE.replace("<tool_call>", '{"name": ..., "parameters": ...}'), "<|im_end|>", {f"so {LLAMA}": [F]}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("template", "end", "texts"), FORMATS.values(), ids=FORMATS)
def test_the_templates_of_models_give_tools_calls_and_results(
    template: str, end: str, texts: dict[str, list[Call]]
) -> None:
    tokenizer = smoke.build_tokenizer()
    tokenizer.add_tokens([end], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template, end
    parser, renderer = CallParser(tokenizer, [SCHEMA]), Renderer(tokenizer, {"tools": [SCHEMA]})
    context = renderer.prompt(Turn([{"role": "user", "content": "question"}]))
    assert '"f"' in tokenizer.decode(context) or "f " in tokenizer.decode(context)
    for text, calls in (texts | {"the answer is 3": []}).items():
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        assert parser.parse(context, ids, renderer.text(ids)) == calls
    broken = next(iter(texts)).replace("}", "", 1)
    (call,) = parser.parse(context, [*tokenizer(broken).input_ids, tokenizer.eos_token_id], broken)
    assert call.problem.startswith("malformed call: ")
    between = tokenizer.decode(
        renderer.between([{"role": "tool", "name": "f", "content": "seen"}], [tokenizer.eos_token_id])
    )
    assert between.count("seen") == 1 and "x" not in between.replace("<|im_", "") and end in between
