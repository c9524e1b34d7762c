"""The graph task of evidence/graph_task.py: its graphs, what the model reads and was shown, and the exact metrics."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bench.scripts import script
from transformers import AutoModelForCausalLM

from grpo_recipes.extensions.problems.modebench.dataset import list_right_answers, parse_problem


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with script("graph_task", threads=1, folder="evidence") as module:
        yield module


def test_no_graph_and_no_prompt_is_in_two_parts(bench: ModuleType) -> None:
    parts = bench.split(0)
    assert (len(parts.trained), len(parts.held_out)) == (24, 24) and len(parts.others) > 3800
    every = [*parts.trained, *parts.held_out, *parts.others]
    assert len({bench.prompt(problem) for problem in every}) == len(every)
    assert len({repr(parse_problem(problem)["edges"]) for problem in every}) == len(every)
    assert all(4 <= len(list_right_answers(problem)) <= 12 for problem in every)


def test_a_draw_is_the_same_each_time_and_changes_every_part(bench: ModuleType) -> None:
    first, second = bench.split(0), bench.split(1)
    bench.split.cache_clear()
    assert bench.split(0) == first
    assert not {*first.trained, *first.held_out} & {*second.trained, *second.held_out}
    assert len({*first.others} & {*second.others}) < 100


def test_the_prompt_says_all_that_the_answer_needs(bench: ModuleType) -> None:
    for problem in bench.split(0).trained:
        text = bench.prompt(problem)
        shown, before = [[int(digit, 16) for digit in text[start::2]] for start in (0, 1)]
        fitting = [
            answer
            for answer in bench.ANSWERS
            if not any(shown[i] >> int(answer[i]) - 1 & 1 for i in range(5))
            and not any(before[i] >> i - j - 1 & 1 and answer[i] == answer[j] for i in range(5) for j in range(i))
        ]
        assert fitting == list_right_answers(problem)


def test_metrics_are_those_of_many_samples_of_a_fixed_table(bench: ModuleType) -> None:
    table, end = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.4, 0.5, 0.1], [0.2, 0.6, 0.2], [0.3, 0.3, 0.4]], 0.9
    problem = max(bench.split(0).trained, key=lambda candidate: len(list_right_answers(candidate)))
    chances = {
        text: end * math.prod(row[int(color) - 1] for row, color in zip(table, text, strict=True))
        for text in bench.ANSWERS
    }
    rewards = bench.modebench([[{"content": text}] for text in chances], [problem] * len(chances))
    right = [text for text, reward in zip(chances, rewards, strict=True) if reward]
    rng = random.Random(0)
    draws = [rng.choices([*chances, "cut"], [*chances.values(), 1 - end], k=8) for _ in range(20000)]
    counts = [collections.Counter(text for text in draw if text in right) for draw in draws]
    scores = bench.Measure([problem])(_Table(bench, table, end))
    assert scores["mean@8"] == pytest.approx(math.fsum(chances[text] for text in right), abs=1e-12)
    assert scores["mean@8"] == pytest.approx(sum(count.total() for count in counts) / 8 / len(counts), abs=0.003)
    assert scores["pass@8"] == pytest.approx(sum(map(bool, counts)) / len(counts), abs=0.01)
    assert scores["distinct@8"] == pytest.approx(sum(map(len, counts)) / len(counts), abs=0.02)
    assert scores["coverage@8"] == pytest.approx(scores["distinct@8"] / len(right))
    of_right = [chances[text] / scores["mean@8"] for text in right]
    assert scores["modes"] == pytest.approx(math.exp(-sum(share * math.log(share) for share in of_right)))


class _Table(torch.nn.Module):
    """A model that gives each place of the answer fixed chances, whatever came before."""

    def __init__(self, bench: ModuleType, table: list[list[float]], end: float):
        super().__init__()
        tokenizer = bench.smoke.build_tokenizer()
        self.logits_TV = torch.full((len(table) + 2, len(tokenizer)), -math.inf, dtype=torch.float64)
        self.logits_TV[:-2, tokenizer.convert_tokens_to_ids(list("123"))] = torch.tensor(
            table, dtype=torch.float64
        ).log()
        self.logits_TV[-2, [tokenizer.eos_token_id, 0]] = torch.tensor([end, 1 - end], dtype=torch.float64).log()

    def forward(self, ids_BT: torch.Tensor, logits_to_keep: int) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits_TV[-logits_to_keep:].expand(len(ids_BT), -1, -1))


@pytest.mark.slow
def test_the_right_share_is_what_a_model_samples_and_the_reward_takes(bench: ModuleType) -> None:
    torch.manual_seed(0)
    tokenizer = bench.smoke.build_tokenizer()
    model = bench.smoke.build_model(tokenizer)
    parts, plan = bench.split(0), bench.Pretraining(steps=25, batch=64)
    bench.pretrain(model, tokenizer, parts.others[:200], plan)
    problem = max(parts.trained, key=lambda candidate: len(list_right_answers(candidate)))
    prompt = bench.encoded([(problem, "11111")])[:, :-6]
    sampled = model.generate(prompt, do_sample=True, max_new_tokens=6, num_return_sequences=3000, top_k=0)
    texts = tokenizer.batch_decode(sampled[:, prompt.shape[1] :], skip_special_tokens=True)
    share = sum(bench.modebench([[{"content": text}] for text in texts], [problem] * len(texts))) / len(texts)
    mass = bench.Measure([problem])(model)["mean@8"]
    assert 0.01 < mass == pytest.approx(share, abs=4 * math.sqrt(mass / len(texts)))


def test_the_pretraining_shows_wrong_answers_and_some_right_ones_more_often(bench: ModuleType) -> None:
    problem = bench.split(0).others[0]
    plan = bench.Pretraining(wrong_share=0.25, preference=(0.5, 0.3, 0.2))
    shares = dict(zip(bench.ANSWERS, bench.seen(problem, plan), strict=True))
    right = list_right_answers(problem)
    assert math.isclose(sum(shares.values()), 1) and math.isclose(sum(shares[text] for text in right), 0.75)
    weights = {text: math.prod({"1": 5, "2": 3, "3": 2}[color] for color in text) for text in right}
    assert len(set(weights.values())) > 2
    assert [shares[text] / shares[right[0]] for text in right] == pytest.approx(
        [weights[text] / weights[right[0]] for text in right]
    )


def test_guessers(bench: ModuleType) -> None:
    problem = bench.split(0).trained[0]
    scores = bench.guesser_scores([problem])
    right, partial = list_right_answers(problem), parse_problem(problem)["partial"]
    rng, hits = random.Random(0), 0
    near = {vertex: set() for vertex, color in enumerate(partial, 1) if color == "?"}
    for first, second in parse_problem(problem)["edges"]:
        for vertex, neighbor in ((first, second), (second, first)):
            if vertex in near:
                near[vertex].add(partial[neighbor - 1])
    for _ in range(20000):
        hits += "".join(rng.choice(sorted(set("123") - colors)) for colors in near.values()) in right
    assert scores["colours that no shown neighbour has"]["mean@8"] == pytest.approx(hits / 20000, abs=0.015)
    assert scores["uniform over all answers"]["mean@8"] == pytest.approx(len(right) / 243)
    assert scores["best constant"]["mean@8"] == 1 and scores["best constant"]["modes"] == 1
    assert scores["uniform over the right answers"]["modes"] == pytest.approx(len(right))


@pytest.mark.slow
def test_the_model_is_made_once_and_depends_on_draw_and_plan(bench: ModuleType, tmp_path: Path) -> None:
    plan = bench.Pretraining(steps=2, batch=4)
    task = bench.graph(tmp_path / "one", 0, plan)
    repeated = bench.graph(tmp_path / "other", 0, plan)
    assert task.model.name == repeated.model.name and torch.equal(_weights(task.model), _weights(repeated.model))
    modified = task.model.stat().st_mtime_ns
    assert bench.graph(tmp_path / "one", 0, plan).model.stat().st_mtime_ns == modified
    longer = bench.Pretraining(steps=3, batch=4)
    changed_models = [bench.pretrained(tmp_path / "one", *changed) for changed in ((1, plan), (0, longer))]
    assert all(not torch.equal(_weights(task.model), _weights(model)) for model in changed_models)
    assert list(task.dataset["answer"]) == list(bench.split(0).trained)
    completions = [[{"content": list_right_answers(answer)[0]}] for answer in task.dataset["answer"]]
    assert task.reward(completions, task.dataset["answer"])
    model = AutoModelForCausalLM.from_pretrained(task.model)
    assert {name: 0 < part(model)["pass@8"] < 0.5 for name, part in task.parts.items()} == {
        "trained on": True, "held out": True
    }  # fmt: skip


def _weights(folder: Path) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in AutoModelForCausalLM.from_pretrained(folder).parameters()])
