"""S2: every dictionary that a recipe passes on to another library is checked: its names, values and owners."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from grpo_recipes.recipe import merge_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.keys import catalogue, nested_catalogue, passed_catalogue
from grpo_recipes.recipe.passed_on import OWNED_NAMES

MODEL = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: openai/gsm8k\n"
TEMPLATE = "chat_template: '{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}x{% endif %}'\n"
GAME = """class Game:
    def __init__(self, size, seats=2): ...

    def reset(self, seed): ...

    def step(self, action): ...
"""


def problems_of(tmp_path: Path, text: str, *flags: str) -> list[str]:
    """Return every problem of a recipe with a model and a dataset, as `grpo check` prints them."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text if "environment" in text else MODEL + text)
    recipe, problems = merge_recipe(path, flags)
    return [str(problem) for problem in [*problems, *check(recipe, {})]]


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("use_vllm: true\ngeneration_kwargs: {top_p: 0.5}", "'top_p' would override the key top_p", "set top_p: 0.5"),
        ("generation_kwargs: {max_new_tokens: 9}", "the key max_completion_length", "set max_completion_length: 9"),
        ("generation_kwargs: {num_return_sequences: 2}", "the key num_generations", "set num_generations: 2"),
        ("generation_kwargs: {do_sample: false}", "the trainer always samples", "remove do_sample"),
        ("use_vllm: true\ngeneration_kwargs: {stopp: [x]}", "unknown name 'stopp'", "write 'stop'"),
        ("use_vllm: true\ngeneration_kwargs: {num_beams: 4}", "vLLM does not read it", "remove num_beams"),
        ("use_vllm: false\ngeneration_kwargs: {ignore_eos: true}", "transformers (use_vllm: false) does not", "remove"),
        (
            "use_vllm: true\ngeneration_kwargs: {min_tokens: 1.5}",
            "expected an integer, got 1.5",
            "to an integer",
        ),
        ("use_vllm: true\ngeneration_kwargs: {logit_bias: {1: 2}}", "biases the importance-sampling", "remove logit_b"),
        (
            "use_vllm: true\nvllm_structured_outputs_regex: a\nvllm_importance_sampling_correction: false\n"
            "generation_kwargs: {structured_outputs: {regex: b}}",
            "structured_outputs and the key vllm_structured_outputs_regex",
            "remove structured_outputs",
        ),
        ("model_init_kwargs: {attn_implementation: sdpa}", "the key attn_impl", "set attn_implementation: sdpa"),
        ("model_init_kwargs: {torch_dtype: bfloat16}", "would override the key dtype", "set dtype: bfloat16"),
        ("model_init_kwargs: {device_map: auto}", "accelerate places the model", "remove device_map"),
        ("model_init_kwargs: {use_cach: false}", "unknown name 'use_cach'", "write 'use_cache'"),
        ("model_init_kwargs: {num_hidden_layers: 2}", "The server would not get it", "remove num_hidden_layers"),
        ("model_init_kwargs: {use_cache: maybe}", "expected true or false, got 'maybe'", "to true or false"),
        ("chat_template_kwargs: {add_generation_prompt: false}", "the trainer sets it for every", "remove add_gener"),
        (TEMPLATE + "chat_template_kwargs: {enable_thinkin: false}", "does not read", "write 'enable_thinking'"),
        (TEMPLATE + "chat_template_kwargs: {thinking_budget: 5}", "does not read", "it reads enable_thinking"),
        (
            "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {min_lr: 1.0e-7}",
            "cosine does not read it",
            "remove min_lr",
        ),
        ("lr_scheduler_type: linear\nlr_scheduler_kwargs: {power: 2}", "linear reads no such", "remove lr_scheduler_k"),
        ("lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycle: 2}", "unknown name", "write 'num_cycles'"),
        ("lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_warmup_steps: 5}", "warmup_steps", "warmup_steps: 5"),
        ("lr_scheduler_type: cosine_with_min_lr", "needs min_lr or min_lr_rate", "{min_lr_rate: 0.1}"),
        ("lr_scheduler_type: warmup_stable_decay\nmax_steps: 100", "num_decay_steps", "{num_decay_steps: 10}"),
        ("optim: sgd\noptim_args: momentun=0.9", "unknown name 'momentun'", "write 'momentum'"),
        ("optim: sgd\noptim_args: momentum=high", "expected a number, got 'high'", "to a number"),
        ("optim: sgd\noptim_args: lr=1", "would override the key learning_rate", "set learning_rate: '1'"),
        ("optim: sgd\noptim_args: momentum", "expected name=value pairs", "set optim_args: "),
        ("optim: adamw_torch\noptim_args: amsgrad=True", "reads no such arguments", "remove optim_args"),
        ("liger_kernel_config: {ropes: true}", "unknown name 'ropes'", "write 'rope'"),
        ("transformers_continuous_batching_config: {num_block: 1}", "unknown name", "write 'num_blocks'"),
        ("transformers_continuous_batching_config: {num_blocks: x}", "expected an integer", "to an integer"),
        (
            "accelerator_config: {gradient_accumulation_kwargs: {num_steps: 4}}",
            "would override the key gradient_accumulation_steps",
            "set gradient_accumulation_steps: 4",
        ),
        (
            "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batc: true}}",
            "unknown key 'sync_each_batc'",
            "write 'sync_each_batch'",
        ),
        ("gradient_checkpointing_kwargs: {every_n_layer: 2}", "unknown key 'every_n_layer'", "write 'every_n_layers'"),
    ],
)
def test_a_dictionary_for_another_library_is_checked(tmp_path: Path, text: str, message: str, fix: str) -> None:
    """S2: unknown names, names that a key owns, and values of a wrong kind are rejected."""
    problems = problems_of(tmp_path, text)
    assert any(message in problem and fix in problem.partition(". Fix: ")[2] for problem in problems), problems


@pytest.mark.parametrize(
    "text",
    [
        "use_vllm: true\ngeneration_kwargs: {stop: ['</answer>'], ignore_eos: false, stop_token_ids: [1]}",
        "use_vllm: true\nvllm_importance_sampling_correction: false\ngeneration_kwargs: {bad_words: [x]}",
        "use_vllm: false\ngeneration_kwargs: {suppress_tokens: [1], num_beams: 2}",
        "model_init_kwargs: {use_cache: false, attention_dropout: 0.1}",
        TEMPLATE + "chat_template_kwargs: {enable_thinking: false}",
        "chat_template_kwargs: {whatever_a_template_on_the_hub_reads: 1}",
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}",
        "lr_scheduler_kwargs: {}",
        "optim: sgd\noptim_args: momentum=0.9,nesterov=True",
        "gradient_checkpointing_kwargs: {use_reentrant: false, every_n_layers: 2, offload: true}",
        "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}",
    ],
)
def test_names_that_a_library_reads_are_accepted(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, text) == []


def test_a_flag_is_checked_as_the_recipe_is(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "use_vllm: true", "--generation_kwargs", "{top_k: 5}")
    assert problem.startswith("--generation_kwargs: generation_kwargs: 'top_k' would override the key top_k")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{size: 1, seat: 2}", "has no parameter 'seat'. Fix: use 'seats'"),
        ("{seats: 2}", "needs the argument 'size'. Fix: add size to environment_args"),
        ("{size: 1}", ""),
    ],
)
def test_arguments_of_the_users_environment_are_compared_with_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str, message: str
) -> None:
    """S2: ``environment_args`` of the user's class. Its code is read and not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    head = "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\nreward_funcs: [environment]\n"
    problems = problems_of(tmp_path, f"{head}environment: game.py:Game\nenvironment_args: {args}\n")
    assert ([problem for problem in problems if message in problem] != []) if message else problems == []


def test_every_key_that_holds_a_dictionary_is_checked() -> None:
    """S2: a new key with a dictionary needs known names, or a reason here."""
    checked = {*passed_catalogue(), *nested_catalogue(), *OWNED_NAMES}
    by_their_class = {"environment_args", "atropos_environment_args"}  # a library's or the user's class accepts them
    dictionaries = {key for key, entry in catalogue().items() if entry["type"] == "dict"}
    assert dictionaries - checked - by_their_class == set()


def test_names_of_model_init_kwargs_are_read_by_transformers() -> None:
    """S2: hand-kept names exist in the library, and owned names are not in both tables."""
    from transformers import LlamaConfig, MixtralConfig, PreTrainedModel

    source = inspect.getsource(PreTrainedModel.from_pretrained)
    fields = {*vars(LlamaConfig()), *vars(MixtralConfig())}
    for name in passed_catalogue()["model_init_kwargs"][""]:
        assert name in source or name in fields, name
    for key in ("generation_kwargs", "model_init_kwargs", "lr_scheduler_kwargs"):
        for names in passed_catalogue()[key].values():
            assert not set(names) & set(OWNED_NAMES[key])


def test_owned_names_point_to_keys_of_a_recipe() -> None:
    owners = {owner for names in OWNED_NAMES.values() for owner in names.values() if owner.isidentifier()}
    assert owners <= set(catalogue())
