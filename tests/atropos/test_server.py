"""The server class for a stock vLLM, against a fake of its routes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("atroposlib")

import httpx
import openai
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager

from grpo_recipes import smoke
from grpo_recipes.extensions.atropos import server as module
from grpo_recipes.extensions.atropos.server import (
    LOWEST,
    PromptTooLong,
    RunServer,
    RunServerConfig,
    ServerGone,
    build_generation_params,
    record_requests,
)  # fmt: skip

from .fake_vllm import FakeVllm, Sampled, save_tokenizer

TOKENIZER = smoke.build_tokenizer()
END = TOKENIZER.eos_token_id


def numbered(prompt: list[int], number: int) -> Sampled:
    """Sample a token for the number, then the end token."""
    return [number + 40, END], [-0.5 - number, -0.25], "stop"


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    (tmp_path / "token").write_text("the-token\n")
    monkeypatch.setenv("GRPO_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.02)
    fake = FakeVllm(numbered)
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def tokenizer_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def server_of(vllm: FakeVllm, **changes: Any) -> RunServer:
    settings = {"base_url": f"{vllm.url}/v1", "model_name": "this-run", "patience": 20.0, "timeout": 5, **changes}
    return RunServer(RunServerConfig(**settings))


def sample(server: RunServer, **parameters: Any) -> Any:
    return asyncio.run(server.tokens_and_logprobs_completion(**{"max_tokens": 8, **parameters}))


def test_token_ids_go_in_and_token_ids_with_log_probs_come_out(vllm: FakeVllm) -> None:
    result = sample(server_of(vllm), input_ids=[5, 6, 7], n=2, temperature=0.7, stop=["x"], top_k=3)
    assert result == ([5, 6, 7], [[40, END], [41, END]], [[-0.5, -0.25], [-1.5, -0.25]], ["stop", "stop"])
    (request,) = vllm.asked
    # Includes every parameter that vLLM would otherwise read from the model's generation_config.json.
    assert request == {
        "model": "this-run", "prompt": [5, 6, 7], "n": 2, "max_tokens": 8, "temperature": 0.7, "top_p": 1.0, "top_k": 3,
        "min_p": 0.0, "repetition_penalty": 1.0, "stop": ["x"], "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip


def test_a_text_is_tokenized_and_a_second_begin_of_text_is_left_out(vllm: FakeVllm, tokenizer_name: str) -> None:
    server = server_of(vllm, tokenizer_name=tokenizer_name)
    assert sample(server, prompt="1+2=")[0] == TOKENIZER.encode("1+2=")
    server.tokenizer.bos_token = "a"
    begin = server.tokenizer.bos_token_id
    # ManagedServer passes the text of a chat and its tokens. Tokenizer and template each add a first token to them.
    assert sample(server, prompt="a1", input_ids=[begin, begin, 9])[0] == [begin, 9]
    assert sample(server, input_ids=[begin, begin, 9])[0] == [begin, begin, 9]


def test_the_recipes_sampling_is_that_of_requests_that_say_nothing(vllm: FakeVllm) -> None:
    server = server_of(vllm, sampling={"temperature": 0.6, "top_p": 0.9})
    sample(server, input_ids=[1])
    sample(server, input_ids=[1], temperature=0.0, top_p=None)
    assert [(request["temperature"], request["top_p"]) for request in vllm.asked] == [(0.6, 0.9), (0.0, 0.9)]


def test_a_completion_has_no_more_room_than_the_prompt_leaves(vllm: FakeVllm) -> None:
    server = server_of(vllm, longest=10)
    sample(server, input_ids=[1] * 7, max_tokens=2048)
    sample(server, input_ids=[1] * 7, max_tokens=None)
    sample(server, input_ids=[1] * 7, max_tokens=None, max_new_tokens=2)
    assert [request["max_tokens"] for request in vllm.asked] == [3, 3, 2]
    with pytest.raises(PromptTooLong, match="the prompt has 10 tokens, at most 9 are allowed"):
        sample(server, input_ids=[1] * 10)
    with pytest.raises(ValueError, match="max_tokens is missing"):
        sample(server_of(vllm), input_ids=[1], max_tokens=None)


def test_the_token_is_read_for_each_request_and_never_kept(vllm: FakeVllm, tmp_path: Path) -> None:
    server = server_of(vllm)
    sample(server, input_ids=[1])
    (tmp_path / "token").write_text("another")
    sample(server, input_ids=[1])
    assert vllm.authorized == ["Bearer the-token", "Bearer another"]


@pytest.mark.parametrize("failures", [[500, 503], [0, 0], [401, 404, 429]])
def test_a_server_that_is_lost_for_a_while_is_asked_again_and_that_is_said_once(
    vllm: FakeVllm, failures: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    vllm.fails = list(failures)
    server = server_of(vllm)
    assert sample(server, input_ids=[1])[1] == [[40, END]]
    assert len(vllm.authorized) == len(failures) + 1
    output = capsys.readouterr().out
    assert output.count("does not answer (") == 1 and output.count("answers again after") == 1
    assert "the-token" not in output
    sample(server, input_ids=[1])
    assert capsys.readouterr().out == ""


def test_an_outage_is_printed_once_though_requests_overlap(vllm: FakeVllm, capsys: pytest.CaptureFixture[str]) -> None:
    server = server_of(vllm)

    async def overlap() -> None:
        """Let a request fail, an earlier one succeed, the failed one succeed, and another earlier one fail."""
        recovered, succeeds, fails = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def start(*attempts: tuple[asyncio.Event | None, bool]) -> asyncio.Task[Any]:
            """Start a request, with the event that each attempt waits for and whether it then succeeds."""
            remaining = iter(attempts)

            async def create(**_: Any) -> Any:
                event, is_answered = next(remaining)
                if event is not None:
                    await event.wait()
                if not is_answered:
                    raise openai.APIConnectionError(request=httpx.Request("POST", vllm.url))
                return SimpleNamespace(headers={})

            return asyncio.create_task(server._request(create, {"model": "m"}, str))

        early_success, early_failure = start((succeeds, True)), start((fails, False), (None, True))
        await asyncio.sleep(0.01)
        failed = start((None, False), (recovered, True))
        while server._lost_since is None:
            await asyncio.sleep(0.01)
        for event, request in ((succeeds, early_success), (recovered, failed), (fails, early_failure)):
            event.set()
            await request

    asyncio.run(asyncio.wait_for(overlap(), 20))
    output = capsys.readouterr().out
    assert output.count("does not answer (") == 1 and output.count("answers again after") == 1


def test_a_restart_with_another_token_at_the_same_address_is_waited_for(vllm: FakeVllm, tmp_path: Path) -> None:
    server = server_of(vllm)

    async def through_a_restart() -> Any:
        await server.tokens_and_logprobs_completion(input_ids=[1], max_tokens=8)
        vllm.close()
        asking = asyncio.create_task(server.tokens_and_logprobs_completion(input_ids=[2], max_tokens=8))
        await asyncio.sleep(0.1)
        other = FakeVllm(numbered, vllm.port)
        other.token, other.policy = "next", None  # it does not have the trainer's weights
        while not other.authorized:
            await asyncio.sleep(0.01)
        (tmp_path / "token").write_text("next")
        while not other.asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not asking.done()  # samples from other weights are discarded
        other.policy = 4
        result = await asking
        other.close()
        return result

    assert asyncio.run(through_a_restart())[1] == [[40, END]]


def test_a_server_that_stays_away_ends_the_wait(vllm: FakeVllm) -> None:
    server = server_of(vllm, patience=0.3)
    vllm.fails = [500] * 99
    with pytest.raises(ServerGone, match=r"at http://127.*/v1 did not answer for 0.3 s: InternalServerError"):
        sample(server, input_ids=[1])


def test_a_request_that_the_server_refuses_is_not_repeated_to_it(vllm: FakeVllm) -> None:
    server = server_of(vllm)
    calls = {
        server.tokens_and_logprobs_completion: {"input_ids": [1]},
        server.completion: {"prompt": "x"},
        server.chat_completion: {"messages": []},
    }
    for number, (ask, arguments) in enumerate(calls.items(), 1):
        vllm.fails = [400]
        with pytest.raises(openai.BadRequestError, match="told to fail"):
            asyncio.run(ask(max_tokens=8, **arguments))
        assert len(vllm.authorized) == number


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": None},
        {"token_ids": [40]},
        {"token_ids": [], "logprobs": {"token_logprobs": []}},
        {"logprobs": None},
        {"logprobs": {"token_logprobs": [-0.5, None]}},
        {"logprobs": {"token_logprobs": [-0.5, math.nan]}},
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_asked_for_again(vllm: FakeVllm, change: dict[str, Any]) -> None:
    whole = vllm.completions({"prompt": [1], "model": "this-run"})
    vllm.content = {**whole, "choices": [{**whole["choices"][0], **change}]}
    assert sample(server_of(vllm), input_ids=[1])[1:3] == ([[40, END]], [[-0.5, -0.25]])
    assert len(vllm.asked) == 2


def test_fewer_completions_than_were_asked_for_are_asked_for_again(vllm: FakeVllm) -> None:
    vllm.content = vllm.completions({"prompt": [1], "model": "this-run"})
    assert len(sample(server_of(vllm), input_ids=[1], n=2)[1]) == 2


def test_a_log_prob_of_minus_infinity_becomes_a_number(vllm: FakeVllm) -> None:
    vllm.samples = lambda prompt, number: ([7], [-math.inf], "length")
    assert sample(server_of(vllm), input_ids=[1])[2:] == ([[LOWEST]], ["length"])


def test_what_is_asked_in_a_block_is_noted_with_the_policy_of_its_begin(vllm: FakeVllm) -> None:
    manager = ServerManager([server_of(vllm).config], server_class=RunServer)

    async def ask() -> list[Any]:
        with record_requests() as recorded:  # 12 completions in two parallel requests
            result = await manager.tokens_and_logprobs_completion(input_ids=[1], n=12, max_tokens=8, temperature=0.5)
            assert len(result[1]) == 12
            vllm.policy = 3
            await manager.chat_completion(messages=[{"role": "user", "content": "hello"}])  # not trained on
            await manager.tokens_and_logprobs_completion(input_ids=[1], n=1, max_tokens=8, temperature=0.5, top_p=0.5)
        await manager.tokens_and_logprobs_completion(input_ids=[1], n=1, max_tokens=8)
        return recorded

    vllm.policy = 2
    requests = asyncio.run(ask())
    assert [request.policy_version for request in requests] == [2, 2, 3]
    plain = {"temperature": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert build_generation_params(requests) == {**plain, "top_p": [1.0, 0.5], "policy_version": 2}
    assert build_generation_params(requests[:2]) == {**plain, "top_p": 1.0, "policy_version": 2}
    assert build_generation_params([]) == {}


def test_a_server_that_was_never_told_its_policy_leaves_it_open(vllm: FakeVllm) -> None:
    vllm.policy = None

    async def ask() -> dict[str, Any]:
        with record_requests() as recorded:
            await server_of(vllm).tokens_and_logprobs_completion(input_ids=[1], max_tokens=8)
        return build_generation_params(recorded)

    assert "policy_version" not in asyncio.run(ask())


def test_chats_and_texts_are_asked_as_they_are(vllm: FakeVllm) -> None:
    server = server_of(vllm)
    messages = [{"role": "user", "content": "hello"}]

    async def ask() -> tuple[str, str]:
        chat = await server.chat_completion(messages=messages, max_tokens=5)
        text = await server.completion(prompt=[1], n=1, max_tokens=5)
        return chat.choices[0].message.content, text.choices[0].text

    assert asyncio.run(ask()) == ("hello", "x")
    assert vllm.asked[0]["messages"] == messages and "logprobs" not in vllm.asked[0]
    assert [request["model"] for request in vllm.asked] == ["this-run"] * 2


def test_a_plain_configuration_of_atroposlib_is_taken_too_and_health_looked_at(vllm: FakeVllm) -> None:
    config = APIServerConfig(base_url=f"{vllm.url}/v1", model_name="this-run", api_key="x", health_check=True)
    server = RunServer(config)

    async def looked_at() -> list[bool]:
        looking = asyncio.create_task(server.check_server_status_task())
        health = []
        for closes in (True, False):
            while server.server_healthy is not closes or (not health and not closes):
                await asyncio.sleep(0.02)
            health.append(server.server_healthy)
            if closes:
                vllm.close()
                server._http = type(server._http)(trust_env=False)  # without open connections
        looking.cancel()
        return health

    assert asyncio.run(asyncio.wait_for(looked_at(), 10)) == [True, False]


def test_atroposlibs_managed_server_takes_it(vllm: FakeVllm, tokenizer_name: str) -> None:
    manager = ServerManager([server_of(vllm, tokenizer_name=tokenizer_name).config], server_class=RunServer)
    vllm.samples = lambda prompt, number: (TOKENIZER.encode(f"<answer>{number}</answer>"), [-0.1] * 3, "stop")

    async def ask() -> tuple[Any, Any]:
        async with manager.managed_server(tokenizer=TOKENIZER) as managed:
            chat = await managed.chat_completion(messages=[{"role": "user", "content": "0+1="}], n=2, max_tokens=8)
            return chat, managed.get_state()["nodes"]

    chat, nodes = asyncio.run(ask())
    prompt = TOKENIZER.apply_chat_template([{"role": "user", "content": "0+1="}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert [choice.message.content for choice in chat.choices] == ["<answer>0</answer>", "<answer>1</answer>"]
    for number, node in enumerate(nodes):
        sampled = TOKENIZER.encode(f"<answer>{number}</answer>")
        assert node.tokens == prompt + sampled and node.masked_tokens == [-100] * len(prompt) + sampled
        assert node.logprobs == [1.0] * len(prompt) + [-0.1] * 3
