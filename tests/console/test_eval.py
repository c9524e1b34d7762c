"""`grpo eval`, with a fake server: scores, files, continuation, evaluated models and rejected options."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import pytest
from rollouts.fake_openai import FakeServer

from grpo_recipes import smoke
from grpo_recipes.cli import main
from grpo_recipes.console import eval as module
from grpo_recipes.launch.serve import Server, ServerFailed
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.rollouts import generate
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import write_json

OUT = Path("evals/my")
TOKENIZER = smoke.build_tokenizer()
# Replies of the model to each problem, for an even and an odd seed.
SAYS = {
    "2+1=": ("<answer>3</answer>", "<answer>4</answer>"),
    "3+1=": ("<answer>4</answer>", "<answer>4</answer>"),
    "4+1=": ("5", "<answer>6</answer>"),
}
GOLD = {"2+1=": "3", "3+1=": "4", "4+1=": "5"}
RECIPE = """
model_name_or_path: smoke:sums
dataset_name: rows.jsonl
eval_dataset_name: held_out.jsonl
eval_subsample: 1.0
reward_funcs: [pure_accuracy_math]
system_prompt: Add.
max_completion_length: 9
temperature: 0.9
num_generations: 4
bf16: false
"""


class Answers(FakeServer):
    """Replies with the texts in ``SAYS``."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        base = super().answer(path, body)
        prompt = TOKENIZER.decode(body["prompt"])
        text = next(texts for problem, texts in SAYS.items() if problem in prompt)[body["seed"] % 2]
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        choice = {"text": text, "token_ids": ids, "logprobs": {"token_logprobs": [0.0] * len(ids)}}
        return {**base, "choices": [base["choices"][0] | choice]}


@pytest.fixture
def server() -> Iterator[Answers]:
    fake = Answers()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with a recipe and three evaluation problems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    for name in ("OPENAI_API_KEY", "CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
    rows = [{"problem": problem, "answer": answer, "level": len(answer)} for problem, answer in GOLD.items()]
    Path("held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rows.jsonl").write_text('{"problem": "1+1=", "answer": "2", "level": 1}\n')
    Path("my.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def evaluate(server: Answers) -> Callable[..., int]:
    """``evaluate("my.yaml", "--k", "2")``: run the command with the fake server and return its exit code."""

    def run(target: str, *options: str) -> int:
        address = ["--base-url", server.url, "--served-model-name", "tiny", "--wait", "0"]
        return main(["eval", target, *address, *options])

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def result(out: Path = OUT) -> dict[str, Any]:
    scores: dict[str, Any] = json.loads((out / "eval.json").read_text())
    return scores


def problem_of(row: dict[str, Any]) -> str:
    return str(row["prompt"][-1]["content"])


def test_the_scores_are_those_of_the_completions(evaluate, server: Answers, capsys) -> None:
    assert evaluate("my.yaml", "--num-generations", "6", "--limit", "5") == 0
    rows, scores = lines(OUT / "completions.jsonl"), result()
    right = [
        [entry["text"] == f"<answer>{GOLD[problem_of(row)]}</answer>" for entry in row["completions"]] for row in rows
    ]
    assert sorted(map(sum, right))[::2] == [0, 6] and 0 < sorted(map(sum, right))[1] < 6
    for k in (1, 2, 4, 5, 6):
        drawn = [fmean(any(draw) for draw in combinations(row, k)) for row in right]
        assert scores[f"pass@{k}"] == pytest.approx(fmean(drawn)) == pytest.approx(scores[f"best@{k}"])
        assert scores[f"mean@{k}"] == pytest.approx(fmean(fmean(row[:k]) for row in right))
        low, high = scores[f"pass@{k}_ci"]
        assert 0 <= low <= scores[f"pass@{k}"] <= high <= 1
    assert scores["majority@1"] == pytest.approx(fmean(row[0] for row in right))
    assert scores["reward"] == scores["rewards/pure_accuracy_math/mean"] == pytest.approx(fmean(map(fmean, right)))
    lengths = [len(entry["ids"]) for row in rows for entry in row["completions"]]
    assert scores["mean_length"] == fmean(lengths) and scores["truncated"] == 0 and scores["no_verdict"] == 0
    assert (scores["model"], scores["prompts"], scores["samples"]) == ("smoke:sums", 3, 6)
    sent = [body for _, body in server.asked]
    expected = {"temperature": 0.9, "max_tokens": 9, "model": "tiny"}
    assert all(expected.items() <= body.items() for body in sent) and len({body["seed"] for body in sent}) == 18
    output = capsys.readouterr().out
    assert f"\npass@6      {scores['pass@6']:>8.3f}  {scores['pass@6_ci'][0]:.3f} to" in output
    assert "grpo: scores in evals/my/eval.json, samples in evals/my/eval.html" in output
    page = (OUT / "eval.html").read_text()
    assert page.count('data-verdict="right"') == sum(map(sum, right)) and "2+1=" in page


def test_what_was_cut_off_goes_on_to_the_same_result(evaluate, server: Answers, capsys) -> None:
    assert evaluate("my.yaml") == 0
    whole = {path.name: path.read_bytes() for path in OUT.iterdir() if path.suffix != ".html"}
    first, second, third = whole["completions.jsonl"].splitlines(keepends=True)
    (OUT / "completions.jsonl").write_bytes(third + first + second[:30])
    scored = whole["scores.jsonl"].splitlines(keepends=True)
    (OUT / "scores.jsonl").write_bytes(scored[2] + scored[0][:30])
    (OUT / "eval.json").unlink()
    server.asked.clear()
    assert evaluate("my.yaml") == 0 and len(server.asked) == 4
    assert "scoring 2 prompts" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in OUT.iterdir() if path.suffix != ".html"} == whole
    server.asked.clear()
    assert main(["eval", "my.yaml", "--base-url", "http://127.0.0.1:9", "--wait", "0"]) == 0  # no request is sent
    assert not server.asked and result() == json.loads(whole["eval.json"])


def test_another_reward_scores_the_same_completions(evaluate, server: Answers, capsys) -> None:
    Path("mine.py").write_text(
        "def ends(completions, level, answer, solution, completion_ids, **kwargs):\n"
        "    assert all(level) and answer == solution and completion_ids\n"
        "    return [None if '6' in one[-1]['content'] else 2.0 for one in completions]\n"
    )
    assert evaluate("my.yaml") == 0 and result()["pass@1"] < 1
    server.asked.clear()
    assert evaluate("my.yaml", "--reward", "mine.py:ends", "pure_accuracy_math") == 0 and not server.asked
    scores, rows = result(), lines(OUT / "scores.jsonl")
    assert [list(entry["rewards"]) for entry in rows[0]["completions"]] == [["ends", "pure_accuracy_math"]] * 4
    sixes = [entry for row in rows for entry in row["completions"] if "6" in entry["text"]]
    assert sixes and all(entry["rewards"] == {"ends": None, "pure_accuracy_math": 0.0} for entry in sixes)
    assert scores["rewards/ends/mean"] == 2.0 and scores["no_verdict"] == 0
    assert evaluate("my.yaml", "--reward", "mine.py:ends") == 0
    assert (
        result()["no_verdict"] == len(sixes) and result()["pass@1"] == 1.0
    )  # a right answer has a reward of at least 1
    before = Path("mine.py").read_text()
    Path("mine.py").write_text(before.replace("2.0", "0.5"))
    assert evaluate("my.yaml", "--reward", "mine.py:ends") == 0 and result()["pass@1"] is None  # rewards below 1 (M20)


def test_completions_that_a_reward_failed_to_score_are_scored_again(evaluate, folder: Path, capsys) -> None:
    Path("mine.py").write_text(
        "import pathlib\n"
        "def judge(completions, answer, **columns):\n"
        f"    if answer == ['5'] and not pathlib.Path({str(folder / 'judge')!r}).exists():\n"
        "        raise RuntimeError('no judge')\n"
        "    return [1.0]\n"
    )
    assert evaluate("my.yaml", "--reward", "mine.py:judge") == 0 and result()["no_verdict"] == 4
    Path("judge").touch()
    assert evaluate("my.yaml", "--reward", "mine.py:judge") == 0 and result()["no_verdict"] == 0
    assert "scoring 1 prompts" in capsys.readouterr().out and result()["reward"] == 1.0
    assert [row["index"] for row in lines(OUT / "scores.jsonl")] == [0, 1, 2]


def test_k_is_chosen_up_to_the_completions_there_are(evaluate, capsys) -> None:
    assert evaluate("my.yaml", "--k", "5") == 2
    error = capsys.readouterr().err
    assert "--k: pass@5 needs 5 completions per prompt, got 4. Fix: use --num-generations 5" in error
    assert not OUT.exists()
    assert evaluate("my.yaml", "--k", "3", "1") == 0
    assert [name for name in result() if name.startswith("pass@")] == ["pass@1", "pass@3", "pass@1_ci", "pass@3_ci"]


def test_greedy_completions_are_one_of_each_prompt(evaluate, server: Answers) -> None:
    assert evaluate("my.yaml", "--temperature", "0") == 0
    assert result()["samples"] == 1 and {body["temperature"] for _, body in server.asked} == {0.0}


def test_what_failed_leaves_no_scores_and_the_next_call_tries_it_again(evaluate, server: Answers, capsys) -> None:
    server.fails = [400]
    assert evaluate("my.yaml", "--batch-size", "1") == 1
    assert "1 prompts failed: BadRequestError" in capsys.readouterr().err
    assert len(lines(OUT / "completions.jsonl")) == 2 and not (OUT / "eval.json").exists()
    assert evaluate("my.yaml") == 0 and result()["prompts"] == 3


def test_ctrl_c_keeps_what_is_there(evaluate, monkeypatch, capsys) -> None:
    add = generate.CompletionsFile.add

    def interrupt(self: Any, index: int, completions: Any) -> None:
        add(self, index, completions)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.CompletionsFile, "add", interrupt)
    assert evaluate("my.yaml") == 130 and len(lines(OUT / "completions.jsonl")) == 1
    assert "Continue with the same command" in capsys.readouterr().out


@pytest.mark.parametrize("change", [["--temperature", "0.5"], ["--num-generations", "2"], ["--seed", "7"]])
def test_a_folder_of_other_settings_is_refused(evaluate, change: list[str], capsys) -> None:
    assert evaluate("my.yaml", "--limit", "1") == 0
    before = {path: path.read_bytes() for path in OUT.iterdir()}
    assert evaluate("my.yaml", *change) == 2
    assert "grpo: --out: evals/my/completions.jsonl was made with other settings: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in OUT.iterdir()} == before
    assert evaluate("my.yaml", *change, "--out", "other") == 0 and result(Path("other"))["prompts"] == 3


# --- evaluated models ------------------------------------------------------------------------------------------------


def save_model(folder: Path) -> None:
    """Write a folder like a model's, with the tokenizer of the built-in model."""
    TOKENIZER.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create a run of the recipe with a model, a checkpoint, and a reward without its original file."""
    folder = tmp_path / "runs" / "sums-20261120-101500"
    (folder / "rewards").mkdir(parents=True)
    (folder / "rewards" / "gone.py").write_text(
        "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    entries = [line for line in RECIPE.strip().splitlines() if not line.startswith("reward_funcs")]
    entries += ["reward_funcs: ['gone.py:one']", "reward_isolation: none"]
    (folder / "recipe.yaml").write_text("".join(f"# my.yaml:{at}\n{line}\n" for at, line in enumerate(entries)))
    write_json(folder / "run.json", {"run_name": "sums"})
    write_json(folder / "summary.json", {"status": "completed"})
    save_model(folder / "model")
    save_model(folder / "staged" / "checkpoint-2")
    (folder / "checkpoints").mkdir()
    publish_checkpoint(folder / "staged" / "checkpoint-2", folder / "checkpoints", 2, 1)
    return folder


def test_a_run_is_evaluated_by_its_recipe_with_its_model(run: Path, server: Answers, capsys) -> None:
    Path("link").symlink_to(run / "model")
    server.models = {"tiny": str(Path("link").absolute())}  # the same folder by another path
    command = ["eval", "last", "--base-url", server.url, "--wait", "0"]
    assert main(command) == 0
    scores = result(Path("evals") / run.name)
    assert scores["model"] == str(run / "model") and scores["settings"]["model_files"]
    assert scores["rewards/one/mean"] == scores["pass@1"] == 1.0
    (run / "model" / "config.json").write_text('{"model_type": "another"}')
    assert main(command) == 2 and "model_files" in capsys.readouterr().err


def test_a_checkpoint_is_evaluated_by_the_recipe_of_its_run(run: Path, server: Answers, capsys) -> None:
    checkpoint = run / "checkpoints" / "checkpoint-2"
    command = ["--base-url", server.url, "--wait", "0"]
    server.models = {"tiny": str(run / "model")}
    assert main(["eval", str(checkpoint), *command]) == 2  # the server has the final model
    error = capsys.readouterr().err
    assert f"--base-url: {server.url} serves 'tiny', not '{checkpoint}'" in error and not Path("evals").exists()
    server.models = {"tiny": str(checkpoint)}
    assert main(["eval", str(checkpoint), *command]) == 0
    assert result(Path(f"evals/{run.name}-checkpoint-2"))["model"] == str(checkpoint)
    assert main(["eval", str(run / "checkpoints" / "checkpoint-3"), *command]) == 2
    assert "checkpoint-3: not a complete checkpoint. Fix: use checkpoint-2" in capsys.readouterr().err
    (checkpoint / "COMPLETE").unlink()
    assert main(["eval", str(checkpoint), *command]) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_an_adapter_is_refused(run: Path, capsys) -> None:
    staged = run / "staged" / "checkpoint-4"
    staged.mkdir()
    (staged / "adapter_model.safetensors").write_bytes(b"adapter")
    publish_checkpoint(staged, run / "checkpoints", 4, 1)
    assert main(["eval", str(run / "checkpoints" / "checkpoint-4")]) == 2
    assert "no model that a server can load: only an adapter" in capsys.readouterr().err
    shutil.rmtree(run / "model")
    assert main(["eval", str(run)]) == 2
    assert "has no model/" in capsys.readouterr().err and not Path("evals").exists()


def test_a_bare_model_is_told_its_dataset_and_reward(tmp_path: Path, evaluate, server: Answers, capsys) -> None:
    save_model(tmp_path / "base")
    words = ["--dataset", "held_out.jsonl", "--reward", "pure_accuracy_math"]
    assert evaluate("base", *words, "--max_completion_length", "7") == 0
    scores = result(Path("evals/base"))
    assert scores["prompts"] == 3 and scores["samples"] == 4 and server.asked[0][1]["max_tokens"] == 7
    assert evaluate("base", *words[:2]) == 2
    assert "base' is a model without a recipe" in capsys.readouterr().err
    assert evaluate("base", *words[2:]) == 2
    assert "--dataset: missing" in capsys.readouterr().err


def test_another_model_dataset_and_split_are_taken(tmp_path: Path, evaluate) -> None:
    save_model(tmp_path / "base")
    Path("data").mkdir()
    Path("data/validation.jsonl").write_text('{"problem": "3+1=", "answer": "4"}\n')
    words = ["--model", "base", "--dataset", "data", "--split", "validation"]
    assert evaluate("my.yaml", *words) == 0
    assert result()["model"] == "base" and result()["prompts"] == 1 and result()["pass@1"] == 1.0


def test_a_server_is_started_for_the_model_and_ended(tmp_path: Path, server: Answers, monkeypatch, capsys) -> None:
    save_model(tmp_path / "base")
    events: list[Any] = []

    @contextmanager
    def serving(recipe: Any, model: str, _: Any) -> Iterator[Server]:
        events.append((model, recipe["vllm_max_model_length"]))
        owner = OwnListener("127.0.0.1", urlsplit(server.url).port or 0, os.getpid)  # the process of the fake server
        yield Server(server.url, "tiny", "token", owner)
        events.append("ended")

    monkeypatch.setattr(module, "serving", serving)
    command = ["eval", "base", "--dataset", "held_out.jsonl", "--reward", "pure_accuracy_math"]
    assert main(command) == 0
    assert events[0][0] == str(tmp_path / "base") and 1024 < events[0][1] < 1064 and events[1:] == ["ended"]
    assert server.authorized[-1] == "Bearer token"
    assert main(command) == 0 and len(events) == 2  # all scores exist

    @contextmanager
    def failing(*_: Any) -> Iterator[Server]:
        raise ServerFailed("the server died")
        yield

    monkeypatch.setattr(module, "serving", failing)
    assert main([*command, "--out", "other/place"]) == 1
    assert "the server died" in capsys.readouterr().err and not Path("other").exists()


def test_a_deleted_file_of_completions_is_not_scored_by_old_scores(evaluate, monkeypatch) -> None:
    assert evaluate("my.yaml") == 0
    (OUT / "completions.jsonl").unlink()
    monkeypatch.setitem(SAYS, "2+1=", ("no", "no"))
    assert evaluate("my.yaml") == 0
    assert {entry["text"] for row in lines(OUT / "scores.jsonl") for entry in row["completions"]} >= {"no"}


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.yaml"], "recipe 'none.yaml' not found"),
        (["nowhere"], "nowhere: is not a run directory (no run.json). Fix: use a recipe (.yaml)"),
        (["my.yaml", "--num-generations", "0"], "--num-generations: expected 1 or more, got 0"),
        (["my.yaml", "--limit", "0"], "--limit: expected 1 or more, got 0"),
        (["my.yaml", "--k", "0"], "--k: expected 1 or more, got 0. Fix: use 1 or more"),
        (["my.yaml", "--split", "test"], "--split: does nothing without --dataset"),
        (["my.yaml", "--served-model-name", "x"], "--served-model-name: does nothing without --base-url"),
        (["my.yaml", "--temperature", "0", "--num-generations", "2"], "--num-generations: 2 greedy completions"),
        (["my.yaml", "--dataset", "none.jsonl"], "--dataset: no file 'none.jsonl'"),
        (
            ["my.yaml", "--reward", "pure_acuracy_math"],
            "--reward: unknown reward 'pure_acuracy_math'. Fix: write pure_ac",
        ),
        (["my.yaml", "--reward", "mine.py:needs"], "'mine.py:needs' needs 'colour', which no reward gets"),
        (["my.yaml", "--reward", "mine.py:live", "--reward_isolation", "none"], "an evaluation alone has no trainer"),
        (["my.yaml", "--model", "./nowhere"], "--model: model folder './nowhere' not found"),
        (["my.yaml", "--base-url", "localhost"], "--base-url: 'localhost' is not an address"),
        (["my.yaml", "--base-url", "http://127.0.0.1:9", "--served-model-name", "x"], "--base-url: no server answers"),
        (["my.yaml", "--vllm_max_model_length", "12"], "vllm_max_model_length: a prompt and a completion have up to"),
        (
            ["my.yaml", "--max_completion_length", "null"],
            "--max_completion_length: grpo eval needs a limit. Fix: set max",
        ),
        (["alone.yaml"], "--dataset: 'rows.jsonl' has no split 'test' to evaluate on"),
        (["my.yaml", "--num-generation", "2"], "--num-generation"),
        (
            ["my.yaml", "--eval_temperature=0", "--num_generations_eval=1", "--num-generations", "4"],
            "--num-generations: 4 greedy completions of a prompt are equal",
        ),
        (["base", "--model_name_or_path=x"], "--model_name_or_path: 'base' is the model. Fix: remove it"),
        (
            ["base", "--dataset", "rows.jsonl", "--reward", "pure_accuracy_math", "--dataset_name=z"],
            "--dataset_name: --dataset and --split set it",
        ),
        (["base", "--model", "x"], "--model: replaces the model of a recipe, but 'base' is a model or a run"),
    ],
)
def test_what_is_wrong_is_named_and_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(module, "serving", lambda *_: pytest.fail("a server was started"))
    save_model(tmp_path / "base")
    Path("alone.yaml").write_text(RECIPE.replace("eval_dataset_name: held_out.jsonl", ""))
    Path("mine.py").write_text(
        "def needs(completions, colour, **kwargs):\n    return [1.0] * len(completions)\n"
        "def live(completions, trainer_state):\n    return [1.0] * len(completions)\n"
    )
    before = sorted(tmp_path.rglob("*"))
    assert main(["eval", *words, "--wait", "0"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before


def test_prompts_must_come_from_a_dataset(tmp_path: Path, capsys) -> None:
    (tmp_path / "recipes").symlink_to(Path(__file__).resolve().parents[2] / "recipes")
    assert main(["eval", "recipes/examples/two_sums.yaml"]) == 2
    assert "grpo eval samples without the recipe's environment" in capsys.readouterr().err


def test_prompts_are_written_with_their_pass_rates(evaluate, capsys) -> None:
    options = ("--num-generations", "6", "--write-filtered", "medium.jsonl")
    assert evaluate("my.yaml", *options, "--keep", "0.01..0.99") == 0
    (row,) = lines(Path("medium.jsonl"))
    assert row == {
        "problem": "2+1=",
        "answer": "3",
        "level": 1,
        "pass_rate": pytest.approx(result()["mean@6"] * 3 - 1, abs=1e-4),
    }
    output = capsys.readouterr().out
    assert "1 of 3 prompts written to medium.jsonl" in output
    counts = dict(re.findall(r"^(0|1|below \d(?:/\d)?) +(\d+)$", output, re.MULTILINE))
    assert (counts["0"], counts["1"], sum(map(int, counts.values()))) == ("1", "1", 3)

    Path("train.yaml").write_text(
        RECIPE.replace("rows.jsonl", "medium.jsonl") + "dataset_filter: pass_rate in 0.1..0.9\n"
    )
    assert main(["check", "train.yaml"]) == 0
    assert evaluate("my.yaml", *options, "--keep", "0..1") == 0
    assert {row["problem"]: row["answer"] for row in lines(Path("medium.jsonl"))} == GOLD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", "0..1"), "--keep: does nothing without --write-filtered"),
        (("--write-filtered", "a.jsonl", "--keep", "half"), "--keep: expected LEAST..MOST, got 'half'"),
        (("--write-filtered", "a.csv"), "--write-filtered: expected a .jsonl file, got 'a.csv'"),
    ],
)
def test_wrong_options_of_pass_rates_are_named(evaluate, options: tuple[str, ...], message: str, capsys) -> None:
    assert evaluate("my.yaml", *options) == 2
    assert message in capsys.readouterr().err and not OUT.exists()


def test_the_key_comes_from_the_environment(evaluate, server: Answers, monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    server.token = "the-key"
    assert evaluate("my.yaml") == 0 and set(server.authorized) == {"Bearer the-key"}
    assert all("the-key" not in path.read_text() for path in OUT.iterdir())


def test_keys_of_evaluations_are_sampled_by(evaluate, server: Answers) -> None:
    plain = {"temperature": 0.9, "top_p": 1.0, "max_tokens": 9}
    eval_flags = (
        "--eval_temperature=0.5",
        "--eval_top_p=0.8",
        "--eval_max_completion_length=7",
        "--eval_sampling_seed=11",
    )
    seeds = []
    for flags, expected in (((), plain), (eval_flags, {"temperature": 0.5, "top_p": 0.8, "max_tokens": 7})):
        server.asked.clear()
        assert evaluate("my.yaml", "--out", f"evals/{len(flags)}", *flags) == 0
        assert len(server.asked) == 12
        assert all(body.items() >= expected.items() for _, body in server.asked)
        seeds.append([body["seed"] for _, body in server.asked])
    assert not {*seeds[0]} & {*seeds[1]}
    assert [result(Path(f"evals/{count}"))["seed"] for count in (0, 4)] == [42, 11]
