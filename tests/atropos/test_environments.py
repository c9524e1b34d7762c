"""The shipped Atropos environments: tokens of groups, episodes of several turns, and the source of scores."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("atroposlib")

from datasets import Dataset

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.environments import (
    ArithmeticEnv,
    DatasetEnv,
    DatasetEnvConfig,
    Episode,
    RecipeEnv,
    RecipeEnvConfig,
    build_group,
)  # fmt: skip
from grpo_recipes.extensions.atropos.server import PromptTooLong, RunServerConfig
from grpo_recipes.recipe.user_code import load_object

from .fake_vllm import FakeVllm, Sampled, save_tokenizer

TOKENIZER = smoke.build_tokenizer()
END = TOKENIZER.eos_token_id
REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "recipes/examples/atropos_two_sums.py"
GSM8K = REPOSITORY.parent / "shared/data/gsm8k/test.jsonl"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def prompt_ids(*messages: tuple[str, str]) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in messages]
    return TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def saying(*texts: str, end: bool = True) -> Callable[[list[int], int], Sampled]:
    """Return samples with these texts by their number, with log-probs -0.1, -0.2, …"""

    def sample(prompt: list[int], number: int) -> Sampled:
        tokens = ids(texts[number % len(texts)]) + [END] * end
        return tokens, [-(place + 1) / 10 for place in range(len(tokens))], "stop" if end else "length"

    return sample


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    fake = FakeVllm(saying("<answer>1</answer>", "<answer>2</answer>"))
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def tokenizer_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(vllm: FakeVllm, tokenizer_name: str) -> Callable[..., Any]:
    """``make(CLASS, FIELD=VALUE, ...)``: an environment with groups of two that asks the fake."""

    def make_it(kind: type[RecipeEnv], **fields: Any) -> Any:
        sizes = {"group_size": 2, "max_token_length": 64, "max_tokens": 16}
        config = kind.env_config_cls(tokenizer_name=tokenizer_name, **{**sizes, **fields})
        server = RunServerConfig(base_url=f"{vllm.url}/v1", model_name="run", longest=config.max_token_length)
        return kind(config, [server])

    return make_it


def collect(environment: RecipeEnv, item: Any = None) -> dict[str, Any] | None:
    """Collect the group of an item, by default the next item."""
    group, backlog = asyncio.run(environment.collect_trajectories(item or environment.next_item()))
    assert backlog == []
    return group


class Doubles(RecipeEnv):
    """An environment as the first lines of the module show it."""

    def next_item(self) -> dict[str, str]:
        return {"prompt": "Twice 1 is", "right": "2"}

    async def score(self, item: dict[str, str], text: str) -> float:
        return float(item["right"] in text)


class TwoTurns(Doubles):
    """Asks again."""

    async def play(self, item: dict[str, str], episode: Episode) -> list[float]:
        first = float("1" in episode.text)
        return [first, 10 * float("1" in await episode.turn("And now?"))]


def test_a_group_has_the_tokens_as_sampled_and_what_they_were_sampled_with(make, vllm) -> None:
    vllm.policy = 5
    group = collect(make(Doubles, temperature=0.8))
    prompt, first, second = prompt_ids(("user", "Twice 1 is")), ids("<answer>1</answer>"), ids("<answer>2</answer>")
    assert group == {
        "tokens": [[*prompt, *first, END], [*prompt, *second, END]],
        "masks": [[*[-100] * len(prompt), *first, END], [*[-100] * len(prompt), *second, END]],
        "inference_logprobs": [[*[1.0] * len(prompt), -0.1, -0.2, -0.3, -0.4]] * 2,
        "scores": [0.0, 1.0],
        "generation_params": {
            "temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "policy_version": 5, "environment": "Doubles",
        },
    }  # fmt: skip
    (request,) = vllm.asked
    assert (request["prompt"], request["n"], request["max_tokens"], request["temperature"]) == (prompt, 2, 16, 0.8)


def test_a_group_of_any_size_is_one_request(make, vllm) -> None:
    group = collect(make(Doubles, group_size=24))
    assert len(group["tokens"]) == 24 and [request["n"] for request in vllm.asked] == [24]


def test_the_recipes_system_prompt_and_template_are_used(make, vllm) -> None:
    collect(make(Doubles, system_prompt="Add."))
    assert vllm.asked[0]["prompt"] == prompt_ids(("system", "Add."), ("user", "Twice 1 is"))
    template = "{% for m in messages %}{{ m['content'] }}{{ sign }}{% endfor %}"
    collect(make(Doubles, chat_template=template, chat_template_kwargs={"sign": "!"}))
    assert vllm.asked[1]["prompt"] == ids("Twice 1 is!")


def test_over_several_turns_sampled_tokens_stay_and_what_is_said_between_is_masked(make, vllm) -> None:
    group = collect(make(TwoTurns, group_size=1))
    prompt, reply = prompt_ids(("user", "Twice 1 is")), [*ids("<answer>1</answer>"), END]
    between = prompt_ids(("user", "And now?"))
    assert group["tokens"] == [[*prompt, *reply, *between, *reply]]  # one token ends a turn, not two
    assert group["masks"] == [[*[-100] * len(prompt), *reply, *[-100] * len(between), *reply]]
    sampled = [-0.1, -0.2, -0.3, -0.4]
    assert group["inference_logprobs"] == [[*[1.0] * len(prompt), *sampled, *[1.0] * len(between), *sampled]]
    assert group["scores"] == [11.0] and "advantages" not in group
    assert vllm.asked[1]["prompt"] == [*prompt, *reply, *between] and vllm.asked[1]["n"] == 1


def test_a_turn_that_was_cut_gets_its_end_as_a_token_that_is_not_trained_on(make, vllm) -> None:
    vllm.samples = saying("<answer>1", end=False)
    (tokens,), (masks,) = (collect(make(TwoTurns, group_size=1))[name] for name in ("tokens", "masks"))
    begin = len(prompt_ids(("user", "Twice 1 is"))) + len(ids("<answer>1"))
    assert tokens[begin] == END and masks[begin] == -100


def test_the_oldest_weights_of_an_episode_count(make, vllm) -> None:
    class Slow(TwoTurns):
        async def play(self, item: Any, episode: Episode) -> Any:
            vllm.policy = 9
            return await super().play(item, episode)

    vllm.policy = 8
    assert collect(make(Slow))["generation_params"]["policy_version"] == 8


def test_a_turn_without_room_is_an_empty_text_and_no_request(make, vllm) -> None:
    class Empty(Doubles):
        async def play(self, item: Any, episode: Episode) -> float:
            assert await episode.turn("And now?" * 9) == "" and not episode.complete
            return 3.0

    group = collect(make(Empty, max_token_length=40))
    assert group["scores"] == [3.0, 3.0] and len(vllm.asked) == 1
    assert {len(tokens) for tokens in group["tokens"]} == {len(prompt_ids(("user", "Twice 1 is"))) + 4}


def test_a_prompt_longer_than_its_share_is_refused_before_it_is_sampled(make, vllm) -> None:
    environment = make(Doubles, max_token_length=20)
    with pytest.raises(PromptTooLong, match="the prompt has 13 tokens, at most 4 are allowed"):
        collect(environment)
    assert vllm.asked == []


def test_scores_by_turn_become_advantages_by_token(make, vllm) -> None:
    def either(prompt: list[int], number: int) -> Sampled:
        """1 and then 0, or 0 and then 1."""
        history = prompt[len(prompt_ids(("user", "Twice 1 is"))) :]
        is_correct = history[0] == ids("0")[0] if history else number == 0
        return [*ids("1" if is_correct else "0"), END], [-0.1, -0.1], "stop"

    vllm.samples = either
    group = collect(make(TwoTurns, turn_advantages=True))
    assert sorted(group["scores"]) == [1.0, 10.0]
    for tokens, masks, score, advantages in zip(
        group["tokens"], group["masks"], group["scores"], group["advantages"], strict=True
    ):
        trained = [advantages[place] for place, mask in enumerate(masks) if mask != -100]
        assert trained == ([0.5, 0.5, -5.0, -5.0] if score == 1.0 else [-0.5, -0.5, 5.0, 5.0])
        assert len(advantages) == len(tokens)
        assert all(advantages[place] == 0.0 for place, mask in enumerate(masks) if mask == -100)


def test_an_episode_without_a_score_has_no_part_in_the_update(make) -> None:
    class Picky(Doubles):
        async def score(self, item: Any, text: str) -> float | None:
            return None if "1" in text else 4.0

    group = collect(make(Picky, group_size=4))
    assert group["scores"] == [4.0] * 4
    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}] * 2

    class Silent(Doubles):
        def score(self, item: Any, text: str) -> None:
            return None

    assert collect(make(Silent)) is None


def test_the_example_is_an_environment_of_two_turns(make, vllm) -> None:
    environment = make(load_object(f"{EXAMPLE}:TwoSums"), turn_advantages=True)
    item = environment.next_item()
    answers = [f"<answer>{item['right'][0]}</answer>", "wrong"]

    def first_right(prompt: list[int], number: int) -> Sampled:
        text = answers[number] if len(vllm.asked) == 1 else f"<answer>{item['right'][1]}</answer>"
        return [*ids(text), END], [-0.1] * (len(ids(text)) + 1), "stop"

    vllm.samples = first_right
    group = collect(environment, item)
    assert group["scores"] == [1.0, 0.5] and len(EXAMPLE.read_text().splitlines()) < 60
    assert {max(row) for row in group["advantages"]} == {0.25, 0.0}  # the second turn was right in both
    assert environment.next_item() != item


@pytest.mark.parametrize("worth", [float("nan"), float("inf"), [], 1e39, -1e20, [1.0, 1e39]])  # S8: float32
def test_a_score_that_is_no_number_never_leaves_the_environment(make, worth) -> None:
    episodes = [Episode(make(Doubles), [1])]
    with pytest.raises(ValueError, match="can't be trained on"):
        build_group(episodes, [worth], {})


def test_items_follow_from_seed_name_and_step(make, monkeypatch) -> None:
    def items(step: int, **fields: Any) -> list[str]:
        environment = make(ArithmeticEnv, **fields)

        async def registered(self: Any) -> None:
            self.curr_step = step

        monkeypatch.setattr("atroposlib.envs.base.BaseEnv.register_env", registered)
        asyncio.run(environment.register_env())
        return [environment.next_item()["prompt"] for _ in range(20)]

    first = items(0, seed=3)
    assert items(0, seed=3) == first
    other_items = [items(7, seed=3), items(0, seed=4), items(0, seed=3, wandb_name="second")]
    assert first not in other_items and len({tuple(drawn) for drawn in other_items}) == 3
    assert set("".join(first)) <= set("0123456789+=")


def test_arithmetic_is_the_smoke_task(make, vllm) -> None:
    environment = make(ArithmeticEnv)
    environment.random = random.Random(0)
    rows = {row["problem"]: row["answer"] for part in smoke.split_sums() for row in part}
    items = [environment.next_item() for _ in range(300)]
    assert all(rows[item["prompt"]] == item["answer"] for item in items)
    assert len({item["prompt"] for item in items}) > 80
    group = collect(environment, {"prompt": "0+2=", "answer": "2"})
    assert group["scores"] == [0.0, 1.0] and group["generation_params"]["environment"] == "arithmetic"
    assert group["tokens"][0][: -len(ids("<answer>1</answer>")) - 1] == prompt_ids(("user", "0+2="))


def test_a_dataset_is_drawn_whole_before_any_of_it_comes_again(make) -> None:
    environment = make(DatasetEnv, dataset_name="smoke:sums")
    drawn = [environment.next_item()["prompt"][0]["content"] for _ in range(160)]
    assert len(set(drawn[:80])) == len(set(drawn[80:])) == 80 and drawn[:80] != drawn[80:]


def test_a_dataset_of_the_hub_is_read_where_it_was_fetched(make, tmp_path, monkeypatch) -> None:
    Dataset.from_list([{"problem": "1+1=", "answer": "2"}]).save_to_disk(tmp_path / "fetched")
    requests: list[Any] = []

    def fetched(*arguments: Any) -> Path:
        requests.append(arguments)
        return tmp_path / "fetched"

    monkeypatch.setattr(DatasetEnv, "fetched", staticmethod(fetched))
    named = {"dataset_name": "someone/sums", "dataset_config": "main", "dataset_train_split": "test"}
    assert make(DatasetEnv, **named).next_item()["answer"] == "2"
    DatasetEnv.check_config(DatasetEnvConfig(**named), fetched=fetched)
    assert requests == [("someone/sums", "main", "test")] * 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.0, 1.0]),
        ({"reward": "format_tags"}, [1.0, 1.0]),
        # The correct completion that fills its four tokens gets the lowest score of the correct completions.
        (
            {"reward": "cosine_length", "reward_args": {"cosine_max_len": 4, "cosine_min_value_correct": 0.25}},
            [-0.5, 0.25],
        ),
    ],
)
def test_problems_of_a_dataset_are_scored_by_a_reward_of_ours(make, fields, expected) -> None:
    environment = make(DatasetEnv, dataset_name="smoke:sums", **fields)
    group = collect(environment, {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})
    assert group["scores"] == pytest.approx(expected)


def test_a_reward_of_the_users_is_called_in_a_child_with_the_columns(make, vllm, tmp_path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "solution": "x #### 2", "bonus": 5}\n')
    (tmp_path / "rule.py").write_text(
        "import os\n"
        "def rule(completions, answer, bonus, prompts):\n"
        "    assert prompts[0][-1]['content'] == '1+1='\n"
        "    if '1' in completions[0][0]['content']: raise ValueError('no')\n"
        f"    here = 100 * (os.getpid() == {os.getpid()})\n"
        "    return [bonus[0] + float(answer[0] in completions[0][0]['content']) + here]\n"
    )
    environment = make(
        DatasetEnv,
        dataset_name=str(tmp_path / "sums.jsonl"),
        dataset_prompt_column="question",
        dataset_solution_column="solution",
        dataset_solution_marker="####",
        reward=f"{tmp_path}/rule.py:rule",
    )
    group = collect(environment)
    assert group["scores"] == [6.0, 6.0]  # the first call raised
    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}]


@pytest.mark.skipif(not GSM8K.exists(), reason="the problems of GSM8K are not here")
def test_gsm8k_is_read_by_its_columns_and_scored(make, vllm) -> None:
    columns = {"dataset_prompt_column": "question", "dataset_solution_marker": "####"}
    environment = make(
        DatasetEnv, dataset_name=str(GSM8K), **columns, system_prompt="Answer in <answer></answer>.",
        max_token_length=4096,
    )  # fmt: skip
    item = environment.next_item()
    assert len(environment._problems) == 1319 and item["answer"].replace(",", "").lstrip("-").replace(".", "").isdigit()
    vllm.samples = saying(f"So <answer>{item['answer']}</answer>", "I do not know")
    group = collect(environment, item)
    assert group["scores"] == [1.0, 0.0]
    assert TOKENIZER.decode(group["tokens"][0]).startswith("<|system|>Answer in <answer></answer>.<|im_end|><|user|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset_name": ""}, "needs a dataset"),
        ({"dataset_name": __file__}, "the dataset cannot be read: not a "),
        ({"dataset_prompt_column": "question"}, "has no column 'question'"),
        ({"reward": "pure_acuracy_math"}, "unknown reward 'pure_acuracy_math'. Fix: set pure_accuracy_math"),
        ({"reward": "environment"}, "unknown reward 'environment'"),
        ({"reward": "nowhere.py:f"}, "no file 'nowhere.py'"),
        ({"reward_args": {"answer_maching": "strict"}}, "has no argument 'answer_maching'. Fix: use answer_matching"),
        (
            {"reward": "math_verify", "reward_args": {"a": 1}},
            "'math_verify' has no argument 'a'. Fix: remove reward_args",
        ),
    ],
)
def test_what_is_wrong_with_a_dataset_or_its_reward_is_said(fields, message) -> None:
    with pytest.raises(ConfigError) as error:
        DatasetEnv.check_config(DatasetEnvConfig(**{"dataset_name": "smoke:sums", **fields}))
    assert message in str(error.value)


def test_a_tokenizer_without_a_template_is_refused(make, tmp_path) -> None:
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ConfigError, match="has no chat template"):
        Doubles(RecipeEnvConfig(tokenizer_name=str(tmp_path)), [RunServerConfig()])
