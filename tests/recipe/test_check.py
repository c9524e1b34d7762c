"""Check each rule with a recipe that breaks it and with the corrected recipe."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from golden import compare_messages, golden_files

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import read_recipe, registry
from grpo_recipes.recipe.check import check, resolve_recipe

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path for path in ROOT.rglob("*.yaml") if path.parent != ROOT / "base")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_recipes_are_right(path, monkeypatch):
    monkeypatch.chdir(ROOT.parent)  # the recipes name their files relative to this folder
    recipe = read_recipe(path)
    if "code_tests" in recipe["reward_funcs"] and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    assert check(recipe, dict.fromkeys(recipe["reward_environment"], "set")) == []


def test_there_are_shipped_recipes():
    assert {"grpo.yaml", "config_math.yaml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", golden_files(__file__, "check"))
def test_a_broken_rule_is_told_and_the_correction_passes(read, path):
    compare_messages(path, read)


def test_the_server_must_serve_the_model_that_is_trained(read):
    recipe = read()
    (problem,) = check(recipe, {"VLLM_MODEL": "Qwen/other"})
    assert problem.where == "VLLM_MODEL"
    assert "Qwen/other" in problem.what and recipe["model_name_or_path"] in problem.what
    assert check(recipe, {"VLLM_MODEL": recipe["model_name_or_path"]}) == []
    assert check(recipe, {"VLLM_MODEL": ""}) == []


def test_all_contradictions_are_told_at_once(read):
    keys = {"reward_funcs": ["x", "y"], "reward_weights": [1.0], "top_p": 0.5, "load_in_4bit": True}
    problems = check(read(**keys), {"VLLM_MODEL": "z"})
    assert len(problems) == 6


def test_a_problem_of_a_default_names_the_recipe_and_one_of_a_flag_the_flag(read):
    assert check(read(without="model_name_or_path"), {})[0].where == "recipe.yaml"
    assert check(read(["--top_p", "0.5"]), {})[0].where == "--top_p"


@pytest.mark.parametrize(
    "keys", [{"dataset_config": "main"}, {"eval_strategy": "steps", "eval_steps": 5}, {"eval_dataset_name": "b" * 300}]
)
def test_a_name_too_long_for_a_file_is_not_the_name_of_a_dataset(read, keys):
    (problem,) = check(read(dataset_name="a" * 300, **keys), {})
    assert "is neither a file here nor a hub id" in problem.what


def test_smoke_data_may_have_the_configuration_of_a_base(read):
    assert check(read(dataset_name="smoke:sums", dataset_config="main"), {}) == []


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("my_rewards.py", "write my_rewards.py:function"),
        ("my.rewards.f", "write my.rewards:f"),
        ("mine", "write one of"),
    ],
)
def test_a_reward_of_the_users_without_a_colon_is_corrected(read, name, fix):
    (problem,) = check(read(reward_funcs=[name]), {})
    assert problem.what == f"unknown reward '{name}'" and problem.fix.startswith(fix)


def test_a_dataset_in_a_file_passes_when_the_file_is_there(read, tmp_path):
    rows = tmp_path / "rows.jsonl"
    assert len(check(read(dataset_name=str(rows)), {})) == 1
    rows.write_text('{"problem": "1", "answer": "1"}\n')
    assert check(read(dataset_name=str(rows), prompts_per_step=1), {}) == []


@pytest.mark.parametrize("key", ["model_name_or_path", "dataset_name"])
def test_the_home_of_a_user_who_does_not_exist_is_a_missing_path(read, key):
    (problem,) = check(read(**{key: "~no-such-user-here/x"}), {})
    assert "no-such-user-here" in problem.what


def test_columns_of_a_local_file_are_checked_by_its_first_line(read, tmp_path):
    data = tmp_path / "mine.jsonl"
    data.write_text('{"question": "1+1", "gold": "2"}\n' * 12)
    (problem,) = check(read(dataset_name=str(data), dataset_prompt_column="question"), {})
    assert "'mine.jsonl' has no column 'answer'" in problem.what
    assert problem.fix == "write one of question, gold"
    assert (
        check(read(dataset_name=str(data), dataset_prompt_column="question", dataset_solution_column="gold"), {}) == []
    )
    data.write_text("not json\n" * 12)
    (problem,) = check(read(dataset_name=str(data)), {})
    assert "does not begin with a JSON object" in problem.what


def test_no_text_is_taken_for_a_name_on_the_hub(read, tmp_path):
    (tmp_path / "model.yaml").write_text("")
    (tmp_path / "config.json").write_text("{}")
    address, file = "https://huggingface.co/Qwen/Qwen3-4B", str(tmp_path / "model.yaml")
    for name in (address, "my model", "a/b/c", "smoke:sum", file):
        (problem,) = check(read(model_name_or_path=name), {})
        assert problem.where.startswith("recipe.yaml:") and f"'{name}'" in problem.what, problem
    for name in ("gpt2", "Qwen/Qwen3-4B", "smoke:sums", "smoke:sums-tied", str(tmp_path)):
        assert check(read(model_name_or_path=name), {}) == []


def test_no_text_is_taken_for_a_dataset_on_the_hub(read):
    for name in ("https://huggingface.co/datasets/openai/gsm8k", "my data", "smoke:sum"):
        (problem,) = check(read(dataset_name=name), {})
        assert f"'{name}'" in problem.what, problem


@pytest.mark.parametrize("name", ["a/b", "../x", "..", ".hidden", "-x", "a\nb", "", " ", "x" * 101, "é" * 60])
def test_a_run_name_is_the_name_of_a_folder(read, name):
    (problem,) = check(read(run_name=name), {})
    assert problem.where.startswith("recipe.yaml:") and "run_name" in problem.what


@pytest.mark.parametrize("name", ["mine", "Größe 2 (a=1, b=2)", "7", "x" * 100])
def test_most_names_are_run_names(read, name):
    assert check(read(run_name=name), {}) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"load_in_8bit": True},
        {"bnb_4bit_quant_type": "nf4"},
        {"use_bnb_nested_quant": True},
        {"bnb_4bit_quant_storage": "uint8"},
    ],
)
def test_keys_of_what_is_not_supported_are_refused_too(read, keys):
    (problem,) = check(read(**keys), {})
    assert f"{next(iter(keys))} is not supported: the adapter would be trained on quantized weights" in problem.what
    assert "no comparison can prove that it samples from the trained model" in problem.what
    assert problem.fix.endswith("LoRA on weights in bfloat16 (use_peft: true) saves most of the memory too")


def test_two_ports_are_two(read):
    (problem,) = check(read(vllm_server_port=8123, vllm_group_port=8123), {})
    assert problem.what == "vllm_group_port and vllm_server_port are both 8123"
    (problem,) = check(read(["--main_process_port", "8123"], vllm_server_port=8123), {})
    assert str(problem).startswith("--main_process_port: main_process_port and vllm_server_port are both 8123. Fix:")
    assert check(read(vllm_server_port=8123, vllm_group_port=8124, main_process_port=8125), {}) == []


def test_a_chat_template_is_no_file_name(read):
    (problem,) = check(read(chat_template="template.jinja"), {})
    assert "does not use messages" in problem.what
    assert check(read(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"), {}) == []


@pytest.mark.parametrize(("keys", "message"), [
    ({"reward_funcs": {"a": 1}, "callbacks": ["nope.py:C"]}, "nope.py"),
    ({"use_vllm": True, "top_k": 20, "min_p": "x"}, "top_k 20 biases"),
    ({"maxent_objective": "tempered", "maxent_beta": "x"}, "changes nothing"),
])  # fmt: skip
def test_a_value_of_the_wrong_type_hides_no_other_problem(tmp_path, keys, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "a/b", "dataset_name": "c/d", **keys}))
    with pytest.raises(ConfigError) as refused:
        resolve_recipe(str(path), None, [], {}, "cpu")
    assert len(refused.value.problems) > 1 and message in str(refused.value)


def test_a_tracker_without_its_package_is_rejected_with_the_command_that_installs_it(read):
    (problem,) = check(read(report_to="swanlab"), {})
    assert problem.what == "report_to ['swanlab'] needs the package swanlab<0.8, which is not installed"
    assert problem.fix == "remove report_to, or pip install 'swanlab<0.8' into this environment"


def test_the_callback_of_another_tracker_needs_its_package(read, monkeypatch):
    """R14: a missing package passed the check and ended the run in a traceback."""
    (problem,) = check(read(callbacks=["transformers.integrations:MLflowCallback"]), {})
    assert "needs the package mlflow, which is not installed" in problem.what
    monkeypatch.setitem(registry._PACKAGES, ("callbacks", "transformers*:MLflowCallback"), ("json", "json"))
    assert check(read(callbacks=["transformers.integrations:MLflowCallback"]), {}) == []
