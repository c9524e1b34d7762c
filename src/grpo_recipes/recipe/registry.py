"""Tables of everything that a recipe can name: rewards, benchmarks, MaxEnt objectives, weight sync methods.

The tables describe the code, but do not import it, so that `grpo check` needs no torch.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from packaging.version import Version

from grpo_recipes.errors import Problem, config_error
from grpo_recipes.recipe.extensions import entries, parts
from grpo_recipes.recipe.generated import generated
from grpo_recipes.recipe.keys import nearest_of
from grpo_recipes.recipe.trackers import TRACKERS

# The setups of a recipe and its plan that decide which weight sync methods work -> their names in messages.
SETUPS = {
    "single": "one training process",
    "ddp": "several training processes (DDP)",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
    "fsdp2": "FSDP2",
    "custom": "CONFIG_FILE",
    "full": "training of all weights",
    "lora": "LoRA (use_peft)",
    "tensor_parallel": "vllm_tensor_parallel_size above 1",
    "replicas": "vllm_data_parallel_size above 1",
    "nodes": "server and rank 0 on two nodes",  # for vLLM inside the trainers: trainers on two nodes
}
YES = "yes"  # tested on CPU
ON_GPUS = "on GPUs"  # needs GPUs; untested
ON_CPU = "on CPU"  # tested on CPU; GPUs run different code, which is untested
_EVERYWHERE = frozenset({"cpu", "cuda"})
_BUFFERS = "DeepSpeed keeps the weights in its own buffers"
_SPLIT, _MAY_SPLIT = "no training process has the whole weights", "it may split the weights"


@dataclass(frozen=True)
class SyncMethod:
    """A method that sends new weights to vLLM, and the setups that it supports."""

    reconnects: frozenset[str]  # devices on which its client sends a restarted server the last weights and continues
    serves: Mapping[str, str]  # setup -> YES, ON_GPUS, ON_CPU, or the reason why it is not supported

    def refusal(self, setups: Iterable[str]) -> tuple[str, str] | None:
        """Return the first of ``setups`` that is not supported, in words, with the reason; else None."""
        refused = (name for name in setups if self.serves[name] not in (YES, ON_GPUS, ON_CPU))
        return next(((SETUPS[name], self.serves[name]) for name in refused), None)

    def runs_on(self, device: str) -> bool:
        """Return whether the method works in an environment for ``cpu`` or ``cuda``."""
        return device == "cuda" or ON_GPUS not in self.serves.values()


def _fill_setups(status: str, **reasons: str) -> dict[str, str]:
    """Return ``status`` for every setup, except for the setups with a reason against them."""
    return {**dict.fromkeys(SETUPS, status), **reasons}


SYNC_METHODS = {
    "file": SyncMethod(reconnects=_EVERYWHERE, serves=_fill_setups(YES)),
    "nccl": SyncMethod(reconnects=frozenset(), serves=_fill_setups(ON_GPUS)),
    "shared": SyncMethod(
        reconnects=frozenset({"cpu"}),  # CUDA memory is undefined after its process has ended
        serves=_fill_setups(
            ON_CPU,
            zero2=_BUFFERS,
            zero3=_SPLIT,
            fsdp2=_SPLIT,
            custom=_MAY_SPLIT,
            lora="no training process has the merged weights",
            tensor_parallel="each worker has a part of the weights",
            replicas="each replica has its own copy of the weights",
            nodes="memory ends at the node",
        ),
    ),
    "lora": SyncMethod(
        reconnects=_EVERYWHERE,
        serves=_fill_setups(
            YES, zero3=_SPLIT, fsdp2=_SPLIT, custom=_MAY_SPLIT, full="it carries an adapter (use_peft)"
        ),
    ),
    "restart": SyncMethod(reconnects=_EVERYWHERE, serves=_fill_setups(YES)),
}
COLOCATE = "colocate"  # vLLM runs inside the trainers and loads the weights directly
# All methods that send weights to vLLM: `grpo check` and the plan enforce this table, and the docs print it.
SYNC_TABLE = {
    **SYNC_METHODS,
    COLOCATE: SyncMethod(
        reconnects=frozenset(), serves=_fill_setups(YES, replicas="each trainer already has its own vLLM")
    ),
}
EXTERNAL = "external"  # an external server, which loads the weights from files
NOT_WITH_LORA = ("zero3", "fsdp2")  # accelerators with which no method has been shown to send an adapter to vLLM
ADAPTER = "grpo-adapter"  # the trained adapter's name at the server, used as the model of a request
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the sizes for which vLLM reserves memory
# External servers, by the API that returns completions.
SERVER_BACKENDS = ("vllm_server", "sglang_server")


def sync_methods_for(setups: Collection[str], device: str | None = None) -> list[str]:
    """Return the weight sync methods that work in all these setups, and on the device if it is given."""
    serving = [name for name, method in SYNC_METHODS.items() if not method.refusal(setups)]
    return [name for name in serving if device is None or SYNC_METHODS[name].runs_on(device)]


# Tracker -> transformers' callback, and (package, module). Those not in TRACKERS are only available as a callback.
TRACKER_CALLBACKS = {
    "azure_ml": ("AzureMLCallback", ("azureml-core", "azureml")),
    "clearml": ("ClearMLCallback", ("clearml", "clearml")),
    "codecarbon": ("CodeCarbonCallback", ("codecarbon", "codecarbon")),
    "comet_ml": ("CometCallback", ("comet-ml", "comet_ml")),
    "dagshub": ("DagsHubCallback", ("dagshub", "dagshub")),
    "dvclive": ("DVCLiveCallback", ("dvclive", "dvclive")),
    "flyte": ("FlyteCallback", ("flytekit", "flytekit")),
    "mlflow": ("MLflowCallback", ("mlflow", "mlflow")),
    "neptune": ("NeptuneCallback", ("neptune", "neptune")),
    "swanlab": ("SwanLabCallback", ("swanlab", "swanlab")),
    "trackio": ("TrackioCallback", ("trackio", "trackio")),
}

# (key, pattern of values) -> (package, module) that they need. The first match counts. The lock has none of them.
_PACKAGES = {
    ("use_liger_kernel", "True"): ("liger-kernel", "liger_kernel"),
    ("attn_implementation", "flash_attention_2"): ("flash-attn", "flash_attn"),
    ("attn_implementation", "flash_attention_3"): ("flash-attn-3", "flash_attn_interface"),
    ("attn_implementation", "*/*"): ("kernels", "kernels"),
    ("optim", "adamw_torch_[48]bit"): ("torchao", "torchao"),
    ("optim", "galore_*"): ("galore-torch", "galore_torch"),
    ("optim", "apollo_*"): ("apollo-torch", "apollo_torch"),
    ("optim", "*lomo"): ("lomo-optim", "lomo_optim"),
    ("optim", "grokadamw"): ("grokadamw", "grokadamw"),
    ("optim", "schedule_free_*"): ("schedulefree", "schedulefree"),
    ("optim", "stable_adamw"): ("torch-optimi", "optimi"),
    ("optim", "adamw_anyprecision"): ("torchdistx", "torchdistx"),
    ("optim", "adamw_torch_xla"): ("torch_xla", "torch_xla"),
    ("optim", "adamw_torch_npu_fused"): ("torch_npu", "torch_npu"),
    ("optim", "*[28]bit"): ("bitsandbytes", "bitsandbytes"),
    ("optim", "ademamix"): ("bitsandbytes", "bitsandbytes"),
    ("optim", "rmsprop_bnb"): ("bitsandbytes", "bitsandbytes"),
    **{("report_to", name): (tracker.package, tracker.module) for name, tracker in TRACKERS.items()},
    **{("callbacks", f"transformers*:{name}"): package for name, package in TRACKER_CALLBACKS.values()},
}
PACKAGE_KEYS = tuple(dict.fromkeys(key for key, _ in _PACKAGES))

SOURCE_REWARD = "environment"  # the reward that comes from a prompt source, together with its completions


@dataclass(frozen=True)
class Reward:
    """A reward that a recipe names without a colon."""

    name: str
    function: str  # ``module:name``; pure and fast, unless ``in_children``
    keys: tuple[str, ...] = ()  # recipe keys that are arguments of the function
    accuracy: bool = False  # the score is 1 for a right answer and 0 for a wrong answer
    one_answer: bool = False  # it compares with one reference answer
    judges: tuple[str, ...] = ()  # generated datasets that it can judge; empty: all datasets
    in_children: bool = False  # runs in child processes, which can be killed, because a completion may take forever
    calls_server: bool = False  # async, and needs the keys reward_concurrency and reward_environment
    # Whether it reads the rows' solutions in a recipe, given a lookup of its keys. By default as ``reads_answer``.
    needs_solution: Callable[[Callable[[str], Any]], bool] | None = None
    instead_of_solution: tuple[str, ...] = ()  # columns that it reads instead of the solution, if the rows have them
    # For `grpo check-rewards`.
    writings: tuple[str, ...] = ()  # formats of an answer that it reads; empty: <answer>%s</answer>, also with a box
    tagged: bool = False  # it reads only answers inside <answer>...</answer>
    answers: str = ""  # a function (row) -> (right answers, wrong answers), or None if it cannot judge the row

    @property
    def reads_answer(self) -> bool:
        """Whether its score depends on the answer in a completion."""
        return self.accuracy or self.one_answer

    def reads_solution(self, lookup: Callable[[str], Any]) -> bool:
        """Return whether it reads the rows' solutions; ``lookup`` returns the value of a recipe key."""
        return self.reads_answer if self.needs_solution is None else self.needs_solution(lookup)


_FUNCTIONS = "grpo_recipes.rewards.functions"
_REWARDS = (
    Reward("pure_accuracy_math", f"{_FUNCTIONS}:pure_accuracy_math", ("answer_matching",), accuracy=True,
        one_answer=True, tagged=True),
    # Importing the library takes a second, so this reward has its own module.
    Reward("math_verify", "grpo_recipes.rewards.math_verify:math_verify", accuracy=True, one_answer=True,
        in_children=True, writings=("<answer>%s</answer>", r"<answer>\boxed{%s}</answer>", r"\boxed{%s}")),
    Reward("format_tags", f"{_FUNCTIONS}:format_tags", tagged=True),
    Reward("cosine_length", f"{_FUNCTIONS}:cosine_length", (
        "answer_matching", "cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct",
        "cosine_max_value_correct", "cosine_max_len", "max_completion_length"), one_answer=True, tagged=True),
    Reward("repetition_penalty", f"{_FUNCTIONS}:repetition_penalty", ("repetition_n_grams", "repetition_max_penalty")),
    Reward("soft_overlong", f"{_FUNCTIONS}:soft_overlong", ("max_completion_length", "soft_punish_cache")),
    Reward(SOURCE_REWARD, f"{_FUNCTIONS}:environment"),
)  # fmt: skip
DEFAULT_ACCURACY = "pure_accuracy_math"  # judges benchmarks if no reward of the recipe is an accuracy


def rewards() -> dict[str, Reward]:
    """Return every reward that a recipe can name without a colon, by name; raise ConfigError if two have one name."""
    by_name: dict[str, Reward] = {}
    for reward in (*_REWARDS, *entries("rewards")):
        if by_name.setdefault(reward.name, reward) is not reward:
            message = f"the reward '{reward.name}' is declared twice"
            raise config_error("extensions", message, f"rename {reward.function}")
    return by_name


def reward_keys(names: Iterable[str]) -> set[str]:
    """Return the recipe keys that are arguments of these rewards; user rewards and unknown names are ignored."""
    known = rewards()
    return {key for name in names if name in known for key in known[name].keys}


def rewards_with_server() -> set[str]:
    """Return the names of the registered rewards that call a server."""
    return {name for name, reward in rewards().items() if reward.calls_server}


def rewards_in_children() -> set[str]:
    """Return the names of the registered rewards that always run in child processes."""
    return {name for name, reward in rewards().items() if reward.in_children}


def list_reward_models(names: Iterable[str]) -> list[str]:
    """Return the entries of ``reward_funcs`` that are models, hub ids and folders, without duplicates."""
    return list(dict.fromkeys(name for name in names if "/" in name and ":" not in name and not name.endswith(".py")))


NO_ANSWER = "no answer from its server"  # the reason begins with it if a reward's server left a completion unscored


@dataclass(frozen=True)
class Benchmark:
    """The dataset of a benchmark, and its columns."""

    help: str  # one line for `grpo keys --benchmarks`
    id: str  # dataset on the hub
    split: str
    config: str | None = None  # configuration of the dataset
    prompt: str = "problem"  # column of the problem
    solution: str = "answer"  # column of the right answer
    marker: str | None = None  # the answer follows the last occurrence of this text in the solution
    wrong: tuple[str, ...] = ()  # columns of wrong answers; makes it multiple choice, answered with a letter
    gated: bool = False  # the hub requires an accepted license and HF_TOKEN


_BENCHMARKS: dict[str, Benchmark] = {
    "math_500": Benchmark("500 competition problems of MATH", "HuggingFaceH4/MATH-500", "test"),
    "gsm8k": Benchmark("1,319 grade-school word problems", "openai/gsm8k", "test", "main", "question", marker="####"),
    "aime24": Benchmark("30 problems of AIME 2024, answers 0 to 999", "HuggingFaceH4/aime_2024", "train"),
    "aime25": Benchmark("30 problems of AIME 2025, answers 0 to 999", "math-ai/aime25", "test"),
    "gpqa": Benchmark(
        "198 multiple-choice questions of GPQA diamond; gated: needs HF_TOKEN", "Idavidrein/gpqa", "train",
        "gpqa_diamond", prompt="Question", solution="Correct Answer",
        wrong=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"), gated=True,
    ),
    "smoke:sums": Benchmark("20 held-out sums of the smoke task; needs no network", "smoke:sums", "test"),
}  # fmt: skip


def benchmarks() -> dict[str, Benchmark]:
    """Return the benchmarks that a recipe can name, including the benchmarks of extensions."""
    by_name = dict(_BENCHMARKS)
    for registered in parts("benchmarks"):
        by_name |= registered
    return by_name


# Benchmarks that run code written by the model, which needs a sandbox -> the lighteval task.
_RUNS_MODEL_CODE = {"lcb": "lcb:codegeneration", "lcb_v4": "lcb:codegeneration_v4"}


def is_file(name: str) -> bool:
    """Return whether a benchmark is a local file of problems, not a registered name."""
    return name.endswith(".jsonl")


def benchmark_columns(names: Collection[str], recipe_columns: tuple[str, str]) -> tuple[str, str] | None:
    """Return the columns of problem and answer in a user's file with the columns ``names``; None if it lacks them.

    They are "problem" and "answer", or else ``recipe_columns``.
    """
    candidates = (("problem", "answer"), recipe_columns)
    return next((columns for columns in candidates if set(columns) <= set(names)), None)


def benchmark_problem(name: str, where: str, played: Collection[str] = ()) -> Problem | None:
    """Return the problem of a name in ``benchmarks``, or None if the name is valid.

    ``where`` is the location of the key. ``played`` are names that the recipe's prompt source runs itself.
    """
    if name in _RUNS_MODEL_CODE:
        message = f"benchmark '{name}' runs code written by the model, which is not supported"
        command = f'lighteval vllm "model_name=<run>/model" "{_RUNS_MODEL_CODE[name]}|0"'
        return Problem(where, message, f"remove it and run, in an environment of lighteval: {command}")
    if is_file(name) and not os.path.isfile(os.path.expanduser(name)):
        return Problem(where, f"file '{name}' not found", "name an existing .jsonl file")
    known = benchmarks()
    if is_file(name) or name in known or name in played:
        return None
    close = nearest_of(name, [*known, *played])
    fix = f"write '{close}'" if close else f"write one of {', '.join(known)}, or the path of a .jsonl file"
    return Problem(where, f"unknown benchmark '{name}'", fix)


def benchmark_sources(names: Iterable[str]) -> list[tuple[str, str | None, str]]:
    """Return (id, config, split) of each dataset to download for these benchmarks; other names are ignored."""
    known = benchmarks()
    chosen = [known[name] for name in names if name in known]
    fetched = [benchmark for benchmark in chosen if not ((data := generated(benchmark.id)) and data.in_files)]
    return [(benchmark.id, benchmark.config, benchmark.split) for benchmark in fetched]


_TARGET_KEYS = frozenset(
    ("maxent_q_temperature", "maxent_q_epsilon", "maxent_beta",
     "maxent_length_normalize_ref", "maxent_length_normalize_policy")
)  # fmt: skip
_UTILITY_KEYS = frozenset(("maxent_utility",))
_POLICY_KEYS = frozenset(("maxent_policy_temperature", "maxent_policy_spread"))
# Key that gives tau's controller a target -> the metric that it controls, maxent/<name>.
TAU_TARGETS = {
    "maxent_target_ratio": "target_ratio",
    "maxent_target_weight_entropy": "weight_entropy",
    "maxent_target_eff_rollouts": "eff_rollouts",
}
_TAU_KEYS = frozenset(
    ("maxent_tau", "maxent_tau_lr", "maxent_tau_min", "maxent_tau_max", "maxent_tau_warmup_steps", *TAU_TARGETS)
)


@dataclass(frozen=True)
class Objective:
    """One objective of MaxEnt-GRPO. ``algorithms.maxent`` has the mathematics, docs/maxent.md the evidence."""

    tau: float | None  # default of maxent_tau; None if the objective has no temperature
    unread: frozenset[str]  # the maxent keys that it does not read
    targets_q: bool  # weights come from listwise_q and the reference, so tau + beta must be positive

    def tau_or_default(self, tau: float | None) -> float | None:
        """Return ``tau``, the recipe's ``maxent_tau``, or if it is None the objective's default, which may be None."""
        return self.tau if tau is None else tau

    def loss_type(self, recipe: Callable[[str], Any]) -> str:
        """Return TRL's ``loss_type`` for this objective: ``grpo`` is a mean over tokens, ``dr_grpo`` a sum."""
        return "grpo" if self.targets_q and policy_per_token(recipe) else "dr_grpo"

    def fixed_keys(self, recipe: Callable[[str], Any]) -> dict[str, str]:
        """Return TRL's keys with the values that the objective needs: weights come from the plain sum of rewards."""
        loss = self.loss_type(recipe)
        plain_sum = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}
        return {"loss_type": loss, "advantage_estimator": "group", **plain_sum}


def policy_per_token(recipe: Callable[[str], Any]) -> bool:
    """Return whether a MaxEnt loss divides the policy's log-prob of a completion by the completion's length.

    ``maxent_length_normalize_policy`` decides, except that listwise with a policy temperature never divides. ``recipe``
    returns the value of a recipe key.
    """
    has_temperature = recipe("maxent_objective") == "listwise" and recipe("maxent_policy_temperature") > 0
    return not has_temperature and bool(recipe("maxent_length_normalize_policy"))


# No objective is the default, because none meets the criteria of evidence/protocol.md. The tau of listwise and
# tempered, and maxent_policy_temperature, were tuned there. The tau of weighted_mle is a convention.
OBJECTIVES: dict[str, Objective] = {
    "listwise": Objective(tau=0.2, unread=_UTILITY_KEYS, targets_q=True),
    "weighted_mle": Objective(tau=0.05, unread=_UTILITY_KEYS | _POLICY_KEYS, targets_q=True),
    "tempered": Objective(tau=0.5, unread=_TARGET_KEYS | _POLICY_KEYS, targets_q=False),
    "maxrl": Objective(tau=None, unread=_TARGET_KEYS | _POLICY_KEYS | _UTILITY_KEYS | _TAU_KEYS, targets_q=False),
}


def tau_targets(recipe: Callable[[str], Any]) -> list[str]:
    """Return the keys that give tau's controller a target in this recipe."""
    return [key for key in TAU_TARGETS if recipe(key) is not None]


def built_for_cpu() -> bool:
    """Return whether torch is the CPU build, without importing it; raise PackageNotFoundError if it is missing."""
    return importlib.metadata.version("torch").endswith("+cpu")


def missing_package(key: str, value: Any) -> str | None:
    """Return the first package that a value of ``key``, or an item of a list, needs but that is not installed, or None.

    Nothing is imported.
    """
    for item in value if isinstance(value, list) else [value]:
        needs = (need for (name, values), need in _PACKAGES.items() if name == key and fnmatchcase(str(item), values))
        package, module = next(needs, (None, None))
        if package and module:
            distribution, limit, version = package.partition("<")  # a version may be limited, as in swanlab<0.8
            if importlib.util.find_spec(module) is None:
                return package
            if limit and Version(importlib.metadata.version(distribution)) >= Version(version):
                return package
    return None
