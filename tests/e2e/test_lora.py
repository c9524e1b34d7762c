"""LoRA through the real server, which receives the merged model; the final model is merged too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_forgetful_proxy import FakeForgetfulProxy
from real_runs import Launch
from test_guard import Bench

LORA = ("--use_peft", "--lora_target_modules", "all-linear")
STEPS = 12


@pytest.mark.slow
def test_an_adapter_learns_and_the_merged_model_is_left(launch: Callable[..., Launch]) -> None:
    run = launch(
        *LORA, "--num_processes", "2", "--accelerator", "ddp", "--learning_rate", "2e-3", "--max_steps", str(STEPS),
        "--benchmarks", "smoke:sums",
    )  # fmt: skip

    assert run.wait() == 0, run.output

    rows = run.rows()
    rewards = [row["reward"] for row in rows]
    assert len(rows) == STEPS and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    # The server computed with base and adapter merged, in every step.
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert run.log("server").count("grpo: weights loaded") == STEPS + 1  # and once more for the benchmark
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert_the_model_is_base_and_adapter(run.run_dir, plan["model"])
    assert run.summary()["benchmarks"]["smoke:sums"]["pass@1"] > 0.5


@pytest.mark.slow
def test_two_processes_share_the_optimizer_of_an_adapter(launch: Callable[..., Launch]) -> None:
    sharing = ("--num_processes", "2", "--accelerator", "zero2")
    batch = ("--prompts_per_step", "4", "--num_generations", "8", "--learning_rate", "5e-3", "--max_steps", "3")
    run = launch(*LORA, *sharing, *batch, "--save_steps", "2")

    assert run.wait() == 0, run.output

    rows = run.rows()
    assert [row["grad_norm"] > 0 for row in rows] == [True] * 3
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    checkpoint = run.run_dir / "checkpoints" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists() and (checkpoint / "COMPLETE").exists()
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["accelerator"] == "zero2" and (checkpoint / "zero_to_fp32.py").exists()  # DeepSpeed writes it
    assert_the_model_is_base_and_adapter(run.run_dir, plan["model"])


def assert_the_model_is_base_and_adapter(run: Path, base: str) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    first = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokens = torch.arange(4, 44).view(4, 10)
    with torch.no_grad():
        logits, of_base = model(tokens).logits, first(tokens).logits
        of_parts = PeftModel.from_pretrained(first, run / "adapter").eval()(tokens).logits
    torch.testing.assert_close(logits, of_parts, atol=1e-4, rtol=1e-4)
    assert (logits - of_base).abs().max() > 0.1


@pytest.mark.slow
def test_weights_one_step_old_stop_a_lora_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *LORA, "--dtype", "bfloat16", "--learning_rate", "1e-3")
    with bench.server() as url:
        proxy = FakeForgetfulProxy(url, honest=2)
        code, output = bench.train(proxy.port)
        proxy.close()

    assert code != 0 and proxy.forgotten == 1, output
    (cause,) = bench.causes()
    assert "WeightsDiffer: weights did not reach the server through the 'file' bridge" in cause
    assert "step 2 was not taken" in cause
