"""One request to run-api: repeated attempts, time limits, and lost batches."""

from __future__ import annotations

import itertools
import socket
import time
from typing import Any

import pytest

from atropos.fake_run_api import NO_BATCH, fake_run_api
from atropos.groups import group
from grpo_recipes.extensions.atropos.client import AtroposClient, AtroposError, WaitAborted
from grpo_recipes.extensions.atropos.connection import Connection

pytestmark = pytest.mark.alone

DATA = {"batch": [group().to_json()]}


def client(url: str, messages: list[str] | None = None, **keys: Any) -> AtroposClient:
    say = (lambda _: None) if messages is None else messages.append
    return AtroposClient(url, **{"timeout": 5.0, "delay": 0.01, "max_wait": 20.0, "say": say, **keys})


def refused_url() -> str:
    """Return a URL without a listening server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_pauses_grow_by_half_to_two_seconds_with_at_most_a_tenth_more() -> None:
    connection = Connection(
        "http://x", timeout=1, attempts=1, delay=0.3, stopped=lambda: False, compressed=False
    )  # fmt: skip
    plain = [0.3, 0.45, 0.675, 1.0125, 1.51875, 2.0, 2.0, 2.0]
    for _ in range(200):
        for pause, shortest in zip(itertools.islice(connection.pauses(), 8), plain, strict=True):
            assert shortest <= pause <= 1.1 * shortest + 1e-9


def test_waits_for_a_batch_are_those_pauses() -> None:
    with fake_run_api(batch=[*[NO_BATCH] * 5, DATA]) as fake:
        client(fake.url, delay=0.1).next_batch()
    gaps = [after - before for before, after in itertools.pairwise(fake.asked["/batch"])]
    for gap, shortest in zip(gaps, [0.1, 0.15, 0.225, 0.3375, 0.50625], strict=True):
        assert shortest <= gap < 1.1 * shortest + 0.2


@pytest.mark.parametrize("fault", [(503, "Service Unavailable"), (502, "Bad Gateway")])
def test_a_server_error_is_repeated_and_the_batch_comes(fault: Any) -> None:
    with fake_run_api(batch=[fault, fault, DATA]) as fake:
        atropos = client(fake.url)
        assert atropos.next_batch() == [group()]
        assert len(fake.asked["/batch"]) == 3
        assert atropos.counts["lost_batches"] == 0  # a proxy's error: run-api still has the batch


def test_an_internal_error_of_run_api_is_a_lost_batch_and_the_next_one_comes() -> None:
    messages: list[str] = []
    with fake_run_api(batch=[(500, "Internal Server Error"), DATA]) as fake:
        atropos = client(fake.url, messages)
        assert atropos.next_batch() == [group()] and atropos.counts["lost_batches"] == 1
    assert any("lost a batch: /batch answered 500: Internal Server Error" in line for line in messages)


def test_attempts_are_bounded() -> None:
    with fake_run_api(batch=[(503, "busy")], status=[(503, "busy")]) as fake:
        atropos = client(fake.url, attempts=4)
        with pytest.raises(AtroposError, match=f"Atropos API not reachable at {fake.url}: it answered 503: busy"):
            atropos.next_batch()
        assert len(fake.asked["/batch"]) == 4
        with pytest.raises(AtroposError, match=r"answered 503: busy \(/status, 4 times\)"):
            fake.asked.clear()
            atropos.status()
        assert len(fake.asked["/status"]) == 4


@pytest.mark.parametrize("status", [400, 404, 422])
def test_what_run_api_refuses_is_asked_once(status: int) -> None:
    with fake_run_api(batch=[(status, "no such thing")], info=[(status, "no such thing")]) as fake:
        for ask in (client(fake.url).next_batch, client(fake.url).info):
            with pytest.raises(AtroposError, match=f"rejected .*{status}: no such thing"):
                ask()
        assert [len(fake.asked[path]) for path in ("/batch", "/info")] == [1, 1]


@pytest.mark.parametrize("fault", ["silent", "slow", "cut"])
def test_an_answer_that_does_not_come_in_time_is_a_lost_batch(fault: str) -> None:
    messages: list[str] = []
    with fake_run_api(batch=[fault, DATA]) as fake:
        atropos = client(fake.url, messages, timeout=0.4)
        began = time.monotonic()
        assert atropos.next_batch() == [group()]
        assert time.monotonic() - began < 3 and atropos.counts["lost_batches"] == 1
    why = "gave no answer" if fault == "cut" else "did not answer within 0.4 s"
    assert messages[0].startswith(f"run-api at {fake.url} may have lost a batch: /batch {why}")


def test_a_refused_connection_is_repeated_and_loses_nothing() -> None:
    atropos = client(refused_url(), attempts=3)
    with pytest.raises(AtroposError, match="Atropos API not reachable"):
        atropos.next_batch()
    assert atropos.counts["lost_batches"] == 0


@pytest.mark.parametrize("page", [(200, "<html>hello</html>"), {"models": []}, [1]])
def test_another_program_at_the_url_is_no_run_api(page: Any) -> None:
    with (
        fake_run_api(batch=[page]) as fake,
        pytest.raises(AtroposError, match=r"the server at .*/batch is not a run-api"),
    ):
        client(fake.url).next_batch()


def test_a_request_that_must_not_repeat_is_sent_once_if_no_answer_comes() -> None:
    with fake_run_api(scored_data_list=["cut"]) as fake:
        with pytest.raises(AtroposError, match="may have received the request"):
            client(fake.url)._api.request("POST", "/scored_data_list", [group().to_json()], repeat=False)
        assert len(fake.asked["/scored_data_list"]) == 1


def test_a_request_that_must_not_repeat_is_repeated_after_a_server_error() -> None:
    with fake_run_api(scored_data_list=[(503, "busy"), {"status": "received"}]) as fake:
        client(fake.url)._api.request("POST", "/scored_data_list", [group().to_json()], repeat=False)
        assert fake.bodies["/scored_data_list"] == [[group().to_json()]] * 2


def test_a_run_that_stops_waits_no_longer() -> None:
    began = time.monotonic()
    with fake_run_api(batch=[NO_BATCH]) as fake, pytest.raises(WaitAborted):
        client(fake.url, delay=2.0, stopped=lambda: time.monotonic() - began > 0.5).next_batch()
    assert 0.5 < time.monotonic() - began < 1.5


def test_no_proxy_sees_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, refused_url())
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with fake_run_api(batch=[DATA]) as fake:
        assert client(fake.url).next_batch() == [group()]


def test_nobody_there_is_an_error_with_the_url_after_the_timeout() -> None:
    url, began = refused_url(), time.monotonic()
    with pytest.raises(
        AtroposError, match=f"^Atropos API not reachable at {url}: it gave no answer .*Connection refused.*, for 1 s$"
    ):
        client(url, timeout=1.0).register(dict.fromkeys(["wandb_group", "wandb_project", "checkpoint_dir"], "") | {
            "batch_size": 4, "max_token_len": 64, "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1,
        })  # fmt: skip
    assert time.monotonic() - began < 3


def test_a_silent_socket_is_not_waited_for_longer() -> None:
    with fake_run_api(status=["silent"]) as fake:
        began = time.monotonic()
        with pytest.raises(AtroposError, match=f"Atropos API not reachable at {fake.url}"):
            client(fake.url, timeout=0.6)._connect()
        assert time.monotonic() - began < 3
