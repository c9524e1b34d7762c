"""The plan of a run: devices, ports, argv and environment of every process."""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import Assets
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import find_accelerate_file, format_plan, with_sources
from grpo_recipes.plan.types import Process
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.check import choose_recipe
from grpo_recipes.slurm.client import SlurmJob
from grpo_recipes.smoke import smoke_folder

from .model_folders import QWEN_7B, model_folder

ROOT = Path(__file__).parents[2]
MATH = ROOT / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"
SMOKE = ROOT / "recipes/smoke/grpo.yaml"
UUIDS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")
MIGS = ("MIG-aaaa", "MIG-bbbb")


def trl_file(name: str) -> str:
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    return str(Path(folder) / "accelerate_configs" / f"{name}.yaml")


@pytest.mark.parametrize(
    ("gpus", "parallel", "server", "trainers"),
    [
        (("0", "1"), 1, ("0",), ("1",)),
        (("0", "1", "2", "3"), 1, ("0",), ("1", "2", "3")),
        (("0", "1", "2", "3"), 2, ("0", "1"), ("2", "3")),
        (("3", "1", "0", "2"), 1, ("3",), ("1", "0", "2")),
        (UUIDS, 1, ("GPU-aaaa",), ("GPU-bbbb", "GPU-cccc")),
        (MIGS, 1, ("MIG-aaaa",), ("MIG-bbbb",)),
    ],
)
def test_the_first_gpus_serve_and_the_rest_train(planned, option, gpus, parallel, server, trainers):
    plan = planned(gpus=gpus, vllm_tensor_parallel_size=parallel)
    assert plan.mode == "server"
    assert [process.role for process in plan.processes] == ["server", "trainer"]
    for role, devices in (("server", server), ("trainer", trainers)):
        process = plan.process(role)
        assert process.gpus == devices
        assert process.environment["CUDA_VISIBLE_DEVICES"] == ",".join(devices)
    assert option(plan.process("trainer").argv, "--num_processes") == str(len(trainers))
    assert ("--tensor-parallel-size" in plan.process("server").argv) == (parallel > 1)
    assert plan.unused_gpus == ()


def test_an_environment_without_trl_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"trl is not installed\. Fix: run make setup"):
        find_accelerate_file("zero2", {})


def test_one_gpu_means_colocate_without_a_server(planned, option):
    plan = planned(gpus=("0",))
    assert (plan.mode, plan.bridge, plan.process("server")) == ("colocate", None, None)
    shown = format_plan(plan, argv=False).splitlines()
    assert "vllm       colocate (no server: vLLM is inside the trainers)" in shown
    assert f"ports      trainers {plan.ports.main_process}" in shown
    argv = plan.process("trainer").argv
    assert plan.process("trainer").gpus == ("0",)
    assert option(argv, "--vllm_mode") == "colocate"
    assert option(argv, "--vllm_gpu_memory_utilization") == "0.3"


def test_colocate_trains_on_all_gpus_with_the_memory_the_user_gave(planned, option):
    plan = planned(vllm_mode="colocate", vllm_gpu_memory_utilization=0.4)
    assert plan.process("trainer").gpus == ("0", "1", "2", "3")
    assert plan.process("server") is None
    assert option(plan.process("trainer").argv, "--vllm_gpu_memory_utilization") == "0.4"


def test_trainers_with_vllm_inside_get_what_a_server_on_cpu_gets(planned, option):
    keys = {
        "vllm_mode": "colocate",
        "num_processes": 2,
        "max_prompt_length": 32,
        "max_completion_length": 8,
        "vllm_max_model_length": None,
    }
    plan = planned(device="cpu", environment={"VLLM_PLUGINS": "mine"}, **keys)
    (trainer,) = plan.processes
    assert (plan.mode, plan.bridge, plan.threads) == ("colocate", None, 4)  # no core is kept for a server
    assert option(trainer.argv, "--vllm_max_model_length") == "40"
    names = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_PLUGINS", "TORCHDYNAMO_DISABLE")
    assert [trainer.environment.get(name) for name in names] == ["1", "1", "mine,grpo_recipes", "1"]
    assert "GRPO_SERVER" not in trainer.environment

    compiled = planned(device="cpu", torch_compile=True, **keys).process("trainer")
    assert "TORCHDYNAMO_DISABLE" not in compiled.environment
    assert "GRPO_HIDDEN_PACKAGES" not in compiled.environment
    assert compiled.environment["OMP_NUM_THREADS"] == option(compiled.argv, "--num_cpu_threads_per_process") == "4"
    apart = planned(device="cpu", **{**keys, "vllm_mode": "server"})
    assert apart.threads == 3 and "VLLM_CPU_KVCACHE_SPACE" not in apart.process("trainer").environment
    on_gpus = planned(vllm_mode="colocate").process("trainer").environment
    assert on_gpus["VLLM_NO_USAGE_STATS"] == "1" and not {*names[2:], names[0]} & on_gpus.keys()


def test_a_kv_cache_on_cpu_has_room_for_twice_the_sequences_that_the_server_generates_at_the_same_time(
    planned, option, tmp_path
):
    """In vLLM the variable, which every server gets, overrides the flag. server/serve.py removes it."""
    layers, heads, head_size, element = 4, 2, 128, 4
    model = model_folder(tmp_path, QWEN_7B | {"num_hidden_layers": layers, "num_key_value_heads": heads})
    keys = {"model_name_or_path": model, "dtype": "float32", "bf16": False, "device": "cpu"}

    def planned_cache(length, sequences, **changes):
        return planned(**keys, vllm_max_model_length=length, vllm_max_num_seqs=sequences, **changes).kv_cache_bytes

    token = 2 * layers * heads * head_size * element
    assert planned_cache(1000, 40) == 2 * 40 * 1024 * token  # 8 blocks of 128 tokens for each sequence
    assert planned_cache(1000, 40, vllm_args={"block_size": 1024}) == 2 * 40 * 1024 * token
    assert planned_cache(1100, 20, vllm_args={"block_size": 1024}) == 2 * 20 * 2048 * token
    assert planned_cache(1000, 40, vllm_args={"kv_cache_memory_bytes": None}) == 2 * 40 * 1024 * token
    assert planned_cache(1000, 1) == 64 * 2**20
    assert planned_cache(8000, 200) == 2**30
    assert planned_cache(1000, 40, vllm_args={"kv_cache_memory_bytes": 2**29}) == 2**29

    plan = planned(**keys, vllm_max_model_length=1000, vllm_max_num_seqs=40)
    assert option(plan.process("server").argv, "--kv-cache-memory-bytes") == str(plan.kv_cache_bytes)
    exported = {"VLLM_CPU_KVCACHE_SPACE": "7"}
    plan = planned(**keys, environment=exported, vllm_args={"kv_cache_memory_bytes": 2**29})
    server = plan.process("server")
    assert server.argv.count("--kv-cache-memory-bytes") == 1
    assert option(server.argv, "--kv-cache-memory-bytes") == str(2**29)
    assert server.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_vllm_chooses_the_kv_cache_on_gpus_and_inside_trainers(planned):
    assert planned().kv_cache_bytes is None
    plan = planned(device="cpu", vllm_mode="colocate", num_processes=2)
    assert plan.kv_cache_bytes is None


def test_without_vllm_everything_trains(planned):
    plan = planned(use_vllm=False)
    assert (plan.mode, plan.bridge, plan.process("server")) == ("transformers", None, None)
    assert plan.process("trainer").gpus == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("resources", "keys", "message"),
    [
        ({"gpus": ("0",)}, {"vllm_mode": "server"}, "vllm_mode: colocate"),
        ({"gpus": ()}, {}, "--gres"),
        (
            {"gpus": ("0", "1", "2")},
            {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2, "prompts_per_step": 3},
            "does not divide the 3 trainers that would share one vLLM. Fix: set vllm_tensor_parallel_size: 1, or",
        ),
        ({"gpus": ("0", "1")}, {"vllm_tensor_parallel_size": 2}, "leaves no GPU to train on"),
        ({"gpus": ("0", "1")}, {"vllm_tensor_parallel_size": 3}, "set vllm_tensor_parallel_size: 1"),
        ({"gpus": ("0", "1", "2")}, {"num_processes": 3}, "exceeds the 2 GPUs"),
        ({}, {"accelerator": "single", "num_processes": 2}, "accelerator: single runs one process"),
        (
            {"device": "cpu"},
            {"vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
            "vLLM can't sleep on CPU: .* remove vllm_enable_sleep_mode",
        ),
        ({"device": "cpu"}, {"weight_sync": "nccl"}, "weight_sync: file"),
        ({"environment": {"CONFIG_FILE": "/no/such.yaml"}}, {}, "CONFIG_FILE"),
        ({"environment": {"VLLM_MODEL": "other/model"}}, {}, "VLLM_MODEL"),
        ({"device": "cpu"}, {"model_name_or_path": "smoke:nothing"}, "smoke:sums"),
        ({}, {"reward_funcs": ["nothing"]}, "unknown reward 'nothing'"),
    ],
)
def test_what_the_machine_cannot_do_is_refused_with_the_way_out(planned, resources, keys, message):
    with pytest.raises(ConfigError, match=message):
        planned(**resources, **keys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "parallelism_config:\n  parallelism_config_cp_size: 2\n",
            "parallelism_config_cp_size 2 in .* splits sequences",
        ),
        (
            "parallelism_config:\n  parallelism_config_sp_size: 4\n",
            "parallelism_config_sp_size 4 in .* splits sequences",
        ),
        ("a: [", "is not YAML"),
        ("parallelism_config:\n  parallelism_config_cp_size: 1\n  parallelism_config_dp_shard_size: 2\n", None),
    ],
)
def test_an_accelerate_file_that_splits_sequences_is_refused(planned, tmp_path, text, message):
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    refused = pytest.raises(ConfigError, match=message) if message else nullcontext()
    with refused:
        planned(environment={"CONFIG_FILE": str(file)})


@pytest.mark.parametrize(
    ("accelerator", "trainers", "name"),
    [
        ("auto", 1, "single_gpu"),
        ("auto", 3, "multi_gpu"),
        ("single", 1, "single_gpu"),
        ("ddp", 3, "multi_gpu"),
        ("ddp", 1, "single_gpu"),
        ("zero2", 3, "zero2"),
        ("zero3", 3, "zero3"),
        ("zero3", 1, "zero3"),
        ("fsdp2", 3, "fsdp2"),
    ],
)
def test_an_accelerator_picks_trls_packaged_file(planned, option, accelerator, trainers, name):
    argv = planned(gpus=("0", "1", "2", "3")[: trainers + 1], accelerator=accelerator).process("trainer").argv
    file = option(argv, "--config_file")
    assert file == trl_file(name)
    assert Path(file).is_file()
    assert option(argv, "--num_processes") == str(trainers)


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize(
    ("keys", "updates_float32"),
    [
        ({}, False),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "auto"}, True),
        ({"dtype": "bfloat16", "use_peft": True}, False),  # adapters are float32
        ({"dtype": "bfloat16", "use_peft": True, "lora_modules_to_save": ["lm_head"]}, True),
    ],
)
def test_accelerator_auto_keeps_float32_weights_on_one_gpu_too(planned, gpus, keys, updates_float32):
    several = "ddp" if gpus > 2 else "single"
    plan = planned(gpus=tuple(map(str, range(gpus))), **keys)
    assert plan.accelerator == ("zero2" if updates_float32 else several)


def test_accelerator_single_uses_one_gpu_and_names_the_idle_ones(planned):
    plan = planned(accelerator="single")
    assert plan.process("trainer").gpus == ("1",)
    assert plan.unused_gpus == ("2", "3")


@pytest.mark.parametrize("gpus", [2, 4, 7, 8])
def test_the_shipped_math_recipe_is_the_same_experiment_on_any_machine(planned, option, gpus):
    plan = planned(recipe=read_recipe(MATH), gpus=tuple(map(str, range(gpus))))
    assert plan.batch.completions == 840
    assert plan.unused_gpus == ()
    argv = plan.process("trainer").argv
    world, each, times = (
        int(option(argv, flag))
        for flag in ("--num_processes", "--per_device_train_batch_size", "--gradient_accumulation_steps")
    )
    assert (world, world * each * times) == (gpus - 1, 840)


def test_gpus_that_nothing_uses_are_named(planned):
    plan = planned(gpus=tuple("01234567"), prompts_per_step=8, num_generations=2)
    assert plan.unused_gpus == ("5", "6", "7")
    assert "GPU 5, 6, 7 is unused" in plan.notes
    used = "4 of 7 trainers are used: no larger number divides the batch; prompts_per_step: 7 (now 8) uses all"
    assert used in plan.notes
    assert planned(gpus=tuple("01234567"), prompts_per_step=7, num_generations=2).unused_gpus == ()
    least = planned(gpus=tuple("01234567"), prompts_per_step=2, num_generations=4).notes
    assert any(note.endswith("; prompts_per_step: 7 (now 2) uses all") for note in least)


def test_slurms_other_count_of_gpus_is_told_and_the_drivers_used(planned):
    plan = planned(gpus=("0", "1"), job=SlurmJob(7, "c", 1, 4))
    assert any("Slurm reports 4 GPUs, but the driver shows 2" in note for note in plan.notes)
    assert plan.process("trainer").gpus == ("1",)
    assert planned(gpus=("0", "1"), job=SlurmJob(7, "c", 1, 2)).notes == []


@pytest.mark.parametrize(
    ("variable", "value", "where", "argument"),
    [
        ("VLLM_PORT", "9000", "server --port", "9000"),
        ("VLLM_PORT", "9000", "trainer --vllm_server_port", "9000"),
        ("VLLM_GROUP_PORT", "9001", "trainer --vllm_group_port", "9001"),
        ("MASTER_PORT", "9002", "trainer --main_process_port", "9002"),
        ("VLLM_TP_SIZE", "2", "server --tensor-parallel-size", "2"),
        ("VLLM_TP_SIZE", "2", "trainer --num_processes", "2"),
        ("VLLM_MAX_LEN", "4096", "server --max-model-len", "4096"),
        ("VLLM_MEM_UTIL", ".8", "server --gpu-memory-utilization", "0.8"),
        ("VLLM_MODE", "colocate", "trainer --vllm_mode", "colocate"),
        ("RUN_NAME", "mine", "trainer --run_name", "mine-stamp"),
        ("RUN_ROOT", "/elsewhere", "trainer --output_dir", "/elsewhere/unnamed-stamp/checkpoints"),
        ("ACCELERATOR", "zero3", "trainer --config_file", trl_file("zero3")),
        ("CONFIG_FILE", str(SMOKE), "trainer --config_file", str(SMOKE)),
        ("ACC_TEE", "3", "trainer --tee", "3"),
    ],
)
def test_a_variable_of_the_guide_reaches_the_command(planned, option, variable, value, where, argument):
    role, flag = where.split()
    assert option(planned(environment={variable: value}).process(role).argv, flag) == argument
    plain = planned().process(role).argv
    assert flag not in plain or option(plain, flag) != argument


def test_the_guides_variables_name_the_logs(planned):
    plan = planned(environment={"SERVER_LOG": "/x/serve.log", "TRAINING_LOG": "out/train.log"})
    assert {process.role: process.log for process in plan.processes} == {
        "server": "/x/serve.log",
        "trainer": "out/train.log",
    }
    assert all(process.log.startswith("logs/liv_") for process in planned().processes)


def test_an_output_that_accelerate_does_not_know_is_refused(planned):
    with pytest.raises(ConfigError, match=r"ACC_TEE: expected 0, 1, 2 or 3, got '4'"):
        planned(environment={"ACC_TEE": "4"})


def test_variables_of_the_guide_that_nothing_reads_are_told(planned):
    notes = planned(environment={"GPUS_PER_NODE": "4", "MAX_PROMPT_CHARS": "2048"}).notes
    assert [note.split(" is not read: ")[0] for note in notes] == ["GPUS_PER_NODE", "MAX_PROMPT_CHARS"]
    assert "max_prompt_length" in notes[1] and planned().notes == []


def test_the_seed_variable_reaches_the_frozen_recipe(read):
    assert "seed: 7" in read(variables={"TRAIN_SEED": "7"}).as_yaml()


def test_vllm_tp_size_moves_the_devices(planned):
    plan = planned(environment={"VLLM_TP_SIZE": "2"})
    assert plan.process("server").gpus == ("0", "1")
    assert plan.process("trainer").gpus == ("2", "3")


def test_the_run_name_stands_in_the_logs_names(planned):
    plan = planned(environment={"RUN_NAME": "mine"})
    assert [process.log for process in plan.processes] == [
        "logs/liv_vllm_mine_stamp.log",
        "logs/liv_train_mine_stamp.log",
    ]


OURS = {
    "VLLM_MODEL": "Qwen/Qwen2.5-1.5B-Instruct", "VLLM_PORT": "9000", "VLLM_TP_SIZE": "2", "VLLM_MAX_LEN": "4096",
    "VLLM_MEM_UTIL": "0.8", "VLLM_MODE": "server", "VLLM_GROUP_PORT": "9001", "MASTER_PORT": "9002", "RUN_NAME": "x",
    "ACCELERATOR": "zero2", "TRAIN_SEED": "7", "CONFIG_FILE": str(SMOKE),
}  # fmt: skip


def test_our_variables_stop_at_the_launcher(planned):
    base = base_environment({**OURS, "VLLM_LOGGING_LEVEL": "DEBUG"})
    for process in planned(environment=OURS).processes:
        environment = {**base, **process.environment}
        assert not set(OURS) & set(environment)
        assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_inside_slurm_vllm_gets_an_internal_port_of_the_jobs_block(planned, option):
    plan = planned(job=SlurmJob(7, "c", 1, None))
    server, trainer = plan.process("server"), plan.process("trainer")
    assert (
        option(server.argv, "--port") == option(trainer.argv, "--vllm_server_port") == str(plan.ports.server) == "20070"
    )
    assert server.environment["VLLM_PORT"] == str(plan.ports.vllm_internal)
    assert "VLLM_PORT" not in trainer.environment


def test_a_cpu_plan_uses_the_file_bridge_and_no_gpu(planned, option):
    plan = planned(device="cpu", recipe=read_recipe(SMOKE))
    assert (plan.device, plan.mode, plan.bridge, plan.smoke) == ("cpu", "server", "file", True)
    trainer = plan.process("trainer")
    assert option(trainer.argv, "--use_cpu") == "true"
    assert option(trainer.argv, "--weight_sync") == "file"
    assert option(trainer.argv, "--mixed_precision") == "no"
    for process in plan.processes:
        assert process.gpus == () and process.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_cpu_processes_are_as_many_as_the_recipe_asks_for(planned, option):
    argv = planned(device="cpu", num_processes=2).process("trainer").argv
    assert option(argv, "--num_processes") == "2"
    assert option(argv, "--config_file") == trl_file("multi_gpu")


@pytest.mark.parametrize(
    ("keys", "bridge"), [({}, "nccl"), ({"weight_sync": "file"}, "file"), ({"weight_sync": "nccl"}, "nccl")]
)
def test_the_bridge_between_gpus(planned, option, keys, bridge):
    plan = planned(**keys)
    trainer = plan.process("trainer")
    assert plan.bridge == bridge == option(trainer.argv, "--weight_sync")
    assert trainer.environment.get("GRPO_HIDDEN_PACKAGES") == (None if bridge == "nccl" else "vllm")


@pytest.mark.parametrize(("bridge", "on_loss"), [("nccl", "restart with trainers"), ("file", "restart")])
def test_a_process_says_what_it_starts_after_when_it_is_ready_and_what_its_loss_means(planned, bridge, on_loss):
    server, trainer = planned(weight_sync=bridge).processes
    assert (server.after, server.ready, server.on_loss) == ((), "serving", on_loss)
    assert (trainer.after, trainer.ready, trainer.on_loss) == (("server",), "started", "fail")
    assert trainer.beside == ("server",)
    assert planned(gpus=("0",)).processes[0].after == ()


def test_a_process_is_read_back_from_the_plan_as_json(planned):
    plan = planned()
    assert [
        Process.of_json(process) for process in json.loads(json.dumps(plan.as_json()))["processes"]
    ] == plan.processes


@pytest.mark.parametrize(
    ("keys", "precision"), [({}, "bf16"), ({"bf16": True}, "bf16"), ({"bf16": False}, "no"), ({"fp16": True}, "fp16")]
)
def test_mixed_precision_is_always_passed(planned, option, keys, precision):
    assert option(planned(**keys).process("trainer").argv, "--mixed_precision") == precision


def test_smoke_model_and_data_come_from_the_cache(planned, option, tmp_path):
    plan = planned(device="cpu", recipe=read_recipe(SMOKE))
    folder = smoke_folder("smoke:sums", {"CACHE_ROOT": str(tmp_path / "cache")})
    assert folder.is_relative_to(tmp_path / "cache")
    assert plan.model == option(plan.process("server").argv, "--model") == str(folder / "model")
    assert plan.dataset == option(plan.process("trainer").argv, "--dataset_name") == str(folder / "train.jsonl")
    assert smoke_folder("smoke:sums-tied", {}).name != smoke_folder("smoke:sums", {}).name


def test_a_plan_is_plain_data_and_readable(planned):
    plan = planned()
    data = json.loads(json.dumps(plan.as_json()))
    assert data["batch"]["completions"] == 48
    assert [process["role"] for process in data["processes"]] == ["server", "trainer"]
    text = format_plan(plan)
    for fact in ("recipe.yaml", "48 per step", "8000", "51216", "29525", "nccl", "--served-model-name"):
        assert fact in text
    short = format_plan(plan, argv=False)
    assert "--served-model-name" not in short and "PYTHON" not in short
    assert f"server     log {plan.process('server').log}" in short.splitlines()


def test_a_recipe_is_found_by_argument_then_config_then_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.write_text("")
    assert choose_recipe(str(mine), {"CONFIG": str(SMOKE)}, "grpo", "cpu") == mine
    assert choose_recipe(None, {"CONFIG": str(mine)}, "grpo", "cpu") == mine
    assert choose_recipe(None, {"GRPO_DEFAULT_RECIPE": "1"}, "grpo", "cpu") == SMOKE
    assert choose_recipe(None, {"GRPO_DEFAULT_RECIPE": "1"}, "grpo", "cuda") == MATH
    assert choose_recipe(None, {"GRPO_DEFAULT_RECIPE": "1"}, "maxent", "cpu") == SMOKE.with_name("maxent.yaml")
    assert choose_recipe(None, {"GRPO_DEFAULT_RECIPE": "1"}, "maxent", "cuda") == MATH.parents[1] / "maxent" / MATH.name
    assert choose_recipe("recipes/smoke/grpo.yaml", {}, "grpo", "cpu") == SMOKE


def test_a_recipe_may_be_named_from_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.yaml").touch()
    assert choose_recipe("~/my.yaml", {}, "grpo", "cpu") == tmp_path / "my.yaml"  # of --config=~/my.yaml


@pytest.mark.parametrize(("path", "config", "where"), [("no.yaml", None, "RECIPE"), (None, "no.yaml", "CONFIG")])
def test_a_missing_recipe_is_named_with_where_it_came_from(path, config, where):
    with pytest.raises(ConfigError) as refused:
        choose_recipe(path, {"CONFIG": config} if config else {}, "grpo", "cpu")
    assert refused.value.problems[0].where == where and "'no.yaml'" in refused.value.problems[0].what


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("gpro.yaml", "write recipes/smoke/grpo.yaml"),
        ("runs/grpo.yaml", "write recipes/smoke/grpo.yaml"),
        ("first_rnu", "write first_run.yaml"),
        ("mien.yaml", "write recipes/deep/mine.yaml"),
        (
            "config_mth.yaml",
            "write e.g. recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml, "
            "recipes/Llama-3.1-8B-Instruct/grpo/config_math.yaml, recipes/Qwen2.5-0.5B-Instruct/grpo/config_math.yaml",
        ),
        ("another.yaml", "name a .yaml file in the current folder or under recipes/"),
    ],
)
def test_a_misspelt_file_name_finds_the_recipe_in_whatever_folder(path, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes/deep").mkdir(parents=True)
    for name in ("first_run.yaml", "recipes/deep/mine.yaml"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        choose_recipe(path, {}, "grpo", "cuda")
    assert refused.value.problems[0].fix == fix


def test_the_users_vllm_plugins_are_kept_and_ours_is_added(planned):
    assert "VLLM_PLUGINS" not in planned().process("server").environment
    server = planned(environment={"VLLM_PLUGINS": "mine"}).process("server")
    assert server.environment["VLLM_PLUGINS"] == "mine,grpo_recipes"


def test_a_recipe_name_that_no_file_can_have(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe 'x+' not found"):
        choose_recipe("x" * 5000, {}, "grpo", "cpu")


def test_trainers_are_started_by_our_launcher_whose_rendezvous_stays_at_its_own_address(planned):
    argv = planned().process("trainer").argv
    assert argv[1:4] == [
        "-P",
        "-m",
        "grpo_recipes.launch.accelerate",
    ]  # -P: nothing is imported from the working folder
    assert argv[argv.index("--main_process_ip") + 1] == "127.0.0.1"


def test_limits_of_a_start_grow_with_the_weights_unless_the_recipe_says_one(planned, tmp_path, option):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(20 * 10**9)  # sparse
    plan = planned(model_name_or_path=str(model))
    assert (plan.weight_bytes, plan.server_timeout, plan.meeting_timeout) == (20 * 10**9, 1200, 900)
    assert option(plan.process("trainer").argv, "--vllm_server_timeout") == "1200.0"
    assert planned(model_name_or_path=str(model), vllm_server_timeout=50).server_timeout == 50
    away = planned()
    assert (away.weight_bytes, away.server_timeout, away.meeting_timeout) == (0, 600, 300)


@pytest.mark.parametrize("name", ["a[1]", "what?", "star*"])
def test_a_model_folder_that_vllm_takes_for_a_pattern_is_refused(planned, read, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    resources = Resources("cpu", (), 2)
    with pytest.raises(ConfigError, match=r"as a pattern and finds no files\. Fix: move it"):
        with_sources(planned(model_name_or_path=str(folder)), read(), resources, Assets([], []))
    assert with_sources(planned(model_name_or_path=str(folder), use_vllm=False), read(), resources, Assets([], []))


def test_slices_of_a_gpu_are_planned_with_a_note(planned):
    three = (*MIGS, "MIG-cccc")
    assert any("does not connect trainers on MIG slices" in note for note in planned(gpus=three).notes)
    for gpus in (MIGS, MIGS[:1]):
        assert not any("MIG" in note for note in planned(gpus=gpus).notes)
    assert (planned(gpus=MIGS).bridge, planned(gpus=UUIDS[:2]).bridge) == ("file", "nccl")


def test_ranks_wait_in_nccl_for_as_long_as_the_launcher_lets_them(planned, option):
    """A save may take twice stall_timeout, and rank 0 may sample again after a restart. NCCL kills at ddp_timeout."""
    assert option(planned().process("trainer").argv, "--ddp_timeout") == "7200"
    slow = {"server_request_timeout": 5000, "vllm_server_timeout": 700, "stall_timeout": 100}
    assert option(planned(**slow).process("trainer").argv, "--ddp_timeout") == "10700"
    least = {"server_request_timeout": 10, "vllm_server_timeout": 10, "stall_timeout": 100}
    assert option(planned(**least).process("trainer").argv, "--ddp_timeout") == "1800"
    for unchanged in (planned(ddp_timeout=60), planned(device="cpu")):
        assert "--ddp_timeout" not in unchanged.process("trainer").argv


def test_an_optimizer_on_the_cpu_has_more_than_one_thread(planned, option):
    sharded = {"accelerator": "fsdp2", "num_processes": 3}
    assert planned(**sharded).threads == 1
    plan = planned(**sharded, fsdp_cpu_offload=True)
    assert plan.threads == 2, "8 cores, one of them for the server"
    assert plan.process("trainer").environment["OMP_NUM_THREADS"] == "2"
