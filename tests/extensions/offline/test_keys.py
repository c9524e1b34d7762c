"""Hydra keys of the offline trainer: each changes the recipe, or is rejected with the edit to make."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from grpo_recipes.extensions.offline import keys as offline
from grpo_recipes.extensions.problems.seeded import GENERATORS, SCHEME
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.registry import rewards


def flat(nested: dict[str, Any], start: str = "") -> dict[str, Any]:
    """Flatten nested configuration keys."""
    values: dict[str, Any] = {}
    for name, value in nested.items():
        values |= flat(value, f"{start}{name}.") if isinstance(value, dict) else {f"{start}{name}": value}
    return values


def config(**changes: Any) -> dict[str, Any]:
    values = flat(yaml.safe_load((find_code_root() / "conf/offline_grpo.yaml").read_text()))
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in values.items():
        if isinstance(value, str) and value.startswith("${"):
            values[key] = values[value[2:-1]]
    return values


def nobody(url: str) -> bool:
    return False


def keys(**changes: Any) -> dict[str, Any]:
    translation = offline.translate(config(**changes), nobody)
    assert translation.problems == []
    return {key: value.value for key, value in translation.keys.items()}


def problem(**changes: Any) -> str:
    (rejection,) = offline.translate(config(**changes), nobody).problems
    return f"{rejection.where}: {rejection.what}. Fix: {rejection.fix}"


def test_the_configuration_has_every_key_and_no_other() -> None:
    assert set(config()) == set(offline.KEYS)


# Another value of each key -> the recipe keys that it sets. Those in OTHER_RUN change no recipe key.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model.train_id": ("a/b", {"model_name_or_path": "a/b"}),
    "model.ref_id": ("a/b", {"ref_model_name_or_path": "a/b"}),
    "generation.base_url": ("http://localhost:30001/v1", {"vllm_server_port": 30001}),
    "generation.batch_size": (16, {"max_concurrent_requests": 16}),
    "generation.max_new_tokens": (64, {"max_completion_length": 64, "eval_max_completion_length": 64}),
    "generation.temperature": (0.5, {"temperature": 0.5, "eval_temperature": 0.5}),
    "generation.top_p": (0.9, {"top_p": 0.9, "eval_top_p": 0.9}),
    "generation.top_k": (7, {"top_k": 7}),
    "generation.repetition_penalty": (1.0, {"repetition_penalty": 1.0}),
    "train.iterations": (3, {"max_steps": 6}),
    "train.batch_size": (
        4,
        {
            "per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 40, "save_steps": 4,
            "eval_steps": 4,
        },
    ),
    "train.lr": (5e-6, {"learning_rate": 5e-6}),
    "train.grad_clip": (0.5, {"max_grad_norm": 0.5}),
    "train.kl_coef": (0.02, {"beta": 0.02}),
    "train.entropy_coef": (0.01, {"entropy_coef": 0.01}),
    "train.grad_accum_steps": (
        2, {"gradient_accumulation_steps": 2, "max_steps": 10, "save_steps": 1, "eval_steps": 1},
    ),
    "data.problems": (
        "arithmetic", {"dataset_name": "seeded:arithmetic", "reward_funcs": "pure_accuracy_math"},
    ),
    "data.problems_per_iteration": (
        2, {"steps_per_generation": 1, "max_steps": 10, "save_steps": 1, "eval_steps": 1},
    ),
    "data.rollouts_per_problem": (
        8,
        {
            "num_generations": 8, "steps_per_generation": 4, "max_steps": 40, "save_steps": 4,
            "eval_steps": 4,
        },
    ),
    "data.train_seed_start": (7, {"problem_seed_start": 7}),
    "data.num_train_seeds": (9, {"problem_seeds": 9}),
    "eval.interval": (5, {"eval_steps": 10}),
    "eval.batch_size": (4, {"per_device_eval_batch_size": 4}),
    "eval.replicates": (2, {"num_generations_eval": 2}),
    "eval.num_ids": (3, {"eval_problem_seeds": 3}),
    "eval.id_seed_start": (77, {"eval_problem_seed_start": 77}),
    "eval.seed_base": (7, {"eval_sampling_seed": 7}),
    "eval.max_new_tokens": (32, {"eval_max_completion_length": 32}),
    "eval.temperature": (0.3, {"eval_temperature": 0.3}),
    "eval.top_p": (0.5, {"eval_top_p": 0.5}),
    "checkpoint.save_interval": (2, {"save_steps": 4}),
    "checkpoint.keep_last_k": (1, {"save_total_limit": 1}),
    "logging.wandb.run_name": ("mine", {"run_name": "mine"}),
    "seed": (1, {"seed": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_key_changes_the_recipe_and_nothing_else(name: str) -> None:
    value, expected = CHANGES[name]
    plain, changed = keys(model__ref_id="c/d"), keys(**{"model__ref_id": "c/d", name.replace(".", "__"): value})
    assert {key: text for key, text in changed.items() if plain.get(key) != text} == expected
    assert all(key in catalogue() or "problem_seed" in key for key in changed)


def test_every_generator_that_exists_is_named_with_a_reward_that_exists() -> None:
    row = offline.TABLE.by_name["data.problems"]
    assert {f"{SCHEME}{name}" for name in row.values} == set(GENERATORS)
    assert {keys["dataset_name"] for keys in row.values.values()} == set(GENERATORS)
    assert {keys["reward_funcs"] for keys in row.values.values()} <= set(rewards())
    assert all(name in row.fix for name in row.values)


def test_evaluations_and_wandb_are_turned_on_and_off() -> None:
    assert keys()["eval_strategy"] == "steps" and keys()["report_to"] == "none"
    off = keys(eval__enabled=False)
    assert off["eval_strategy"] == "no" and "eval_steps" not in off
    on = keys(logging__wandb__enabled=True, logging__wandb__project="p")
    assert on["report_to"] == "wandb" and on["wandb_project"] == "p"
    assert {name for name in offline.KEYS if name not in CHANGES} == {
        "model.device", "generation.backend", "eval.enabled", "eval.backend", "eval.base_url", "eval.do_sample",
        "eval.ids", "logging.wandb.enabled", "logging.wandb.project",
    }  # fmt: skip


def test_greedy_evaluations_and_their_problems() -> None:
    greedy = keys(eval__do_sample=False, eval__replicates=1)
    assert (greedy["eval_temperature"], greedy["num_generations_eval"]) == (0, 1)
    chosen = keys(eval__ids=[3, 9])
    assert chosen["eval_problem_ids"] == [3, 9]
    assert not {"eval_problem_seeds", "eval_problem_seed_start"} & chosen.keys()
    off = keys(eval__enabled=False)
    assert [key for key in off if "eval" in key] == ["eval_strategy"]


@pytest.mark.parametrize(
    ("url", "backend", "answers", "server_url"),
    [
        ("http://127.0.0.1:30000", "vllm_server", False, None),  # the launch starts one there
        ("http://127.0.0.1:30000", "vllm_server", True, "http://127.0.0.1:30000"),
        ("http://far:30000/v1", "vllm_server", False, "http://far:30000/v1"),
        ("http://127.0.0.1:30001", "sglang_server", False, "http://127.0.0.1:30001"),
    ],
)
def test_a_server_that_somebody_started_is_asked(url: str, backend: str, answers: bool, server_url: str | None) -> None:
    where = {"generation.base_url": url, "eval.base_url": url, "generation.backend": backend, "eval.backend": backend}
    looked: list[str] = []
    translation = offline.translate(config() | where, lambda place: bool(looked.append(place)) or answers)
    set_keys = {key: value.value for key, value in translation.keys.items()}
    assert translation.problems == [] and set_keys.get("vllm_server_base_url") == server_url
    assert set_keys.get("server_backend") == (backend if server_url else None)
    assert ("vllm_server_port" in translation.keys) == (server_url is None) and set(looked) <= {url}


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"train.batch_size": 3}, "train.batch_size: steps of 3 x 1 completions do not", "to one of 1, 2, 4, 8, 16"),
        ({"train.iterations": 0}, "train.iterations: must be an integer of at least 1, got 0", "train.iterations=4"),
        ({"data.problems": "chess"}, "data.problems: 'chess' has no equivalent here", "arithmetic, sums"),
        ({"generation.backend": "hf", "eval.backend": "hf"}, "generation.backend: 'hf' is unknown", "vllm"),
        ({"eval.backend": "sglang_server"}, "eval.backend: evaluations need the training's server", "remove it"),
        ({"eval.base_url": "http://127.0.0.1:1"}, "eval.base_url: evaluations need the training's server", "remove it"),
        ({"generation.base_url": "far:1", "eval.base_url": "far:1"}, "generation.base_url: 'far:1' is", "http"),
        ({"eval.do_sample": False}, "eval.do_sample: greedy completions of a problem are identical", "replicates=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(changes: dict[str, Any], where: str, fix: str) -> None:
    message = problem(**{key.replace(".", "__"): value for key, value in changes.items()})
    assert message.startswith(where) and fix in message.partition("Fix: ")[2]
