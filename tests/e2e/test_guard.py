"""Servers that answer 200 and serve other weights: every rank stops before an update is computed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from fake_forgetful_proxy import FakeForgetfulProxy
from one_by_one import Bench

from grpo_recipes import smoke
from grpo_recipes.paths import cache_root
from grpo_recipes.runs.rundir import read_metrics


@pytest.mark.slow
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
        assert "it has the weights of sync 2, and the trainer sent sync 3; step 2 was not taken" in cause
    # The two steps with new weights are kept. The third batch came from old weights and was not used.
    assert [row["step"] for row in read_metrics(bench.run_dir)] == [1, 2]
    # A comparison of log-probs would have detected nothing.
    assert all(row["sampling/sampling_logp_difference/mean"] < 0.05 for row in read_metrics(bench.run_dir)), output


@pytest.mark.slow
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
    assert rows[0]["reward"] > 0.3  # the trainer's model, not the server's first model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        # vLLM's own CPU build replaces linear weights by packed copies: nothing is left to compare.
        pytest.param("", "weights did not reach the server through the 'file' bridge", id="stock-cpu-build"),
        # Only the tied output embeddings are a packed copy: the checksum is right, and the log-probs are not.
        pytest.param("fake_packing", "the server computes with other weights than the trainer's", id="packed-lm-head"),
    ],
)
def test_a_server_that_computes_with_other_weights_than_it_holds_is_stopped(
    tmp_path: Path, plugin: str, message: str
) -> None:
    bench = Bench(tmp_path, "--model_name_or_path", "smoke:sums-tied")
    make_smoke("sums-tied", tied=True)
    install_fake_packing(tmp_path)
    with bench.server(model=other_tied_model(tmp_path), VLLM_PLUGINS=plugin, PYTHONPATH=str(tmp_path)):
        code, _ = bench.train()

    assert code != 0
    (cause,) = bench.causes()
    assert f"WeightsDiffer: {message}" in cause
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
    folder = cache_root(os.environ) / "smoke" / f"{name}-{smoke.hash_settings(tied=tied)}"
    smoke.make_smoke_task(folder, tied=tied)


def other_tied_model(folder: Path) -> str:
    """The same architecture with different weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = cache_root(os.environ) / "smoke" / f"sums-tied-{smoke.hash_settings(tied=True)}" / "model"
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(source)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder / "other")
    return str(folder / "other")
