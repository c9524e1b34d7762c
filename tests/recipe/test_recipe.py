"""Reading a recipe: precedence, sources, types, and all problems reported together."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import DEFAULT_SOURCE, merge_recipe, read_recipe
from grpo_recipes.recipe.converters import names
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, environment_keys

TOKEN = "hf_" + "plantedsecret" * 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def problems_of(path: Path, text: str, *flags: str, **environment: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_recipe(path, flags, environment)
    return [str(problem) for problem in refused.value.problems]


def value_of(path: Path, text: str, key: str, *flags: str, **environment: str):
    path.write_text(text)
    return read_recipe(path, flags, environment)[key]


@pytest.mark.parametrize(
    ("text", "environment", "flags", "value", "source"),
    [
        ("", {}, [], 42, "default"),
        ("# a comment\nseed: 1\n", {}, [], 1, "recipe.yaml:2"),
        ("seed: 1", {"TRAIN_SEED": "2"}, [], 2, "TRAIN_SEED"),
        ("seed: 1", {"TRAIN_SEED": "2"}, ["--seed", "3"], 3, "--seed"),
        ("seed: 1", {"TRAIN_SEED": ""}, [], 1, "recipe.yaml:1"),
        ("seed: 1", {}, ["--seed=3"], 3, "--seed"),
        ("", {"TRAIN_SEED": "2"}, [], 2, "TRAIN_SEED"),
    ],
)
def test_flag_beats_environment_beats_yaml_beats_default(path, text, environment, flags, value, source):
    path.write_text(text)
    recipe = read_recipe(path, flags, environment)
    assert (recipe["seed"], recipe.source("seed")) == (value, source)
    assert recipe.is_set("seed") == (source != DEFAULT_SOURCE)


def test_every_environment_key_is_read_with_its_variable_as_source(path):
    path.write_text("")
    samples = {"str": "text", "int": "1024", "float": "0.5", "bool": "True"}
    for variable, key in environment_keys().items():
        entry = catalogue()[key]
        text = entry["choices"][-1] if entry.get("choices") else samples[entry["type"]]
        recipe = read_recipe(path, [], {variable: text})
        assert (str(recipe[key]), recipe.source(key)) == (text, variable)


def test_an_environment_is_only_read_when_given(path, monkeypatch):
    monkeypatch.setenv("TRAIN_SEED", "7")
    path.write_text("")
    assert read_recipe(path)["seed"] == 42


def test_every_key_of_the_catalogue_has_a_value(path):
    path.write_text("")
    assert set(read_recipe(path).values) == set(catalogue())


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--learning_rate", "1e-6"], "learning_rate", 1e-6),
        (["--learning_rate=1e-6"], "learning_rate", 1e-6),
        (["--learning-rate", "1e-6"], "learning_rate", 1e-6),
        (["--use_vllm"], "use_vllm", True),
        (["--use_vllm", "false"], "use_vllm", False),
        (["--use_vllm=no"], "use_vllm", False),
        (["--no_use_vllm"], "use_vllm", False),
        (["--no-gradient-checkpointing"], "gradient_checkpointing", False),
        (["--reward_funcs", "a", "b"], "reward_funcs", ["a", "b"]),
        (["--reward_funcs=a,b"], "reward_funcs", ["a", "b"]),
        (["--reward_funcs", "a,b"], "reward_funcs", ["a", "b"]),
        (["--reward_weights", "1.0", "-0.5"], "reward_weights", [1.0, -0.5]),
        (["--reward_weights", "null"], "reward_weights", None),
        (["--max_prompt_length", "null"], "max_prompt_length", None),
        (["--run_name", "42"], "run_name", "42"),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--model_init_kwargs", "{low: 1}"], "model_init_kwargs", {"low": 1}),
        (["--report_to", "none"], "report_to", []),
        (["--reward_weights", "[1.0, 0.5]"], "reward_weights", [1.0, 0.5]),
        (["--reward_weights=[1e-1]"], "reward_weights", [0.1]),
        (["--reward_weights", "[1.0,", "0.5]"], "reward_weights", [1.0, 0.5]),
        (["--reward_funcs", "['x', y]"], "reward_funcs", ["x", "y"]),
        (["--reward_funcs", "[]"], "reward_funcs", []),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_ways_to_write_a_flag(path, flags, key, value):
    parsed = value_of(path, "", key, *flags)
    assert parsed == value
    assert type(parsed) is type(value)


def test_the_guides_overwrite_flag_is_accepted_with_a_note(path):
    path.write_text("")
    for value in ("false", "true"):
        (note,) = read_recipe(path, ["--overwrite_output_dir", value]).notes
        assert note.startswith(f"--overwrite_output_dir: {value} changes nothing: every launch")


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--unset", "eval_steps"], None),
        (["--unset=eval-steps"], None),
        (["--unset", "seed,eval_steps"], None),
        (["--unset", "seed", "eval_steps"], None),
        (["--unset", "seed", "--unset", "eval_steps"], None),
        (["--unset", "seed"], 5.0),
    ],
)
def test_a_flag_takes_back_a_key_of_the_file_or_of_a_variable(path, flags, value):
    """M18: ``--unset KEY`` gives the key its default."""
    path.write_text("eval_steps: 5\n")
    recipe = read_recipe(path, flags, {"TRAIN_SEED": "7"})
    assert recipe["eval_steps"] == value and recipe.is_set("eval_steps") == (value is not None)
    assert recipe.is_set("seed") == ("seed" not in " ".join(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--unset", "eval_step"], "unknown key 'eval_step'. Fix: write --unset eval_steps"),
        (["--unset", "xyzzy"], "unknown key 'xyzzy'. Fix: remove --unset xyzzy"),
        (["--unset"], "is given without a value. Fix: write --unset KEY"),
        (["--unset", "seed", "--seed", "1"], "--unset seed and --seed can't be combined. Fix: remove one of them"),
    ],
)
def test_a_wrong_unset_is_refused(path, flags, message):
    (problem,) = problems_of(path, "seed: 1", *flags)
    assert problem == f"--unset: {message}"


def test_a_chain_of_bases_has_a_limit(tmp_path):
    """M9: a chain of 500 files was accepted."""
    for index in range(30):
        (tmp_path / f"{index}.yaml").write_text(f"base: {index + 1}.yaml\n" if index < 29 else "seed: 3\n")
    assert read_recipe(tmp_path / "19.yaml")["seed"] == 3
    with pytest.raises(ConfigError, match=r"10\.yaml:1: 'base' leads through more than 10 recipes"):
        read_recipe(tmp_path / "0.yaml")


@pytest.mark.alone
def test_thousands_of_unknown_keys_are_told_without_delay(path):
    """M9: each unknown key took 6 ms to find the nearest name."""
    path.write_text("".join(f"learning_rte{index}x: {index}\n" for index in range(2000)))
    start = time.process_time()
    with pytest.raises(ConfigError) as refused:
        read_recipe(path)
    assert len(refused.value.problems) == 2000
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "flags", "where", "message"),
    [
        ("learning_rte: 1", [], "recipe.yaml:1", "write 'learning_rate'"),
        ("seed: 1\nxyzzyx: 1", [], "recipe.yaml:2", "remove it"),
        ("", ["--max_comp", "7"], "--max_comp", "unknown key 'max_comp'"),
        ("", ["--seeed=7"], "--seeed", "Fix: write --seed 7"),
        ("", ["--lr", "1e-6"], "--lr", "Fix: write --learning_rate 1e-6"),
        *(("", ["--lr", *values], "--lr", "Fix: write --learning_rate VALUE") for values in ([], ["--seed", "3"])),
        ("", ["--temp", "0.5"], "--temp", "(flags are not abbreviated). Fix: write --temperature 0.5"),
        ("", ["--num_gen=4"], "--num_gen", "Fix: write --num_generations 4"),
        ("", ["--dataset_configs", "a b"], "--dataset_configs", "Fix: write --dataset_config 'a b'"),
        ("", ["-lr", "1e-6"], "-lr", "begins with one hyphen. Fix: write --lr"),
        ("", ["--dry"], "--dry", "unknown key"),
        ("", ["--no_seed"], "--no_seed", "unknown key 'no_seed'"),
        ("", ["7"], "'7'", "is neither the recipe nor the value of a flag"),
        ("", ["--seed", "7", "8"], "--seed", "expected one value"),
        ("seed: 1\nlearning_rate: 1\nseed: 2", [], "recipe.yaml:3", "first on line 1"),
        ("model_init_kwargs:\n  a: 1\n  a: 2", [], "recipe.yaml:3", "'a' is given twice"),
        ("model_init_kwargs:\n  a:\n    - b: 1\n      b: 2", [], "recipe.yaml:4", "'b' is given twice"),
        ("num_generations: 7.5", [], "recipe.yaml:1", "an integer"),
        ("num_generations: many", [], "recipe.yaml:1", "an integer"),
        ("num_generations: true", [], "recipe.yaml:1", "an integer"),
        ("max_steps: .inf", [], "recipe.yaml:1", "an integer"),
        ("learning_rate: .nan", [], "recipe.yaml:1", "expected a number, got nan"),
        ("learning_rate: [1]", [], "recipe.yaml:1", "a number"),
        ("learning_rate:", [], "recipe.yaml:1", "got nothing"),
        ("reward_funcs: 7", [], "recipe.yaml:1", "expected a list"),
        *(
            ("seed: 1", [f"--{key}", "--beta", "0"], f"--{key}", f"is given without a value. Fix: write --{key} VALUE")
            for key in ("max_steps", "run_name", "reward_funcs", "learning_rate", "lr_scheduler_kwargs")
        ),
        ("seed: 1", ["--max_steps="], "--max_steps", "is given without a value. Fix: write --max_steps VALUE"),
        ("reward_weights: [1, x]", [], "recipe.yaml:1", "a number"),
        ("model_init_kwargs: [1]", [], "recipe.yaml:1", "expected a mapping"),
        ("", ["--model_init_kwargs", "{a: "], "--model_init_kwargs", "mapping"),
        ("run_name: no", [], "recipe.yaml:1", "quote the word"),
        ("bf16: maybe", [], "recipe.yaml:1", "true or false"),
        ("bf16: 1", [], "recipe.yaml:1", "true or false"),
        ("num_generations: 1", [], "recipe.yaml:1", "at least 2"),
        ("vllm_gpu_memory_utilization: 1.5", [], "recipe.yaml:1", "at most 1.0"),
        ("logging_steps: often", [], "recipe.yaml:1", "a number"),
        ("num_generations: null", [], "recipe.yaml:1", "got nothing"),
        ("vllm_server_port: 80", [], "recipe.yaml:1", "at least 1024"),
        ("vllm_mode: servr", [], "recipe.yaml:1", "server, colocate"),
        ("loss_type: gspo", [], "recipe.yaml:1", "set loss_type to one of grpo"),
    ],
)
def test_a_fault_is_told_with_its_place_and_what_to_write(path, text, flags, where, message):
    (problem,) = problems_of(path, text, *flags)
    assert problem.startswith(f"{where}: ")
    assert message in problem
    assert ". Fix: " in problem and "\n" not in problem


def test_names_of_others_are_refused_with_what_to_write(path):
    for key, fix in [*((name, row.fix_for("x")) for name, row in names().items()), *OWNED_KEYS.items()]:
        assert key not in catalogue()
        if key in ("output_dir", "logging_first_step", "overwrite_output_dir"):
            continue  # any value is noted
        (problem,) = problems_of(path, f"{key}: x")
        assert problem.startswith("recipe.yaml:1: ") and problem.endswith(f"Fix: {fix}")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("learning_rate: 1e-6", "learning_rate", 1e-6),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("num_generations: 8.0", "num_generations", 8),
        ("max_steps: 999999999", "max_steps", 999999999),
        ("run_name: 42", "run_name", "42"),
        ("reward_funcs: one", "reward_funcs", ["one"]),
        ("reward_weights: [1, 2e-1]", "reward_weights", [1.0, 0.2]),
        ("max_prompt_length: null", "max_prompt_length", None),
        ("report_to: none", "report_to", []),
        ("system_prompt: >-\n  two\n  lines", "system_prompt", "two lines"),
    ],
)
def test_values_are_typed_by_the_catalogue(path, text, key, value):
    parsed = value_of(path, text, key)
    assert parsed == value
    assert type(parsed) is type(value)


def test_everything_wrong_is_told_at_once(path):
    text = "seed: x\nlearning_rte: 1\ntorch_dtype: y\nnum_generations: 1\nnum_generations: 0\n"
    told = problems_of(path, text, "--hub_token", "z", VLLM_PORT="http")
    wheres = [problem.split(": ")[0] for problem in told]
    assert sorted(wheres) == sorted(
        [
            "recipe.yaml:1",
            "recipe.yaml:2",
            "recipe.yaml:3",
            "recipe.yaml:5",
            "recipe.yaml:5",
            "--hub_token",
            "VLLM_PORT",
        ]
    )


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (f"run_name: {TOKEN}", []),
        ("", ["--system_prompt", f"say {TOKEN}"]),
        ("model_name_or_path: https://user:pw@host/model", []),
        (f"reward_funcs: [{TOKEN}]", []),
        (f"model_init_kwargs:\n  auth:\n    token: {TOKEN}", []),
        ("", ["--reward_funcs", "a", TOKEN]),
    ],
    ids=["text", "flag", "url", "list", "nested", "list-flag"],
)
def test_a_secret_in_a_value_is_refused_and_not_repeated(path, text, flags):
    (problem,) = problems_of(path, text, *flags)
    assert "looks like a secret" in problem
    assert TOKEN not in problem and "user:pw" not in problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"seed: [1", "not valid YAML"),
        (b"seed: 1\n  learning_rate: 2\n", "not valid YAML"),
        (
            b"seed: 1\n\tmax_steps: 3\n",
            "recipe.yaml:2: not valid YAML (it has a tab). Fix: indent the line with spaces",
        ),
        (b"- seed\n", "a recipe must be a mapping"),
        (b"seed", "a recipe must be a mapping"),
        (b"seed: 1\n---\nseed: 2\n", "found another document"),
        (b"chat_template: {{ messages }}\n", "not valid YAML"),
        (b"seed: \x00\n", "not valid YAML"),
        (b"run_name: \xff\xfe\n", "cannot be read"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_recipe(path)
    (problem,) = refused.value.problems
    assert message in str(problem) and "\n" not in str(problem)
    assert "recipe.yaml" in problem.where


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        read_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_is_all_defaults(path, text):
    path.write_text(text)
    recipe = read_recipe(path)
    assert not [key for key in recipe.values if recipe.is_set(key)]


def test_the_yaml_of_a_recipe_reads_back_as_the_same_recipe(path, tmp_path):
    path.write_text(
        "system_prompt: |\n  two lines: a # b\n\n  and 'quotes' \"too\" ä\nrun_name: 'no'\nlearning_rate: 1e-6\n"
        "reward_weights: [1, 0.5]\nreward_funcs: [a, b]\nreport_to: none\nmodel_init_kwargs: {a: {b: [1, null]}}\n"
        "max_prompt_length: null\nbf16: true\ndataset_solution_marker: '####'\n"
        'chat_template: "{% if a %}\\t# {{ b }}\\n"'
    )
    recipe = read_recipe(path, ["--seed", "5", "--no_use_vllm"], {"VLLM_PORT": "9000"})
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(recipe.as_yaml())

    reread = read_recipe(frozen)

    for key in catalogue():
        assert reread[key] == recipe[key], key
        assert reread.is_set(key) == recipe.is_set(key), key
    assert "# VLLM_PORT" in frozen.read_text() and "# --seed" in frozen.read_text()
    assert "# recipe.yaml:" in frozen.read_text()


def test_reading_leaves_the_file_alone(path):
    path.write_text("seed: 1\n")
    before = path.stat().st_mtime_ns
    read_recipe(path, ["--seed", "2"])
    assert path.read_text() == "seed: 1\n" and path.stat().st_mtime_ns == before


def test_a_base_is_overridden_key_by_key(tmp_path):
    (tmp_path / "root.yaml").write_text("seed: 1\nbeta: 0.1\nrun_name: root\n")
    (tmp_path / "middle.yaml").write_text("base: root.yaml\nseed: 2\nrun_name: middle\n")
    path = tmp_path / "leaf.yaml"
    path.write_text("base: middle.yaml\nseed: 3\n")
    recipe = read_recipe(path, ["--beta", "0.2"])
    values = {key: (recipe[key], recipe.source(key)) for key in ("seed", "run_name", "beta")}
    assert values == {"seed": (3, "leaf.yaml:2"), "run_name": ("middle", "middle.yaml:3"), "beta": (0.2, "--beta")}
    assert "base" not in recipe.as_yaml()


def test_a_base_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/root.yaml").write_text("seed: 7\n")
    path = tmp_path / "leaf.yaml"
    path.write_text("base: ~/root.yaml\n")
    assert read_recipe(path)["seed"] == 7
    path.write_text("base: $HOME/root.yaml\n")
    with pytest.raises(ConfigError, match="Fix: write the path without variables"):
        read_recipe(path)


def test_a_fault_in_a_base_names_its_own_line(tmp_path):
    (tmp_path / "root.yaml").write_text("\nseeed: 1\n")
    path = tmp_path / "leaf.yaml"
    assert problems_of(path, "base: root.yaml\nbeta: x\n")[0].startswith("leaf.yaml:2")
    assert problems_of(path, "base: root.yaml\nbeta: x\n")[1].startswith("root.yaml:2: unknown key 'seeed'")


@pytest.mark.parametrize(
    ("text", "message"),
    [("base: leaf.yaml", "builds on this recipe"), ("base: other.yaml", "builds on"), ("base: 7", "got 7")],
)
def test_bases_that_go_nowhere(tmp_path, text, message):
    (tmp_path / "other.yaml").write_text("base: leaf.yaml\n")
    (problem,) = problems_of(tmp_path / "leaf.yaml", text)
    assert message in problem


def test_another_name_of_a_key(path):
    path.write_text("gen_temperature: 0.7\n")
    recipe = read_recipe(path)
    assert recipe["temperature"] == 0.7
    assert recipe.notes == ["recipe.yaml:1: 'gen_temperature' is read as temperature"]
    assert value_of(path, "temperature: 0.7", "temperature", "--gen_temperature", "0.9") == 0.9
    assert "two names" in problems_of(path, "temperature: 0.7\ngen_temperature: 0.9\n")[0]


def test_what_a_broken_key_means_is_not_guessed(path):
    from grpo_recipes.recipe import BrokenKey, merge_recipe

    path.write_text("num_generations: x\nseed: 1\n")
    recipe, problems = merge_recipe(path)
    assert len(problems) == 1 and recipe["seed"] == 1
    with pytest.raises(BrokenKey):
        recipe["num_generations"]


def test_parts_of_a_mapping_are_typed(path):
    text = "dataset_mixture:\n  seed: '3'\n  datasets: [{id: a/b, weight: '0.5', columns: question}]\n"
    mixture = value_of(path, text, "dataset_mixture")
    assert mixture == {"seed": 3, "datasets": [{"id": "a/b", "weight": 0.5, "columns": ["question"]}]}
    flag = ["--dataset_mixture", "{seed: '3', datasets: [{id: a/b}]}"]
    assert value_of(path, "", "dataset_mixture", *flag) == {"seed": 3, "datasets": [{"id": "a/b"}]}


def test_a_message_names_the_recipe_as_it_is_typed_from_here(tmp_path: Path, monkeypatch) -> None:
    inside, outside = tmp_path / "own" / "a.yaml", tmp_path / "elsewhere" / "base.yaml"
    for path, text in ((outside, "learning_rte: 1\n"), (inside, f"base: {outside}\nseeed: 1\nbf16: true\n")):
        path.parent.mkdir()
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "own")
    recipe, problems = merge_recipe(inside)
    assert {problem.where for problem in problems} == {"a.yaml:2", f"{outside}:1"}
    monkeypatch.chdir(tmp_path)
    assert {problem.where for problem in merge_recipe(inside)[1]} == {"own/a.yaml:2", "elsewhere/base.yaml:1"}
    assert merge_recipe(inside)[0].source("bf16") == "own/a.yaml:3" and recipe.location("seed") == "own/a.yaml"
