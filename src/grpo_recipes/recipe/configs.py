"""Every recipe key: TRL's dataclasses plus ours, one documented line a field.

Only the trainer imports this module, since importing TRL takes torch and seconds. ``check``, ``plan`` and ``launch``
know the core's keys from ``keys.json``, and editors know all keys from ``recipes/schema.json``: ``make keys`` writes
both from here (``scripts/make_keys.py``), and a test fails when they differ. The keys of an extension are declared in
its own folder.
"""

import dataclasses
from dataclasses import dataclass

import trl
from accelerate.utils import GradientAccumulationPlugin
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.fields import MOST_GPUS, MOST_OF_A_GROUP, MOST_ROWS, MOST_STEPS, MOST_TOKENS, key
from grpo_recipes.recipe.registry import OBJECTIVES, SERVER_BACKENDS

# Plain `str` in TRL's types, so that a typo would only fail inside the trainer.
TRL_CHOICES: dict[str, list[str]] = {
    "loss_type": ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"],
    "scale_rewards": ["group", "batch", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_model_impl": ["auto", "vllm", "transformers", "terratorch"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "lora_task_type": ["CAUSAL_LM"],
    "dtype": ["auto", "bfloat16", "float16", "float32"],
    "save_strategy": ["no", "steps", "epoch"],
}

# Limits of TRL's keys, which no type of a dataclass holds: least, most, keys. Those of ours are beside the fields.
# Where torch, TRL or vLLM refuse a number too, they do so after the server has started.
_LIMITS: tuple[tuple[float | None, float | None, str], ...] = (
    (1, MOST_TOKENS, "max_completion_length"),
    (1, MOST_ROWS,
     "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_iterations lora_alpha "
     "steps_per_generation generation_batch_size"),
    (1, MOST_OF_A_GROUP, "lora_r num_generations_eval"),
    (None, MOST_STEPS, "max_steps"),
    (0.0, None,
     "learning_rate beta epsilon epsilon_high weight_decay max_grad_norm warmup_steps num_train_epochs eval_steps "
     "eval_delay"),
    (0, None, "dataloader_num_workers num_completions_to_print"),
    (0, 2**32 - 1, "seed"),  # numpy takes no other
    (1e-06, None, "temperature repetition_penalty"),
    (2, MOST_OF_A_GROUP, "num_generations"),
    (-1, None, "top_k"),
    (0.0, 1.0, "top_p adam_beta1 adam_beta2 min_p ref_model_mixup_alpha top_entropy_quantile"),
)  # fmt: skip
RANGES: dict[str, dict[str, float]] = {
    name: {end: limit for end, limit in (("min", least), ("max", most)) if limit is not None}
    for least, most, names in _LIMITS
    for name in names.split()
}


# fmt: off
@dataclass
class CoreArguments(trl.ScriptArguments):
    """Where prompts, solutions and rewards come from, and where the run goes."""

    dataset_mixture: dict | None = key(None, "Several datasets instead of dataset_name: DatasetMixtureConfig.")
    dataset_prompt_column: str = key("problem", "Column holding the problem text or a list of chat messages.")
    dataset_solution_column: str = key("answer", "Column holding the reference solution given to the rewards.")
    dataset_solution_marker: str | None = key(None,
        "Keep only what follows the last occurrence of this text in the solution, e.g. '####' for GSM8K.")
    system_prompt: str | None = key(None, "System message put before every prompt that has none.")
    chat_template: str | None = key(None, "Jinja chat template that replaces the tokenizer's own.")
    max_prompt_length: int | None = key(None,
        "Longest rendered prompt in tokens; longer ones are dropped.", min=1, max=MOST_TOKENS)
    max_train_prompts: int | None = key(None, "Prompts kept, the first of a seeded shuffle, or of a stream.", min=1)
    eval_dataset_name: str | None = key(None,
        "Dataset evaluated on; by default dataset_test_split of dataset_name, or the mixture's test_split_size.")
    eval_dataset_config: str | None = key(None, "Configuration of the evaluation dataset.")
    eval_dataset_split: str = key("test", "Split of eval_dataset_name evaluated on.")
    eval_dataset_prompt_column: str | None = key(None, "As dataset_prompt_column, which is the default.")
    eval_dataset_solution_column: str | None = key(None, "As dataset_solution_column, which is the default.")
    eval_subsample: float = key(1.0, "Fraction of the evaluation set to use, drawn by seed.", min=0.0001, max=1.0)
    eval_max_prompts: int = key(1000, "Most evaluation prompts after eval_subsample.", min=1)
    benchmarks: list[str] = key([],
        "Benchmarks run on the final model: names listed by `grpo keys --benchmarks`, .jsonl files with problem and "
        "answer columns, or environments of the recipe, whose evaluation episodes are played.")
    benchmark_samples: int = key(1, "Completions of each benchmark problem (k of pass@k).", min=1, max=MOST_OF_A_GROUP)
    benchmark_max_problems: int | None = key(None, "Most problems of a benchmark, by seed; all by default.", min=1)
    benchmark_temperature: float = key(0.6, "Sampling temperature of benchmarks; 0 is greedy.", min=0.0)
    callbacks: list[str] = key([], "Your trainer callbacks: module:Class or file.py:Class, made without arguments.")
    reward_funcs: list[str] = key(["pure_accuracy_math"],
        "Rewards, summed by weight: names of ours, or your own as module:function or file.py:function.")
    answer_matching: str = key("normalized",
        "How pure_accuracy_math compares: normalized ($, \\boxed{}, 1,000, units, 1/2), or strict (the same text).",
        choices=["normalized", "strict"])
    cosine_min_value_wrong: float = key(0.0, "cosine_length: reward of a wrong completion of length 0.")
    cosine_max_value_wrong: float = key(-0.5, "cosine_length: reward of a wrong completion of length cosine_max_len.")
    cosine_min_value_correct: float = key(0.5, "cosine_length: reward of a right completion of length cosine_max_len.")
    cosine_max_value_correct: float = key(1.0, "cosine_length: reward of a right completion of length 0.")
    cosine_max_len: int | None = key(None, "cosine_length: most tokens; max_completion_length by default.", min=1)
    repetition_n_grams: int = key(3, "repetition_penalty: words of the n-grams counted.", min=1)
    repetition_max_penalty: float = key(-1.0, "repetition_penalty: reward of one that only repeats itself.", max=0.0)
    soft_punish_cache: int | None = key(None,
        "soft_overlong: last tokens before max_completion_length in which the penalty grows from 0 to -1.", min=1)
    reward_isolation: str = key("completion",
        "Your own rewards: called a completion at a time in a child process with the limits below (completion), or on "
        "the whole batch inside the trainer, without limits (none).", choices=["completion", "none"])
    reward_timeout: float = key(5.0, "Seconds a reward in a child process may take for one completion.", min=0.01)
    reward_memory_gib: float = key(4.0, "Memory in GiB that a reward's child process may take.", min=0.1)
    reward_workers: int | None = key(None,
        "Child processes for rewards; by default 1 per 2 cores, at most 8.", min=1, max=1024)
    reward_concurrency: int = key(32, "Calls of an async reward of yours at a time in one child.", min=1, max=1024)
    reward_environment: list[str] = key([],
        "Names of variables of the shell that rewards in child processes and environments get, such as a judge's key; "
        "they get no other.")
    reward_max_no_verdict: float = key(0.5,
        "Share of a step's completions left unscored (time limit, crash, not a number) that ends the run.",
        min=0.0, max=1.0)
    run_root: str = key("runs", "Folder in which the run directory <run_name>-<timestamp> is made.")
    fsdp_cpu_offload: bool = key(False,
        "With accelerator: fsdp2, keep parameters, gradients and optimizer states in the memory of the CPU.")
    accelerator: str = key("auto",
        "How training processes share the model: TRL's packaged accelerate file of that name.",
        choices=["auto", "single", "ddp", "zero2", "zero3", "fsdp2"])
    num_processes: int | None = key(None,
        "Training processes; by default one per training GPU, one on CPU.", min=1, max=1024)
    main_process_port: int | None = key(None, "Rendezvous port of trainers; 29525 outside Slurm.", min=1024, max=65535)


@dataclass
class DatasetConfig:
    """One dataset of a mixture: an entry of ``dataset_mixture.datasets``."""

    id: str = key("", "Hub id, local file or folder.")
    config: str | None = key(None, "Configuration of the dataset.")
    split: str = key("train", "Split that is read.")
    columns: list[str] | None = key(None,
        "Prompt and solution column, then others passed to rewards; by default the recipe's two and all others.")
    weight: float | None = key(None, "Share of its rows used, drawn by seed; all by default.", min=0.0001, max=1.0)


@dataclass
class DatasetMixtureConfig:
    """Several datasets joined and shuffled: the mapping under ``dataset_mixture``."""

    datasets: list[DatasetConfig] = key([], "Entries with the keys of DatasetConfig.")
    seed: int = key(0, "Seed of the subsamples and of the shuffle.")
    test_split_size: float | None = key(None, "Held out for evaluation: a share below 1, or a number of rows.")


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's GRPO options plus the batch of the experiment, the weight bridge and its guard."""

    num_generations: int = key(8,
        "Completions of each prompt: the group within which advantages are computed.",
        min=2, max=MOST_OF_A_GROUP)
    prompts_per_step: int | None = key(None,
        "Prompts of one optimizer step over all devices; per-device size and accumulation follow from it.",
        min=1, max=MOST_ROWS)
    trim_padding: bool = key(True,
        "Feed rows of about one length together, at most a tenth of padding in a pass; the loss is that of the rows.")
    tokens_per_micro_batch: int | None = key(None,
        "Most tokens of a forward and backward pass on one device, whose rows are of about one length; auto: what "
        "per_device_train_batch_size rows of the longest sequence have, less where the memory estimate says so.",
        min=1, auto=True)
    padding_free: bool = key(False,
        "Feed the rows of a pass one after the other, without padding; attn_implementation must be named.")
    ref_model_name_or_path: str | None = key(None,
        "Hub id or folder of the reference that beta holds the policy near; by default the model as training begins.")
    weight_sync: str = key("auto",
        "How new weights reach the server: nccl between GPUs, file (safetensors in shared memory), shared (one copy "
        "for trainer and server), lora (the adapter alone), restart (a new server each time).",
        choices=["auto", "nccl", "file", "shared", "lora", "restart"])
    weight_guard: bool = key(True,
        "After each sync prove that the server uses the trainer's weights, or stop the run.")
    weight_guard_tolerance: float | None = key(None,
        "Largest mean |log-prob difference| between server and trainer; by default 1e-3 in float32, 5e-2 in bfloat16.",
        min=0.0)
    vllm_server_base_url: str | None = key(None,
        "Address of a server that somebody started, which is asked in the place of one that the launch starts; new "
        "weights reach it as files, which it must be able to read.")
    server_backend: str = key("vllm_server",
        "What answers at vllm_server_base_url: vLLM, started with VLLM_SERVER_DEV_MODE=1, or SGLang.",
        choices=list(SERVER_BACKENDS))
    max_concurrent_requests: int = key(256,
        "Requests in flight at the server: each has all completions of a prompt, at vllm_server_base_url one.",
        min=1, max=MOST_ROWS)
    eval_temperature: float | None = key(None,
        "Temperature of evaluations; 0 is greedy. By default temperature.", min=0.0)
    eval_top_p: float | None = key(None, "Nucleus of evaluations; by default top_p.", min=0.0001, max=1.0)
    eval_max_completion_length: int | None = key(None,
        "Most tokens of a completion of an evaluation; by default max_completion_length.", min=1, max=MOST_TOKENS)
    eval_sampling_seed: int | None = key(None,
        "What the sampling seeds of evaluations are derived from; by default seed.", min=0)
    seed_server: bool | None = key(None,
        "One sampling seed per prompt and step, so that a CPU run samples the same tokens again; on CPU by default.")
    server_request_timeout: float = key(1800.0,
        "Longest wait in seconds for one answer of the vLLM server, which then counts as lost.", min=1.0)
    vllm_server_timeout: float = key(600.0, "Longest wait in seconds for the vLLM server to be ready.", min=1.0)
    server_restarts: int = key(2,
        "Restarts of a dead or hung vLLM server in an attempt, a step between each; so many of each process of an "
        "extension too.", min=0)
    server_stall_timeout: float = key(300.0,
        "Seconds the vLLM server may make no token while it is waited for before it counts as hung.", min=1.0)
    weight_sync_timeout: float = key(600.0,
        "Seconds a transfer of weights to the vLLM server, or the rendezvous for it, may take: through NCCL it takes "
        "seconds, through files on a network file system minutes.", min=1.0)
    stall_timeout: float = key(3600.0,
        "Seconds a training process may stay in one phase before the run ends with the stacks of all of them.", min=1.0)
    max_requeues: int = key(100, "Times Slurm may restart the job after the run was stopped to go on later.", min=0)
    vllm_mode: str = key("server",
        "server: vLLM on the first GPUs, training on the others; colocate: vLLM inside every training process.",
        choices=["server", "colocate"])
    overlap_generation: bool = key(False,
        "Sample the next generation while this one is trained on: one step off-policy, corrected by importance "
        "sampling. Steps take less time and learn a little less each; docs/overlap.md measures both.")
    vllm_server_host: str = key("127.0.0.1", "Address of the vLLM server; in a job on several nodes the first node's.")
    vllm_node: str = key("shared",
        "In a job on several nodes: shared: trainers have the first node's other GPUs; own: the server has that node.",
        choices=["shared", "own"])
    vllm_gpu: str = key("own",
        "own: the server's GPUs only serve; shared: trainers use them too, so that one GPU is enough for a server "
        "(weight_sync file or lora; weight_sync: shared always does this).",
        choices=["own", "shared"])
    vllm_server_port: int = key(8000, "Port of the vLLM server.", min=1024, max=65535)
    vllm_group_port: int = key(51216, "Port of the NCCL group that carries the weights.", min=1024, max=65535)
    vllm_gpu_memory_utilization: float = key(0.9,
        "Fraction of GPU memory that vLLM may use: 0.90 of its own GPU, 0.3 of a GPU that trains too (colocate, "
        "vllm_gpu: shared or weight_sync: shared) unless this is given.", min=0.05, max=1.0)
    vllm_tensor_parallel_size: int = key(1, "GPUs one vLLM model is split over.", min=1, max=MOST_GPUS)
    vllm_enforce_eager: bool = key(False,
        "Run vLLM without CUDA graphs: it starts sooner, needs less memory and samples more slowly. Always so on CPU.")
    vllm_max_model_length: int | None = key(None,
        "Most tokens of prompt plus completion the server accepts.", min=1, max=MOST_TOKENS)
    vllm_max_num_seqs: int | None = key(None,
        "Most completions that a vLLM engine generates at the same time. By default all completions of a generation, "
        "evaluation batch or benchmark, fewer if memory is short.", min=1, max=2048)
    logging_steps: float = key(1, "Always 1: one row of metrics.jsonl per optimizer step.", min=1, max=1)
    save_steps: float = key(100, "Optimizer steps between checkpoints, or a share of all steps below 1.", min=0.0001)
    push_to_hub: bool = key(False, "Push the final model to the hub at the end of a run. Needs write access.")
    hub_model_id: str | None = key(None, "Repository push_to_hub writes to: user/name; by default the run's name.")
    hub_strategy: str = key("end", "Always end: push_to_hub pushes once, at the end of the run.", choices=["end"])
    hub_revision: str | None = key(None, "Branch push_to_hub writes to, made if not there; main by default.")
    hub_private_repo: bool | None = key(True, "Whether a repository that push_to_hub makes is private.")
    wandb_project: str | None = key(None, "W&B project; WANDB_PROJECT.")
    wandb_entity: str | None = key(None, "W&B team or user; WANDB_ENTITY.")
    wandb_run_group: str | None = key(None, "W&B group that the run belongs to; WANDB_RUN_GROUP.")
    kl_target: float | None = key(None,
        "KL divergence from the reference (per token, the metric kl) that beta is moved to hold; fixed beta without.",
        min=1e-09)
    kl_horizon: float = key(2000.0, "kl_target: completions in which beta can change by its factor.", min=1.0)
    kl_ctl_step_size: float = key(0.2, "kl_target: largest relative error a step answers to.", min=1e-06, max=0.99)
    kl_beta_min: float = key(1e-4,
        "kl_target: least beta, from where it comes back in time when the KL has long been below its target.", min=0.0)
    maxent_objective: str | None = key(None,
        "What MaxEnt-GRPO optimizes; it makes this a MaxEnt recipe. MAXENT=1 without it selects listwise. listwise: "
        "cross-entropy from a target over the group to the policy's own distribution over it. weighted_mle: likelihood "
        "weighted by that target. tempered: Dr.GRPO with rows weighted by softmax(utility / tau). maxrl: reward over "
        "the group's mean, less 1.",
        choices=sorted(OBJECTIVES))
    maxent_tau: float | None = key(None,
        "Temperature of the MaxEnt weights: 0 puts all on the best of a group, .inf weighs alike; the objective's own "
        "by default.", min=0.0, infinite=True)
    maxent_beta: float = key(0.0, "Pull of the MaxEnt target to the reference; that of the loss is beta.", min=0.0)
    maxent_q_temperature: float = key(1.0, "Temperature of the softmax that makes q of the rewards.", min=1e-06)
    maxent_q_epsilon: float = key(1e-6, "Least mass of each completion in q; below 1 / num_generations.", min=0.0)
    maxent_length_normalize_ref: bool = key(True,
        "Whether the reference's log-prob of a completion is divided by its length in the MaxEnt target.")
    maxent_length_normalize_policy: bool = key(True,
        "Whether the policy's log-prob of a completion is divided by its length in the MaxEnt loss: of weighted_mle, "
        "and of listwise with maxent_policy_temperature 0.")
    maxent_policy_temperature: float = key(3.5,
        "Temperature (nats) of the policy's distribution over a group in listwise: softmax(summed log-prob / it). "
        "0 is the length of each completion, by which the objective weakens.", min=0.0)
    maxent_policy_spread: float = key(0.0,
        "listwise: where the log-probs of a group spread further, maxent_policy_temperature becomes this many of their "
        "standard deviations.", min=0.0)
    maxent_utility: str = key("advantage",
        "Utility that tempered weighs by: advantage (reward minus the group's mean), or length_scaled (that times "
        "length / max_completion_length, as in the paper).", choices=["advantage", "length_scaled"])
    maxent_target_ratio: float | None = key(None,
        "Mean MaxEnt weight of a right answer by that of a wrong one that tau is moved to hold; fixed tau without.",
        min=1.01)
    maxent_target_weight_entropy: float | None = key(None,
        "Mean entropy (nats) of the MaxEnt weights that tau is moved to hold: with rewards of 0 and 1 at least the log "
        "of the number of right answers.", min=0.0)
    maxent_target_eff_rollouts: float | None = key(None,
        "Mean effective number of completions of a group (exp of the weights' entropy) that tau is moved to hold: with "
        "rewards of 0 and 1 at least the number of right answers.", min=1.0)
    maxent_tau_lr: float = key(0.2, "Step of tau's controller: change of log tau per nat of error.", min=1e-06)
    maxent_tau_min: float = key(0.001, "Smallest tau of the controller.", min=1e-09)
    maxent_tau_max: float = key(1000.0, "Largest tau of the controller.", min=1e-09)
    maxent_tau_warmup_steps: int = key(0, "Optimizer steps before the controller moves tau.", min=0)
    report_samples: int = key(4, "Sampled completions of each step kept for report.html; 0 keeps none.", min=0)
    show_completion_steps: int = key(20,
        "Steps between two sampled completions that the launcher prints; 0 prints none.", min=0)
    save_total_limit: int | None = key(2, "Complete checkpoints kept; older ones are removed after a new one.", min=1)


@dataclass
class ModelConfig(trl.ModelConfig):
    """TRL's model options, with LoRA's names of layers as a list always, and no dropout unless it is asked for."""

    use_peft: bool = key(False, "Train a LoRA adapter instead of the weights; model/ is still the merged model.")
    lora_dropout: float = key(0.0,
        "Share of the adapter's inputs dropped in training. The tokens were sampled without: 0 keeps the two alike.",
        min=0.0, max=0.99)
    lora_target_modules: list[str] | None = key(None,
        "Linear layers that get an adapter, by the ends of their names, or all-linear; PEFT's choice by default.")
    lora_modules_to_save: list[str] | None = key(None, "Layers trained as a whole, by the ends of their names.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lora_target_modules, str) and self.lora_target_modules != "all-linear":
            # TRL makes a text of a list of one, which PEFT takes for a regular expression on whole names.
            self.lora_target_modules = [self.lora_target_modules]


# The keys of the core and of every extension.
ScriptArguments = dataclasses.make_dataclass("ScriptArguments", (), bases=(CoreArguments, *parts("keys")))
ScriptArguments.__doc__ = CoreArguments.__doc__
CONFIGS = (ScriptArguments, GRPOConfig, ModelConfig)


@dataclass
class GradientCheckpointingConfig:
    """The mapping under ``gradient_checkpointing_kwargs``: arguments of ``gradient_checkpointing_enable``."""

    use_reentrant: bool = key(False, "Whether to use the reentrant implementation.")
    preserve_rng_state: bool = key(True, "Whether the random state is kept for the recomputation.")
    determinism_check: str = key("default", "What is compared on recomputation.", choices=["default", "none"])
    debug: bool = key(False, "Whether errors hold a trace of the operators.")
    early_stop: bool = key(True, "Whether recomputation stops as soon as everything needed is there.")
    every_n_layers: int = key(1, "Checkpoint only every n-th decoder layer; more saves time and needs memory.", min=1)
    offload: bool = key(False, "Keep the saved activations in pinned host memory: less GPU memory, slower steps.")

# fmt: on

# Classes of mappings inside a key.
NESTED = {
    "dataset_mixture": DatasetMixtureConfig,
    "dataset_mixture.datasets": DatasetConfig,
    "gradient_checkpointing_kwargs": GradientCheckpointingConfig,
    "accelerator_config": AcceleratorConfig,
    "accelerator_config.gradient_accumulation_kwargs": GradientAccumulationPlugin,
}
