"""Servers that answer 200 and serve other weights: every rank stops before an update is computed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_forgetful_proxy import FakeForgetfulProxy
from real_runs import clean_environment

from grpo_recipes import smoke
from grpo_recipes.launch.environment import base_environment, make_scratch, run_environment
from grpo_recipes.launch.plan import Names, Plan, make_plan
from grpo_recipes.launch.ports import free_ports, plan_ports
from grpo_recipes.launch.resources import find_resources
from grpo_recipes.launch.rundir import read_json, read_metrics, write_json
from grpo_recipes.launch.server import wait_until_ready
from grpo_recipes.paths import cache_root, home
from grpo_recipes.recipe import read_recipe

SHORT = ("--max_steps", "4", "--prompts_per_step", "4", "--num_generations", "8", "--save_strategy", "no")


class Bench:
    """The plan's server and trainers started one by one, so that something can be put between them."""

    def __init__(self, folder: Path, *flags: str):
        self.run_dir = folder / "run"
        (self.run_dir / "processes").mkdir(parents=True)
        self._shell = clean_environment(folder, str(folder))
        self._recipe = read_recipe(home() / "recipes/smoke/grpo.yaml", (*SHORT, *flags))
        (self.run_dir / "recipe.yaml").write_text(self._recipe.as_yaml())
        self._names = Names(self.run_dir, "guard", "guard-served", "now")
        self._resources = find_resources({})
        self._scratch = make_scratch({})
        self._ports, _ = free_ports(self._recipe, plan_ports(self._recipe, None), "127.0.0.1")
        self.plan = self._plan()
        self._environment = {
            **base_environment(self._shell),
            **run_environment(self._shell, self._scratch, self.run_dir, "guard-served"),
        }
        self._log = folder / "log.txt"

    def _plan(self, server_port: int | None = None) -> Plan:
        ports = replace(self._ports, server=server_port or self._ports.server)
        return make_plan(self._recipe, self._resources, {}, self._names, ports=ports)

    @contextmanager
    def server(self, model: str | None = None, **variables: str) -> Iterator[str]:
        process = self.plan.process("server")
        assert process is not None
        argv = [model if model and part == self.plan.model else part for part in process.argv]
        with self._log.open("ab") as log:
            environment = {**self._environment, **process.environment, **variables}
            server = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
        port, token = self._ports.server, self._scratch.token.read_text()
        try:
            wait_until_ready(
                lambda: server.poll() is None, os.getpid(), "127.0.0.1", port, "guard-served", token, timeout=120
            )
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)
            self._scratch.remove()

    def train(self, server_port: int | None = None) -> tuple[int, str]:
        plan = self._plan(server_port)
        write_json(self.run_dir / "plan.json", plan.as_json())
        process = plan.process("trainer")
        assert process is not None
        environment = {**self._environment, **process.environment}
        done = subprocess.run(process.argv, env=environment, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout + done.stderr

    def causes(self) -> list[str]:
        records = sorted((self.run_dir / "processes").glob("rank_*.json"))
        return [(read_json(path) or {}).get("cause", "") for path in records]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize("processes", [pytest.param(1, id="one-process"), pytest.param(2, id="two-processes")])
def test_weights_one_step_old_in_bf16_at_1e_6_stop_every_rank(tmp_path: Path, processes: int) -> None:
    bench = Bench(tmp_path, "--dtype", "bfloat16", "--learning_rate", "1e-6", "--num_processes", str(processes))
    with bench.server() as url:
        proxy = FakeForgetfulProxy(url, honest=2)
        code, output = bench.train(proxy.port)
        proxy.close()

    assert code != 0
    assert proxy.forgotten == 1
    causes = bench.causes()
    assert len(causes) == processes
    for cause in causes:
        assert "WeightsDiffer: weights did not reach the server through the 'file' bridge" in cause
        assert "step 2 was not taken" in cause
    # The two honest steps stand; from the third batch, sampled with old weights, no update was computed.
    assert [row["step"] for row in read_metrics(bench.run_dir)] == [1, 2]
    # What a log-prob probe alone would have seen: nothing.
    assert all(row["sampling/sampling_logp_difference/mean"] < 0.05 for row in read_metrics(bench.run_dir)), output


@pytest.mark.slow
@pytest.mark.rotating
def test_tied_embeddings_work_through_the_file_bridge(tmp_path: Path) -> None:
    """All Qwen2.5 up to 3B tie them. The server starts from other weights than the trainer's."""
    bench = Bench(tmp_path, "--model_name_or_path", "smoke:sums-tied", "--learning_rate", "1e-3")
    make_smoke("sums-tied", tied=True)
    with bench.server(model=other_tied_model(tmp_path)):
        code, output = bench.train()

    assert code == 0, output
    rows = read_metrics(bench.run_dir)
    assert len(rows) == 4
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert rows[0]["reward"] > 0.3  # of the trainer's model, not of the one the server was started with


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        # vLLM's own CPU build replaces linear weights by packed copies: nothing is left to compare.
        pytest.param("", "weights did not reach the server through the 'file' bridge", id="stock-cpu-build"),
        # Only the tied output embeddings are a packed copy: the checksum is right, and the log-probs are not.
        pytest.param("fake_packing", "the server computes with other weights than the trainer's", id="packed-lm-head"),
    ],
)
def test_a_server_that_computes_with_other_weights_than_it_holds_is_stopped(
    tmp_path: Path, plugin: str, said: str
) -> None:
    bench = Bench(tmp_path, "--model_name_or_path", "smoke:sums-tied")
    make_smoke("sums-tied", tied=True)
    install_fake_packing(tmp_path)
    with bench.server(model=other_tied_model(tmp_path), VLLM_PLUGINS=plugin, PYTHONPATH=str(tmp_path)):
        code, _ = bench.train()

    assert code != 0
    (cause,) = bench.causes()
    assert f"WeightsDiffer: {said}" in cause
    if plugin:
        measured = re.search(r"difference\| ([\d.e+-]+) on the first batch", cause)
        assert measured is not None and float(measured[1]) > 0.1
    assert "step 0 was not taken" in cause
    assert read_metrics(bench.run_dir) == []


def install_fake_packing(folder: Path) -> None:
    """A vLLM plug-in of the test's own, found through PYTHONPATH."""
    information = folder / "fake_packing-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-packing\nVersion: 0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nfake_packing = fake_packing:register\n")
    shutil.copy(Path(__file__).with_name("fake_packing.py"), folder)


def make_smoke(name: str, tied: bool) -> None:
    folder = cache_root(os.environ) / "smoke" / f"{name}-{smoke.fingerprint(tied=tied)}"
    smoke.make(folder, tied=tied)


def other_tied_model(folder: Path) -> str:
    """The same architecture with weights of its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = cache_root(os.environ) / "smoke" / f"sums-tied-{smoke.fingerprint(tied=True)}" / "model"
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(source)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "other")
    return str(folder / "other")
