"""The test of each cell of the table of weight sync methods on CPU: a run below, or another test."""

from __future__ import annotations

TWO = ("--num_processes", "2")
LORA = ("--use_peft", "--lora_target_modules", "all-linear", "--learning_rate", "2e-3")
# (bridge, setup) -> the flags of a short run in tests/e2e/test_bridges.py. Log-probs agree after every step.
RUNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("file", "tensor_parallel"): ("--vllm_tensor_parallel_size", "2"),
    ("shared", "ddp"): (*TWO, "--accelerator", "ddp"),
    ("lora", "ddp"): (*LORA, *TWO, "--accelerator", "ddp"),
    ("lora", "zero2"): (*LORA, *TWO, "--accelerator", "zero2"),
    ("lora", "tensor_parallel"): (*LORA, "--vllm_tensor_parallel_size", "2"),
    **{("restart", name): (*TWO, "--accelerator", name) for name in ("ddp", "zero2", "zero3", "fsdp2")},
    ("restart", "lora"): LORA,
    ("restart", "tensor_parallel"): ("--vllm_tensor_parallel_size", "2"),
    ("lora", "replicas"): (*LORA, "--vllm_data_parallel_size", "2"),
    ("restart", "replicas"): ("--vllm_data_parallel_size", "2"),
}
_LEARNS = "tests/e2e/test_smoke_run.py::test_training_sh_trains_the_smoke_recipe"
_ONE_COPY = "tests/e2e/test_bridges.py::test_the_smoke_recipe_learns_in_one_copy_of_the_weights"
_ADAPTER = "tests/e2e/test_bridges.py::test_an_adapter_learns_alone"
_NEW_SERVERS = "tests/e2e/test_bridges.py::test_a_new_server_for_each_model_learns"
_TWO = "tests/e2e/test_distributed.py::test_two_processes_train_through_the_server"
_CUSTOM = "tests/e2e/test_distributed.py::test_config_file_replaces_the_packaged_accelerate_file"
_APART = "tests/e2e/test_two_nodes.py::test_a_server_alone_on_its_node_gets_the_weights_of_the_other"
_INSIDE = "tests/e2e/test_colocated.py::test_two_processes_sample_with_the_weights_they_train"
_ALONE = "tests/e2e/test_colocated.py::test_two_processes_give_the_update_of_one_with_the_joined_batch"
# (bridge or colocate, setup) -> the test that shows it, with its parameters as pytest names them.
ELSEWHERE: dict[tuple[str, str], str] = {
    ("file", "single"): _LEARNS,
    ("file", "full"): _LEARNS,
    **{("file", name): f"{_TWO}[{name}]" for name in ("ddp", "zero2", "zero3", "fsdp2")},
    ("file", "custom"): f"{_CUSTOM}[file]",
    ("file", "lora"): "tests/e2e/test_lora.py::test_an_adapter_learns_and_the_merged_model_is_left",
    ("file", "replicas"): "tests/e2e/test_replicas.py::test_a_killed_replica_and_a_stop_change_nothing",
    ("file", "nodes"): f"{_APART}[file-keys0]",
    ("shared", "single"): _ONE_COPY,
    ("shared", "full"): _ONE_COPY,
    ("lora", "single"): _ADAPTER,
    ("lora", "lora"): _ADAPTER,
    ("lora", "nodes"): f"{_APART}[lora-keys1]",
    ("restart", "single"): _NEW_SERVERS,
    ("restart", "full"): _NEW_SERVERS,
    ("restart", "custom"): f"{_CUSTOM}[restart]",
    ("restart", "nodes"): f"{_APART}[restart-keys2]",
    ("colocate", "single"): _ALONE,
    ("colocate", "full"): _ALONE,
    **{("colocate", name): f"{_INSIDE}[{name}]" for name in ("ddp", "zero2", "zero3", "fsdp2", "lora")},
    ("colocate", "tensor_parallel"): f"{_INSIDE}[tensor-parallel]",
    ("colocate", "custom"): "tests/e2e/test_colocated.py::test_config_file_replaces_the_packaged_accelerate_file",
    ("colocate", "nodes"): "tests/e2e/test_colocated.py::test_two_nodes_add_up_to_one",
}
