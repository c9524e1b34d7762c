"""All recipe keys of the core: TRL's dataclasses and ours, with one line of help per field.

This module imports torch and TRL, which takes seconds. Therefore only code that needs them anyway imports it, for
example the trainer and `grpo check --deep`. ``check``, ``plan`` and ``launch`` read the keys from ``keys.json``. ``make
keys`` writes this file, and ``recipes/schema.json`` for editors. A test fails if these files differ. An extension
declares its keys in its own folder.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trl
from accelerate.utils import GradientAccumulationPlugin
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.fields import MOST_GPUS, MOST_OF_A_GROUP, MOST_ROWS, MOST_STEPS, MOST_TOKENS, key
from grpo_recipes.recipe.registry import OBJECTIVES, SERVER_BACKENDS
from grpo_recipes.recipe.shapes import DEFAULT_SOLUTION

# TRL types these keys as `str`, so a typo would only fail inside the trainer.
TRL_CHOICES: dict[str, list[str]] = {
    "scale_rewards": ["group", "batch", "none"],
    "importance_sampling_level": ["token", "sequence"],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "vllm_model_impl": ["auto", "vllm", "transformers", "terratorch"],
    "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
    "lora_task_type": ["CAUSAL_LM"],
    "dtype": ["auto", "bfloat16", "float16", "float32"],
    "save_strategy": ["no", "steps", "epoch"],
}

# Limits of TRL's keys: least, most, keys. Our own fields declare their limits themselves. Torch, TRL and vLLM would
# reject some of these numbers too, but only after the server has started.
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
    (0, 2**32 - 1, "seed"),  # the range of numpy
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
    """Keys for prompts, solutions, rewards, processes and the run directory."""

    dataset_mixture: dict[str, Any] | None = key(None,
        "Several datasets instead of dataset_name: DatasetMixtureConfig.")
    dataset_prompt_column: str = key("problem", "Column with the problem: text or a list of chat messages.")
    dataset_solution_column: str = key(DEFAULT_SOLUTION, "Column with the reference solution for the rewards.")
    dataset_solution_marker: str | None = key(None,
        "Keep only the text after the last occurrence of this marker in the solution, e.g. '####' for GSM8K.")
    system_prompt: str | None = key(None, "System message for every prompt without one.")
    chat_template: str | None = key(None, "Jinja chat template that replaces the tokenizer's template.")
    dataset_filter: str | None = key(None,
        "Train only on rows with a number in a range, e.g. 'pass_rate in 0.1..0.9'. `grpo eval --write-filtered` "
        "writes such a column.")
    max_prompt_length: int | None = key(None,
        "Longest rendered prompt in tokens; longer prompts are dropped.", min=1, max=MOST_TOKENS)
    max_train_prompts: int | None = key(None,
        "Number of training prompts to keep: the first of a seeded shuffle, or of a stream.", min=1)
    eval_dataset_name: str | None = key(None,
        "Evaluation dataset; by default dataset_test_split of dataset_name, or the mixture's test_split_size.")
    eval_dataset_config: str | None = key(None, "Configuration of the evaluation dataset.")
    eval_dataset_split: str = key("test", "Split of eval_dataset_name to evaluate on.")
    eval_dataset_prompt_column: str | None = key(None,
        "Column with the problem in the evaluation dataset; dataset_prompt_column by default.")
    eval_dataset_solution_column: str | None = key(None,
        "Column with the solution in the evaluation dataset; dataset_solution_column by default.")
    eval_subsample: float = key(1.0, "Fraction of the evaluation set to use, drawn by seed.", min=0.0001, max=1.0)
    eval_max_prompts: int = key(1000, "Most evaluation prompts after eval_subsample.", min=1)
    benchmarks: list[str] = key([],
        "Benchmarks to run on the final model: names listed by `grpo keys --benchmarks`, .jsonl files with problem and "
        "answer columns, or environments of the recipe, with their evaluation episodes.")
    benchmark_samples: int = key(1, "Completions of each benchmark problem (k of pass@k).", min=1, max=MOST_OF_A_GROUP)
    benchmark_max_problems: int | None = key(None,
        "Most problems of a benchmark, drawn by seed; all by default.", min=1)
    benchmark_temperature: float = key(0.6, "Sampling temperature of benchmarks; 0 is greedy.", min=0.0)
    callbacks: list[str] = key([],
        "Your trainer callbacks: module:Class or file.py:Class, constructed without arguments.")
    reward_funcs: list[str] = key(["pure_accuracy_math"],
        "Rewards, summed by weight: built-in names, or your own as module:function or file.py:function.")
    answer_matching: str = key("normalized",
        "How pure_accuracy_math compares: normalized ($, \\boxed{}, 1,000, units, 1/2), or strict (the same text).",
        choices=["normalized", "strict"])
    cosine_min_value_wrong: float = key(0.0, "cosine_length: reward of a wrong completion of length 0.")
    cosine_max_value_wrong: float = key(-0.5, "cosine_length: reward of a wrong completion of length cosine_max_len.")
    cosine_min_value_correct: float = key(0.5, "cosine_length: reward of a right completion of length cosine_max_len.")
    cosine_max_value_correct: float = key(1.0, "cosine_length: reward of a right completion of length 0.")
    cosine_max_len: int | None = key(None, "cosine_length: most tokens; max_completion_length by default.", min=1)
    repetition_n_grams: int = key(3, "repetition_penalty: words per n-gram.", min=1)
    repetition_max_penalty: float = key(-1.0,
        "repetition_penalty: reward of a completion that only repeats itself.", max=0.0)
    soft_punish_cache: int | None = key(None,
        "soft_overlong: last tokens before max_completion_length in which the penalty grows from 0 to -1.", min=1)
    reward_isolation: str = key("completion",
        "How your own rewards run. completion: one completion at a time in a child process, with the limits below. "
        "none: on the whole batch inside the trainer, without limits.", choices=["completion", "none"])
    reward_timeout: float = key(5.0, "Time limit in seconds for one completion of a reward in a child process.",
        min=0.01)
    reward_memory_gib: float = key(4.0, "Memory limit in GiB of a reward's child process.", min=0.1)
    reward_workers: int | None = key(None,
        "Child processes for rewards; by default 1 per 2 cores, at most 8.", min=1, max=1024)
    reward_concurrency: int = key(32, "Concurrent calls of your async reward in one child process.", min=1, max=1024)
    reward_environment: list[str] = key([],
        "Names of shell variables, such as a judge's key, that rewards in child processes and environments get. They "
        "get no others.")
    reward_max_no_verdict: float = key(0.5,
        "Fraction of a step's completions without a score (time limit, crash, not a number) that ends the run.",
        min=0.0, max=1.0)
    run_root: str = key("runs", "Folder for run directories, named <run_name>-<timestamp>.")
    fsdp_cpu_offload: bool = key(False,
        "With accelerator: fsdp2, keep parameters, gradients and optimizer states in CPU memory.")
    accelerator: str = key("auto",
        "How training processes share the model: TRL's packaged accelerate file of this name.",
        choices=["auto", "single", "ddp", "zero2", "zero3", "fsdp2"])
    num_processes: int | None = key(None,
        "Training processes; by default one per training GPU, one on CPU.", min=1, max=1024)
    main_process_port: int | None = key(None,
        "Rendezvous port of the trainers; 29525 outside Slurm.", min=1024, max=65535)


@dataclass
class DatasetConfig:
    """One dataset of a mixture: an entry of ``dataset_mixture.datasets``."""

    id: str = key("", "Hub id, local file or folder.")
    config: str | None = key(None, "Configuration of the dataset.")
    split: str = key("train", "Split to read.")
    columns: list[str] | None = key(None,
        "Prompt and solution column, then other columns for rewards; by default the recipe's two and all others.")
    weight: float | None = key(None, "Fraction of its rows to use, drawn by seed; all by default.", min=0.0001, max=1.0)


@dataclass
class DatasetMixtureConfig:
    """Several datasets joined and shuffled: the mapping under ``dataset_mixture``."""

    datasets: list[DatasetConfig] = key([], "Entries with the keys of DatasetConfig.")
    seed: int = key(0, "Seed of the subsamples and of the shuffle.")
    test_split_size: float | None = key(None, "Rows to hold out for evaluation: a fraction below 1, or a number.")


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """TRL's GRPO options, and ours for the batch, the vLLM server, weight sync, evaluation and MaxEnt."""

    if TYPE_CHECKING:  # TRL declares these fields as optional or as text, and sets or parses them in __post_init__
        output_dir: str = ""
        generation_batch_size: int = 0
        steps_per_generation: int = 0
        max_completion_length: int = 0
        chat_template_kwargs: dict[str, Any] | None = None
        model_init_kwargs: dict[str, Any] | None = None

    num_generations: int = key(8,
        "Completions of each prompt: the group within which advantages are computed.",
        min=2, max=MOST_OF_A_GROUP)
    prompts_per_step: int | None = key(None,
        "Prompts of one optimizer step on all devices; the per-device batch and accumulation are derived from it.",
        min=1, max=MOST_ROWS)
    loss_type: str = key("dapo",
        "Loss of tokens and its mean; `grpo keys objective` has the papers. grpo: mean over the tokens of each "
        "completion, then over completions. dapo: mean over the step's tokens. bnpo: mean over the tokens of a forward "
        "pass. dr_grpo: sum of tokens divided by max_completion_length. cispo: clips the weights of log-probs at "
        "epsilon_high. sapo: replaces clipping by a gate with the temperatures sapo_temperature_*. gmpo: geometric "
        "mean of a completion's ratios, with log-ratios clipped at epsilon. luspo: ratios of whole completions times "
        "the length. vespo: smooth weights of whole completions.",
        choices=["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo", "gmpo"])
    advantage_estimator: str = key("group",
        "How advantages follow from rewards; `grpo keys objective` has the papers. group: minus the group's mean, "
        "divided as scale_rewards says. rloo: minus the mean of the group's other completions. reinforce_plus_plus: "
        "minus the batch's mean, divided by its standard deviation. reinforce_plus_plus_baseline: minus the group's "
        "mean, divided by the batch's standard deviation of that difference.",
        choices=["group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
    dynamic_sampling: bool = key(False,
        "Replace each group whose rewards are all equal, which teaches nothing, by the group of another prompt before "
        "the update; see docs/performance.md.")
    dynamic_sampling_max_rounds: int = key(3,
        "dynamic_sampling: most rounds of new prompts for a generation. Groups without a signal that are left stay in "
        "the update.", min=1, max=100)
    trim_padding: bool = key(True,
        "Sort the rows of an optimizer step by length, and trim the padding of each forward pass.")
    pad_to_multiple_of: int | None = key(None,
        "Round the padded lengths of prompts and completions up to a multiple of this; with trim_padding also the "
        "lengths of forward passes. auto: do not round.",
        min=1, auto=True)
    padding_free: bool = key(False,
        "Concatenate the rows of a forward pass instead of padding them; needs attn_implementation.")
    ref_model_name_or_path: str | None = key(None,
        "Hub id or folder of the reference model for beta; by default the model at the start of training.")
    teacher_model_name_or_path: str | None = key(None,
        "Hub id or folder of a teacher with the same tokenizer (on-policy distillation). The advantage of each sampled "
        "token gains teacher_coef times its log-prob under the teacher minus its log-prob when it was sampled.")
    teacher_coef: float = key(1.0,
        "teacher_model_name_or_path: weight of the teacher's part of the advantages. For distillation without rewards, "
        "set reward_weights to zeros.", min=1e-09)
    weight_sync: str = key("auto",
        "How new weights reach the server: nccl between GPUs, file (safetensors in shared memory), shared (one copy "
        "for trainer and server), lora (only the adapter), restart (a new server each time).",
        choices=["auto", "nccl", "file", "shared", "lora", "restart"])
    weight_guard: bool = key(True,
        "After each sync, verify that the server uses the trainer's weights, and stop the run if not.")
    weight_guard_tolerance: float | None = key(None,
        "Largest mean |log-prob difference| between server and trainer; by default 1e-3 in float32, 5e-2 in bfloat16.",
        min=0.0)
    vllm_server_base_url: str | None = key(None,
        "Address of an external server, used instead of starting one. It gets new weights as files, which it must be "
        "able to read.")
    server_backend: str = key("vllm_server",
        "Type of the server at vllm_server_base_url: vLLM, started with VLLM_SERVER_DEV_MODE=1, or SGLang.",
        choices=list(SERVER_BACKENDS))
    max_concurrent_requests: int = key(256,
        "Requests sent to the server at the same time. Each has all completions of a prompt, or one completion at "
        "vllm_server_base_url.", min=1, max=MOST_ROWS)
    eval_temperature: float | None = key(None,
        "Temperature of evaluations; 0 is greedy. By default temperature.", min=0.0)
    eval_top_p: float | None = key(None, "Nucleus of evaluations; by default top_p.", min=0.0001, max=1.0)
    eval_max_completion_length: int | None = key(None,
        "Most tokens of an evaluation's completion; by default max_completion_length.", min=1, max=MOST_TOKENS)
    load_best_model_at_end: bool = key(False,
        "Keep the checkpoint with the largest eval_reward, and write it to model/ instead of the model of the last "
        "step. An evaluation with a new best reward saves a checkpoint.")
    early_stopping_patience: int | None = key(None,
        "End the training after this number of evaluations in a row without a new best eval_reward.",
        min=1, max=MOST_STEPS)
    eval_sampling_seed: int | None = key(None,
        "Seed from which the sampling seeds of evaluations are derived; by default seed.", min=0)
    seed_server: bool | None = key(None,
        "Use one sampling seed per prompt and step, so that a CPU run samples the same tokens again; true on CPU by "
        "default.")
    server_request_timeout: float = key(1800.0,
        "Longest wait in seconds for one response of the vLLM server, which then counts as lost.", min=1.0)
    vllm_server_timeout: float = key(600.0, "Longest wait in seconds for the vLLM server to be ready.", min=1.0)
    server_restarts: int = key(2,
        "Restarts of a dead or hung vLLM server in an attempt, with at least one step between them. The same limit "
        "applies to each process of an extension.", min=0)
    server_stall_timeout: float = key(300.0,
        "Seconds without a new token, while requests are waiting, after which the vLLM server counts as hung.", min=1.0)
    weight_sync_timeout: float = key(600.0,
        "Longest time in seconds for a transfer of weights to the vLLM server, or for its rendezvous. NCCL takes "
        "seconds, files on a network file system take minutes.", min=1.0)
    stall_timeout: float = key(3600.0,
        "Longest time in seconds that a training process may stay in one phase. Then the run ends and prints the "
        "stacks of all processes.", min=1.0)
    max_requeues: int = key(100, "How often Slurm may restart the job of a stopped run.", min=0)
    vllm_mode: str = key("server",
        "server: vLLM on the first GPUs, training on the others; colocate: vLLM inside every training process.",
        choices=["server", "colocate"])
    overlap_generation: bool = key(False,
        "Sample the next generation while training on the current one: one step off-policy, corrected by importance "
        "sampling. Steps are faster, but learn slightly less; see docs/performance.md.")
    vllm_server_host: str = key("127.0.0.1",
        "Address of the vLLM server; in a job on several nodes, the address of the first node.")
    vllm_node: str = key("shared",
        "For jobs on several nodes. shared: trainers use the first node's other GPUs; own: the server has that node.",
        choices=["shared", "own"])
    vllm_gpu: str = key("own",
        "own: the server's GPUs only serve; shared: trainers use them too, so that one GPU is enough for a server "
        "(weight_sync file or lora; weight_sync: shared always does this).",
        choices=["own", "shared"])
    vllm_server_port: int = key(8000, "Port of the vLLM server.", min=1024, max=65535)
    vllm_group_port: int = key(51216, "Port of the NCCL group that transfers the weights.", min=1024, max=65535)
    vllm_gpu_memory_utilization: float = key(0.9,
        "Fraction of GPU memory for vLLM. Unless this is set, 0.9 of its own GPU, or 0.3 of a GPU that also trains "
        "(colocate, vllm_gpu: shared or weight_sync: shared).", min=0.05, max=1.0)
    vllm_tensor_parallel_size: int = key(1, "Number of GPUs that share one vLLM model.", min=1, max=MOST_GPUS)
    vllm_data_parallel_size: int | None = key(1,
        "Replicas of the vLLM server behind one URL. They share the requests, and each uses vllm_tensor_parallel_size "
        "GPUs. On CPU, each replica computes with one thread. auto: the number with the shortest step, predicted from "
        "the newest run of the recipe in run_root; 1 without such a run or on CPU.", min=1, max=MOST_GPUS, auto=True)
    vllm_data_parallel_size_local: int | None = key(None,
        "Replicas on each node, for a server on several nodes. It runs on the first nodes of the job, by default only "
        "on the first.", min=1, max=MOST_GPUS)
    vllm_enforce_eager: bool = key(False,
        "Run vLLM without CUDA graphs: it starts sooner and needs less memory, but samples more slowly. Always true on "
        "CPU.")
    vllm_max_model_length: int | None = key(None,
        "Most tokens of prompt plus completion that the server accepts.", min=1, max=MOST_TOKENS)
    vllm_max_num_seqs: int | None = key(None,
        "Most completions that a vLLM engine generates at the same time. By default all completions of a generation, "
        "evaluation batch or benchmark, fewer if memory is short.", min=1, max=2048)
    vllm_args: dict[str, Any] | None = key(None,
        "More flags of `vllm serve` for the run's server, with underscores, e.g. {max_num_batched_tokens: 4096}.")
    logging_steps: float = key(1, "Always 1: one row of metrics.jsonl per optimizer step.", min=1, max=1)
    save_steps: float = key(100, "Optimizer steps between checkpoints, or a fraction of all steps below 1.", min=0.0001)
    push_to_hub: bool = key(False, "Push the final model to the hub at the end of a run. Needs write access.")
    hub_model_id: str | None = key(None, "Repository for push_to_hub: user/name; by default the run's name.")
    hub_strategy: str = key("end", "Always end: push_to_hub pushes once, at the end of the run.", choices=["end"])
    hub_revision: str | None = key(None, "Branch for push_to_hub, created if it is missing; main by default.")
    hub_private_repo: bool | None = key(True, "Whether push_to_hub creates a private repository.")
    report_to: None | str | list[str] = key("none",  # noqa: RUF036 (the order that transformers' parser accepts)
        "Trackers that get the metrics: tensorboard, wandb, trackio, mlflow, swanlab and comet_ml. Files of the run "
        "directory are written in any case.")
    project: str = key("grpo-recipes",
        "Project of the run in Trackio, SwanLab and Comet, and its experiment in MLflow. Their own variables, such as "
        "MLFLOW_EXPERIMENT_NAME, override it. W&B uses it if you set it and wandb_project is unset.")
    wandb_project: str | None = key(None, "W&B project; WANDB_PROJECT.")
    wandb_entity: str | None = key(None, "W&B team or user; WANDB_ENTITY.")
    wandb_run_group: str | None = key(None, "W&B group of the run; WANDB_RUN_GROUP.")
    kl_target: float | None = key(None,
        "Target for the KL divergence from the reference (per token, the metric kl), reached by moving beta. Without "
        "it, beta is fixed.", min=1e-09)
    kl_horizon: float = key(2000.0, "kl_target: completions in which beta can change by its factor.", min=1.0)
    kl_ctl_step_size: float = key(0.2, "kl_target: largest relative error used in a step.", min=1e-06, max=0.99)
    kl_beta_min: float = key(1e-4,
        "kl_target: smallest beta. It lets beta recover in time after the KL was below its target for long.", min=0.0)
    maxent_objective: str | None = key(None,
        "Objective of MaxEnt-GRPO; setting it makes this a MaxEnt recipe. MAXENT=1 without it selects listwise. "
        "listwise: cross-entropy from a target over the group to the policy's own distribution over it. weighted_mle: "
        "likelihood weighted by that target. tempered: Dr.GRPO with rows weighted by softmax(utility / tau). maxrl: "
        "reward divided by the group's mean, minus 1.",
        choices=sorted(OBJECTIVES))
    maxent_tau: float | None = key(None,
        "Temperature of the MaxEnt weights: 0 puts all weight on the best of a group, .inf gives equal weights. The "
        "default depends on the objective.", min=0.0, infinite=True)
    maxent_beta: float = key(0.0,
        "How strongly the reference pulls the MaxEnt target; in the loss, beta does this.", min=0.0)
    maxent_q_temperature: float = key(1.0, "Temperature of the softmax that turns rewards into q.", min=1e-06)
    maxent_q_epsilon: float = key(1e-6, "Least mass of each completion in q; below 1 / num_generations.", min=0.0)
    maxent_length_normalize_ref: bool = key(True,
        "Whether the reference's log-prob of a completion is divided by its length in the MaxEnt target.")
    maxent_length_normalize_policy: bool = key(True,
        "Whether the policy's log-prob of a completion is divided by its length in the MaxEnt loss. Used by "
        "weighted_mle, and by listwise with maxent_policy_temperature 0.")
    maxent_policy_temperature: float = key(3.5,
        "listwise: temperature T (nats) of the policy's distribution over a group, softmax(summed log-prob / T). With "
        "0, T is the length of each completion, and the objective weakens with the length.", min=0.0)
    maxent_policy_spread: float = key(0.0,
        "listwise: raise maxent_policy_temperature to at least this many standard deviations of a group's log-probs.",
        min=0.0)
    maxent_utility: str = key("advantage",
        "Utility in the weights of tempered: advantage (reward minus the group's mean), or length_scaled (advantage "
        "times length / max_completion_length, as in the paper).", choices=["advantage", "length_scaled"])
    maxent_target_ratio: float | None = key(None,
        "Target for the mean MaxEnt weight of right answers divided by the weight of wrong answers, reached by moving "
        "tau. Without a target, tau is fixed.", min=1.01)
    maxent_target_weight_entropy: float | None = key(None,
        "Target for the mean entropy (nats) of the MaxEnt weights, reached by moving tau. With rewards of 0 and 1 it "
        "is at least the log of the number of right answers.", min=0.0)
    maxent_target_eff_rollouts: float | None = key(None,
        "Target for the mean effective number of completions of a group (exp of the weights' entropy), reached by "
        "moving tau. With rewards of 0 and 1 it is at least the number of right answers.", min=1.0)
    maxent_tau_lr: float = key(0.2, "Step of tau's controller: change of log tau per nat of error.", min=1e-06)
    maxent_tau_min: float = key(0.001, "Smallest tau of the controller.", min=1e-09)
    maxent_tau_max: float = key(1000.0, "Largest tau of the controller.", min=1e-09)
    maxent_tau_warmup_steps: int = key(0, "Optimizer steps before the controller moves tau.", min=0)
    report_samples: int = key(4, "Sampled completions of each step to keep for report.html; 0 keeps none.", min=0)
    show_completion_steps: int = key(20,
        "Steps between two sampled completions that the launcher prints; 0 prints none.", min=0)
    save_total_limit: int | None = key(2,
        "Number of complete checkpoints to keep; older ones are removed. With load_best_model_at_end, the best one "
        "counts, and at least 2 are kept.", min=1)

    def __post_init__(self) -> None:
        """Set ``metric_for_best_model`` if a key needs it, and keep at least 2 checkpoints to load the best one."""
        if self.load_best_model_at_end or self.early_stopping_patience is not None:
            self.metric_for_best_model = self.metric_for_best_model or "eval_reward"
        if self.load_best_model_at_end and self.save_total_limit == 1:
            self.save_total_limit = 2  # with 1, transformers deletes the newest checkpoint at the end
        super().__post_init__()


@dataclass
class RowsConfig(GRPOConfig):
    """``GRPOConfig`` for tasks that train on rows without sampling: the batch has no groups of completions."""

    def __post_init__(self) -> None:
        """Call only the method of TRL's base class, which checks the options of every trainer."""
        super(trl.GRPOConfig, self).__post_init__()  # without TRL's checks of the groups


@dataclass
class ModelConfig(trl.ModelConfig):
    """TRL's model options. LoRA's layer names are always a list, and LoRA's dropout is 0 by default."""

    use_peft: bool = key(False, "Train a LoRA adapter instead of the weights; model/ still has the merged model.")
    lora_dropout: float = key(0.0,
        "Fraction of the adapter's inputs dropped in training. Sampling has no dropout, so 0 keeps both equal.",
        min=0.0, max=0.99)
    lora_target_modules: list[str] | None = key(None,
        "Linear layers that get an adapter, by the ends of their names, or all-linear; PEFT's default if unset.")
    lora_modules_to_save: list[str] | None = key(None, "Layers to train in full, by the ends of their names.")

    def __post_init__(self) -> None:
        """Turn a single layer in ``lora_target_modules`` back to a list, unless it is "all-linear"."""
        super().__post_init__()
        modules: Any = self.lora_target_modules  # TRL turns a list with one item into a string
        if isinstance(modules, str) and modules != "all-linear":
            self.lora_target_modules = [modules]  # PEFT treats a string as a regular expression


if TYPE_CHECKING:

    class ScriptArguments(CoreArguments):
        """The keys of the core and of every extension."""

        def __getattr__(self, extension_key: str) -> Any: ...

else:
    ScriptArguments = dataclasses.make_dataclass("ScriptArguments", (), bases=(CoreArguments, *parts("keys")))
    ScriptArguments.__doc__ = CoreArguments.__doc__
CONFIGS: tuple[Any, ...] = (ScriptArguments, GRPOConfig, ModelConfig)
CONFIGS_OF_ROWS: tuple[Any, ...] = (ScriptArguments, RowsConfig, ModelConfig)


@dataclass
class GradientCheckpointingConfig:
    """The mapping under ``gradient_checkpointing_kwargs``: arguments of ``gradient_checkpointing_enable``."""

    use_reentrant: bool = key(False, "Whether to use the reentrant implementation.")
    preserve_rng_state: bool = key(True, "Whether to restore the random state for the recomputation.")
    determinism_check: str = key("default", "Comparison after the recomputation.", choices=["default", "none"])
    debug: bool = key(False, "Whether errors include a trace of the operators.")
    early_stop: bool = key(True, "Whether to stop the recomputation as soon as all needed tensors are available.")
    every_n_layers: int = key(1,
        "Checkpoint only every n-th decoder layer. A larger n saves time and needs more memory.", min=1)
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
