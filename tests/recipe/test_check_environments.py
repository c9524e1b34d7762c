"""Check and plan recipes that get their prompts from environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden import compare_messages, golden_files

from grpo_recipes import cli
from grpo_recipes.extensions.environments.recipe import uses_trl_environment
from grpo_recipes.recipe import Recipe, read_recipe
from grpo_recipes.recipe.check import check, notes
from grpo_recipes.recipe.sources import rollout_class, source_of, user_code
from grpo_recipes.recipe.user_code import copy_source

GAME = Path(__file__).parents[1] / "rollouts/wild_environment.py"
PLAYS = {"dataset_name": None, "environment": f"{GAME}:Sums", "reward_funcs": ["environment"]}
MIXED = {**PLAYS, "environment": None, "environment_mixture": {"environments": [{"id": f"{GAME}:Sums"}]}}
Read = Callable[..., Recipe]


def test_a_reward_that_nobody_wrote_is_not_to_be_removed(read: Read) -> None:
    (problem,) = check(read(dataset_name=None, environment=f"{GAME}:Sums"), {})
    assert problem.fix == "set reward_funcs: [environment]"


def test_the_base_model_plays_only_if_the_server_has_it(read: Read) -> None:
    pytest.importorskip("textarena")
    keys = PLAYS | {"environment": "textarena:TicTacToe-v0", "environment_args": {"opponents": "base"}}
    policy = {"environment_args": {"opponents": "policy"}}
    adapter = {"use_peft": True, "weight_sync": "lora"}
    for lacking in ({}, {"use_peft": True}, {"use_peft": True, "weight_sync": "file"}):
        (problem,) = check(read(**keys | lacking), {})
        assert problem.fix == "set opponents: policy, or add use_peft: true and weight_sync: lora"
        assert check(read(**keys | lacking | policy), {}) == check(read(**keys | lacking | adapter), {}) == []
    for lacking in ({"vllm_mode": "colocate"}, {"use_vllm": False}):
        (problem,) = check(read(**keys | lacking), {})
        assert problem.fix == "set opponents: policy" and check(read(**keys | lacking | policy), {}) == []


@pytest.mark.parametrize("mixed", [False, True])
def test_a_checkpoint_is_no_opponent(read: Read, tmp_path: Path, mixed: bool) -> None:
    pytest.importorskip("textarena")
    (tmp_path / "config.json").write_text("{}")
    for opponents, alternatives in ((str(tmp_path), ["random", "policy"]), ("Qwen/Qwen2.5-0.5B-Instruct", ["random"])):
        (problem,) = check(read(**game(opponents, mixed)), {})
        assert problem.what == f"opponents: '{opponents}' is not supported"
        assert problem.fix == 'set "random", "policy" or "base"'
        assert not any(check(read(**game(other, mixed)), {}) for other in alternatives)


def game(opponents: str, mixed: bool) -> dict[str, Any]:
    """Return the keys of a recipe with a game, with or without another environment."""
    entry = {"id": "textarena:TicTacToe-v0", "args": {"opponents": opponents}}
    if mixed:
        return MIXED | {"environment_mixture": {"environments": [{"id": f"{GAME}:Sums"}, entry]}}
    return PLAYS | {"environment": entry["id"], "environment_args": entry["args"]}


def test_an_episode_needs_a_limit(read: Read) -> None:
    (problem,) = check(read(**PLAYS, max_completion_length=None), {})
    assert str(problem).endswith("episodes need a limit. Fix: set max_completion_length, e.g. 256")
    assert check(read(**PLAYS, max_completion_length=256), {}) == []


def test_a_server_of_openenv_needs_the_network(read: Read) -> None:
    pytest.importorskip("openenv")
    keys = PLAYS | {"environment": "openenv:http://127.0.0.1:9"}
    (problem,) = check(read(**keys), {})
    assert "needs the network. Fix: add environment_network: true" in str(problem)
    assert check(read(**keys, environment_network=True), {}) == []


@pytest.mark.parametrize("path", golden_files(__file__, "environments"))
def test_what_is_refused_of_environments(read: Read, path: Path) -> None:
    compare_messages(path, read)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (f"environment: {GAME}:Sums",
         ":Sums; an episode has at most 4 turns of 8 tokens, and 32 of max_completion_length 64 for messages"),
        (f"environment: {GAME}:Sums\nenvironment_turn_length: 12", "at most 4 turns of 12 tokens, and 16 of"),
        (f"environment: {GAME}:Sums\nenvironment_turn_length: 16", "episodes of full turns end unfinished"),
        (f"environment_mixture: {{environments: [{{id: '{GAME}:Sums', weight: 3}}, {{id: '{GAME}:Wild'}}]}}",
         ":Wild (25%); an episode"),
    ],
)  # fmt: skip
def test_the_plan_says_how_long_an_episode_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: smoke:sums\ndtype: float32\nbf16: false\n{named}\n"
        "reward_funcs: [environment]\nenvironment_max_turns: 4\nmax_completion_length: 64\nprompts_per_step: 4\n"
    )
    assert cli.main(["plan", str(recipe)]) == 0
    assert message in capsys.readouterr().out


def test_the_rewards_of_an_environment_are_not_tried_on_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: smoke:sums\nenvironment: {GAME}:Sums\nreward_funcs: [environment]\n")
    assert cli.main(["check-rewards", str(recipe)]) == 2
    assert "Fix: run grpo check --deep, which plays an episode" in capsys.readouterr().err


def test_a_trl_environment_is_only_played_in_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')
    recipe, shop = tmp_path / "recipe.yaml", GAME.with_name("trl_shop.py")
    recipe.write_text(
        f"model_name_or_path: smoke:sums\nenvironment: {shop}:Shop\ndataset_name: {tmp_path}/a.jsonl\n"
        "reward_funcs: [environment]\nmax_completion_length: 64\n"
        'chat_template: "{% if tools %}{{ tools }}{% endif %}{% for message in messages %}<|{{ message.role }}|>'
        '{{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"\n'
    )
    for command, message, fix in (
        ("check-rewards", "the rewards need episodes", "run grpo launch with --max_steps 1"),
        ("play", "Shop' is a TRL environment", "run grpo check --deep, which plays an episode"),
    ):
        assert cli.main([command, str(recipe)]) == 2
        told = capsys.readouterr().err
        assert message in told and f"Fix: {fix}" in told


def test_a_missing_class_is_the_only_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its methods are tools, which the template would have to show, is not known."""
    (tmp_path / "a.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: smoke:sums\ndtype: float32\nenvironment: {GAME}:Missing\n"
        f"dataset_name: {tmp_path}/a.jsonl\nmax_completion_length: 64\n"
    )
    assert cli.main(["check", str(recipe)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no 'Missing'" in line


def test_a_model_that_only_training_has_is_no_opponent_in_a_benchmark(read: Read) -> None:
    pytest.importorskip("textarena")
    played = {**PLAYS, "environment": "textarena:TicTacToe-v0", "benchmarks": ["textarena:TicTacToe-v0"]}
    assert check(read(**played, environment_args={"opponents": "policy"}), {}) == []
    adapter = {"use_peft": True, "weight_sync": "lora"}
    (problem,) = check(read(**played, **adapter, environment_args={"opponents": "base"}), {})
    assert "a benchmark can't play 'textarena:TicTacToe-v0' against 'base'" in str(problem)


def test_each_problem_of_an_environment_has_its_own_line(read: Read, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    entry = {"id": "textarena:TicTacToe-v0", "args": {"opponents": "gpt"}}
    mixture = [{"id": f"{GAME}:Sums"}, {"id": f"{GAME}:Summs", "args": {"most": 2}}, entry, {"weight": 2.0}]
    problems = check(read(**MIXED | {"environment_mixture": {"environments": mixture}}), {})
    lines = (tmp_path / "recipe.yaml").read_text().splitlines()
    numbers = [int(problem.where.rpartition(":")[2]) for problem in problems]
    expected = [f"id: {GAME}:Summs", "args:", "weight: 2.0"]
    assert [lines[number - 1].strip("- ") for number in numbers] == expected, problems
    assert [problem.what.split()[-1] for problem in problems] == ["'Summs'", "supported", "id"]

    (problem,) = check(read(**PLAYS | {"environment": entry["id"], "environment_args": entry["args"]}), {})
    line = (tmp_path / "recipe.yaml").read_text().splitlines()[int(problem.where.rpartition(":")[2]) - 1]
    assert line == "environment_args:"
    (problem,) = check(read(**PLAYS | {"environment": ""}), {})
    assert problem.where.startswith("recipe.yaml:")


def test_an_environment_that_gets_no_episode_is_told(read: Read) -> None:
    mixture = {"environments": [{"id": f"{GAME}:Sums", "weight": 500.0}, {"id": f"{GAME}:Wild"}]}
    keys = MIXED | {"environment_mixture": mixture, "environment_eval_episodes": 64}
    assert check(read(**keys), {}) == []  # nothing evaluates
    (problem,) = check(read(**keys, benchmarks=[f"{GAME}:Wild"]), {})
    assert f"environment_eval_episodes: 64 leaves no episode for '{GAME}:Wild'" in str(problem)
    (problem,) = check(read(**keys, environment_episodes=100), {})
    assert "environment_episodes: 100 leaves no episode" in str(problem)


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        ("environment_eval_episodes: 7", "eval_strategy, or an environment of the recipe among benchmarks"),
        ("benchmark_solved: 0.5", "an environment of the recipe among benchmarks"),
    ],
)
def test_keys_of_evaluation_that_nothing_reads_are_noted(tmp_path: Path, key: str, needed: str) -> None:
    recipe, plays = tmp_path / "recipe.yaml", f"environment: {GAME}:Sums\nreward_funcs: [environment]\n"
    recipe.write_text(f"model_name_or_path: smoke:sums\n{plays}{key}\n")
    assert f"does nothing without {needed}" in " ".join(notes(read_recipe(recipe)))
    recipe.write_text(f"model_name_or_path: smoke:sums\n{plays}{key}\nbenchmarks: ['{GAME}:Sums']\n")
    assert notes(read_recipe(recipe)) == []


def test_variables_are_handed_to_environments(read: Read) -> None:
    recipe = read(**PLAYS, reward_environment=["GAME_DATA"])
    assert not any("reward_environment" in note for note in notes(recipe))
    (problem,) = check(recipe, {})
    assert "Fix: export GAME_DATA first" in str(problem)
    assert check(recipe, {"GAME_DATA": "x"}) == []


def test_a_recipe_with_tools_keeps_its_dataset_and_rewards(read: Read) -> None:
    own = Path(__file__).with_name("golden") / "environments/own.py"
    keys = {"tools": [f"{own}:price"], "environment_timeout": 3.0, "environment_turn_length": 9, "max_tool_calls": 2}
    recipe = read(**keys, reward_environment=["HOME"])
    assert check(recipe, {"HOME": "/"}) == []
    assert not any("does nothing" in note for note in notes(recipe))
    assert source_of(recipe.__getitem__) is None and f"{own}:price" in user_code(recipe.__getitem__)
    assert rollout_class(recipe.__getitem__).__name__ == "ToolEpisodes"
    assert any("max_tool_calls does nothing without tools" in note for note in notes(read(max_tool_calls=2)))


def test_a_reward_model_does_not_read_episodes_or_tools(read: Read) -> None:
    own = Path(__file__).with_name("golden") / "environments/own.py"
    tools = {"tools": [f"{own}:price"], "reward_funcs": ["math_verify"]}
    for keys in (PLAYS, tools):
        (problem,) = check(read(**keys | {"reward_funcs": [*keys["reward_funcs"], "acme/judge"]}), {})
        assert problem.what.startswith("reward model 'acme/judge' reads a chat with one answer")
        assert problem.fix == f"set reward_funcs: {keys['reward_funcs']}".replace("'", "")
        assert check(read(**keys), {}) == []


def test_the_plan_says_what_tools_may_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, recipe = Path(__file__).with_name("golden") / "environments/own.py", tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: smoke:sums\ndtype: float32\nbf16: false\ndataset_name: smoke:sums\n"
        f"dataset_prompt_column: problem\ndataset_solution_column: answer\ntools: ['{own}:price']\n"
        "max_completion_length: 64\nprompts_per_step: 4\nchat_template: '{{ tools }}{{ messages }}'\n"
    )
    assert cli.main(["plan", str(recipe)]) == 0
    assert "tools price: at most 8 calls in an episode, and 32 tokens in a turn" in capsys.readouterr().out


def test_a_trl_environment_keeps_its_dataset_and_rewards(read: Read, tmp_path: Path) -> None:
    own = Path(__file__).with_name("golden") / "environments/own.py"
    keys = {"environment": f"{own}:Shop", "environment_timeout": 3.0, "max_tool_calls": 2}
    recipe = read(**keys, reward_environment=["HOME"])
    assert check(recipe, {"HOME": "/"}) == []
    assert not any("does nothing" in note for note in notes(recipe))
    assert source_of(recipe.__getitem__) is None and f"{own}:Shop" in user_code(recipe.__getitem__)
    assert rollout_class(recipe.__getitem__).__name__ == "TRLEpisodes"
    (tmp_path / "rows.jsonl").write_text('{"problem": "a", "answer": "b"}\n' * 300)
    local = {"dataset_name": str(tmp_path / "rows.jsonl"), "dataset_prompt_column": "problem"}
    local |= {"dataset_solution_column": "answer", "reward_funcs": [f"{own}:reads"]}
    assert check(read(**keys, **local), {}) == []
    (problem,) = check(read(**local), {})
    assert "needs 'environments', which no reward gets" in problem.what


def test_rows_of_a_trl_environment_need_no_solution(read: Read, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "a"}\n' * 300)
    keys = {"dataset_name": str(tmp_path / "rows.jsonl"), "environment": f"{GAME.with_name('trl_shop.py')}:Shop"}
    assert check(read(**keys, reward_funcs=["environment"]), {}) == []
    (problem,) = check(read(**keys, reward_funcs=["environment", "math_verify"]), {})
    assert "has no column 'answer'" in problem.what
    (problem,) = check(read(**keys, reward_funcs=["environment"], dataset_solution_column="glod"), {})
    assert "has no column 'glod'" in problem.what
    (tmp_path / "rows.jsonl").write_text('{"problem": "a", "answer": ""}\n' * 300)
    assert check(read(**keys, reward_funcs=["environment"]), {}) == []
    (problem,) = check(read(**keys, reward_funcs=["environment", "math_verify"]), {})
    assert "has no solution in the first" in problem.what


def test_a_run_keeps_the_form_of_its_environment(read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's file may change after the run has started."""
    file, with_step = tmp_path / "own/shop.py", "    def step(self, action): ...\n"
    file.parent.mkdir()
    shop = (
        "class Shop:\n    def reset(self, **columns): ...\n    def price(self, item: str) -> int:\n"
        "        'Look up a price.'\n        return 1\n"
    )
    file.write_text(shop)
    recipe = read(environment=f"{file}:Shop")
    copy = copy_source(f"{file}:Shop", tmp_path / "rewards")
    (tmp_path / "run.json").write_text("{}")
    changed = shop.replace("class Shop:\n", f"class Shop:\n{with_step}")
    file.write_text(changed)
    assert uses_trl_environment(recipe.__getitem__) and check(recipe, {}) == []
    lookup = {"environment": f"{file}:Shop", "dataset_name": "x"}.get
    assert not uses_trl_environment(lookup)
    monkeypatch.setenv("GRPO_RUN_DIR", str(tmp_path))  # as in a training process
    assert uses_trl_environment(lookup)
    copy.write_text(changed)
    assert not uses_trl_environment(lookup) and not uses_trl_environment(recipe.__getitem__)
