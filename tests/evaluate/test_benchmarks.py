"""Benchmarks on a trained model with transformers' own sampling: results, files, failures, stops, resumed runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.evaluate.benchmarks import (
    BenchmarkFailed,
    StoppedInBenchmarks,
    load_problems,
    make_recipe_scorer,
    run_benchmarks,
)
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.registry import benchmarks
from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.score import make_reward
from grpo_recipes.rollouts import backends
from grpo_recipes.rollouts.backends import Prompt, Sampling, make_rollouts, problem_seed
from grpo_recipes.runs.rundir import finish_summary
from grpo_recipes.stats import pass_at_k_table

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
from tiny_training import train

ROWS = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(3)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, known_sums: dict[str, Any]) -> Any:
    """Return a tiny trainer after training, with a model that knows some sums."""
    trainer, _ = train(tmp_path_factory.mktemp("trained"), max_steps=1, max_completion_length=6)
    trainer.model.load_state_dict(known_sums)
    return trainer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def arguments(run: Path, **keys: Any) -> ScriptArguments:
    defaults = {"benchmarks": [str(run / "sums.jsonl")], "reward_funcs": ["different_characters"]}
    defaults["answer_matching"] = "strict"
    return ScriptArguments(dataset_name="x", **defaults | keys)


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "benchmarks.json").read_text())


def rows_of(run: Path) -> list[dict[str, Any]]:
    (file,) = (run / "benchmarks").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def never() -> bool:
    return False


def test_a_benchmark_is_sampled_scored_and_written(trainer: Any, run: Path) -> None:
    run_benchmarks(trainer, arguments(run, benchmark_samples=4, benchmark_temperature=1.0), run, never)

    (result,) = results(run).values()
    rows = rows_of(run)
    assert [(row["problem"], row["gold"]) for row in rows] == [(row["problem"], row["answer"]) for row in ROWS]
    for row in rows:
        texts = [[{"role": "assistant", "content": text}] for text in row["completions"]]
        # Compared as the recipe says: a sampled "01" is right for 1 by value, and wrong as text.
        scores = pure_accuracy_math(completions=texts, answer=[row["gold"]] * 4, answer_matching="strict")
        assert row["scores"] == scores, row
        assert len(row["completions"]) == len(row["lengths"]) == len(row["truncated"]) == 4
    assert result.items() >= pass_at_k_table([row["scores"] for row in rows]).items()
    assert 0 < result["pass@1"] < result["pass@2"] < result["pass@4"] < 1
    low, high = result["pass@1_ci"]
    assert low < result["pass@1"] < high
    assert (result["problems"], result["samples"], result["no_verdict"]) == (15, 4, 0)
    assert result["mean_length"] == pytest.approx(sum(sum(row["lengths"]) for row in rows) / 60, abs=0.06)
    assert result["truncated"] == pytest.approx(sum(sum(row["truncated"]) for row in rows) / 60, abs=1e-4)
    assert result["reward"] == "pure_accuracy_math"
    assert finish_summary(run, status="completed")["benchmarks"] == results(run)


def test_the_same_run_gives_the_same_result_and_another_seed_another(
    trainer: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for seed in (1, 1, 2):
        monkeypatch.setattr(trainer.args, "seed", seed)
        (run / "benchmarks" / "settings.json").unlink(missing_ok=True)
        run_benchmarks(trainer, arguments(run, benchmark_temperature=1.0), run, never)
        texts.append([row["completions"] for row in rows_of(run)])
    assert texts[0] == texts[1] != texts[2]


def test_temperature_0_is_greedy(trainer: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for seed in (1, 2):
        monkeypatch.setattr(trainer.args, "seed", seed)
        run_benchmarks(trainer, arguments(run, benchmark_temperature=0.0), run, never)
        texts.append([row["completions"] for row in rows_of(run)])
    assert texts[0] == texts[1]
    assert trainer.generation_config.do_sample and trainer.generation_config.temperature == 1.0  # as before


def test_a_finished_benchmark_is_not_run_again_and_a_changed_one_is(trainer: Any, run: Path) -> None:
    run_benchmarks(trainer, arguments(run), run, never)
    file = run / "benchmarks.json"
    before = file.stat().st_mtime_ns

    run_benchmarks(trainer, arguments(run), run, never)
    assert file.stat().st_mtime_ns == before

    run_benchmarks(trainer, arguments(run, benchmark_samples=2), run, never)
    (result,) = results(run).values()
    assert result["samples"] == 2 and file.stat().st_mtime_ns > before


@pytest.mark.parametrize("changed", ["answer_matching", "problems", "template arguments"])
def test_whatever_changes_a_result_runs_the_benchmark_again(
    trainer: Any, run: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    run_benchmarks(trainer, arguments(run), run, never)
    before = (run / "benchmarks.json").stat().st_mtime_ns
    if changed == "problems":
        (run / "sums.jsonl").write_text(json.dumps({"problem": "0+1=", "answer": "1"}) + "\n")
    elif changed == "template arguments":
        monkeypatch.setattr(trainer.args, "chat_template_kwargs", {"enable_thinking": False})

    keys = {"answer_matching": "normalized"} if changed == "answer_matching" else {}
    run_benchmarks(trainer, arguments(run, **keys), run, never)

    assert (run / "benchmarks.json").stat().st_mtime_ns > before


def test_one_that_fails_does_not_keep_the_others(trainer: Any, run: Path) -> None:
    (run / "empty.jsonl").write_text(json.dumps({"problem": "", "answer": "1"}) + "\n")
    names = ["missing.jsonl", str(run / "empty.jsonl"), str(run / "sums.jsonl")]

    with pytest.raises(BenchmarkFailed) as failed:
        run_benchmarks(trainer, arguments(run, benchmarks=names), run, never)

    text = str(failed.value)
    assert "\n" not in text and "benchmark missing.jsonl: benchmarks: no file" in text
    assert "row 0 of " in text and "has no problem or no answer" in text
    assert text.endswith("The model is saved; a resumed run tries again")
    assert list(results(run)) == names[2:]


def test_prompts_longer_than_the_server_takes_are_told(
    trainer: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "serve_final_weights", lambda: None)
    monkeypatch.setattr(trainer.args, "vllm_max_model_length", 11)
    with pytest.raises(BenchmarkFailed, match=r"a prompt of 7 tokens and a completion of 6 exceed vllm_max_model_le"):
        run_benchmarks(trainer, arguments(run), run, never)


def test_a_stop_request_ends_between_chunks_and_the_next_attempt_starts_it_over(
    trainer: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_recipes.evaluate.benchmarks.CHUNK", 4)
    looks: Iterator[bool] = iter([False, False, True])

    with pytest.raises(StoppedInBenchmarks) as stopped:
        run_benchmarks(trainer, arguments(run), run, lambda: next(looks))

    assert stopped.value.code == 75 and str(stopped.value).startswith("stopped on request in benchmark ")
    assert len(rows_of(run)) == 8 and not (run / "benchmarks.json").exists()
    run_benchmarks(trainer, arguments(run), run, never)
    assert len(rows_of(run)) == 15


def test_problems_drawn_by_seed_are_the_same_problems(run: Path) -> None:
    args = arguments(run, benchmark_max_problems=6, system_prompt="Add.")
    first, same, other = (load_problems(str(run / "sums.jsonl"), args, seed) for seed in (3, 3, 4))
    assert len(first) == 6 and first == same and first != other
    assert [problem.index for problem in first] == sorted(problem.index for problem in first)
    assert [message["role"] for message in first[0].prompt] == ["system", "user"]
    assert first[0].prompt[-1]["content"] == ROWS[first[0].index]["problem"]
    seeds = {problem_seed(run_seed, name, index) for run_seed in (0, 1) for name in "ab" for index in range(50)}
    assert len(seeds) == 200 and max(seeds) < 2**31


def test_answers_after_a_marker_and_columns_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = saved(tmp_path, {"question": ["1+1?"], "answer": ["one and one\n#### 2"]})
    (problem,) = load_problems("gsm8k", ScriptArguments(dataset_name="x"), 0, fetched)
    assert (problem.prompt[-1]["content"], problem.gold) == ("1+1?", "2")


def test_multiple_choice_hides_the_right_answer_among_shuffled_options(tmp_path: Path) -> None:
    columns = {"Question": ["Which?"] * 40, "Correct Answer": ["right\n"] * 40}
    columns |= {f"Incorrect Answer {number}": [f"wrong {number}"] * 40 for number in (1, 2, 3)}
    args, fetched = ScriptArguments(dataset_name="x"), saved(tmp_path, columns)

    problems = load_problems("gpqa", args, 0, fetched)

    assert {problem.gold for problem in problems} == set("ABCD")
    for problem in problems:
        lines = problem.prompt[-1]["content"].split("\n")
        assert f"{problem.gold}) right" in lines and sum("wrong" in line for line in lines) == 3
    assert problems == load_problems("gpqa", args, 0, fetched) != load_problems("gpqa", args, 1, fetched)


def saved(folder: Path, columns: dict[str, list[str]]) -> Any:
    from datasets import Dataset

    Dataset.from_dict(columns).save_to_disk(str(folder / "fetched"))
    known = {(benchmark.id, benchmark.config, benchmark.split) for benchmark in benchmarks().values()}
    return lambda *source: folder / "fetched" if source in known else None


def test_the_recipes_own_accuracy_reward_judges() -> None:
    args = SimpleNamespace(answer_matching="strict")
    strict = make_reward("pure_accuracy_math", args, None)
    scorer = make_recipe_scorer(["format_tags", "pure_accuracy_math"], [None, strict], args, None)
    assert scorer.name == "pure_accuracy_math" and scorer.reward is strict
    problem = SimpleNamespace(prompt=[{"role": "user", "content": "1000?"}], gold="1000")
    texts = ["<answer>1000</answer>", "<answer>1,000</answer>", "none"]
    completions = [[[{"role": "assistant", "content": text}] for text in texts]]
    assert scorer.scores([problem], completions) == [[1.0, 0.0, 0.0]]

    default = make_recipe_scorer(["format_tags"], [None], SimpleNamespace(answer_matching="normalized"), None)
    assert default.name == "pure_accuracy_math"
    assert default.scores([problem], completions) == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize(("world", "parallel"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_ranks_share_the_work_and_each_prompt_is_answered_once(
    monkeypatch: pytest.MonkeyPatch, world: int, parallel: int, count: int
) -> None:
    prompts = [Prompt([number], number) for number in range(count)]
    parts: list[list[Any]] = []
    monkeypatch.setattr(backends, "gather_object", lambda mine: parts.append(mine) or mine)
    sizes = []
    for rank in range(world):
        engine = FakeEngine()
        make_rollouts(fake_trainer(engine, rank, world, parallel)).sample(prompts, Sampling(1, 0.7, 8))
        sizes.append(len(engine.seeds))
    drawn = [completions for part in parts for completions in part][:count]
    assert drawn == [[[number, 0]] for number in range(count)]
    assert len(set(sizes)) == 1  # sharded models take the same number of passes on each rank


class FakeEngine:
    """vLLM's ``LLM.generate``, as far as sampling uses it."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(self, requests: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.seeds += [parameters.seed for parameters in sampling_params]
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=(*request["prompt_token_ids"], k)) for k in range(parameters.n)]
            )
            for request, parameters in zip(requests, sampling_params, strict=True)
        ]


def fake_trainer(engine: FakeEngine, rank: int = 0, world: int = 1, parallel: int = 1) -> Any:
    return SimpleNamespace(
        use_vllm=True, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        vllm_generation=SimpleNamespace(mode="colocate", llm=engine, tensor_parallel_size=parallel),
        args=SimpleNamespace(process_index=rank, world_size=world, weight_guard=True),
    )  # fmt: skip


def test_vllm_in_the_trainer_gets_a_seed_a_problem() -> None:
    engine = FakeEngine()
    drawn = make_rollouts(fake_trainer(engine)).sample([Prompt([5], 11), Prompt([6], 12)], Sampling(2, 0.7, 8))
    assert drawn == [[[5, 0], [5, 1]], [[6, 0], [6, 1]]]
    assert engine.seeds == [11, 12]


def test_an_engine_sleeps_again_also_where_a_benchmark_fails() -> None:
    engine, slept = FakeEngine(), []
    trainer = fake_trainer(engine)
    trainer.vllm_generation.enable_sleep_mode, trainer._last_loaded_step = True, -1
    trainer.note_loaded_step = lambda step: setattr(trainer, "_last_loaded_step", step)
    engine.sleep = lambda level: slept.append(level)
    with pytest.raises(RuntimeError, match="stopped"), make_rollouts(trainer).resending_weights():
        trainer.note_loaded_step(0)
        raise RuntimeError("stopped")
    assert slept == [2] and trainer._last_loaded_step == -1
