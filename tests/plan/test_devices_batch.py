"""The batch of the experiment over any number of trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import derive_batch, derive_eval_batch, largest_divisor
from grpo_recipes.recipe import read_recipe

MATH = Path(__file__).parents[2] / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"


@pytest.mark.parametrize(
    ("number", "most", "divisor"), [(12, 5, 4), (12, 12, 12), (12, 100, 12), (7, 6, 1), (840, 8, 8), (1, 1, 1)]
)
def test_the_largest_divisor_that_is_not_above(number, most, divisor):
    assert largest_divisor(number, most) == divisor


@pytest.mark.parametrize("trainers", range(1, 25))
def test_prompts_per_step_means_the_same_batch_for_any_number_of_trainers(read, trainers):
    recipe = read(prompts_per_step=12, num_generations=4, per_device_train_batch_size=8)
    batch = derive_batch(recipe, trainers)
    assert batch.completions == 48
    assert batch.world_size * batch.per_device * batch.accumulation == 48
    assert batch.world_size <= trainers
    assert batch.per_device <= 8


def test_trainers_that_do_not_divide_the_batch_are_left_out(read):
    assert derive_batch(read(prompts_per_step=12, num_generations=4), 5).world_size == 4
    assert derive_batch(read(prompts_per_step=12, num_generations=4), 7).world_size == 6


@pytest.mark.parametrize(("gpus", "trainers"), [(2, 1), (4, 3), (7, 6), (8, 7)])
def test_the_shipped_math_recipe_uses_every_trainer_with_the_same_batch(gpus, trainers):
    batch = derive_batch(read_recipe(MATH), gpus - 1)
    assert (batch.completions, batch.world_size) == (840, trainers)
    assert batch.per_device * batch.accumulation * trainers == 840


def test_a_batch_is_told_in_words(read):
    batch = derive_batch(read(prompts_per_step=12, num_generations=4, per_device_train_batch_size=8), 3)
    assert str(batch) == "12 prompts x 4 completions = 48 per step = 3 trainers x 8 per device x 2 accumulated"


@pytest.mark.parametrize(
    ("trainers", "keys", "completions"),
    [
        (2, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, 24),
        (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}, 4),
        (2, {"per_device_train_batch_size": 1, "steps_per_generation": 4}, 2),
        (2, {"per_device_train_batch_size": 4, "generation_batch_size": 16}, 8),
    ],
)
def test_without_prompts_per_step_trls_keys_mean_what_they_mean_in_trl(read, trainers, keys, completions):
    batch = derive_batch(read(prompts_per_step=None, num_generations=4, **keys), trainers)
    assert (batch.completions, batch.world_size) == (completions, trainers)
    assert batch.per_device == keys["per_device_train_batch_size"]


@pytest.mark.parametrize(
    "keys",
    [
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 4, "generation_batch_size": 10},
        {"per_device_train_batch_size": 1, "steps_per_generation": 3},
    ],
)
def test_a_generation_that_is_no_whole_number_of_groups_is_refused(read, keys):
    with pytest.raises(ConfigError, match="whole groups of 4"):
        derive_batch(read(prompts_per_step=None, num_generations=4, **keys), 2)


def test_a_batch_without_completions_per_prompt_is_refused(read):
    with pytest.raises(ConfigError, match="num_generations"):
        derive_batch(read(num_generations=None), 2)


@pytest.mark.parametrize("trainers", [1, 3, 6, 7])
@pytest.mark.parametrize("group", [1, 4, 6])
@pytest.mark.parametrize("most", [None, 8, 12])
def test_evaluation_batches_are_whole_groups_for_any_number_of_trainers(read, trainers, group, most):
    keys = {} if most is None else {"per_device_eval_batch_size": most}
    recipe = read(
        prompts_per_step=42, num_generations=4, eval_strategy="steps", eval_steps=5, num_generations_eval=group, **keys
    )
    batch = derive_batch(recipe, trainers)

    size = derive_eval_batch(recipe, batch)

    assert batch.world_size == trainers and size > 0
    assert size * trainers % group == 0  # TRL's rule
    larger = [other for other in range(size + 1, (most or size) + 1) if other * trainers % group == 0]
    assert not larger  # and the recipe's number is used as far as it goes
    if most is None:
        assert size > batch.per_device


def test_no_evaluation_no_batch_of_it(read):
    recipe = read(num_generations=4)
    assert derive_eval_batch(recipe, derive_batch(recipe, 1)) is None


def test_an_evaluation_batch_too_small_for_a_group_is_refused(read):
    recipe = read(
        prompts_per_step=12, num_generations=8, eval_strategy="steps", eval_steps=5, per_device_eval_batch_size=2
    )
    with pytest.raises(ConfigError, match=r"3 trainers x 2 completions .* groups of 8.*per_device_eval_batch_size: 8"):
        derive_eval_batch(recipe, derive_batch(recipe, 3))
