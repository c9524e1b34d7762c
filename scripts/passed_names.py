"""Ask other libraries which names they read in the dictionaries that a recipe passes on to them.

``make_keys.py`` writes the result into ``keys.json``, because ``grpo check`` imports none of these libraries.
"""

import argparse
import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from vllm import SamplingParams
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from grpo_recipes.recipe.passed_on import OWNED_NAMES
from grpo_recipes.recipe.vllm_flags import KEY, OWNED_FLAGS

Names = dict[str, dict[str, Any]]
# Arguments of ``from_pretrained``, and fields of models' configurations that only training reads. Every other field
# would make the trained model another one than the server's.
_MODEL = {
    "use_kernels": "bool", "allow_all_kernels": "bool", "kernel_config": "dict", "experts_implementation": "str",
    "use_safetensors": "bool", "disable_mmap": "bool", "use_cache": "bool", "attention_dropout": "float",
    "output_router_logits": "bool", "router_aux_loss_coef": "float",
}  # fmt: skip
# Liger is not in the lock: the switches of its ``apply_liger_kernel_to_*``. TRL rejects fused_linear_cross_entropy.
_LIGER = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "cross_entropy")
_CHOICES = {
    "warmup_type": ["linear", "cosine", "1-sqrt"], "decay_type": ["linear", "cosine", "1-sqrt"],
    "mode": ["min", "max"], "threshold_mode": ["rel", "abs"],
}  # fmt: skip


def passed_names(kind_of: Callable[[Any], tuple[str, bool]]) -> dict[str, dict[str, Names]]:
    """Return key -> variant -> name -> its type; ``kind_of`` returns the catalogue's type of an annotation."""
    hints = typing.get_type_hints(SamplingParams)
    server = set(hints) & set(CompletionRequest.model_fields)
    generation = re.findall(r"^ {8}(\w+) \((.*?)(?:\):|$)", inspect.getdoc(GenerationConfig) or "", re.M)
    generation = generation or re.findall(r"^ {8}(\w+) \((.*)", GenerationConfig.__doc__ or "", re.M)
    batching = typing.get_type_hints(ContinuousBatchingConfig)
    schedulers = {kind.value: [function] for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    schedulers["reduce_lr_on_plateau"].append(ReduceLROnPlateau)
    schedulers["greedy"].append(GreedyLR)
    schedulers |= {"constant": [], "constant_with_warmup": []}  # get_scheduler passes nothing on to these
    owned = OWNED_NAMES["generation_kwargs"]
    return {
        "generation_kwargs": {
            "vllm": {name: _entry(name, kind_of(hints[name])[0]) for name in sorted(server - set(owned))},
            "transformers": {name: _entry(name, _described(text)) for name, text in generation if name not in owned},
        },
        "model_init_kwargs": {"": {name: _entry(name, kind) for name, kind in _MODEL.items()}},
        KEY: {"": _server_flags()},
        "lr_scheduler_kwargs": {kind: _parameters(kind_of, functions) for kind, functions in schedulers.items()},
        "liger_kernel_config": {"": {name: _entry(name, "bool") for name in _LIGER}},
        "transformers_continuous_batching_config": {
            "": {
                name: _entry(name, kind_of(hint)[0])
                for name, hint in batching.items()
                if name not in OWNED_NAMES["transformers_continuous_batching_config"]
            }
        },
        "optim_args": {
            str(optim.value): names
            for optim, handler in _OPTIMIZER_HANDLERS.items()
            if (names := _option_names(handler, str(optim.value)))
        },
    }


def _entry(name: str, kind: str, **facts: Any) -> dict[str, Any]:
    choices = {"choices": _CHOICES[name]} if name in _CHOICES else {}
    return {"type": kind, "optional": True, **choices, **facts}


def _server_flags() -> Names:
    """Return the flags of ``vllm serve`` that ``vllm_args`` may set."""
    flags: Names = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        name = next((word for word in action.option_strings if word.startswith("--")), "--help")[2:].replace("-", "_")
        if name in OWNED_FLAGS or name == "help":
            continue
        kind = "bool" if isinstance(action, argparse.BooleanOptionalAction) else _parsed_type(action.type)
        choices = [choice for choice in action.choices or () if choice is not None]
        facts = {"choices": sorted(choices)} if choices else {}
        flags[name] = _entry(name, f"list[{kind}]" if action.nargs == "+" else kind, **facts)
    return dict(sorted(flags.items()))


def _parsed_type(parse: Any) -> str:
    """Return the type that a flag's function returns: vLLM's own functions are known by their names."""
    if getattr(parse, "__name__", "") == "_optional_type":
        return _parsed_type(inspect.getclosurevars(parse).nonlocals["return_type"])
    if isinstance(parse, type):
        return {int: "int", float: "float"}.get(parse, "str")
    names = {
        "human_readable_int": "int", "loads": "any", "_parse_type": "any", "union_dict_and_str": "any",
        "parse_dataclass": "dict",
    }  # fmt: skip
    return names.get(getattr(parse, "__name__", ""), "str")


def _described(text: str) -> str:
    """Return the type that a docstring's line gives in backticks."""
    words = re.findall(r"`([^`]+)`", text.replace("Union[int, list[int]]", "list[int]"))[:2]
    wide = [word for word in words if word.startswith(("list[", "dict"))] or words
    if len(set(wide)) != 1 or not re.fullmatch(r"(list\[)*(int|float|str|bool)\]*|dict.*", wide[0]):
        return "any"
    return "dict" if wide[0].startswith("dict") else wide[0]


def _parameters(kind_of: Callable[[Any], tuple[str, bool]], functions: Sequence[Callable[..., Any]]) -> Names:
    """Return the parameters of schedulers that ``lr_scheduler_kwargs`` may give."""
    names: Names = {}
    for function in functions:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name not in OWNED_NAMES["lr_scheduler_kwargs"]:
                kind = kind_of(hints.get(name))[0]
                usual = {int: "float", float: "float", str: "str"}.get(type(parameter.default), kind)
                required = {"required": True} if parameter.default is parameter.empty else {}
                names[name] = _entry(name, kind if kind in ("int", "bool") else usual, **required)
    return names


def _option_names(handler: Callable[..., Any], optim: str) -> Names:
    """Return the names of ``optim_args`` that the source of a handler reads."""
    source = inspect.getsource(handler)
    if "bitsandbytes" in handler.__name__ and "ademamix" not in optim:
        return {}
    single = re.findall(r'(\w+)?\(?ctx\.optim_args(?:\.get|\.pop)?[(\[]"(\w+)"', source)
    options = {
        name: _entry(name, {"float": "float", "int": "int", "strtobool": "bool"}.get(kind, "str"))
        for kind, name in single
    }
    for names in re.findall(r"for key in \(([^)]*)\)", source):
        options |= {name: _entry(name, "float") for name in re.findall(r'"(\w+)"', names)}
    for name in re.findall(r'ctx\.optim_args\["(\w+)"\]\.lower', source):
        options[name] = _entry(name, "bool")
    return options
