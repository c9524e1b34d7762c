"""`grpo check --deep`: problems that only the libraries can detect, without a download or a launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import Recipe, read_recipe
from grpo_recipes.trainers.deep_check import check_deeply

from .tiny_training import save_reward_model

SMOKE = {
    "model_name_or_path": "smoke:sums", "dtype": "float32", "bf16": False, "vllm_max_model_length": None,
    "max_completion_length": 8,
}  # fmt: skip


@pytest.fixture
def sums(read: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """``sums(KEY=VALUE, ...)``: a recipe on a local file of sums, with keys changed."""
    data = write_sums(tmp_path, 8)
    return lambda **changes: read(**{**SMOKE, "dataset_name": str(data), **changes})


def write_sums(folder: Path, rows: int) -> Path:
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in smoke.split_sums()[0][:rows]))
    return file


def seen(recipe: Recipe, tmp_path: Path) -> str:
    return "\n".join(check_deeply(recipe, {"CACHE_ROOT": str(tmp_path / "cache")}))


def refused(recipe: Recipe, tmp_path: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check_deeply(recipe, {"CACHE_ROOT": str(tmp_path / "cache")})
    return [str(problem) for problem in error.value.problems]


def test_the_first_prompt_its_tokens_its_end_and_the_scores(sums, tmp_path):
    write_sums(tmp_path, 80)
    told = seen(sums(system_prompt="Add."), tmp_path)
    assert "first prompt, 13 tokens:\n<|system|>Add.<|im_end|><|user|>5+9=<|im_end|><|assistant|>" in told
    assert "64 of the first 64 fit; 13 to 13 tokens" in told
    assert "answers    end with <|im_end|>" in told
    assert "reward     pure_accuracy_math: right answers 1.000, wrong answers 0.000" in told
    assert "configs    TRL accepts every value" in told


def test_a_teacher_with_another_tokenizer(sums, tmp_path):
    for name, model in (("same", ""), ("more", smoke.MAFIA)):
        smoke.build_tokenizer(model).save_pretrained(tmp_path / name)
    told = seen(sums(teacher_model_name_or_path=str(tmp_path / "more")), tmp_path)
    assert "configs    TRL accepts every value" in told
    student = {"model_name_or_path": smoke.MAFIA, "teacher_model_name_or_path": str(tmp_path / "same")}
    (problem,) = refused(sums(**student), tmp_path)
    assert "the teacher's tokenizer has no or another id for" in problem


def test_a_reward_model_without_a_chat_template(sums, tmp_path):
    scorer = save_reward_model(tmp_path / "scorer")
    assert "reward     pure_accuracy_math" in seen(sums(reward_funcs=["pure_accuracy_math", str(scorer)]), tmp_path)
    (scorer / "chat_template.jinja").unlink()
    (problem,) = refused(sums(reward_funcs=[str(scorer)]), tmp_path)
    assert f"the tokenizer of '{scorer}' has no chat template" in problem


def test_a_very_long_prompt_is_announced_and_cut(sums, tmp_path, capsys):
    """M9: a prompt of 10 MB took 46 s without output and was printed in full."""
    data = tmp_path / "long.jsonl"
    prompts = [f"first {'1 + ' * 250_000} last", "2+2="]
    data.write_text("".join(json.dumps({"problem": prompt, "answer": "4"}) + "\n" for prompt in prompts))
    told = seen(sums(dataset_name=str(data)), tmp_path)
    assert "grpo: counting the tokens of 2 prompts, 1,000,015 characters in all" in capsys.readouterr().err
    assert len(told) < 5000 and "first prompt, 1000" in told
    assert "<|user|>first 1 + 1" in told and "+ 1 +  last<|im_end|><|assistant|>" in told
    assert re.search(r"\n… 99\d,\d{3} of 1,000,\d{3} characters are left out …\n", told)
    seen(sums(), tmp_path)
    assert "counting" not in capsys.readouterr().err


def test_what_is_not_on_this_machine_is_named_with_the_command(read, tmp_path):
    problems = refused(read(), tmp_path)
    assert len(problems) == 2
    assert all("grpo fetch" in problem for problem in problems)
    assert "Qwen/Qwen2.5-1.5B-Instruct" in problems[0] and "openai/gsm8k" in problems[1]


def test_a_value_that_only_trl_refuses(sums, tmp_path):
    (problem,) = refused(sums(num_generations_eval=3, eval_strategy="steps", eval_steps=0), tmp_path)
    assert "TRL rejects the recipe" in problem and "eval" in problem


def test_no_prompt_fits(sums, tmp_path):
    (problem,) = refused(sums(max_prompt_length=5), tmp_path)
    assert (
        "none of 8 prompts fits, the shortest has 7 tokens" in problem
        and "set max_prompt_length: 7, the longest of these, or more" in problem
    )


def test_a_template_that_cannot_render(sums, tmp_path):
    (problem,) = refused(sums(chat_template="{{ raise_exception('no') }}"), tmp_path)
    assert "cannot render a prompt: no" in problem


def test_a_template_whose_answers_do_not_end(sums, tmp_path):
    told = seen(sums(chat_template="{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"), tmp_path)
    assert "note: the template ends an answer with '<end>', a completion ends at <|im_end|>" in told


def test_solutions_that_no_completion_can_equal(sums, tmp_path):
    data = tmp_path / "long.jsonl"
    rows = [{"problem": f"{n}+1=", "answer": f"We add one to {n}.\nThen\n#### {n + 1}"} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = refused(sums(dataset_name=str(data)), tmp_path)
    assert "are not short answers" in problem and "dataset_solution_marker: '####'" in problem
    assert "right answers 1.000" in seen(sums(dataset_name=str(data), dataset_solution_marker="####"), tmp_path)


def test_a_callback_that_is_none(sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    (problem,) = refused(sums(callbacks=["mine.py:Mine"]), tmp_path)
    assert "not a subclass of transformers.TrainerCallback" in problem
    text = "from transformers import TrainerCallback\n\n\nclass Ours(TrainerCallback):\n    pass\n"
    (tmp_path / "ours.py").write_text(text)
    assert "callbacks  ours.py:Ours" in seen(sums(callbacks=["ours.py:Ours"]), tmp_path)


def test_a_reward_of_ones_own_that_fails(sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(completions, **columns):\n    raise KeyError('gold')\n")
    (problem, *_) = refused(sums(reward_funcs=["mine.py:score"]), tmp_path)
    assert "mine.py:score" in problem and "gold" in problem


COUNTED = """
from pathlib import Path
from helper import WORTH

def score(completions, answer, **columns):
    with Path("{calls}").open("a") as file:
        file.write("x")
    return [WORTH * (a in c[-1]["content"]) for c, a in zip(completions, answer)]
"""


def test_rewards_of_unchanged_files_are_not_tried_again(sums, tmp_path, monkeypatch):
    """M19: the result is cached only for the same rows, keys and files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    calls = tmp_path / "calls"
    (tmp_path / "helper.py").write_text("WORTH = 1.0\n")
    (tmp_path / "mine.py").write_text(COUNTED.format(calls=calls))

    def tried(**keys) -> bool:
        """Check the recipe; return whether the reward was called."""
        before = calls.stat().st_size if calls.exists() else 0
        told = seen(sums(reward_funcs=["mine.py:score"], **keys), tmp_path)
        was_called = calls.stat().st_size > before
        assert "reward     mine.py:score: right answers 1.000" in told
        assert ("(remembered: rows, keys and files are unchanged)" in told) != was_called
        return was_called

    assert tried() and not tried() and not tried(learning_rate=1e-5)
    assert tried(reward_timeout=9.0) and tried(system_prompt="Add.")
    (tmp_path / "mine.py").write_text(f"{COUNTED.format(calls=calls)}\n# changed\n")
    assert tried() and not tried()
    (tmp_path / "helper.py").write_text("WORTH = 1.0  # changed\n")
    assert tried() and not tried()
    monkeypatch.setenv("JUDGE", "http://127.0.0.1:1")
    for _ in range(2):
        assert tried(reward_environment=["JUDGE"]), "a server may give other scores"
    (tmp_path / "sums.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n{"problem": "2+1=", "answer": "3"}\n')
    assert tried() and not tried()
    for file in (tmp_path / "cache/checked-rewards").iterdir():
        file.write_text("{")
    assert tried(), "a damaged result is not an answer"


def test_answers_may_end_with_a_token_of_the_generation_config(sums, tmp_path):
    """M7: Gemma ends turns with a token listed only in its generation_config, and a note denied that."""
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}<|user|>{% endfor %}"
    model = smoke.build_model(tokenizer)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    told = seen(sums(model_name_or_path=str(tmp_path / "model")), tmp_path)
    assert "answers    end with <|user|>" in told and "note: the template ends" not in told
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.save_pretrained(tmp_path / "model")
    told = seen(sums(model_name_or_path=str(tmp_path / "model")), tmp_path)
    assert "note: the template ends an answer with '<|user|>', a completion ends at <|im_end|>" in told


@pytest.mark.slow
def test_a_deep_check_prints_no_warning_of_a_library(tmp_path):
    """M7: vLLM warned about Triton in every --deep on a machine without a GPU."""
    rows = "".join(json.dumps(row) + "\n" for row in smoke.split_sums()[0])
    (tmp_path / "sums.jsonl").write_text(rows)
    keys = "model_name_or_path: smoke:sums\ndataset_name: sums.jsonl\ndtype: float32\nmax_completion_length: 8\n"
    (tmp_path / "a.yaml").write_text(f"{keys}reward_funcs: [pure_accuracy_math]\nreport_to: none\n")
    command = [sys.executable, "-m", "grpo_recipes", "check", "--deep", "a.yaml"]
    environment = {**os.environ, "CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "riton" not in done.stdout + done.stderr and "WARNING" not in done.stdout + done.stderr


def test_layers_that_the_model_lacks_are_told_at_their_line(sums, tmp_path):
    (problem,) = refused(sums(use_peft=True, lora_target_modules=["q_proj", "v_prj"]), tmp_path)
    assert "recipe.yaml:" in problem and "the model has no layer 'v_prj'" in problem
    assert "adapter    on 14 layers" in seen(sums(use_peft=True, lora_target_modules=["all-linear"]), tmp_path)
    assert "adapter" not in seen(sums(), tmp_path)


def test_a_slow_reward_says_how_far_it_is(sums, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_recipes.rewards.probe._QUIET_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(
        "import time\ndef judge(completions, answer):\n    time.sleep(0.005)\n"
        "    return [float('>' + answer[0] + '<' in completions[0][-1]['content'])]\n"
    )
    seen(sums(reward_funcs=["slow.py:judge"]), tmp_path)
    assert "grpo: slow.py:judge: " in (output := capsys.readouterr().err) and " completions in " in output


def test_an_episode_is_played_and_shown(read, tmp_path):
    game = Path(__file__).parents[1] / "rollouts/wild_environment.py"
    keys = {**SMOKE, "dataset_name": None, "reward_funcs": ["environment"], "environment_args": {"exactly": 2}}
    told = seen(read(**keys, environment=f"{game}:Sums", environment_max_turns=3), tmp_path)
    assert "reward 1, ended after 2 turns\n" in told
    assert told.count("[policy] <answer>0</answer>") == 2 and told.count("[user] ") == 2
    cut = seen(read(**keys, environment=f"{game}:Sums", environment_max_turns=1), tmp_path)
    assert "reward 0.5, not finished after 1 turn\n" in cut
    assert cut.count("[policy] <answer>0</answer>") == 1 and cut.count("[user] ") == 2
    (problem,) = refused(read(**keys | {"environment_args": {"turns": 2}}, environment=f"{game}:Sums"), tmp_path)
    assert "recipe.yaml:4: " in problem and "failed in reset: " in problem
    assert "unexpected keyword argument 'turns'); use the arguments of Sums(" in problem


SHOP = """
class Shop:
    def __init__(self, currency="EUR"):
        self.total, self.currency = 0, currency

    def reset(self, prompt, **columns):
        return f" In {self.currency}!"

    def buy(self, item: str, count: int, gift: bool = False) -> str:
        '''
        Buy.

        Args:
            item: Name.
            count: Pieces.
            gift: Wrapped.
        '''
        self.total += 1
        return f"{count} of {item!r} in {self.currency}"

    def price(self, item: str) -> int:
        '''
        Look up.

        Args:
            item: Name.
        '''
        return {"pear": 3}[item]

    def get_reward(self):
        return self.total / 4
"""


def test_an_episode_of_a_trl_environment_calls_each_method_once(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"problem": "Buy a pear."}\n' * 8)
    (tmp_path / "shop.py").write_text(SHOP)
    template = (
        "{% if tools %}{{ tools }}<tool_call>{% endif %}{% for m in messages %}"
        "<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    keys = {**SMOKE, "dataset_name": "rows.jsonl", "environment": "shop.py:Shop", "chat_template": template}
    keys |= {"environment_args": {"currency": "USD"}, "reward_funcs": ["environment"], "max_completion_length": 64}
    told = seen(read(**keys), tmp_path)
    assert re.search(r"shop.py:Shop: \d+ tokens from the environment, reward 0.25, ended after 2 turns\n", told)
    assert (
        "  [user] Buy a pear. In USD!\n"
        '  [policy] dummy calls: buy({"item": "0", "count": 0}), price({"item": "0"})\n'
        "  [tool] 0 of '0' in USD\n  [tool] Error: KeyError: '0'\n  [policy] <answer>0</answer>"
    ) in told
    (tmp_path / "shop.py").write_text(SHOP.replace("/ 4", "/ 0"))
    (problem,) = refused(read(**keys), tmp_path)
    assert "recipe.yaml:" in problem and "'shop.py:Shop' failed in get_reward: ZeroDivisionError" in problem
    (tmp_path / "shop.py").write_text(SHOP.replace('return f" In', 'return 1 + f" In'))
    (problem,) = refused(read(**keys), tmp_path)
    assert "'shop.py:Shop' failed in reset: TypeError" in problem


def test_a_template_that_ends_turns_where_sampling_does_not_is_refused_for_several(read, tmp_path):
    game = Path(__file__).parents[1] / "rollouts/wild_environment.py"
    template = "{% for one in messages %}{{ one['content'] }}</answer>{% endfor %}"
    keys = {**SMOKE, "dataset_name": None, "reward_funcs": ["environment"], "chat_template": template}
    keys |= {"environment": f"{game}:Sums", "environment_args": {"exactly": 1}}
    (problem,) = refused(read(**keys, environment_max_turns=2), tmp_path)
    assert "the template ends a turn with '</answer>', but sampling does not stop there" in problem
    assert "add a chat_template that ends it with <|im_end|>" in problem
    assert "ended after 1 turn" in seen(read(**keys), tmp_path)


def test_sampling_stops_where_the_generation_config_says(read, tmp_path):
    """A model with a different end token than its tokenizer lists it there."""
    game = Path(__file__).parents[1] / "rollouts/wild_environment.py"
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}</answer>\n{% endfor %}"
    model = smoke.build_model(tokenizer)
    end = tokenizer.convert_tokens_to_ids("</answer>")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    keys = {**SMOKE, "model_name_or_path": str(tmp_path / "model"), "dataset_name": None}
    keys |= {"reward_funcs": ["environment"], "environment": f"{game}:Sums", "environment_max_turns": 2}
    assert "ended after" in seen(read(**keys, environment_args={"exactly": 2}), tmp_path)
    (tmp_path / "model/generation_config.json").unlink()
    (problem,) = refused(read(**keys), tmp_path)
    assert "sampling does not stop there" in problem


@pytest.mark.parametrize(
    ("kind", "limit", "told"),
    [
        ("Hangs", {"environment_timeout": 0.5}, "time limit of 0.5 s. Fix: correct it, or raise environment_timeout"),
        ("Grows", {"environment_memory_gib": 0.5}, "memory limit. Fix: correct it, or raise environment_memory_gib"),
        ("Calls", {"environment_network": False}, "set environment_network: true if it needs one"),
    ],
)
def test_each_limit_of_an_environment_is_the_recipes(read, tmp_path, monkeypatch, kind, limit, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(
        "import socket, time\nclass Game:\n    def reset(self, seed):\n        return 'go'\n"
        "class Hangs(Game):\n    def step(self, action):\n        time.sleep(1)\n        return '', 1, True\n"
        "class Grows(Game):\n    def step(self, action):\n        bytearray(700 << 20)\n        return '', 1, True\n"
        "class Calls(Game):\n    def step(self, action):\n        socket.getaddrinfo('localhost', 80)\n"
        "        return '', 1, True\n"
    )
    keys = {**SMOKE, "dataset_name": None, "reward_funcs": ["environment"], "environment": f"game.py:{kind}"}
    (problem,) = refused(read(**keys, **limit), tmp_path)
    assert f"'game.py:{kind}' failed in turn 1: " in problem and told in problem
    assert "reward 1, ended" in seen(read(**keys, environment_network=kind == "Calls"), tmp_path)


def test_a_game_is_played_with_moves_that_it_takes(read, tmp_path):
    pytest.importorskip("textarena")
    path = Path(__file__).parents[2] / "recipes/environments/secret_mafia_smoke.yaml"
    told = seen(read_recipe(path), tmp_path)
    assert told.count("[policy] [") >= 2 and "not valid" not in told and "<answer>" not in told
    game = {**SMOKE, "dataset_name": None, "reward_funcs": ["environment"], "environment_max_turns": 3}
    for opponents in ("random", "policy"):
        keys = {"environment": "textarena:SecretMafia-v0", "environment_args": {"opponents": opponents}}
        assert "not valid" not in (told := seen(read(**game, **keys), tmp_path)) and "[policy] [" in told
    told = seen(read(**game, environment="textarena:TicTacToe-v0", environment_args={"legal_reward": 1}), tmp_path)
    assert "reward 3, not finished after 3 turns" in told and "[policy] [" in told


@pytest.mark.slow
def test_a_template_renders_the_answers_of_tools(read, tmp_path, monkeypatch):
    pytest.importorskip("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "rollouts/envs"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    refusing = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    template = "{{ tools }}{% for m in messages %}" + refusing + "{{ m.role + m.content }}<|im_end|>{% endfor %}"
    keys = {**SMOKE, "dataset_name": None, "reward_funcs": ["environment"], "environment": "verifiers:sums_tool"}
    assert "policy" in seen(read(**keys, chat_template=template), tmp_path)  # no tool answers the only turn
    keys["environment_max_turns"] = 4
    (problem,) = refused(read(**keys, chat_template=template), tmp_path)
    assert "the template cannot render messages of the roles user, assistant, tool: no tools" in problem
    assert "episode    verifiers:sums_tool: " in seen(
        read(**keys, chat_template=template.replace(refusing, "")), tmp_path
    )


def test_environments_of_atropos_are_loaded_with_their_arguments(read, tmp_path, monkeypatch):
    pytest.importorskip("atroposlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from grpo_recipes.extensions.atropos.environments import RecipeEnv\nclass Half(RecipeEnv):\n"
        "    def next_item(self):\n        return {'prompt': 'x'}\n"
    )
    keys = {**SMOKE, "dataset_name": None, "reward_funcs": ["environment"], "max_steps": 2, "max_prompt_length": 64}
    assert "groups     arithmetic loads" in seen(read(**keys, atropos_environment="arithmetic"), tmp_path)
    mixture = {"environments": [{"id": "arithmetic", "args": {"sed": 1}}, {"id": "own.py:Half"}]}
    first, second = refused(read(**keys, atropos_mixture=mixture), tmp_path)
    assert "has no field 'sed'" in first and "does not define score. Fix: define it in the class" in second
