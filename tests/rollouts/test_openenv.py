"""Environments behind a server of OpenEnv."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.environments import stage
from grpo_recipes.extensions.environments.load import load_environment

from .played import needs, play, said

pytestmark = pytest.mark.usefixtures("found")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    needs("openenv:x")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(HERE / "envs" / "openenv_server.py"), str(port)]) as process:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0 or process.poll() is not None:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def turn_of(server: str, episode: str, actions: list[str], observation: str = "", **arguments: str) -> str:
    """Take an episode one turn further, as a child process does."""
    known = json.dumps({"observation_field": "text"} | arguments)
    (turn,) = stage.play([actions], [f"openenv:{server}"], [known], [7], [episode], [stage.hash_turn(observation)])
    return turn


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_finished_episodes_give_their_sessions_back(server: str) -> None:
    files = []
    for episode in range(6):
        turns = [turn_of(server, f"ends/{episode}", ["7"] * actions) for actions in range(3)]
        assert stage.parse_turn(turns[-1]).done
        files.append(open_files())
    assert files == files[:1] * 6


@pytest.mark.slow
def test_episodes_that_fail_or_are_left_give_their_sessions_back(server: str) -> None:
    for episode in range(4):
        turn_of(server, f"fails/{episode}", [], action_field="said")
        with pytest.raises(ConfigError, match="did not answer step"):
            turn_of(server, f"fails/{episode}", ["7"], action_field="said")
        with pytest.raises(ConfigError, match="the server sends no 'seen'"):
            turn_of(server, f"fails in reset/{episode}", [], observation_field="seen")
    files = []
    for generation in range(6):
        turn_of(server, f"generation {generation}/0", [])
        files.append(open_files())
    assert files == files[:1] * 6


def test_a_server_of_openenv_is_played(server: str) -> None:
    """Runs last: it leaves all sessions of the server in use."""
    env = load_environment(f"openenv:{server}", {"action_field": "message", "observation_field": "text"})
    for seed in 7, 8:
        turns = play(env, seed, said(["7", "8"]))
        assert [turn.messages for turn in turns[:1]] == [[{"role": "user", "content": f"say {seed}"}]]
        assert [turn.reward for turn in turns] == [0.0, float(seed == 7), float(seed == 8)]
        assert turns[-1].done and turns[-1].info == {"end": "0 left"}
    other = load_environment(f"openenv:{server}", {"action_field": "said", "observation_field": "seen"})
    with pytest.raises(ConfigError, match="observation_field: the server sends no 'seen'"):
        other.reset(1)
    with pytest.raises(ConfigError, match=r"did not answer step .*message"):
        other.step("1")
    with pytest.raises(ConfigError, match="raise the server's number of sessions"):
        load_environment(f"openenv:{server}", {}).reset(1)


def test_a_server_that_is_not_there_is_named() -> None:
    needs("openenv:x")
    with pytest.raises(ConfigError, match=r"no OpenEnv server at http://127\.0\.0\.1:9"):
        load_environment("openenv:http://127.0.0.1:9", {}).reset(1)
