"""Where each cell of the table of weight bridges is shown on CPU: by the runs below, or by a test of another file."""

from __future__ import annotations

TWO = ("--num_processes", "2")
LORA = ("--use_peft", "--lora_target_modules", "all-linear", "--learning_rate", "2e-3")
# (bridge, setup) -> the flags of a short run in tests/e2e/test_bridges.py, whose log-probs agree after every step.
RUNS: dict[tuple[str, str], tuple[str, ...]] = {
    ("file", "tensor_parallel"): ("--vllm_tensor_parallel_size", "2"),
    ("shared", "ddp"): (*TWO, "--accelerator", "ddp"),
    ("lora", "ddp"): (*LORA, *TWO, "--accelerator", "ddp"),
    ("lora", "zero2"): (*LORA, *TWO, "--accelerator", "zero2"),
    ("lora", "tensor_parallel"): (*LORA, "--vllm_tensor_parallel_size", "2"),
    **{("restart", name): (*TWO, "--accelerator", name) for name in ("ddp", "zero2", "zero3", "fsdp2")},
    ("restart", "lora"): LORA,
    ("restart", "tensor_parallel"): ("--vllm_tensor_parallel_size", "2"),
}
# (bridge, setup) -> the test that shows it.
ELSEWHERE: dict[tuple[str, str], str] = {
    ("file", "single"): "tests/e2e/test_smoke_run.py::test_training_sh_trains_the_smoke_recipe",
    ("shared", "single"): "tests/e2e/test_bridges.py::test_the_smoke_recipe_learns_in_one_copy_of_the_weights",
    ("shared", "full"): "tests/e2e/test_bridges.py::test_the_smoke_recipe_learns_in_one_copy_of_the_weights",
    ("lora", "single"): "tests/e2e/test_bridges.py::test_an_adapter_learns_alone",
    ("lora", "lora"): "tests/e2e/test_bridges.py::test_an_adapter_learns_alone",
    ("lora", "nodes"): "tests/e2e/test_two_nodes.py::test_a_server_alone_on_its_node_gets_the_weights_of_the_other",
    ("restart", "single"): "tests/e2e/test_bridges.py::test_a_new_server_for_each_model_learns",
    ("restart", "full"): "tests/e2e/test_bridges.py::test_a_new_server_for_each_model_learns",
    ("restart", "nodes"): "tests/e2e/test_two_nodes.py::test_a_server_alone_on_its_node_gets_the_weights_of_the_other",
    ("restart", "custom"): "tests/e2e/test_distributed.py::test_config_file_replaces_the_packaged_accelerate_file",
    ("file", "full"): "tests/e2e/test_smoke_run.py::test_training_sh_trains_the_smoke_recipe",
    **{
        ("file", name): "tests/e2e/test_distributed.py::test_two_processes_train_through_the_server"
        for name in ("ddp", "zero2", "zero3", "fsdp2")
    },
    ("file", "custom"): "tests/e2e/test_distributed.py::test_config_file_replaces_the_packaged_accelerate_file",
    ("file", "lora"): "tests/e2e/test_lora.py::test_an_adapter_learns_and_the_merged_model_is_left",
    ("file", "nodes"): "tests/e2e/test_two_nodes.py::test_a_server_alone_on_its_node_gets_the_weights_of_the_other",
}
