"""Recipe keys with their types, in sections: ``recipe.maxent.tau`` reads the key ``maxent_tau``. No torch.

mypy knows the type of each key and rejects a misspelled one. The attribute is the key, or the key without the first
words if the section implies them. Only keys that code reads are listed. ``tests/recipe/test_sections.py`` compares
their types with the catalog.

An extension declares the section of its keys next to them, in ``arguments.py``:

    class DiceKeys(Section):
        sides = Key[int]("dice_sides")

    DiceKeys(recipe).sides
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Values(Protocol):
    """Values by recipe key: a ``Recipe``, or a dictionary of its keys."""

    def __getitem__(self, key: str, /) -> Any: ...


class Section:
    """A group of recipe keys as typed attributes."""

    def __init__(self, recipe: Values) -> None:
        self._recipe = recipe

    def read(self, key: str) -> Any:
        """Return the value of ``key``; raise BrokenKey if the value in the recipe is invalid."""
        return self._recipe[key]


class Key(Generic[T]):
    """The attribute of a section that returns the value of the recipe key ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, section: Section, _: type[Section]) -> T:
        """Return the key's value in the section's recipe; raise BrokenKey if it is invalid."""
        value: T = section.read(self.name)
        return value


class _Attribute(Generic[S]):
    """The attribute of a recipe that returns one of its sections."""

    def __init__(self, section: Callable[[Values], S]) -> None:
        self._section = section

    def __get__(self, recipe: Values, _: type) -> S:
        """Return the section of a recipe."""
        return self._section(recipe)


class Model(Section):
    """Keys of the model, its tokenizer's template and the system prompt."""

    name_or_path = Key[str | None]("model_name_or_path")
    revision = Key[str]("model_revision")
    dtype = Key[str | None]("dtype")
    attn_implementation = Key[str | None]("attn_implementation")
    trust_remote_code = Key[bool]("trust_remote_code")
    chat_template = Key[str | None]("chat_template")
    chat_template_kwargs = Key[dict[str, Any] | None]("chat_template_kwargs")
    system_prompt = Key[str | None]("system_prompt")

    @property
    def name(self) -> str:
        """The model's hub id or folder. It is empty only in a recipe that `grpo check` rejects."""
        return self.name_or_path or ""


class Data(Section):
    """Keys of the training data."""

    name = Key[str | None]("dataset_name")
    config = Key[str | None]("dataset_config")
    train_split = Key[str]("dataset_train_split")
    test_split = Key[str]("dataset_test_split")
    prompt_column = Key[str]("dataset_prompt_column")
    solution_column = Key[str]("dataset_solution_column")
    solution_marker = Key[str | None]("dataset_solution_marker")
    mixture = Key[dict[str, Any] | None]("dataset_mixture")
    streaming = Key[bool]("dataset_streaming")
    filter = Key[str | None]("dataset_filter")
    max_prompt_length = Key[int | None]("max_prompt_length")
    max_train_prompts = Key[int | None]("max_train_prompts")


class Rewards(Section):
    """Keys of rewards."""

    funcs = Key[list[str]]("reward_funcs")
    weights = Key[list[float] | None]("reward_weights")
    environment = Key[list[str]]("reward_environment")
    isolation = Key[str]("reward_isolation")
    max_no_verdict = Key[float]("reward_max_no_verdict")
    answer_matching = Key[str]("answer_matching")
    soft_punish_cache = Key[int | None]("soft_punish_cache")
    multi_objective_aggregation = Key[str]("multi_objective_aggregation")


class Batch(Section):
    """Keys of the batch, and the length of the run."""

    prompts_per_step = Key[int | None]("prompts_per_step")
    num_generations = Key[int]("num_generations")
    per_device_train_batch_size = Key[int]("per_device_train_batch_size")
    gradient_accumulation_steps = Key[int]("gradient_accumulation_steps")
    steps_per_generation = Key[int | None]("steps_per_generation")
    generation_batch_size = Key[int | None]("generation_batch_size")
    max_steps = Key[int]("max_steps")
    num_train_epochs = Key[float]("num_train_epochs")
    seed = Key[int]("seed")
    dynamic_sampling = Key[bool]("dynamic_sampling")
    trim_padding = Key[bool]("trim_padding")
    padding_free = Key[bool]("padding_free")


class Sampling(Section):
    """Keys of sampling, and the correction of its log-probs."""

    max_completion_length = Key[int | None]("max_completion_length")
    temperature = Key[float]("temperature")
    generation_kwargs = Key[dict[str, Any] | None]("generation_kwargs")
    seed_server = Key[bool | None]("seed_server")
    overlap_generation = Key[bool]("overlap_generation")
    mask_truncated_completions = Key[bool]("mask_truncated_completions")
    importance_sampling_correction = Key[bool]("vllm_importance_sampling_correction")
    importance_sampling_clip_max = Key[float | None]("vllm_importance_sampling_clip_max")
    structured_outputs_regex = Key[str | None]("vllm_structured_outputs_regex")
    use_transformers_continuous_batching = Key[bool]("use_transformers_continuous_batching")


class Loss(Section):
    """Keys of the loss, its reference model and its teacher."""

    loss_type = Key[str]("loss_type")
    importance_sampling_level = Key[str]("importance_sampling_level")
    advantage_estimator = Key[str]("advantage_estimator")
    beta = Key[float]("beta")
    epsilon = Key[float]("epsilon")
    epsilon_high = Key[float | None]("epsilon_high")
    kl_target = Key[float | None]("kl_target")
    kl_beta_min = Key[float]("kl_beta_min")
    ref_model_name_or_path = Key[str | None]("ref_model_name_or_path")
    teacher_model_name_or_path = Key[str | None]("teacher_model_name_or_path")
    sync_ref_model = Key[bool]("sync_ref_model")


class MaxEnt(Section):
    """Keys of MaxEnt-GRPO."""

    objective = Key[str | None]("maxent_objective")
    tau = Key[float | None]("maxent_tau")
    beta = Key[float]("maxent_beta")
    q_temperature = Key[float]("maxent_q_temperature")
    q_epsilon = Key[float]("maxent_q_epsilon")
    policy_temperature = Key[float]("maxent_policy_temperature")
    policy_spread = Key[float]("maxent_policy_spread")
    tau_lr = Key[float]("maxent_tau_lr")
    tau_min = Key[float]("maxent_tau_min")
    tau_max = Key[float]("maxent_tau_max")


class Optimizer(Section):
    """Keys of the optimizer."""

    learning_rate = Key[float]("learning_rate")
    lr_scheduler_type = Key[str]("lr_scheduler_type")
    lr_scheduler_kwargs = Key[dict[str, Any] | None]("lr_scheduler_kwargs")
    warmup_steps = Key[float]("warmup_steps")
    optim = Key[str]("optim")
    optim_args = Key[str | None]("optim_args")
    disable_dropout = Key[bool]("disable_dropout")


class Lora(Section):
    """Keys of LoRA."""

    use_peft = Key[bool]("use_peft")
    r = Key[int]("lora_r")
    dropout = Key[float]("lora_dropout")
    target_modules = Key[list[str] | None]("lora_target_modules")
    target_parameters = Key[list[str] | None]("lora_target_parameters")
    modules_to_save = Key[list[str] | None]("lora_modules_to_save")


class Evaluation(Section):
    """Keys of evaluations and benchmarks."""

    strategy = Key[str]("eval_strategy")
    steps = Key[float | None]("eval_steps")
    dataset_name = Key[str | None]("eval_dataset_name")
    dataset_config = Key[str | None]("eval_dataset_config")
    dataset_split = Key[str]("eval_dataset_split")
    dataset_solution_column = Key[str | None]("eval_dataset_solution_column")
    max_prompts = Key[int]("eval_max_prompts")
    subsample = Key[float]("eval_subsample")
    max_completion_length = Key[int | None]("eval_max_completion_length")
    temperature = Key[float | None]("eval_temperature")
    top_p = Key[float | None]("eval_top_p")
    sampling_seed = Key[int | None]("eval_sampling_seed")
    num_generations_eval = Key[int | None]("num_generations_eval")
    per_device_eval_batch_size = Key[int]("per_device_eval_batch_size")
    load_best_model_at_end = Key[bool]("load_best_model_at_end")
    benchmarks = Key[list[str]]("benchmarks")
    benchmark_samples = Key[int]("benchmark_samples")
    benchmark_temperature = Key[float]("benchmark_temperature")


class Run(Section):
    """Keys of the run directory, checkpoints, reports and publishing."""

    name = Key[str | None]("run_name")
    root = Key[str]("run_root")
    save_strategy = Key[str]("save_strategy")
    save_steps = Key[float]("save_steps")
    save_total_limit = Key[int | None]("save_total_limit")
    max_requeues = Key[int]("max_requeues")
    callbacks = Key[list[str]]("callbacks")
    ignore_data_skip = Key[bool]("ignore_data_skip")
    report_to = Key[list[str] | str | None]("report_to")
    project = Key[str]("project")
    show_completion_steps = Key[int]("show_completion_steps")
    push_to_hub = Key[bool]("push_to_hub")
    hub_model_id = Key[str | None]("hub_model_id")
    hub_revision = Key[str | None]("hub_revision")
    hub_private_repo = Key[bool | None]("hub_private_repo")


class Server(Section):
    """Keys of vLLM and weight sync."""

    use_vllm = Key[bool]("use_vllm")
    mode = Key[str]("vllm_mode")
    node = Key[str]("vllm_node")
    gpu = Key[str]("vllm_gpu")
    base_url = Key[str | None]("vllm_server_base_url")
    host = Key[str]("vllm_server_host")
    port = Key[int]("vllm_server_port")
    timeout = Key[float]("vllm_server_timeout")
    args = Key[dict[str, Any] | None]("vllm_args")
    model_impl = Key[str]("vllm_model_impl")
    max_model_length = Key[int | None]("vllm_max_model_length")
    max_num_seqs = Key[int | None]("vllm_max_num_seqs")
    tensor_parallel_size = Key[int]("vllm_tensor_parallel_size")
    data_parallel_size = Key[int | None]("vllm_data_parallel_size")
    data_parallel_size_local = Key[int | None]("vllm_data_parallel_size_local")
    gpu_memory_utilization = Key[float]("vllm_gpu_memory_utilization")
    enforce_eager = Key[bool]("vllm_enforce_eager")
    enable_sleep_mode = Key[bool]("vllm_enable_sleep_mode")
    backend = Key[str]("server_backend")
    request_timeout = Key[float]("server_request_timeout")
    restarts = Key[int]("server_restarts")
    stall_timeout = Key[float]("server_stall_timeout")
    max_concurrent_requests = Key[int]("max_concurrent_requests")
    weight_sync = Key[str]("weight_sync")
    weight_sync_timeout = Key[float]("weight_sync_timeout")

    @property
    def replicas(self) -> int:
        """The number of replicas; 1 for ``auto``, until ``make_plan`` chooses the number."""
        return self.data_parallel_size or 1

    @property
    def nodes(self) -> int:
        """The number of nodes with replicas."""
        return -(-self.replicas // (self.data_parallel_size_local or self.replicas))


class Processes(Section):
    """Keys of training processes, precision and memory."""

    accelerator = Key[str]("accelerator")
    accelerator_config = Key[dict[str, Any] | None]("accelerator_config")
    num_processes = Key[int | None]("num_processes")
    bf16 = Key[bool | None]("bf16")
    fp16 = Key[bool]("fp16")
    gradient_checkpointing = Key[bool]("gradient_checkpointing")
    fsdp_cpu_offload = Key[bool]("fsdp_cpu_offload")
    torch_compile = Key[bool]("torch_compile")
    cast_lm_head_to_fp32 = Key[bool]("cast_lm_head_to_fp32")
    ddp_find_unused_parameters = Key[bool | None]("ddp_find_unused_parameters")
    ddp_timeout = Key[int]("ddp_timeout")
    stall_timeout = Key[float]("stall_timeout")


class Sections:
    """The sections of the core's keys, as attributes of a recipe."""

    model = _Attribute(Model)
    data = _Attribute(Data)
    rewards = _Attribute(Rewards)
    batch = _Attribute(Batch)
    sampling = _Attribute(Sampling)
    loss = _Attribute(Loss)
    maxent = _Attribute(MaxEnt)
    optimizer = _Attribute(Optimizer)
    lora = _Attribute(Lora)
    evaluation = _Attribute(Evaluation)
    run = _Attribute(Run)
    server = _Attribute(Server)
    processes = _Attribute(Processes)
