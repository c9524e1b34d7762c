"""Test the recipe's chat template in TRL's prompts, in requests to the server and in the saved model."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from grpo_recipes import smoke
from grpo_recipes.data import load_prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.model import save_model

TEMPLATE = (
    "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}{{ sign or ':' }}{% endif %}"
)


def test_a_template_of_the_recipe_replaces_the_tokenizers(load, tokenizer):
    assert load(chat_template=TEMPLATE).example == "[0+1=]:"
    assert tokenizer.chat_template == TEMPLATE


def test_a_tokenizer_without_a_template_is_refused(write, tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat_template"):
        load_prompts(ScriptArguments(dataset_name=write()), tokenizer)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system here') }}", "{{ 1", "{{ messages[3].content }}"])
def test_a_template_that_cannot_render_is_refused(load, template):
    with pytest.raises(ConfigError, match="the template cannot render a prompt"):
        load(chat_template=template)


class FakeGeneration:
    """Replace TRL's connection to the server and record the prompts that would be sent."""

    def __init__(self):
        self.sent: list = []

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts, images, num_generations, profiler):
        self.sent = prompts
        return prompts, [[1]] * len(prompts), [[[0.0]]] * len(prompts), None


@pytest.fixture
def trained(tmp_path, tokenizer, write):
    """Build a trainer from a recipe with a template and its arguments; return it with its prompts."""
    kwargs = {"sign": "?"}
    script_args = ScriptArguments(dataset_name=write(), chat_template=TEMPLATE, system_prompt="S")
    prompts = load_prompts(script_args, tokenizer, template_kwargs=kwargs)
    args = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        use_vllm=False,
        num_generations=2,
        per_device_train_batch_size=2,
        chat_template_kwargs=kwargs,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=args,
        train_dataset=prompts.dataset,
        processing_class=tokenizer,
        run_dir=tmp_path,
    )
    return trainer, prompts


def test_the_server_is_sent_token_ids_of_the_trainers_rendering(trained, tokenizer):
    """A server with another template in its model folder still generates from the recipe's template."""
    trainer, prompts = trained
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, FakeGeneration(), -1
    ids, images, fields = trainer._tokenize_prompts(prompts.dataset["prompt"][:])
    trainer._generate_single_turn(ids, images, fields, 2)
    sent = trainer.vllm_generation.sent
    assert [tokenizer.decode(prompt_ids) for prompt_ids in sent] == ["[S][0+1=]?", "[S][1+1=]?", "[S][2+1=]?"]
    assert prompts.example == "[S][0+1=]?" and prompts.counts.longest == len(sent[0])


def test_the_final_model_is_saved_with_the_template(trained, tmp_path):
    trainer, _ = trained
    save_model(trainer, tmp_path / "model")
    saved = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert saved.chat_template == TEMPLATE
    text = saved.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert text == "[x]:"
