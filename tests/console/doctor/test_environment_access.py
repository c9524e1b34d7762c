"""Tokens, proxies, hosts and ports. Secrets are never printed."""

from __future__ import annotations

import os
import socket
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from grpo_recipes.console.doctor import environment

pytestmark = pytest.mark.alone

TOKEN = "hf_" + "b" * 34


class Answering(BaseHTTPRequestHandler):
    """Answers every HEAD with 200."""

    status = 200

    def do_HEAD(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


class Refusing(Answering):
    """A proxy that requires credentials."""

    status = 407


@pytest.fixture
def closed() -> str:
    """Return an address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def at(machine, home: Path):
    """``at(NAME=VALUE)``: a machine with only these variables and an empty home folder."""

    def make(recipe=None, **variables):
        user_machine = machine(recipe, HOME=str(home), **variables)
        for name in ("HF_TOKEN", "HF_HOME", "HF_TOKEN_PATH", "WANDB_API_KEY", "WANDB_MODE", "HF_HUB_OFFLINE", "NETRC"):
            if name not in variables:
                user_machine.environment.pop(name, None)
        return user_machine

    return make


def test_the_token_of_the_hub_in_the_environment(at):
    finding = environment.hub_token(at(HF_TOKEN=TOKEN))
    assert finding.status == "ok" and finding.value == "HF_TOKEN is set"
    assert environment.hub_token(at(HUGGING_FACE_HUB_TOKEN=TOKEN)).value == "HUGGING_FACE_HUB_TOKEN is set"
    for wrong in (f"{TOKEN}\n", f'"{TOKEN}"', "please"):
        finding = environment.hub_token(at(HF_TOKEN=wrong))
        assert finding.status == "warning" and "does not have the format" in finding.value
        assert TOKEN not in finding.value + finding.fix


def test_the_token_of_hf_auth_login_and_who_may_read_it(at, home: Path):
    assert environment.hub_token(at()).value.startswith("none")
    path = home / ".cache/huggingface/token"
    path.parent.mkdir(parents=True)
    path.write_text(TOKEN)
    path.chmod(0o600)
    assert environment.hub_token(at()).status == "ok" and TOKEN not in environment.hub_token(at()).value
    path.chmod(0o644)
    finding = environment.hub_token(at())
    assert (
        finding.status == "warning"
        and finding.fix.startswith("chmod 600")
        and "readable by other users" in finding.value
    )
    assert environment.hub_token(at(HF_HOME="/elsewhere")).value.startswith("none")
    assert environment.hub_token(at(HF_TOKEN_PATH=str(path))).status == "warning"


def test_the_login_of_wandb(at, home: Path, read, serve):
    recipe, address = read(report_to="wandb"), serve(Answering)
    assert environment.wandb(at()).value.startswith("not used")
    finding = environment.wandb(at(recipe, WANDB_BASE_URL=address))
    assert finding.status == "problem" and "wandb login" in finding.fix
    assert environment.wandb(at(recipe, WANDB_MODE="offline")).status == "ok"
    assert environment.wandb(at(recipe, WANDB_API_KEY="k" * 40, WANDB_BASE_URL=address)).status == "ok"
    login = home / ".netrc"
    login.write_text(f"machine 127.0.0.1\n  login user\n  password {'k' * 40}\n")
    login.chmod(0o600)
    finding = environment.wandb(at(recipe, WANDB_BASE_URL=address))
    assert finding.status == "ok" and "kkkk" not in finding.value
    login.chmod(0o640)
    assert environment.wandb(at(recipe, WANDB_BASE_URL=address)).status == "warning"
    login.write_text("machine wandb.example.org\n  login user\n  password x\n")
    assert environment.wandb(at(recipe, WANDB_BASE_URL=address)).status == "problem"


def test_proxies_are_shown_without_credentials(at):
    assert environment.proxies(at()).value == "none set"
    finding = environment.proxies(at(https_proxy="http://alice:s3cret@proxy.example.org:3128"))
    assert finding.status == "ok"
    assert finding.value == "https_proxy=http://proxy.example.org:3128"
    assert environment.proxies(at(http_proxy="http://a:1", HTTP_PROXY="http://b:1")).status == "warning"


def test_the_hub_answers(at, serve, closed: str):
    assert environment.hub(at(HF_ENDPOINT=serve(Answering))).status == "ok"
    finding = environment.hub(at(HF_ENDPOINT=closed))
    assert finding.status == "warning" and "refused" in finding.value and "grpo fetch" in finding.fix
    assert environment.hub(at(HF_ENDPOINT=closed, HF_HUB_OFFLINE="1")).value.startswith("skipped")


def test_a_hub_that_is_silent_is_told_in_seconds(at, monkeypatch):
    monkeypatch.setattr(environment, "_SECONDS", 0.4)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        finding = environment.hub(at(HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}"))
    assert finding.status == "warning" and "timed out" in finding.value
    assert time.monotonic() - began < 3


def test_proxies_are_used_and_told_when_they_refuse(at, serve, closed: str, monkeypatch):
    monkeypatch.setenv("http_proxy", serve(Answering))
    assert environment.hub(at(HF_ENDPOINT="http://hub.invalid")).status == "ok"
    monkeypatch.setenv("http_proxy", serve(Refusing))
    assert "the proxy requires other credentials" in environment.hub(at(HF_ENDPOINT="http://hub.invalid")).value
    monkeypatch.setenv("http_proxy", closed)
    assert environment.hub(at(HF_ENDPOINT="http://hub.invalid")).status == "warning"


def test_wandb_is_asked_for_a_recipe_that_reports_to_it_alone(at, read, serve, closed: str):
    recipe, key = read(report_to="wandb"), "k" * 40
    assert environment.wandb(at(WANDB_BASE_URL=closed)).status == "ok"
    finding = environment.wandb(at(recipe, WANDB_BASE_URL=closed, WANDB_API_KEY=key))
    assert finding.status == "problem" and "WANDB_MODE=offline" in finding.fix
    assert environment.wandb(at(recipe, WANDB_BASE_URL=closed, WANDB_MODE="offline")).status == "ok"
    assert environment.wandb(at(recipe, WANDB_BASE_URL=closed, WANDB_MODE="online")).status == "problem"
    assert environment.wandb(at(recipe, WANDB_BASE_URL=serve(Answering), WANDB_API_KEY=key)).status == "ok"


def test_a_port_the_user_named_and_another_process_holds(at, read):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        finding = environment.ports(at(VLLM_PORT=str(port)))
        by_recipe = environment.ports(at(read(vllm_server_port=port)))
        inside = environment.ports(at(read(vllm_mode="colocate", vllm_server_port=port)))
        unnamed = environment._check_port("vllm_server_port", port, is_chosen=False)
    assert finding.status == "problem"
    assert f"{port} (vllm_server_port)" in finding.value and f"pid {os.getpid()}" in finding.value
    assert by_recipe == finding
    assert str(port) not in inside.value
    assert unnamed.status == "warning"
    assert environment._check_port("vllm_server_port", port, is_chosen=True).value == f"{port} free"


def test_ports_are_those_of_the_launch(at, read):
    assert "separate" in environment.ports(at(SLURM_JOB_ID="12")).value
    assert environment.ports(at(read(), SLURM_JOB_ID="12")).value.startswith("20120 free")


def test_this_machines_name(at, monkeypatch):
    assert environment.host_name(at()).value
    monkeypatch.setattr(socket, "gethostname", lambda: "fake-host-without-address.invalid")
    assert environment.host_name(at()).status == "warning"
