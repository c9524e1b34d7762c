"""The experiment of bench/multi_answer.py in small: task, exact metrics, statistics, and both commands."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from grpo_recipes.recipe.registry import DEFAULT_OBJECTIVE, OBJECTIVES

HOME = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "bench"))
        import multi_answer

        yield multi_answer
    torch.set_num_threads(threads)


def test_equations_have_several_answers_and_are_split(bench: ModuleType) -> None:
    trained, held_out = bench.task.split()
    assert len(trained) == 18 and len(held_out) == 8 and not set(trained) & set(held_out)
    for one in trained + held_out:
        assert 4 <= len(one.solutions) <= 10
        assert all(eval(f"{text[0]}{'+' if one.sign > 0 else '-'}{text[1]}") == one.n for text in one.solutions)
        assert math.isclose(sum(one.shares), 1.0) and max(one.shares) > 3 * min(one.shares)


def test_the_reward_takes_any_right_answer_and_nothing_else(bench: ModuleType) -> None:
    texts = ["04", "22", "40", "41", "4", "404", "+4", "\u0662\u0662", "2 2"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = bench.task.right(completions, sign=[1] * len(texts), n=[4] * len(texts))
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_metrics_are_the_expectation_over_8_samples(bench: ModuleType) -> None:
    chances = {"a": 0.3, "b": 0.1, "wrong": 0.6}
    expected = dict.fromkeys(("mean@8", "pass@8", "distinct@8", "coverage@8"), 0.0)
    for draw in itertools.product(chances, repeat=8):
        found = [answer for answer in draw if answer != "wrong"]
        chance = math.prod(chances[answer] for answer in draw)
        expected["mean@8"] += chance * len(found) / 8
        expected["pass@8"] += chance * bool(found)
        expected["distinct@8"] += chance * len(set(found))
        expected["coverage@8"] += chance * len(set(found)) / 2
    scores = bench.task._scores([0.3, 0.1])
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert scores["modes"] == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_measured_mass_is_what_the_model_samples(bench: ModuleType) -> None:
    torch.manual_seed(0)
    tokenizer = bench.task.smoke.build_tokenizer()
    model = bench.task.smoke.build_model(tokenizer)
    one = bench.task.split()[0][0]
    bench.task._pretrain(model, tokenizer, bench.task.Pretraining(steps=20))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": one.prompt}], add_generation_prompt=True)
    prompt = torch.tensor([chat["input_ids"]])
    sampled = model.generate(prompt, do_sample=True, max_new_tokens=3, num_return_sequences=4000, top_k=0)
    texts = tokenizer.batch_decode(sampled[:, prompt.shape[1] :])
    share = sum(text[2:] == bench.task.smoke.END and one.solved_by(text[:2]) for text in texts) / len(texts)
    mass = bench.task.Measure((one,))(model)["mean@8"]
    assert 0.01 < mass == pytest.approx(share, abs=4 * math.sqrt(mass / len(texts)))


def test_intervals(bench: ModuleType) -> None:
    report = bench.report
    assert report.mean_and_interval([1.0, 2.0, 3.0])["ci"] == pytest.approx([2 - 2.48414, 2 + 2.48414], abs=1e-4)
    welch = report.unpaired([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])  # 2.94 degrees of freedom, rounded down
    assert welch["mean"] == -4 and welch["ci"][1] == pytest.approx(-4 + 4.3027 * math.sqrt(5 / 3), abs=1e-4)


def test_p_values_and_their_correction(bench: ModuleType) -> None:
    p_value = bench.report.p_value
    assert p_value({"mean": 2.3646 / 8**0.5, "sd": 1.0, "runs": 8}) == pytest.approx(0.05, abs=1e-5)
    assert p_value({"mean": -6.3138 / 2**0.5, "sd": 1.0, "runs": 2}) == pytest.approx(0.1, abs=1e-5)
    some, none = {"mean": 5.0, "sd": 1.0, "runs": 8}, {"mean": 1.0, "sd": 1.0, "runs": 8}  # p 8e-6 and 0.025
    table = {
        arm: {"paired": True} | {part: dict.fromkeys(bench.task.METRICS, one) for part in bench.report.PARTS}
        for arm, one in (("far", some), ("near", none))
    }
    found = bench.report.clear({"minus": table})
    assert found["comparisons"] == 20 and len(found["clear_of_0"]) == 10
    assert all(name.startswith("minus: far, ") for name in found["clear_of_0"])


def test_differences_are_paired_by_seed(bench: ModuleType) -> None:
    runs = [_run(bench, "GRPO", None, None, seed, 0.8, 0.1 * seed) for seed in (0, 1, 2)]
    runs += [_run(bench, "other", None, None, seed, 0.8, 0.1 * seed + 0.05) for seed in (0, 1, 2)]
    runs += [_run(bench, "elsewhere", None, None, seed, 0.8, 0.1 * seed - 2) for seed in (20, 21, 22)]
    minus = bench.report.differences(runs, "GRPO")
    assert minus["other"]["paired"] and minus["other"]["train"]["coverage@8"]["ci"] == pytest.approx([0.05, 0.05])
    assert not minus["elsewhere"]["paired"] and minus["elsewhere"]["train"]["coverage@8"]["ci"][0] < -0.2


def test_the_criterion_wants_coverage_but_not_at_the_price_of_reward(bench: ModuleType) -> None:
    runs = [
        _run(bench, "GRPO", None, None, 100, 0.80, 0.2),
        _run(bench, "a 1", "a", 1.0, 100, 0.79, 0.3),
        _run(bench, "a 2", "a", 2.0, 100, 0.81, 0.25),
        _run(bench, "a 3", "a", 3.0, 100, 0.70, 0.9),
        _run(bench, "b 1", "b", 1.0, 100, 0.77, 0.5),
        _run(bench, "b 2", "b", 2.0, 100, 0.60, 0.9),
    ]
    picked = bench.report.chosen(runs, "GRPO")
    assert picked["tau"] == {"a": 1.0, "b": 1.0} and picked["objective"] == "a"


def _run(
    bench: ModuleType, arm: str, objective: str | None, tau: float | None, seed: int, mean: float, coverage: float
) -> dict:
    scores = dict.fromkeys(bench.task.METRICS, 0.5) | {"mean@8": mean, "coverage@8": coverage}
    return {"arm": arm, "objective": objective, "tau": tau, "seed": seed, "train": scores, "held_out": scores}


ALL_ARMS = pytest.param(False, marks=(pytest.mark.slow, pytest.mark.rotating))


@pytest.mark.parametrize("tuning", [True, ALL_ARMS])
def test_both_commands_in_small(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuning: bool
) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "drawn.svg"
    flags = ["--seeds", "1", "--steps", "2", "--workers", "1", "--out", str(out), "--figure", str(drawn)]
    monkeypatch.setattr(sys, "argv", ["multi_answer.py", *flags, *(["--tuning"] if tuning else [])])
    monkeypatch.setattr(bench, "TUNING_TAUS", (0.5,))
    monkeypatch.setattr(bench, "_folder", lambda: tmp_path)
    plan = bench.task.Pretraining(steps=2)
    monkeypatch.setattr(bench.task, "Pretraining", lambda: plan)
    monkeypatch.setitem(bench.SETTINGS, "per_device_train_batch_size", 16)
    monkeypatch.setitem(bench.SETTINGS, "num_generations", 8)
    bench.main()
    result = json.loads(out.read_text())
    assert set(result["baselines"]["held_out"]) >= {"untrained", "best constant", "uniform over the 100 answers"}
    steps = {run["arm"]: [row["step"] for row in run["curve"]] for run in result["runs"]}
    assert steps == {arm: [0, 4] if "twice" in arm else [0, 2] for arm in steps}
    if tuning:
        assert result["chosen"]["tau"] == dict.fromkeys(OBJECTIVES, 0.5) and not drawn.exists()
    else:
        arms = [arm.name for arm in bench.table_arms()]
        assert list(result["summary"]) == arms and all(arm in drawn.read_text() for arm in arms)


def test_defaults_are_what_the_tuning_picked(bench: ModuleType) -> None:
    tuning = json.loads((HOME / "bench/results/multi_answer_tuning.json").read_text())
    table = json.loads((HOME / "bench/results/multi_answer.json").read_text())
    assert tuning["chosen"] == bench.report.chosen(tuning["runs"], "GRPO")
    assert tuning["chosen"]["tau"] == {name: objective.tau for name, objective in OBJECTIVES.items()}
    assert tuning["chosen"]["objective"] == DEFAULT_OBJECTIVE
    assert not {run["seed"] for run in tuning["runs"]} & {run["seed"] for run in table["runs"]}
