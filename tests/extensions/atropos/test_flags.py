"""The Atropos entry point: every flag and variable changes the launch, or is rejected with a fix."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos import main as atropos
from grpo_recipes.extensions.atropos.flags import FIELDS, FLAGS, VARIABLES, list_flag_rows, list_variable_rows
from grpo_recipes.extensions.atropos.main import BASE, VERBOSITY, AtroposLaunch
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.keys import READ_VARIABLES, catalogue, environment_keys
from grpo_recipes.slurm.client import SlurmJob

pytest.importorskip("atroposlib")

NEEDED = ("--model-name", "smoke:sums", "--environment", "arithmetic")
LORA = ("--weight-bridge-mode", "lora_only")
URL = "http://localhost:8000"


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {row.name for row in VARIABLES.rows} | {VERBOSITY}
    for name in {*environment_keys(), *READ_VARIABLES, *variables} - {"CACHE_ROOT", "GRPO_HOME"}:
        monkeypatch.setenv(name, "")  # undo the variables that the launch sets
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return ``machine(gpus, job)``, which sets the visible GPUs (None: a CPU environment) and the Slurm job."""

    def make(gpus: int | None, job: bool = False) -> None:
        names = tuple(map(str, range(gpus or 0)))
        read_slurm_job = SlurmJob(7, "slurm", 1, None) if job else None
        resources = Resources("cpu" if gpus is None else "cuda", names, 8, read_slurm_job, ())
        monkeypatch.setattr(atropos, "find_resources", lambda _: resources)

    make(4)
    return make


@pytest.fixture(autouse=True)
def four_gpus(machine) -> None:
    """Four GPUs, unless a test says otherwise."""


def read(*arguments: str) -> AtroposLaunch:
    return atropos.read_launch(list(arguments))


def recipe_of(door: AtroposLaunch) -> Recipe:
    """Return the recipe that the launch resolves."""
    options = door.options
    return resolve_recipe(options.recipe, options.task, options.flags, os.environ, door.resources.device, options.keys)


def resolved(*arguments: str) -> Recipe:
    """Return the recipe of these flags; missing required flags get test values."""
    pairs = zip(NEEDED[::2], NEEDED[1::2], strict=True)
    needed = [word for flag, value in pairs if flag not in arguments for word in (flag, value)]
    return recipe_of(read(*needed, *arguments))


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        atropos.read_launch(list(arguments))
    return [str(problem) for problem in caught.value.problems]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = atropos.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


# Flag with a value -> recipe keys that it changes.
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("--model-name a/b", {"model_name_or_path": "a/b"}),
    ("--training-steps 20", {"max_steps": 20}),
    ("--batch-size 4", {"per_device_train_batch_size": 4}),
    ("--gradient-accumulation-steps 16", {"gradient_accumulation_steps": 16}),
    ("--lr 2e-6", {"learning_rate": 2e-6}),
    ("--warmup-steps 2", {"warmup_steps": 2.0}),
    ("--optimizer adafactor", {"optim": "adafactor"}),
    ("--seq-len 1024", {"max_prompt_length": 256, "max_completion_length": 768}),
    ("--clip-eps 0.1", {"epsilon": 0.1}),
    ("--dtype float32", {"dtype": "float32"}),
    ("--save-path there", {"run_root": "there"}),
    ("--checkpoint-interval 5", {"save_steps": 5.0}),
    ("--checkpoint-interval 0", {"save_strategy": "no", "save_steps": 100.0}),
    ("--weight-bridge-mode auto", {"weight_sync": "auto"}),
    ("--vllm-restart-interval 3", {"steps_per_generation": 96}),
    ("--vllm-port 9100", {"vllm_server_port": 9100}),
    ("--gpu-memory-utilization 0.6", {"vllm_gpu_memory_utilization": 0.6}),
    ("--vllm-gpu-memory-utilization 0.7", {"vllm_gpu_memory_utilization": 0.7}),
    ("--max-model-len 8192", {"vllm_max_model_length": 8192}),
    ("--atropos-url http://there:8000", {"atropos_api_url": "http://there:8000"}),
    ("--environment dataset", {"atropos_environment": "dataset"}),
    ("--use-wandb", {"report_to": ["wandb"]}),
    ("--wandb-project mine", {"wandb_project": "mine"}),
    ("--wandb-group ours", {"wandb_run_group": "ours"}),
    ("--env.group_size 4", {"num_generations": 4}),
    ("--env.temperature 0.7", {"temperature": 0.7}),
    ("--env.chat_template '{{ messages }}'", {"chat_template": "{{ messages }}"}),
    ("--env.max_num_workers 3 --env.seed=7", {"atropos_environment_args": {"max_num_workers": 3, "seed": 7}}),
    ("--num_generations 16", {"num_generations": 16}),
    ("--atropos_max_staleness 1", {"atropos_max_staleness": 1}),
]
# The same with --weight-bridge-mode lora_only.
OF_ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("--lora-r 64", {"lora_r": 64}),
    ("--lora-alpha 8", {"lora_alpha": 8}),
    ("--lora-dropout 0.05", {"lora_dropout": 0.05}),
    ("--lora-target-modules k_proj o_proj", {"lora_target_modules": ["k_proj", "o_proj"]}),
]
# Flag with a wrong value -> the whole message.
WRONG: list[tuple[str, str]] = [
    ("--training-steps many", "--training-steps: max_steps: expected an integer, got 'many'."
        " Fix: set --training-steps to an integer, e.g. -1"),
    ("--training-steps 0", "--training-steps: max_steps: expected at least 1, or -1, got 0."
        " Fix: set --training-steps to 1 or more, or to -1 to train for num_train_epochs"),
    ("--batch-size 0", "--batch-size: per_device_train_batch_size: expected at least 1, got 0."
        " Fix: set --batch-size to 1 or more, e.g. 8"),
    ("--gradient-accumulation-steps 0",
        "--gradient-accumulation-steps: gradient_accumulation_steps: expected at least 1, got 0."
        " Fix: set --gradient-accumulation-steps to 1 or more"),
    ("--lr fast", "--lr: learning_rate: expected a number, got 'fast'. Fix: set --lr to a number, e.g. 1e-06"),
    ("--warmup-steps -1", "--warmup-steps: warmup_steps: expected at least 0.0, got -1.0."
        " Fix: set --warmup-steps to 0.0 or more"),
    ("--seq-len 3", "--seq-len: must be an integer of at least 4, got '3'. Fix: write e.g. --seq-len 5"),
    ("--clip-eps wide", "--clip-eps: epsilon: expected a number, got 'wide'."
        " Fix: set --clip-eps to a number, e.g. 0.2"),
    ("--checkpoint-interval -1", "--checkpoint-interval: must be an integer of at least 0, got '-1'."
        " Fix: write e.g. --checkpoint-interval 1"),
    ("--vllm-port 80", "--vllm-port: vllm_server_port: expected at least 1024, got 80."
        " Fix: set --vllm-port to 1024 or more, e.g. 8000"),
    ("--gpu-memory-utilization 2",
        "--gpu-memory-utilization: vllm_gpu_memory_utilization: expected at most 1.0, got 2.0."
        " Fix: set --gpu-memory-utilization to 1.0 or less"),
    ("--max-model-len short", "--max-model-len: vllm_max_model_length: expected an integer, got 'short'."
        " Fix: set --max-model-len to an integer"),
    ("--max-model-len 100", "--max-model-len: prompt 512 + completion 1536 tokens exceed vllm_max_model_length 100."
        " Fix: set --max-model-len: 2048, or lower max_prompt_length"),
    ("--vllm-restart-interval 0", "--vllm-restart-interval: must be an integer of at least 1, got '0'."
        " Fix: write e.g. --vllm-restart-interval 2"),
    ("--atropos-url localhost:8000", "--atropos-url: 'localhost:8000' is not an http or https URL."
        " Fix: set e.g. http://localhost:8000"),
    ("--environment arithmetics", "--environment: unknown Atropos environment 'arithmetics'. Fix: set arithmetic"),
    ("--device cpu", "--device: is 'cpu', but the environment was installed for cuda."
        " Fix: set cuda, or create another environment: make setup DEVICE=cpu"),
    ("--device cuda:1", "--device: is 'cuda:1', but the environment was installed for cuda."
        " Fix: export CUDA_VISIBLE_DEVICES=1"),
    ("--vllm-config-path nowhere.json", "--vllm-config-path: file 'nowhere.json' not found."
        " Fix: set an existing file, or remove it"),
    ("--optimizer adamw_8bit", "--optimizer: optim adamw_8bit needs the package bitsandbytes, which is not installed."
        " Fix: remove --optimizer, or pip install bitsandbytes into this environment"),
    ("--lora-r 8", "--lora-r: does nothing with --weight-bridge-mode none."
        " Fix: write --weight-bridge-mode lora_only, or leave it out"),
    ("--enable-lora", "--enable-lora: does nothing with --weight-bridge-mode none."
        " Fix: write --weight-bridge-mode lora_only, or leave it out"),
    ("--single-copy --weight-bridge-mode none", "--single-copy: means --weight-bridge-mode shared_vllm, but"
        " --weight-bridge-mode is none. Fix: remove one of them"),
    ("--vllm-restart-interval 2 --weight-bridge-mode shared_vllm", "--vllm-restart-interval: has no effect with"
        " shared_vllm: the server has every step's weights. Fix: remove it"),
    ("--vllm-restart-interval 2 --prompts_per_step 8", "--vllm-restart-interval: can't be combined with"
        " prompts_per_step. Fix: use --batch-size and --gradient-accumulation-steps instead of prompts_per_step"),
    ("--batch-size 4 --per_device_train_batch_size 4", "--batch-size: sets the same key as"
        " --per_device_train_batch_size. Fix: remove one of them"),
]  # fmt: skip
# Rejected flag -> its fix.
_ADAFACTOR = "remove it; transformers' Trainer runs Adafactor without it, with --lr"
_DISTRIBUTED = "remove it; Atropos' trainer ignores it too. num_processes is the number of training processes"
GONE = {
    "--vllm-gpu 1": "remove it; the server uses the first GPU of CUDA_VISIBLE_DEVICES, and with shared_vllm the first "
    "trainer uses it too",
    "--adafactor-scale-parameter": _ADAFACTOR,
    "--adafactor-relative-step": _ADAFACTOR,
    "--train-layer-indices 0-3,28-31": "remove it; all layers are trained, or with --weight-bridge-mode lora_only "
    "the layers of --lora-target-modules",
    "--lora-layer-indices 20-31": "use the layers' names, e.g. --lora-target-modules layers.20.self_attn.q_proj",
    "--trainer-rank 0": _DISTRIBUTED,
    "--world-size 1": _DISTRIBUTED,
    "--init-method env://": _DISTRIBUTED,
    "--num-inference-nodes 0": _DISTRIBUTED,
    "--port 9001": "use --vllm-port for the server, or --atropos_port for run-api",
}
# Flags with a separate test.
ELSEWHERE = {"--device", "--log-dir", "--single-copy", "--vllm-config-path", "--debug-loading", "--enable-lora",
    "--max-lora-rank", "--enforce-eager"}  # fmt: skip


@pytest.mark.parametrize(("flag", "keys"), CHANGES, ids=lambda value: str(value)[:50])
def test_a_flag_changes_the_recipe(flag: str, keys: dict[str, Any]) -> None:
    usual, recipe = resolved(), resolved(*shlex.split(flag))
    assert {key: recipe[key] for key in keys} == keys
    changed = {key for key in catalogue() if recipe[key] != usual[key]}
    assert changed == set(keys)


@pytest.mark.parametrize(("flag", "keys"), OF_ADAPTERS, ids=lambda value: str(value)[:50])
def test_a_flag_of_adapters_changes_theirs(flag: str, keys: dict[str, Any]) -> None:
    usual, recipe = resolved(*LORA), resolved(*LORA, *shlex.split(flag))
    assert {key: recipe[key] for key in keys} == keys
    assert {key for key in catalogue() if recipe[key] != usual[key]} == set(keys)


@pytest.mark.parametrize(("flag", "message"), WRONG, ids=lambda value: value[:50])
def test_a_wrong_value_is_refused_with_what_to_write(flag: str, message: str) -> None:
    needed = NEEDED[:0] if flag.startswith("--environment ") else NEEDED  # a repeated flag is rejected
    needed_words = [
        word for pair in zip(NEEDED[::2], NEEDED[1::2], strict=True) if pair[0] != "--environment" for word in pair
    ]
    assert refused(*(needed or needed_words), *shlex.split(flag)) == [message]


@pytest.mark.parametrize(("flag", "instead"), GONE.items())
def test_a_flag_without_an_equal_is_refused_with_what_to_do(flag: str, instead: str) -> None:
    name, *value = flag.split()
    assert refused(*NEEDED, name, *value) == [f"{name}: has no equivalent here. Fix: {instead}"]
    if value:
        assert refused(*NEEDED, f"{name}={value[0]}") == [f"{name}: has no equivalent here. Fix: {instead}"]


def test_every_flag_is_tested() -> None:
    tested = {word for flag, _ in (*CHANGES, *OF_ADAPTERS) for word in flag.split() if word.startswith("--")}
    accepted = {row.name for row in FLAGS.rows if not row.rejected}
    assert accepted - tested == ELSEWHERE
    assert {row.name for row in FLAGS.rows if row.rejected} == {flag.split()[0] for flag in GONE}


def test_several_faults_are_said_at_once() -> None:
    assert refused("--world-size", "2", "--port", "1")[0].startswith("--world-size: ")
    assert len(refused("--world-size", "2", "--port", "1")) == 2
    missing, interval, length = refused("--environment", "arithmetic", "--checkpoint-interval", "x", "--seq-len", "y")
    assert missing.startswith("--model-name: is missing.")
    assert "--checkpoint-interval" in length and "--seq-len" in interval


def test_without_a_recipe_the_defaults_are_those_of_the_example_trainer() -> None:
    door = read(*NEEDED)
    recipe = recipe_of(door)
    assert door.options.recipe == str(find_code_root() / BASE)
    expected = {
        "max_steps": 10, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 32, "learning_rate": 1e-5,
        "warmup_steps": 0.0, "lr_scheduler_type": "constant_with_warmup", "optim": "adamw_torch", "epsilon": 0.2,
        "dtype": "bfloat16", "run_root": "trained_model_checkpoints", "save_steps": 3.0, "weight_sync": "restart",
        "use_peft": False, "vllm_server_port": 9001, "vllm_gpu_memory_utilization": 0.45,
        "vllm_max_model_length": 4096, "max_prompt_length": 512, "max_completion_length": 1536, "beta": 0.0,
        "loss_type": "grpo", "steps_per_generation": None, "atropos_api_url": None, "report_to": [],
        "reward_funcs": ["environment"], "vllm_mode": "server",
    }  # fmt: skip
    assert {key: recipe[key] for key in expected} == expected
    assert door.variables == {} and not door.options.benchmark


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("none", {"weight_sync": "restart", "use_peft": False, "dtype": "bfloat16"}),
        ("shared_vllm", {"weight_sync": "shared", "use_peft": False, "dtype": "float32"}),
        ("lora_only", {"weight_sync": "lora", "use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}),
        ("lora_restart", {"weight_sync": "restart", "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}),
        ("auto", {"weight_sync": "auto", "use_peft": False}),
    ],
)
def test_a_mode_is_a_bridge(mode: str, keys: dict[str, Any]) -> None:
    recipe = resolved("--weight-bridge-mode", mode)
    assert {key: recipe[key] for key in keys} == keys


def test_another_mode_is_refused_with_the_modes(capsys) -> None:
    code, _, err = printed(capsys, *NEEDED, "--weight-bridge-mode", "nccl")
    assert code == 2 and "--weight-bridge-mode: invalid choice: 'nccl'" in err
    assert all(f"'{mode}'" in err for mode in ("none", "shared_vllm", "lora_only", "lora_restart", "auto"))
    assert resolved("--weight_sync", "nccl")["weight_sync"] == "nccl"  # a recipe key


def test_single_copy_is_shared_vllm() -> None:
    door = read(*NEEDED, "--single-copy")
    assert recipe_of(door)["weight_sync"] == "shared"
    assert "--single-copy means --weight-bridge-mode shared_vllm" in door.notes
    assert resolved("--single-copy", "--weight-bridge-mode", "shared_vllm")["weight_sync"] == "shared"


def test_room_for_adapters_must_be_enough_and_changes_nothing() -> None:
    """M10: the guide's server has --max-lora-rank 32 and its trainer --lora-r 16."""
    door = read(*NEEDED, *LORA, "--max-lora-rank", "32", "--lora-r", "16")
    assert recipe_of(door)["lora_r"] == 16
    assert "--max-lora-rank 32 has no effect: the server has room for --lora-r 16" in door.notes
    assert refused(*NEEDED, *LORA, "--max-lora-rank", "8") == [
        "--max-lora-rank: is 8, below --lora-r 16. Fix: set --max-lora-rank 16, or remove it"
    ]
    assert refused(*NEEDED, "--max-lora-rank", "32") == [
        "--max-lora-rank: does nothing with --weight-bridge-mode none. Fix: write --weight-bridge-mode lora_only, or "
        "leave it out"
    ]
    assert "integer" in refused(*NEEDED, *LORA, "--max-lora-rank", "x")[0]


def test_flags_of_their_server_say_what_happens_anyway_or_are_refused(machine, monkeypatch, tmp_path) -> None:
    assert recipe_of(read(*NEEDED, *LORA, "--enable-lora"))["weight_sync"] == "lora"
    assert recipe_of(read(*NEEDED, "--enforce-eager"))["vllm_enforce_eager"] is True  # R13


def test_a_bridge_configuration_must_exist_and_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "bridge.json").touch()
    door = read(*NEEDED, "--weight-bridge-mode", "shared_vllm", "--vllm-config-path", "bridge.json")
    assert any(note.startswith("--vllm-config-path bridge.json changes nothing: ") for note in door.notes)
    assert recipe_of(door)["weight_sync"] == "shared"


def test_the_device_is_that_of_the_environment(machine) -> None:
    usual = read(*NEEDED).options.words()
    assert read(*NEEDED, "--device", "cuda").options.words() == usual
    machine(None)
    door = read(*NEEDED, "--device", "cpu")
    assert {key: recipe_of(door)[key] for key in ("dtype", "bf16")} == {"dtype": "float32", "bf16": False}
    assert refused(*NEEDED, "--device", "cuda:1")[0].endswith("create another environment: make setup DEVICE=cuda")


def test_one_gpu_is_shared_or_refused(machine) -> None:
    machine(1)
    assert refused(*NEEDED) == [
        "--weight-bridge-mode: separate server and trainer need two GPUs, only one is visible. Fix: set "
        "--weight-bridge-mode shared_vllm to share the GPU, or request more GPUs"
    ]
    assert recipe_of(read(*NEEDED, "--single-copy"))["weight_sync"] == "shared"


@pytest.mark.parametrize(("gpus", "sequences", "trainers"), [(2, 64, "1 trainer"), (4, 192, "3 trainers")])
def test_what_is_registered_is_batch_by_accumulation_by_processes(machine, gpus, sequences, trainers) -> None:
    machine(gpus)
    (note,) = [note for note in read(*NEEDED).notes if note.startswith("registers ")]
    assert note == (
        f"registers {sequences} sequences at run-api, {sequences // 8} groups of 8: 2 a forward pass x 32 accumulated "
        f"x {trainers}"
    )
    (note,) = [note for note in read(*NEEDED, "--vllm-restart-interval", "3").notes if note.startswith("registers ")]
    assert note.startswith(f"registers {3 * sequences} sequences at run-api") and note.endswith(f"{trainers} x 3 steps")


def test_groups_that_do_not_divide_the_batch_are_refused_before_anything_starts(machine, capsys) -> None:
    machine(2)
    code, out, err = printed(capsys, *NEEDED, "--env.group_size", "7")
    assert code == 2 and out == ""
    assert "grpo: --env.group_size: 64 completions per generation (1 x 2 per device x accumulation)" in err
    assert "are not whole groups of 7" in err
    assert read(*NEEDED, "--env.group_size", "16").options.keys


def test_the_launch_says_who_starts_run_api() -> None:
    assert "no --atropos-url: the launch starts its own run-api" in read(*NEEDED).notes
    door = read(*NEEDED, "--atropos-url", URL)
    assert not any("--atropos-url" in note for note in door.notes)
    alone = read("--model-name", "smoke:sums", "--atropos-url", URL)  # the environments run elsewhere
    assert recipe_of(alone)["atropos_environment"] is None


def test_a_run_api_that_does_not_answer_is_named_before_anything_starts(machine, capsys, tmp_path) -> None:
    machine(None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, _, err = printed(capsys, "--model-name", "smoke:sums", "--atropos-url", url)
    assert code == 2 and err == (
        f"grpo: --atropos-url: Atropos API not reachable at {url}. "
        "Fix: start it with run-api --port PORT, or remove --atropos-url: the launch starts one\n"
    )
    assert not (tmp_path / "trained_model_checkpoints").exists()
    assert printed(capsys, "--model-name", "smoke:sums", "--atropos-url", url, "--dry-run")[0] == 0


def test_something_must_send_groups(tmp_path: Path) -> None:
    message = (
        "--environment: is missing: nothing would send groups. Fix: set --environment arithmetic or dataset or "
        "file.py:Class, or --atropos-url URL of a run-api with your environments"
    )
    assert refused("--model-name", "smoke:sums") == [message]
    assert refused("--config", str(find_code_root() / "recipes/smoke/grpo.yaml")) == [message]


def test_an_own_environment_is_a_class_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_server.py").write_text("class GSM8kEnv:\n    pass\n")
    assert refused("--model-name", "smoke:sums", "--environment", "gsm8k_server.py") == [
        "--environment: unknown Atropos environment 'gsm8k_server.py'. Fix: set gsm8k_server.py:Class, with "
        "the name of the class"
    ]
    recipe = recipe_of(read("--model-name", "smoke:sums", "--environment", "gsm8k_server.py:GSM8kEnv"))
    assert recipe["atropos_environment"] == "gsm8k_server.py:GSM8kEnv"
    (message,) = refused("--model-name", "smoke:sums", "--environment", "none.py:Env")
    assert message.startswith("--environment: ")


def test_the_model_is_required() -> None:
    assert refused("--environment", "arithmetic") == [
        "--model-name: is missing. Fix: set --model-name to a hub id or a folder, or export MODEL"
    ]
    assert recipe_of(read("--model", "a/b", "--environment", "dataset"))["model_name_or_path"] == "a/b"


def test_a_named_recipe_has_its_own_defaults(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.yaml").write_text(
        "model_name_or_path: smoke:sums\natropos_environment: arithmetic\nreward_funcs: [environment]\nmax_steps: 5\n"
        "prompts_per_step: 4\nnum_generations: 4\nuse_vllm: true\ndtype: float32\nmax_prompt_length: 32\n"
    )
    door = read("--config", "mine.yaml", "--lr", "3e-6")
    assert door.options.recipe == "mine.yaml" and door.options.words() == ["--learning_rate", "3e-6"]
    door = read("--config", "mine.yaml", *LORA, "--lora-r", "8")
    flags = ["--weight_sync", "lora", "--use_peft", "true", "--lora_r", "8"]
    assert door.options.words() == flags
    monkeypatch.setenv("CONFIG", "mine.yaml")
    assert read().options.recipe == "mine.yaml" and read().options.words() == []
    assert refused("--config", "none.yaml")[0].startswith("--config: recipe 'none.yaml' not found.")
    assert refused("mine.yaml") == ["'mine.yaml': is not a flag. Fix: use --config mine.yaml for a recipe"]


def test_the_yaml_of_verls_integration_is_a_recipe(tmp_path: Path) -> None:
    text = "atropos: {api_url: 'http://a:1'}\nactor_rollout_ref: {model: {path: 'smoke:sums'}}\n"
    (tmp_path / "theirs.yaml").write_text(text + "trainer: {total_epochs: 7}\ndata: {train_batch_size: 64}\n")
    recipe = recipe_of(read("--config", "theirs.yaml", "--training-steps", "3"))
    assert (recipe["atropos_api_url"], recipe["max_steps"], recipe["prompts_per_step"]) == ("http://a:1", 3, 8)


def test_a_resumed_run_goes_on_as_it_began(monkeypatch) -> None:
    monkeypatch.setenv("MODEL", "a/b")
    door = read("--resume", "last")
    assert (door.options.resume, door.options.recipe, door.options.words(), door.notes) == ("last", None, [], [])
    assert read("--resume", "last", "--training-steps", "20").options.words() == ["--max_steps", "20"]


def test_the_last_run_is_that_of_the_save_path(monkeypatch) -> None:
    assert read("--resume", "last").variables == {"RUN_ROOT": "trained_model_checkpoints"}
    door = read("--resume", "last", "--save-path", "there")
    assert (door.variables, door.options.words()) == ({"RUN_ROOT": "there"}, [])
    assert read("--resume", "last", "--run_root", "there").variables == {}
    assert read("--resume", "some/run").variables == {}
    monkeypatch.setenv("RUN_ROOT", "elsewhere")
    assert read("--resume", "last").variables == {"RUN_ROOT": "elsewhere"}


def test_options_of_launch_are_handed_on() -> None:
    options = read(*NEEDED, "--dry-run", "--benchmark", "--allow-changed-code", "--task", "grpo").options
    assert options.dry_run and options.benchmark and options.allow_changed_code and options.task == "grpo"


def test_a_misspelt_flag_is_answered_with_the_right_one() -> None:
    (message,) = refused(*NEEDED, "--training-step", "3")
    assert message == "--training-step: is not an option of atropos_grpo.py. Fix: use --training-steps"


def test_a_flag_and_its_key_are_given_once_and_a_key_replaces_a_default() -> None:
    assert resolved("--max_steps", "3")["max_steps"] == 3
    assert resolved("--weight-decay", "0.1")["weight_decay"] == 0.1
    assert resolved("--max_prompt_length", "100")["max_prompt_length"] == 100
    assert resolved("--use_peft", "true")["weight_sync"] == "auto"  # a key about adapters: no default mode is added


def test_variables_of_the_launch_win_over_defaults_and_lose_to_flags(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "9300")
    monkeypatch.setenv("RUN_ROOT", "elsewhere")
    recipe = resolved()
    assert (recipe["vllm_server_port"], recipe["run_root"]) == (9300, "elsewhere")
    assert resolved("--vllm-port", "9400", "--save-path", "there")["run_root"] == "there"


def test_in_a_slurm_job_the_server_has_a_port_of_the_job(machine, capsys) -> None:
    machine(4, job=True)
    assert not resolved().is_set("vllm_server_port")
    assert resolved("--vllm-port", "9001")["vllm_server_port"] == 9001


def test_a_port_that_is_taken_is_refused_and_named(machine, capsys) -> None:
    machine(None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, err = printed(capsys, *NEEDED, "--vllm-port", str(port))
    assert code == 2 and err.endswith(
        f"grpo: --vllm-port: port {port} is in use by another process (pid {os.getpid()}). "
        "Fix: free it, or set another --vllm-port\n"
    )


def test_a_dry_run_shows_every_process_and_starts_nothing(machine, capsys, tmp_path, monkeypatch) -> None:
    machine(None)
    monkeypatch.setattr(subprocess, "Popen", None)
    code, out, err = printed(capsys, *NEEDED, *LORA, "--training-steps", "4", "--dry-run")
    assert code == 0 and not (tmp_path / "trained_model_checkpoints").exists()
    first = next(line for line in (out + err).splitlines() if line.startswith("grpo: grpo launch "))
    assert "--weight_sync lora --use_peft true" in first and "--max_steps 4" in first and first.endswith("--dry-run")
    for name in ("run-api", "server", "trainer", "environment-arithmetic"):
        assert f"\n{name:<10} [" in out, name
    assert '"--port", "9001"' in out and '"--enable-lora", "--max-lora-rank", "16"' in out
    assert "64 sequences (8 groups of 8) a batch" in out
    code, out, _ = printed(capsys, *NEEDED, "--atropos-url", URL, "--dry-run")
    assert code == 0 and "\nrun-api " not in out and f'"--api-url", "{URL}"' in out


def test_logs_land_in_the_folder_that_is_named(machine, capsys, monkeypatch) -> None:
    machine(None)
    _, out, err = printed(capsys, *NEEDED, "--log-dir", "their logs", "--dry-run")
    logs = re.findall(r"^ +log (.*)$", out, re.MULTILINE)
    assert len(logs) == 4 and all(log.startswith("their logs/liv_") for log in logs)
    assert "LOGDIR='their logs' grpo launch" in out + err
    monkeypatch.setenv("LOGDIR", "others")
    assert read(*NEEDED).variables == {"LOGDIR": "others"}
    assert read(*NEEDED, "--log-dir", "mine").variables == {"LOGDIR": "mine"}
    monkeypatch.delenv("LOGDIR")
    _, out, _ = printed(capsys, *NEEDED, "--dry-run")
    assert all(log.startswith("logs/liv_") for log in re.findall(r"^ +log (.*)$", out, re.MULTILINE))


def test_loading_is_logged_where_it_is_asked_for() -> None:
    assert read(*NEEDED, "--debug-loading").variables == {VERBOSITY: "debug"}
    assert read(*NEEDED).variables == {}


# --- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "keys"),
    [
        ("MODEL", "a/b", {"model_name_or_path": "a/b"}),
        ("ATROPOS_API_URL", "http://there:9000", {"atropos_api_url": "http://there:9000"}),
        ("MODEL_PATH", "a/c", {"model_name_or_path": "a/c"}),
        ("OUTPUT_DIR", "there", {"run_root": "there"}),
        ("NUM_GPUS", "3", {"num_processes": 2}),
        ("BATCH_SIZE", "512", {"prompts_per_step": 64}),
        ("MAX_EPOCHS", "40", {"max_steps": 40}),
        ("LORA_RANK", "64", {"use_peft": True, "lora_r": 64, "weight_sync": "lora"}),
        ("LORA_RANK", "0", {"use_peft": False, "weight_sync": "auto"}),
        ("INFERENCE_BACKEND", "vllm", {"use_vllm": True}),
    ],
)
def test_a_variable_changes_the_recipe(monkeypatch, name: str, text: str, keys: dict[str, Any]) -> None:
    variable = VARIABLES.by_name[name]
    monkeypatch.setenv(name, text)
    options = ["--read-variables"] if variable.script else []
    environment = ["--environment", "arithmetic"]
    model = [] if name.startswith("MODEL") else ["--model-name", "smoke:sums"]
    recipe = recipe_of(read(*model, *environment, *options))
    assert {key: recipe[key] for key in keys} == keys
    if variable.script:
        without = recipe_of(read("--model-name", "smoke:sums", *environment))
        assert any(without[key] != value for key, value in keys.items()) or text in ("0", "vllm"), "not without it"


def test_flags_win_over_variables(monkeypatch) -> None:
    for name, text in {
        "MODEL": "a/b", "MODEL_PATH": "a/c", "OUTPUT_DIR": "there", "MAX_EPOCHS": "40", "LOGDIR": "x",
        "ATROPOS_API_URL": "http://there:9000",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, text)
    door = read(*NEEDED, "--read-variables", "--atropos-url", URL, "--save-path", "here", "--training-steps", "3")
    recipe = recipe_of(door)
    assert [recipe[key] for key in ("model_name_or_path", "atropos_api_url", "run_root", "max_steps")] == [
        "smoke:sums", URL, "here", 3
    ]  # fmt: skip
    assert not any(" sets --" in note and "LOGDIR" not in note for note in door.notes)
    assert recipe_of(read("--environment", "arithmetic"))["model_name_or_path"] == "a/b"
    assert "MODEL=a/b sets --model-name" in read("--environment", "arithmetic").notes


def test_the_script_has_the_defaults_of_verls() -> None:
    recipe = recipe_of(read("--read-variables", "--environment", "arithmetic"))
    expected = {
        "model_name_or_path": "Qwen/Qwen2.5-3B-Instruct", "prompts_per_step": 128, "num_generations": 8,
        "max_steps": 100, "use_peft": False, "weight_sync": "auto", "num_processes": None,
    }  # fmt: skip
    assert {key: recipe[key] for key in expected} == expected
    door = read("--read-variables", "--environment", "arithmetic")
    (note,) = [note for note in door.notes if note.startswith("registers ")]
    assert note.startswith("registers 1024 sequences at run-api, 128 groups of 8: ")


def test_the_batch_of_the_variable_is_whole_groups_and_gives_way_to_flags(monkeypatch) -> None:
    script = ("--read-variables", *NEEDED)
    monkeypatch.setenv("BATCH_SIZE", "1000")
    assert refused(*script, "--num_generations", "7") == [
        "BATCH_SIZE: must be a multiple of num_generations 7, got 1000: run-api would hand out no batch. "
        "Fix: export BATCH_SIZE=1001, or set another --num_generations"
    ]
    door = read(*script, "--batch-size", "4")
    assert recipe_of(door)["prompts_per_step"] is None and recipe_of(door)["per_device_train_batch_size"] == 4
    assert "BATCH_SIZE=1000 is ignored because --batch-size is set" in door.notes
    assert recipe_of(read(*script, "--prompts_per_step", "5"))["prompts_per_step"] == 5
    monkeypatch.setenv("BATCH_SIZE", "lots")
    assert refused(*script) == [
        "BATCH_SIZE: must be an integer of at least 1, got 'lots'. Fix: export e.g. BATCH_SIZE=2"
    ]


def test_the_gpus_of_the_variable_are_those_of_server_and_trainers(machine, monkeypatch, capsys) -> None:
    script = ("--read-variables", *NEEDED)
    monkeypatch.setenv("NUM_GPUS", "8")
    assert refused(*script) == [
        "NUM_GPUS: 8 GPUs are requested, but only 4 are visible. "
        "Fix: export NUM_GPUS=4, or request more: sbatch --gres=gpu:8 run_atropos_grpo.sh"
    ]
    door = read(*script, "--dry-run")
    assert recipe_of(door)["num_processes"] == 7 and len(door.resources.gpus) == 8
    monkeypatch.setenv("NUM_GPUS", "4")
    assert recipe_of(read(*script, "--weight-bridge-mode", "shared_vllm", "--dtype", "float32"))["num_processes"] == 4
    assert recipe_of(read(*script, "--vllm_tensor_parallel_size", "2"))["num_processes"] == 2
    monkeypatch.setenv("NUM_GPUS", "1")
    assert refused(*script) == [
        "NUM_GPUS: 1 leaves no GPU for training: the server uses 1. Fix: export NUM_GPUS=2, or more"
    ]
    machine(None)
    door = read(*script)
    assert recipe_of(door)["num_processes"] is None
    assert "NUM_GPUS=1 is ignored in a CPU environment" in door.notes


def test_an_adapters_rank_and_a_mode_must_agree(monkeypatch) -> None:
    monkeypatch.setenv("LORA_RANK", "16")
    script = ("--read-variables", *NEEDED)
    assert refused(*script, "--weight-bridge-mode", "none") == [
        "LORA_RANK: is 16, but --weight-bridge-mode none trains all weights. "
        "Fix: set --weight-bridge-mode lora_only or lora_restart"
    ]
    recipe = recipe_of(read(*script, "--weight-bridge-mode", "lora_restart"))
    assert (recipe["weight_sync"], recipe["lora_r"]) == ("restart", 16)
    assert recipe_of(read(*script, "--lora-r", "8"))["lora_r"] == 8  # the flag wins


def test_another_backend_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("INFERENCE_BACKEND", "sglang")
    assert refused("--read-variables", *NEEDED) == [
        "INFERENCE_BACKEND: 'sglang' has no equivalent here. "
        "Fix: export INFERENCE_BACKEND=vllm, or unset it: environments sample from a vLLM server"
    ]
    assert read(*NEEDED)  # variables count only with --read-variables


def test_shared_weights_need_no_variable_and_contradict_its_opposite(monkeypatch) -> None:
    name = "VLLM_ENABLE_SHARED_WEIGHTS"
    assert resolved("--weight-bridge-mode", "shared_vllm")["weight_sync"] == "shared"
    monkeypatch.setenv(name, "1")
    assert resolved("--weight-bridge-mode", "shared_vllm")["weight_sync"] == "shared"
    assert f"{name} 1 changes nothing: --weight-bridge-mode shared_vllm is not set" in read(*NEEDED).notes
    monkeypatch.setenv(name, "0")
    assert refused(*NEEDED, "--weight-bridge-mode", "shared_vllm") == [
        f"{name}: is 0, but --weight-bridge-mode shared_vllm shares weights. Fix: export {name}=1, or unset it"
    ]
    assert not any(name in note for note in read(*NEEDED).notes)


# --- flags of an environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    [
        "--env.tokenizer_name smoke:sums", "--openai.model_name smoke:sums", "--env.use_wandb=False",
        "--openai.server_type vllm", "--openai.base_url http://localhost:9001/v1",
    ],
)  # fmt: skip
def test_what_the_launch_says_to_its_environment_anyway_changes_nothing(flag: str) -> None:
    usual, door = read(*NEEDED), read(*NEEDED, *flag.split())
    assert door.options.words() == usual.options.words()
    (note,) = [note for note in door.notes if note.startswith(flag.partition("=")[0].split()[0])]
    assert note.endswith(" changes nothing: the launch passes the same value to its environments")


# Flags that are accepted only with the value that the launch passes.
OTHER_VALUES = ("--env.tokenizer_name", "--env.use_wandb", "--openai.model_name", "--openai.base_url",
    "--openai.server_type")  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--env.tokenizer_name a/b", "remove it; the tokenizer of --model-name is used"),
        ("--env.use_wandb True", "use --use-wandb: only the trainer reports to W&B"),
        ("--env.max_token_length 100", "use --seq-len"),
        ("--env.rollout_server_url http://localhost:8001", "use --atropos-url"),
        ("--env.total_steps 10", "use --training-steps"),
        ("--env.batch_size 10", "use --batch-size and --gradient-accumulation-steps"),
        ("--env.chat_template_kwargs {}", "use --chat_template_kwargs"),
        ("--env.inference_weight 2", "set atropos_mixture in a recipe, with the weight of each environment"),
        ("--env.min_batch_allocation 0.5", "set atropos_mixture in a recipe, with the min_allocation of each "
            "environment"),
        ("--env.wandb_name x", "remove it; an environment is named after its class"),
        ("--openai.model_name a/b", "remove it; the server serves --model-name"),
        ("--openai.base_url http://localhost:9004/v1", "use --vllm-port: the launch starts the server and passes its "
            "address to the environments"),
        ("--openai.server_type sglang", "set vllm, or remove it: environments sample from a vLLM server"),
        ("--openai.api_key x", "remove it; the launch passes the token to its environments. For an environment that "
            "you start yourself, use atropos_serve.yaml"),
        ("--openai.timeout 3", "remove it: the launch starts the server and passes its address to the environments"),
        ("--server.port 8001", "remove it; Atropos' environments ignore it too. The launch passes run-api's URL to "
            "its environments. For an environment that you start yourself, use --env.rollout_server_url URL"),
    ],
)  # fmt: skip
def test_what_the_launch_says_itself_is_refused(flag: str, fix: str) -> None:
    name, value = flag.split()
    subject = f"'{value}' " if name in OTHER_VALUES else ""
    assert refused(*NEEDED, name, value) == [f"{name}: {subject}has no equivalent here. Fix: {fix}"]


def test_every_field_of_the_table_is_tested() -> None:
    marks = [
        mark
        for test in (test_what_the_launch_says_itself_is_refused,)
        for mark in test.pytestmark  # type: ignore[attr-defined]
    ]
    tested = {flag.split()[0] for mark in marks for flag, _ in mark.args[1]}
    changed = {word for flag, _ in CHANGES for word in flag.split()}
    assert set(FIELDS.by_name) <= tested | changed


def test_a_field_needs_a_value_and_an_environment() -> None:
    assert refused(*NEEDED, "--env.max_num_workers") == [
        "--env.max_num_workers: has no value. Fix: set --env.max_num_workers VALUE"
    ]
    assert refused(*NEEDED, "--env.max_num_workers", "[3") == [
        "--env.max_num_workers: '[3' is not valid YAML. Fix: quote it as YAML requires"
    ]
    assert refused("--model-name", "smoke:sums", "--atropos-url", URL, "--env.max_num_workers", "3") == [
        "--env.max_num_workers: is a field of an environment, but --environment is missing. Fix: add --environment"
    ]


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_names_every_flag_and_variable_with_its_default(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        atropos.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert told.startswith("usage: python src/atropos_grpo.py --model-name MODEL [options]")
    for word in ("python -m example_trainer.grpo", "vllm_api_server.py", "`run-api`", "docs/atropos.md"):
        assert word in told, word
    for row in FLAGS.rows:
        assert all(f"{name} " in told for name in row.names), row.names
        assert row.default is None or f"(default {row.default})" in told, row.names
        about = row.help or row.fix
        assert " ".join(about.split()[:6]) in told or "-" in about, row.names
    for row in VARIABLES.rows:
        assert f"{row.name} {row.help}" in told
    golden = {
        "--training-steps VALUE optimizer steps (default 10)",
        "--lr VALUE learning rate (default 1e-5)",
        "--lora-r VALUE rank of the adapter (default 16)",
        "--weight-bridge-mode {none,shared_vllm,lora_only,lora_restart,auto}",
        "MODEL_PATH the model (default Qwen/Qwen2.5-3B-Instruct)",
    }
    assert [line for line in golden if line not in told] == []


def test_no_default_of_the_help_differs_from_what_is_taken() -> None:
    full, adapters = resolved(), resolved(*LORA)
    for row in FLAGS.rows:
        if row.sets and row.default is not None:
            key = next(iter(row.sets))
            value = (adapters if row.needs else full)[key]
            default = row.values.get(row.default, {}).get(key, row.default)
            assert value == (default.split() if row.type == "words" else type(value)(default)), row.name


def test_tables_of_the_page_have_every_flag_and_variable() -> None:
    assert [name.split(", ")[0] for name, _, _ in list_flag_rows()][: len(FLAGS.rows)] == [
        f"`{row.name}`" for row in FLAGS.rows
    ]
    assert {f"`{name}`" for name in FIELDS.by_name} <= {name for name, _, _ in list_flag_rows()}
    assert [name for name, _, _ in list_variable_rows()] == [f"`{row.name}`" for row in VARIABLES.rows]
    assert all(about for _, _, about in (*list_flag_rows(), *list_variable_rows()))


@pytest.mark.slow
def test_no_flag_of_the_example_trainer_is_forgotten() -> None:
    pytest.importorskip("torch")
    trainer_cli = pytest.importorskip("example_trainer.cli")
    parser: argparse.ArgumentParser = trainer_cli.create_full_parser()
    names = {name for action in parser._actions for name in action.option_strings} - {"-h", "--help"}
    known_flags = {*FLAGS.by_name, "--benchmark"}  # an option of grpo launch
    assert names <= known_flags
