"""Test whether a host answers, with and without a proxy, and the error of a run without a route to W&B."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.resolve import require_tracker_access
from grpo_recipes.plan.commands import tracker_environment
from grpo_recipes.process.reports import can_connect, can_reach, find_route
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys

pytestmark = pytest.mark.alone

REPOSITORY = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_listening_port_is_reachable_and_a_closed_one_is_not(port):
    assert can_connect("127.0.0.1", port)
    assert not can_connect("127.0.0.1", 9)
    assert not can_connect("no-such-host.invalid", 443, timeout=2)


def test_a_silent_host_costs_the_timeout_and_no_more():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]  # fill the queue: further connections get no answer
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        start = time.monotonic()
        assert not can_connect("127.0.0.1", full.getsockname()[1], timeout=0.5)
        assert 0.4 < time.monotonic() - start < 3
        for connection in waiting:
            connection.close()


def test_a_name_server_that_does_not_answer_costs_no_more_either(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(60) and [])
    start = time.monotonic()
    assert not can_connect("api.wandb.ai", 443, timeout=0.3)
    assert time.monotonic() - start < 2
    over.set()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("api.wandb.ai", 443)),
        ({"https_proxy": "http://proxy.site:3128"}, ("proxy.site", 3128)),
        ({"HTTPS_PROXY": "proxy.site:8080"}, ("proxy.site", 8080)),
        ({"ALL_PROXY": "https://proxy.site"}, ("proxy.site", 443)),
        ({"http_proxy": "http://proxy.site:1"}, ("api.wandb.ai", 443)),
        ({"https_proxy": "http://proxy.site:1", "no_proxy": "localhost,.wandb.ai"}, ("api.wandb.ai", 443)),
    ],
)
def test_a_proxy_is_what_must_answer(environment, expected):
    assert find_route("https://api.wandb.ai", environment) == expected


def test_an_address_answers_through_its_proxy(port):
    assert can_reach(NOWHERE, {"http_proxy": f"http://127.0.0.1:{port}"})
    assert not can_reach(f"http://127.0.0.1:{port}", {"http_proxy": NOWHERE})
    assert can_reach(f"http://127.0.0.1:{port}", {"http_proxy": NOWHERE, "no_proxy": "127.0.0.1"})


def test_a_run_that_reports_to_wandb_needs_a_route(read, port):
    recipe = read(report_to=["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match=r"recipe.yaml:\d+: W&B does not answer at .*WANDB_MODE=offline"):
        require_tracker_access(recipe, {"WANDB_BASE_URL": NOWHERE})
    require_tracker_access(recipe, {"WANDB_BASE_URL": f"http://127.0.0.1:{port}"})
    require_tracker_access(recipe, {"WANDB_BASE_URL": NOWHERE, "WANDB_MODE": "offline"})
    require_tracker_access(read(report_to="tensorboard"), {"WANDB_BASE_URL": NOWHERE})
    require_tracker_access(read(report_to="none"), {"WANDB_BASE_URL": NOWHERE})


def test_a_launch_without_a_route_starts_nothing(tmp_path):
    run_variables = {*READ_VARIABLES, *environment_keys(), "WANDB_MODE"}
    environment = {
        name: text for name, text in os.environ.items() if name not in run_variables and not name.startswith("SLURM_")
    }
    recipe = REPOSITORY / "recipes/smoke/grpo.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "grpo_recipes", "launch", str(recipe), "--report_to", "wandb"],
        cwd=tmp_path,
        env={**environment, "RUN_ROOT": str(tmp_path / "runs"), "WANDB_BASE_URL": NOWHERE, "no_proxy": "*"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"grpo: --report_to: W&B does not answer at {NOWHERE} from this machine. Fix: export WANDB_MODE=offline and "
        "run wandb sync later, or set report_to: none\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_wandb_keys_become_its_variables_and_a_variable_wins_over_the_recipe(read):
    keys = {"wandb_project": "maths", "wandb_entity": "lab", "wandb_run_group": "ablation"}
    assert tracker_environment(read(), {}) == {}
    assert tracker_environment(read(**keys), {}) == {
        "WANDB_PROJECT": "maths",
        "WANDB_ENTITY": "lab",
        "WANDB_RUN_GROUP": "ablation",
    }
    assert tracker_environment(read((), {"WANDB_PROJECT": "mine"}, **keys), {})["WANDB_PROJECT"] == "mine"
    flags = ["--wandb_project", "flag"]
    assert tracker_environment(read(flags, {"WANDB_PROJECT": "mine"}, **keys), {})["WANDB_PROJECT"] == "flag"


def test_the_project_reaches_every_tracker_of_the_recipe(read):
    keys = {"report_to": ["mlflow", "swanlab", "comet_ml"], "project": "maths"}
    names = ("MLFLOW_EXPERIMENT_NAME", "SWANLAB_PROJECT", "COMET_PROJECT_NAME", "WANDB_PROJECT")
    assert tracker_environment(read(**keys), {}) == dict.fromkeys(names, "maths")
    assert tracker_environment(read(report_to=["mlflow"]), {}) == {"MLFLOW_EXPERIMENT_NAME": "grpo-recipes"}
    assert "MLFLOW_EXPERIMENT_NAME" not in tracker_environment(read(**keys), {"MLFLOW_EXPERIMENT_ID": "5"})
    assert tracker_environment(read(**keys, wandb_project="mine"), {})["WANDB_PROJECT"] == "mine"
