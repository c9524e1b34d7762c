"""``grpo new --from`` with recipes of other projects: every setting is translated, or left out with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.errors import Problem
from grpo_recipes.extensions.migrate.migrate import Migration, migrate, needs_translation
from grpo_recipes.recipe import merge_recipe
from grpo_recipes.recipe.check import check

FOREIGN = sorted((Path(__file__).parent / "foreign").iterdir())
# Remaining problems of a file without a model or data.
UNNAMED = ("no model is set", "no dataset is set")
KEPT_RECIPES = Path(__file__).parents[3] / "recipes"


def written(migration: Migration) -> list[Problem]:
    """Write a translated recipe, and return the problems that `grpo check` reports."""
    migration.target.write_text(migration.text())
    if migration.unwritten:
        migration.rewards_file.write_text(migration.rewards_text())
    recipe, problems = merge_recipe(migration.target)
    return [*problems, *check(recipe, {})]


def values(migration: Migration) -> dict:
    return yaml.safe_load(migration.text())


def translate(folder: Path, text: str, name: str = "theirs.yaml") -> Migration:
    (folder / name).write_text(text)
    return migrate(folder / name, folder / "my.yaml")


TRL = "model_name_or_path: a/b\ndataset_name: a/b\nnum_generations: 8\nuse_vllm: true\nlearning_rate: 1e-6\n"


def test_there_are_forty_of_them() -> None:
    assert len(FOREIGN) >= 40


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.name)
def test_a_foreign_recipe_becomes_one_that_check_accepts(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert needs_translation(path)
    migration = migrate(path, Path("my.yaml"))
    problems = written(migration)
    assert all(problem.what in UNNAMED for problem in problems), problems
    assert [problem.what for problem in migration.problems] == [problem.what for problem in problems]
    # No setting is lost: it is copied, or listed by the line that changes it or leaves it out.
    text, report = migration.text(), "\n".join(migration.report())
    for name in {} if path.suffix == ".toml" else yaml.safe_load(path.read_text()):
        assert name in text, name
    assert all(line.why in report or not line.why for line in migration.lines)
    assert "not-to-be-copied" not in text + report


def test_the_command_writes_the_recipe_and_the_rewards_to_write(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(TRL + "torch_dtype: float16\nreward_funcs: [genes, format]\nodd: 1\n")
    assert cli.main(["new", "my.yaml", "--from", "theirs.yaml"]) == 0
    out = capsys.readouterr().out
    assert "grpo: dtype is changed: was torch_dtype: float16" in out
    assert "grpo: odd is left out: no key here has this meaning" in out
    assert "grpo: write my_rewards.py: genes" in out
    text = (tmp_path / "my.yaml").read_text()
    assert "# was torch_dtype: float16\ndtype: float16\n" in text
    assert "# not translated: no key here has this meaning\n#   odd: 1\n" in text
    assert yaml.safe_load(text)["reward_funcs"] == ["format_tags", "my_rewards.py:genes"]
    assert "def genes(completions, **columns):" in (tmp_path / "my_rewards.py").read_text()
    assert cli.main(["check", "my.yaml"]) == 0
    assert cli.main(["new", "my.yaml", "--from", "theirs.yaml"]) == 2, "nothing is overwritten"


def test_a_recipe_of_ours_is_copied_as_it_is(tmp_path) -> None:
    own_recipes = [path for path in KEPT_RECIPES.rglob("*.yaml")]
    assert own_recipes and not any(map(needs_translation, own_recipes))


@pytest.mark.parametrize(
    ("rewards", "weights", "expected_weights", "comment"),
    [
        ("[accuracy, format]", "[1.0, 0.2]", {"math_verify": 1.0, "format_tags": 0.2}, ""),
        ("[accuracy, format, tag_count]", "[1, 2, 3]", {"math_verify": 1, "format_tags": 2}, "tag_count: format_tags"),
        ("[accuracy, ioi_code, length]", "[1, 2, 3]", {"math_verify": 1}, "ioi_code: it needs"),
        ("[cosine, soft_overlong_punishment]", "[1, 2]", {"cosine_length": 1, "soft_overlong": 2}, ""),
        ("[accuracy, think_accuracy]", "[1, 2]", {"math_verify": 1}, "think_accuracy: math_verify"),
        ("[accuracy, genes, cf_code]", "[1, 2, 3]", {"math_verify": 1, "my_rewards.py:genes": 2}, "cf_code: it needs"),
        ("[format, code]", "[0.1, 1]", {"format_tags": 0.1, "code_tests": 1}, ""),
    ],
)
def test_rewards_keep_their_weights(rewards, weights, expected_weights, comment, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(TRL + f"reward_funcs: {rewards}\nreward_weights: {weights}\n")
    migration = migrate(Path("theirs.yaml"), Path("my.yaml"))
    recipe = values(migration)
    assert dict(zip(recipe["reward_funcs"], recipe["reward_weights"], strict=True)) == expected_weights
    assert comment in migration.text()


def test_the_key_of_a_code_service_names_the_keys_to_set(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    provider = "reward_funcs: [code]\ncode_provider: e2b\ne2b_router_url: 10.0.0.1:8000\n"
    Path("theirs.yaml").write_text(TRL + provider)
    text = migrate(Path("theirs.yaml"), Path("my.yaml")).text()
    assert "for E2B code_sandbox: e2b and reward_environment: [E2B_API_KEY]\n#   code_provider: e2b" in text
    assert "code_sandbox: e2b calls E2B without a router\n#   e2b_router_url: 10.0.0.1:8000" in text


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("dataset_configs: [main]", "dataset_config", "main"),
        ("save_steps: 0.1", "save_steps", 0.1),
        ("scale_rewards: false", "scale_rewards", "none"),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("push_to_hub_revision: true", "push_to_hub", True),
        ("hub_model_revision: v1\npush_to_hub: true", "hub_revision", "v1"),
        ("report_to: [swanlab, wandb]", "report_to", ["wandb"]),
        ("benchmarks: [math_500, lcb]", "benchmarks", ["math_500"]),
        ("deepspeed: ds_zero3.json", "accelerator", "zero3"),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-7}", "lr_scheduler_kwargs",
         {"min_lr": 1e-7}),
        ("warmup_steps: 0\nwarmup_ratio: 0.1", "warmup_steps", 0.1),
        ("save_total_limit: null", "save_total_limit", None),
        ("run_name: a-${VERSION}", "run_name", "a-${VERSION}"),
        ("top_p: 0.9", "vllm_importance_sampling_correction", False),
        ("system_prompt: x", "dataset_solution_column", "solution"),
        ("loss_type: grpo", "dataset_prompt_column", "prompt"),
        ("lora_rank: 8", "use_peft", True),
        ("lora_r: 8", "use_peft", True),
        ("eval_steps: 8", "eval_strategy", "steps"),
        ("accelerate_config: zero3", "accelerator", "zero3"),
        ("val_before_train: true\neval_strategy: epoch", "eval_on_start", True),
        ("kl_loss_coef: 0.01\nuse_kl_loss: false", "beta", 0.0),
        ("push_to_hub: true\nhub_strategy: end", "hub_strategy", "end"),
        ("", "reward_funcs", ["pure_accuracy_math"]),
        ("dataset_name: json\ndataset_config: {data_files: train.jsonl}", "dataset_name", "train.jsonl"),
        ("dataset_name: [a/b, a/c]", "dataset_mixture", {"datasets": [{"id": "a/b"}, {"id": "a/c"}]}),
        ("eval_strategy: steps\nlogging_steps: 5", "eval_steps", 5),
        ('system_prompt: "in \\boxed{}, a \\frac{}"', "system_prompt", "in \\boxed{}, a \\frac{}"),
        ("benchmarks: [math_500]", "dataset_prompt_column", "prompt"),
        ("grpo_loss_type: dr_grpo", "loss_type", "dr_grpo"),
        ("gen_top_k: -1", "top_k", 0),
        ("objective: maxent_listwise\nmaxent_tau: 0.2", "maxent_tau", 0.2),
        ("rl_post_train_reward_funcs: [accuracy]", "reward_funcs", ["math_verify"]),
        ("eval_before_train: true\neval_strategy: epoch", "eval_on_start", True),
        ("fsdp: fsdp2", "accelerator", "fsdp2"),
    ],
)  # fmt: skip
def test_a_setting_becomes_what_does_the_same(text, key, value, tmp_path) -> None:
    recipe = values(translate(tmp_path, f"{TRL}odd: 1\n{text}\n"))
    assert key in recipe and recipe[key] == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("vllm_device: cuda:7", "vllm_node: own"),
        (
            "attn_implementation: flash_attention_2",
            "the package flash-attn is not installed; the default trains the same",
        ),
        ("use_liger_kernel: true", "the package liger-kernel is not installed"),
        ("optim: adamw_8bit", "the package bitsandbytes is not installed"),
        ("callbacks: [push_to_hub_revision]", "push_to_hub publishes the final model"),
        ("hub_strategy: every_save", "the model is pushed once, at the end"),
        ("hub_always_push: true", "push_to_hub pushes once, at the end of the run"),
        ("hub_model_id: acme/base-${VERSION}\npush_to_hub: true", "expected the name of a repository"),
        ("packing: true", "supervised fine-tuning"),
        ("lora_r: 8\nuse_peft: false", "does nothing without use_peft"),
        ("hub_token: abc", "recipes contain no secrets"),
        ("report_to: []", "it is empty"),
        ("objective: maxent_entropy", "write maxent_objective for MaxEnt, remove it for GRPO"),
        ("hint_ratio: 0.5", "no key here has this meaning"),
        ("deepspeed: auto", "use accelerator"),
        ("dataset_mixture: {datasets: [{id: a/b}]}", "dataset_mixture is set"),
    ],
)
def test_what_is_left_out_stays_as_a_comment_with_its_reason(text, why, tmp_path) -> None:
    migration = translate(tmp_path, f"{TRL}torch_dtype: auto\n{text}\n")
    (line,) = [line for line in migration.text().splitlines() if why in line]
    assert line.startswith("# not translated: ") and why in "\n".join(migration.report())
    key = "dataset_name" if "mixture" in text else text.split(":")[0]
    assert (key not in values(migration) and f"#   {key}:" in migration.text()) or key == "hub_token"


def test_what_other_versions_read_is_not_added(tmp_path) -> None:
    """Leave out ``prompt`` if an older open-r1 read ``problem``, and the keys of an evaluation that is left out."""
    assert "dataset_prompt_column" not in values(translate(tmp_path, f"{TRL}vllm_device: auto\n"))
    recipe = values(translate(tmp_path, f"{TRL}eval_strategy: steps\n"))
    assert not {"eval_strategy", "eval_steps"} & set(recipe)


def test_a_recipe_of_supervised_fine_tuning_is_named_as_one(tmp_path) -> None:
    sft = "model_name_or_path: a/b\ndataset_name: a/b\npacking: true\nmax_length: 512\n"
    message = "theirs.yaml is not a GRPO recipe: packing belongs to supervised fine-tuning, and no reward is set"
    assert message in translate(tmp_path, sft).report()[0]
    assert not any("is not a GRPO recipe" in line for line in translate(tmp_path, f"{TRL}packing: true\n").report())


def test_what_must_be_filled_in_is_named_at_the_top_of_the_file(tmp_path) -> None:
    lines = translate(tmp_path, "torch_dtype: auto\nnum_generations: 8\n").text().splitlines()
    named = ["# not translated: the file does not set it, set your own", "#   model_name_or_path: null"]
    assert lines[2:4] == named and lines[5] == "#   dataset_name: null"


def test_one_setting_by_two_names_says_which_counts(tmp_path) -> None:
    migration = translate(
        tmp_path, f"{TRL}max_completion_length: 64\nmax_completion_len: 32\nvllm_host: x\nreward_mode: a\n"
    )
    report = migration.report()
    assert "grpo: max_completion_len is left out: the file also sets max_completion_length: 64" in report
    assert "grpo: reward_mode is left out: no key here has this meaning" in report, "no key is called reward_model"


def test_how_the_file_is_written_is_told(tmp_path) -> None:
    report = "\n".join(translate(tmp_path, TRL + "odd: 1\ndo_eval: false\ndo_eval: false\nseed: 042\n").report())
    assert "'do_eval' is given twice" in report and "reads 042 as an octal number" in report
    assert "beta (0.04)" in report, "what older versions of TRL took by default"


def test_toml_is_read(tmp_path) -> None:
    migration = translate(tmp_path, '[model]\nname = "a/b"\n[trainer.optim]\nlr = 1e-6\n', "rl.toml")
    assert values(migration)["model_name_or_path"] == "a/b" and values(migration)["learning_rate"] == 1e-6
    (tmp_path / "bad.toml").write_text("[")
    assert cli.main(["new", str(tmp_path / "x.yaml"), "--from", str(tmp_path / "bad.toml")]) == 2


def test_datasets_of_the_trl_cli_become_a_mixture(tmp_path) -> None:
    """M2: TRL's ``datasets:`` with path and name."""
    source = tmp_path / "theirs.yaml"
    source.write_text("model_path: a/b\ndatasets:\n  - {path: openai/gsm8k, name: main}\ntest_split_size: 0.1\n")
    mixture = values(migrate(source, tmp_path / "my.yaml"))["dataset_mixture"]
    assert mixture == {"datasets": [{"id": "openai/gsm8k", "config": "main"}], "test_split_size": 0.1}


def test_a_reward_function_of_verl_is_kept(tmp_path, monkeypatch) -> None:
    """M2: verl's ``custom_reward_function``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text("def mine(completions, **columns): ...\n")
    (tmp_path / "theirs.yaml").write_text("custom_reward_function: {path: score.py, name: mine}\nlr: 1.0e-6\n")
    assert values(migrate(Path("theirs.yaml"), Path("my.yaml")))["reward_funcs"] == ["score.py:mine"]


@pytest.mark.parametrize("name", ["train.py", "train.sh"])
def test_a_script_is_not_a_recipe_to_translate(name, tmp_path, monkeypatch, capsys) -> None:
    """M2: a script gets its own message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("import trl\n")
    assert cli.main(["new", "my.yaml", "--from", name]) == 2
    assert f"'{name}' is a script, not a recipe. Fix: write its settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("environment_factory", "environment: file.py:Class"),
        ("rollout_func", "environment: file.py:Class"),
        ("filter_groups", "dynamic_sampling: true"),
        ("max_staleness", "overlap_generation: true"),
        ("curriculum", "shuffle_dataset: false"),
        ("defaults", "--cfg job"),
    ],
)
def test_a_name_without_an_equal_key_names_what_there_is(name, instead, tmp_path) -> None:
    """M2: "remove it" without the equivalent."""
    source = tmp_path / "theirs.yaml"
    source.write_text(TRL + f"{name}: [x]\n")
    assert instead in migrate(source, tmp_path / "my.yaml").text()


def test_a_model_that_reads_pictures_is_noted(tmp_path) -> None:
    """M2: a vision model "is right"."""
    source = tmp_path / "theirs.yaml"
    source.write_text("model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct\nlr: 1.0e-6\n")
    assert "reads pictures; only its text part" in migrate(source, tmp_path / "my.yaml").report()[0]
