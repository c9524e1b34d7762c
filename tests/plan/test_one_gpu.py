"""``weight_sync: shared`` on GPUs: server and rank 0 have one, as the memory that they share has."""

from __future__ import annotations

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node
from grpo_recipes.plan.plan import format_plan
from grpo_recipes.plan.preflight import sampler_problems

SHARED = {"weight_sync": "shared", "dtype": "float32"}
NODES = [Node(tuple("0123"), 8, f"10.0.0.{number}", "eth0") for number in (1, 2)]


@pytest.mark.parametrize("gpus", [("0",), ("0", "1", "2"), ("GPU-bbbb", "GPU-aaaa")])
def test_rank_0_sees_the_servers_gpu_first_and_the_other_ranks_the_next(planned, option, gpus):
    plan = planned(gpus=gpus, **SHARED)
    server, trainer = plan.processes
    assert (plan.mode, plan.bridge, plan.unused_gpus) == ("server", "shared", ())
    assert server.gpus == gpus[:1] and trainer.gpus == gpus
    assert trainer.after == ("server",) and trainer.beside == (), "it starts when vLLM has taken its memory"
    assert server.environment["CUDA_VISIBLE_DEVICES"] == gpus[0]
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
    assert plan.batch.world_size == len(gpus) and option(trainer.argv, "--num_processes") == str(len(gpus))


def test_vllm_leaves_room_on_its_gpu_as_a_colocated_one_does(planned, option):
    plan = planned(**SHARED)
    assert option(plan.process("server").argv, "--gpu-memory-utilization") == "0.3"
    note = "vLLM uses 0.3 of GPU 0 (vllm_gpu_memory_utilization), and the trainers on it use the remaining memory"
    assert note in plan.notes and note in format_plan(plan)
    plan = planned(**SHARED, vllm_gpu_memory_utilization=0.4)
    assert option(plan.process("server").argv, "--gpu-memory-utilization") == "0.4"
    assert option(planned(weight_sync="nccl").process("server").argv, "--gpu-memory-utilization") == "0.9"


def test_a_gpu_less_is_used_where_one_process_trains(planned):
    plan = planned(**SHARED, num_processes=1)
    assert plan.process("trainer").gpus == ("0",) and plan.unused_gpus == ("1", "2", "3")


def test_a_gpu_of_both_counts_once(planned):
    plan = planned(gpus=("MIG-aaaa",), **SHARED)
    assert plan.process("server").gpus == plan.process("trainer").gpus == ("MIG-aaaa",)
    assert not any("MIG" in note and "NCCL" in note for note in plan.notes)


def test_on_several_nodes_rank_0_is_on_the_servers(planned):
    plan = planned(nodes=NODES, accelerator="ddp", **SHARED)
    server, first, second = plan.processes
    assert (server.node, first.node, second.node) == (0, 0, 1)
    assert server.gpus == ("0",) and first.gpus[0] == "0"
    with pytest.raises(ConfigError, match="shared does not work with server and rank 0 on two nodes"):
        planned(nodes=NODES, accelerator="ddp", vllm_node="own", **SHARED)


@pytest.mark.parametrize("gpus", [("0", "1"), ("0", "1", "2")])
def test_more_than_one_worker_is_refused(planned, gpus):
    with pytest.raises(ConfigError, match="shared does not work with vllm_tensor_parallel_size above 1"):
        planned(gpus=gpus, vllm_tensor_parallel_size=2, **SHARED)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_has_no_handle_for_another_process_is_refused(planned, name):
    setting = {name: "max_split_size_mb:512,expandable_segments:True"}
    with pytest.raises(ConfigError, match=f"{name}: weight_sync: shared .* expandable segments .*Fix: remove exp"):
        planned(environment=setting, **SHARED)
    planned(environment=setting, weight_sync="nccl")
    planned(environment=setting, device="cpu", **SHARED)


def test_memory_that_goes_with_its_server_takes_the_trainers_along(planned):
    assert planned(**SHARED).process("server").on_loss == "restart with trainers"
    assert planned(device="cpu", **SHARED).process("server").on_loss == "restart"


@pytest.mark.parametrize("bridge", ["file", "lora"])
def test_one_gpu_is_enough_for_a_server_and_its_trainer(planned, option, bridge):
    """G3: a documented key puts server and trainer on one GPU, without listing it twice."""
    lora = {"use_peft": True, "lora_target_modules": ["all-linear"]} if bridge == "lora" else {}
    plan = planned(gpus=("0",), vllm_gpu="shared", weight_sync=bridge, **lora)
    server, trainer = plan.processes
    assert (plan.mode, plan.bridge, server.gpus, trainer.gpus) == ("server", bridge, ("0",), ("0",))
    assert option(server.argv, "--gpu-memory-utilization") == "0.3"
    assert any("vLLM uses 0.3 of GPU 0" in note for note in plan.notes)


def test_a_trainer_on_the_servers_gpu_starts_after_it(planned):
    """G6: vLLM measures the free memory while it starts, so nothing else may change it."""
    plan = planned(gpus=("0",), vllm_gpu="shared")
    assert plan.bridge == "file", "the choice of weight_sync: auto"
    assert plan.process("trainer").after == ("server",) and plan.process("trainer").beside == ()
    assert plan.process("server").on_loss == "restart with trainers"
    apart = planned(gpus=("0", "1"), weight_sync="file")
    assert apart.process("trainer").beside == ("server",) and apart.process("server").on_loss == "restart"


def test_all_gpus_train_next_to_a_server_that_shares_them(planned):
    """G3: with several GPUs, the server has the first and every GPU trains."""
    plan = planned(gpus=("0", "1", "2"), vllm_gpu="shared")
    assert plan.process("server").gpus == ("0",) and plan.process("trainer").gpus == ("0", "1", "2")
    assert plan.unused_gpus == ()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight_sync": "nccl"}, "NCCL can't join two processes on one GPU. Fix: set weight_sync: file"),
        ({"weight_sync": "restart"}, "a new server needs a free GPU. Fix: set weight_sync: file"),
        ({"overlap_generation": True}, "overlap_generation and vllm_gpu: shared can't be combined"),
        ({"nodes": NODES, "vllm_node": "own"}, "vllm_gpu: shared and vllm_node: own can't be combined"),
    ],
)
def test_what_does_not_work_on_one_gpu_is_rejected(planned, keys, message):
    """G3: contradictions are errors before anything starts."""
    with pytest.raises(ConfigError, match=message):
        planned(vllm_gpu="shared", **keys)


def test_a_server_on_one_gpu_is_told_the_key(planned):
    """G3: the rejection of one GPU lists the key that makes it enough, and the key does."""
    with pytest.raises(ConfigError, match=r"vllm_mode: server needs two GPUs.*or set vllm_gpu: shared"):
        planned(gpus=("0",), vllm_mode="server")
    assert planned(gpus=("0",), vllm_mode="server", vllm_gpu="shared").mode == "server"


def test_the_base_model_plays_only_next_to_a_server(planned):
    def game(opponents):
        entries = [{"id": "textarena:TicTacToe-v0", "args": {"opponents": opponents}}]
        mixture = {"environment_mixture": {"environments": entries}, "dataset_name": None}
        mixture |= {"reward_funcs": ["environment"]}
        return mixture | {"use_peft": True, "weight_sync": "lora", "dtype": "float32"}

    with pytest.raises(ConfigError, match=r"opponents: base needs .* vllm_gpu: shared .* set opponents: policy"):
        planned(gpus=("0",), **game("base"))
    assert planned(gpus=("0",), **game("policy")).mode == "colocate"
    assert planned(gpus=("0",), **game("base"), vllm_gpu="shared").mode == "server"
    assert planned(gpus=("0", "1"), **game("base")).mode == "server"


def test_flashinfers_sampler_is_not_compiled_for_a_training(planned):
    """G6: it returns no log-probs, so no training uses it, and vLLM's warm-up would compile it with nvcc."""
    for mode, role in (("server", "server"), ("colocate", "trainer")):
        plan = planned(vllm_mode=mode)
        assert plan.process(role).environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        plan = planned(vllm_mode=mode, environment={"VLLM_USE_FLASHINFER_SAMPLER": "1"})
        assert plan.process(role).environment["VLLM_USE_FLASHINFER_SAMPLER"] == "1", "the user decides"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in planned(device="cpu").process("server").environment


def test_a_sampler_that_nvcc_compiles_is_rejected_without_nvcc(tmp_path):
    """G6: FlashInfer's sampler needs nvcc at its first use, which is minutes after the start."""
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "1", "PATH": str(tmp_path), "CUDA_HOME": str(tmp_path),
                   "CUDA_PATH": str(tmp_path)}  # fmt: skip
    (problem,) = sampler_problems(environment)
    assert problem.fix.startswith("unset VLLM_USE_FLASHINFER_SAMPLER, or load the site's CUDA module")
    assert list(sampler_problems({**environment, "VLLM_USE_FLASHINFER_SAMPLER": "0"})) == []
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert list(sampler_problems(environment)) == []
