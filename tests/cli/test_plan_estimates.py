"""`grpo plan`: memory, disk and speed, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.errors import EXIT_CONFIG_ERROR
from grpo_recipes.launch import submission
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.models import compute_model_sizes

MODEL = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """``plan(...)``: return exit code, stdout and stderr of `grpo plan` for a 7B model on eight GPUs."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    recipe = {
        "model_name_or_path": str(tmp_path / "model"), "dataset_name": "openai/gsm8k", "prompts_per_step": 105,
        "num_generations": 8, "max_prompt_length": 512, "max_completion_length": 1024, "dtype": "bfloat16",
        "learning_rate": 1e-3,  # at this rate, accelerator: ddp may update bfloat16 weights
        "run_name": "seven", "run_root": str(tmp_path / "runs"), "use_vllm": True,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["plan", "recipe.yaml", "--gpus", "8", *arguments])
        return code, *capsys.readouterr()

    return run


def blocks(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{name} ")]


def test_what_does_not_fit_is_told_with_the_key_to_change(plan):
    zero3 = ("--accelerator", "zero3", "--gradient_checkpointing", "false")
    code, text, _ = plan("--gpu-memory", "80", *zero3, "--per_device_train_batch_size", "8")
    assert code == 0
    first, _, last = blocks(text, "memory")
    assert " of 80.0 GiB: libraries" in first
    assert last.startswith("memory     does not fit: the trainer needs ")
    assert "Fix: per_device_train_batch_size: " in last
    verdict, gpus = text.splitlines()[:2]
    assert verdict.startswith("verdict    does not fit: memory of the trainer")
    assert gpus == "gpus       0 vLLM server, 1-7 trainer"
    key, _, value = last.partition("Fix: ")[2].partition(": ")
    assert len(blocks(plan("--gpu-memory", "80", *zero3, f"--{key}", value)[1], "memory")) == 2


def test_the_same_as_json(plan):
    flags = ("--accelerator", "ddp", "--per_device_train_batch_size", "8")
    report = json.loads(plan("--gpu-memory", "88", *flags, "--json")[1])
    memory = report["memory"]
    assert sum(memory["trainer"]["parts"].values()) > memory["trainer"]["available"]
    assert memory["trainer"]["available"] == 88 * 2**30
    assert [need["fix"] for need in memory.values()] == ["per_device_train_batch_size: 1", ""]
    elements = compute_model_sizes(MODEL)["parameters"]
    assert report["disk"]["checkpoints"] == 3  # each contains the weights and two optimizer states in bfloat16
    assert report["disk"]["parts"] == {"checkpoints": 3 * 6 * elements, "model": 2 * elements}
    assert report["disk"]["available"] == pytest.approx(os.statvfs(".").f_bavail * os.statvfs(".").f_frsize, rel=0.1)
    assert report["speed"] == {"seconds": None, "runs": 0, "walltime": None, "steps": None}
    assert json.loads(plan("--json")[1])["memory"]["trainer"]["available"] is None


def test_steps_within_the_time_limit_by_an_earlier_run(plan, tmp_path, monkeypatch):
    assert "no earlier run" in blocks(plan()[1], "speed")[0]
    earlier = tmp_path / "runs/seven-20260101-000000"
    earlier.mkdir(parents=True)
    (earlier / "run.json").write_text(json.dumps({"run_name": "seven"}))
    (earlier / "plan.json").write_text(plan("--json")[1])
    rows = [{"step": step, "seconds/step": 36.0} for step in range(1, 5)]
    (earlier / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert blocks(plan()[1], "speed") == ["speed      36 s per step in 1 earlier run: 100 steps per hour"]
    told = blocks(plan("--time", "3-00:00:00")[1], "speed")[0]
    assert told.endswith("about 7,200 steps in 72:00:00")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    assert blocks(plan()[1], "speed")[0].endswith("about 0 steps in 0:00:00")


def test_with_a_time_limit_of_its_own_slurm_is_not_asked(plan, monkeypatch):
    requests: list[object] = []
    monkeypatch.setattr("grpo_recipes.cli.plan.read_job_end_time", requests.append)
    for flags, times in ((("--time", "1-0"), 0), ((), 1)):
        assert plan(*flags)[0] == 0 and len(requests) == times


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--time", "soon"], "'soon' is not a time limit"),
        (["--time", "0"], "use --time 72:00:00"),
        (["--gpu-memory", "0.5"], "no GPU has 0.5 GiB"),
        (["--gpu-memory", "nan"], "no GPU has nan GiB"),
    ],
)
def test_wrong_numbers_are_refused(flags, message, plan):
    code, _, errors = plan(*flags)
    assert code == EXIT_CONFIG_ERROR
    assert message in errors


def test_a_model_that_is_not_here_is_named(plan):
    lines = blocks(plan("--model_name_or_path", "some/model")[1], "memory")
    command = "grpo fetch recipe.yaml --model_name_or_path some/model"
    assert lines == [f"memory     not estimated: its config.json is not on this machine; {command} downloads it"]


def test_submit_judges_by_the_profile(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(submission, "_check_deep", lambda *_: None)
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n' * 200)
    (tmp_path / "site.yaml").write_text("gpus: 8\ngpu_memory_gib: 24\ntime: 1-0\n")
    command = ["submit", "recipe.yaml", "--profile", "site.yaml", "--dry-run", "--dataset_name", "rows.jsonl"]
    assert cli.main([*command, "--accelerator", "ddp"]) == EXIT_CONFIG_ERROR
    assert "the trainer needs 95.2 of 24.0 GiB" in capsys.readouterr().err
    small = ["--per_device_train_batch_size", "1", "--use_peft", "true", "--vllm_gpu_memory_utilization", "0.85"]
    assert cli.main([*command, "--accelerator", "ddp", *small]) == 0
    assert " of 24.0 GiB" in capsys.readouterr().err
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=1, f_files=0))
    assert cli.main([*command, "--accelerator", "ddp", *small]) == EXIT_CONFIG_ERROR
    assert "GiB are free in" in capsys.readouterr().err


def test_argv_and_environment_of_processes_are_printed_with_v_alone(plan):
    _, short, _ = plan("--gpu-memory", "80")
    assert "--served-model-name" not in short and blocks(short, "server") and "NCCL" not in short
    _, long, _ = plan("--gpu-memory", "80", "-v")
    assert "--served-model-name" in long and "CUDA_VISIBLE_DEVICES=" in long


@pytest.mark.parametrize("recipe", ["Qwen2.5-7B-Instruct/grpo/config_math.yaml", "smoke/grpo.yaml"])
def test_a_shipped_recipe_is_estimated_before_its_model_is_here(tmp_path, monkeypatch, capsys, recipe):
    """M8: the sizes of the models of shipped recipes are part of the package."""
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    gpus = [] if recipe.startswith("smoke") else ["--gpus", "8"]
    assert cli.main(["plan", str(find_code_root() / "recipes" / recipe), *gpus, "--run_root", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "not estimated" not in told and len(blocks(told, "memory")) >= 2
    assert blocks(told, "gpus") == (["gpus       0 vLLM server, 1-7 trainer"] if gpus else [])


def test_the_page_shows_the_message_of_a_shipped_recipe_that_does_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    recipe = find_code_root() / "recipes/Qwen2.5-7B-Instruct/grpo/config_math.yaml"
    flags = ["--gradient_checkpointing", "false", "--per_device_train_batch_size", "8", "--run_root", str(tmp_path)]
    assert cli.main(["plan", str(recipe), "--gpus", "8", "--gpu-memory", "80", *flags]) == 0
    assert (
        blocks(capsys.readouterr().out, "memory")[-1]
        in (find_code_root() / "docs/performance.md").read_text().splitlines()
    )


def test_the_map_shows_each_gpu_of_each_node(plan):
    """M8: which process uses which GPU, and which GPUs nothing uses."""
    assert blocks(plan("--prompts_per_step", "4", "--num_generations", "2")[1], "gpus") == [
        "gpus       0 vLLM server, 1-4 trainer, 5-7 unused"
    ]
    assert blocks(plan("--nodes", "2")[1], "gpus")[0].startswith("gpus       node 0: 0 vLLM server, 1-7 trainer")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_generations", "1000000000000"), ("max_completion_length", "1000000000000"),
        ("prompts_per_step", "1000000000"), ("vllm_tensor_parallel_size", "100000"), ("lora_r", "10000000"),
        ("vllm_max_model_length", "100000000000"), ("max_steps", "1000000000000"),
    ],
)  # fmt: skip
def test_absurd_sizes_are_rejected_with_a_size_that_is_not(plan, key, value):
    """M8: a plan of such a size is a typing error, and the fix is accepted."""
    code, _, told = plan(f"--{key}", value)
    assert code == 2 and key in told
    most = int(re.search(r"Fix: set \w+ to (\d+) or less", told)[1])
    assert f"expected at most {most}" in told and most < int(value)


def test_a_batch_of_too_many_completions_is_rejected(plan):
    """M8: each size is valid without the other."""
    code, _, told = plan("--prompts_per_step", "1000000", "--num_generations", "1000")
    assert code == 2 and "is more than 10,000,000 completions" in told
    assert plan("--prompts_per_step", "128", "--num_generations", "8")[0] == 0
