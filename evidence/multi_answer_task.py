"""The sums of ``multi_answer.py``: equations in two digits, each with 4 to 10 right answers, and a tiny model.

``a+b=04`` is answered by the two digits ``a`` and ``b``: 04, 13, 22, 31 and 40 are right. The right answers can be
enumerated, so what a model would score is computed from its probabilities: no sampling noise in any metric. Longer
answers are the two digits and points up to the length.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_recipes import smoke

VERSION = "2"  # raise it whenever anything below changes what `pretrained` writes
SOLUTIONS = range(4, 11)
HELD_OUT, NEVER_SEEN = 5, 5  # of the 26 equations
WRONG_SHARE = 0.5  # of the answers that the model is pre-trained on
SHORTEST = 3  # tokens of an answer: two digits and the end
FILLER = "."
SAMPLES = 8  # the k of pass@k, mean@k, distinct@k, coverage@k
# name of the metric -> what a table calls it
METRICS = {
    "mean@8": "right share of the samples",
    "pass@8": "some right answer among 8 samples",
    "distinct@8": "distinct right answers among 8 samples",
    "coverage@8": "distinct@8 / number of right answers",
    "modes": "exp(entropy) over the right answers",
}
ANSWERS = tuple(f"{a}{b}" for a in range(10) for b in range(10))


@dataclass(frozen=True)
class Task:
    """What an experiment trains: a model, prompts, a reward, recipe keys, and the exact metrics of each part."""

    model: Path
    dataset: Dataset
    reward: Callable[..., list[float | None]]
    keys: dict[str, Any]
    parts: dict[str, Callable[[torch.nn.Module], dict[str, float]]]
    guessers: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # part -> guesser -> its metrics


@dataclass(frozen=True)
class Equation:
    """``a + b = n``, or ``a - b = n`` where sign is -1, in digits a and b."""

    sign: int
    n: int

    @property
    def prompt(self) -> str:
        """As the model reads it; all of one length."""
        return f"a+b={self.n:02d}" if self.sign > 0 else f"a-b={self.n:+d}"

    def solved_by(self, answer: str) -> bool:
        """Whether the text is a right answer, in exactly two digits."""
        return answer in ANSWERS and int(answer[0]) + self.sign * int(answer[1]) == self.n

    @property
    def solutions(self) -> tuple[str, ...]:
        """Every right answer."""
        return tuple(answer for answer in ANSWERS if self.solved_by(answer))

    def shares(self, draw: int) -> tuple[float, ...]:
        """Return how often the model saw each solution among the right ones: 1, 1/2, 1/3, ... in an order drawn."""
        ranks = list(range(1, len(self.solutions) + 1))
        random.Random(f"{draw}/{self.prompt}").shuffle(ranks)
        total = math.fsum(1 / rank for rank in ranks)
        return tuple(1 / rank / total for rank in ranks)


def sums(cache: Path, draw: int = 0, tokens: int = SHORTEST) -> Task:
    """Return the task; ``draw`` decides the split of the equations and the model, ``tokens`` an answer's length."""
    equations = split(draw)
    tail = FILLER * (tokens - SHORTEST)
    rows = [
        {"prompt": [{"role": "user", "content": one.prompt}], "sign": one.sign, "n": one.n, "tail": tail}
        for one in equations["trained on"]
    ]
    return Task(
        model=pretrained(cache, draw, tokens),
        dataset=Dataset.from_list(rows),
        reward=right,
        keys={"max_completion_length": tokens + 1},
        parts={part: Measure(some, tokens) for part, some in equations.items()},
        guessers={part: guesser_scores(some) for part, some in equations.items()},
    )


@cache
def split(draw: int) -> dict[str, tuple[Equation, ...]]:
    """Return equations trained on, held out of the training, and held out of the pre-training too."""
    every = [Equation(sign, n) for sign in (1, -1) for n in range(-9, 19)]
    several = [equation for equation in every if len(equation.solutions) in SOLUTIONS]
    random.Random(draw).shuffle(several)
    seen = HELD_OUT + NEVER_SEEN
    return {
        "trained on": tuple(several[seen:]),
        "held out": tuple(several[:HELD_OUT]),
        "never seen": tuple(several[HELD_OUT:seen]),
    }


def right(completions: list[Any], sign: list[int], n: list[int], tail: list[str], **_: Any) -> list[float]:
    """Return 1 for any right answer that ends as it must, else 0."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(text.endswith(end) and Equation(*numbers).solved_by(text.removesuffix(end)))
        for text, end, *numbers in zip(texts, tail, sign, n, strict=True)
    ]


class Measure:
    """What a model scores on some equations, exactly.

    Each of 8 samples is solution i with probability p_i, independently: distinct@8 is the sum of 1 - (1 - p_i)^8.
    """

    def __init__(self, equations: tuple[Equation, ...], tokens: int = SHORTEST):
        self._counts = [len(one.solutions) for one in equations]
        pairs = [(one.prompt, solution) for one in equations for solution in one.solutions]
        self._ids, self._tokens = _encoded(pairs, tokens), tokens

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """Mean of each metric over the equations."""
        training = model.training
        model.eval()
        logps = _answer_logps(model, self._ids, self._tokens).sum(dim=1).double()
        model.train(training)
        per_equation = [scores(of_one.exp().tolist()) for of_one in logps.split(self._counts)]
        return {name: math.fsum(one[name] for one in per_equation) / len(per_equation) for name in METRICS}


def guesser_scores(equations: tuple[Equation, ...]) -> dict[str, dict[str, float]]:
    """Metrics of guessers that have learned nothing about single equations, and of the best there can be."""
    probabilities = {
        "uniform over the 100 answers": [[0.01] * len(one.solutions) for one in equations],
        "best constant": _constant(equations),
        "best 8 constants, each once": None,
        "uniform over the right answers": [[1 / len(one.solutions)] * len(one.solutions) for one in equations],
    }
    scored = {}
    for name, of_all in probabilities.items():
        per_equation = [scores(of_one) for of_one in of_all] if of_all else _fixed_list(equations)
        scored[name] = {key: math.fsum(one[key] for one in per_equation) / len(equations) for key in per_equation[0]}
    return scored


def _constant(equations: tuple[Equation, ...]) -> list[list[float]]:
    """The one answer that is right most often."""
    best = max(ANSWERS, key=lambda answer: sum(one.solved_by(answer) for one in equations))
    return [[float(solution == best) for solution in one.solutions] for one in equations]


def _fixed_list(equations: tuple[Equation, ...]) -> list[dict[str, float]]:
    """Eight different answers for every equation, chosen greedily to solve as many equations as they can."""
    chosen: list[str] = []
    for _ in range(SAMPLES):
        open_ones = [one for one in equations if not any(one.solved_by(answer) for answer in chosen)]
        chosen.append(
            max((a for a in ANSWERS if a not in chosen), key=lambda answer: sum(o.solved_by(answer) for o in open_ones))
        )
    found = [sum(one.solved_by(answer) for answer in chosen) for one in equations]
    return [
        {"mean@8": hits / SAMPLES, "pass@8": float(hits > 0), "distinct@8": hits, "coverage@8": hits / len(o.solutions)}
        for hits, o in zip(found, equations, strict=True)
    ]


def scores(probabilities: list[float]) -> dict[str, float]:
    """Expected metrics of 8 independent samples of one equation.

    Args:
        probabilities: of each of its right answers.
    """
    mass = math.fsum(probabilities)
    distinct = math.fsum(1 - (1 - p) ** SAMPLES for p in probabilities)
    shares = [p / mass for p in probabilities if p > 0] if mass else []
    return {
        "mean@8": mass,
        "pass@8": 1 - (1 - min(mass, 1.0)) ** SAMPLES,
        "distinct@8": distinct,
        "coverage@8": distinct / len(probabilities),
        "modes": math.exp(-math.fsum(share * math.log(share) for share in shares)),
    }


def _encoded(pairs: list[tuple[str, str]], tokens: int) -> torch.Tensor:
    """Token ids of prompt, answer and end, (B, T)."""
    tokenizer = smoke.build_tokenizer()
    chats = [[{"role": "user", "content": prompt}] for prompt, _ in pairs]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    end = FILLER * (tokens - SHORTEST) + smoke.END
    return torch.tensor(tokenizer([f"{text}{one}{end}" for text, (_, one) in zip(texts, pairs, strict=True)]).input_ids)


def _answer_logps(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """Log-probs of the answer's tokens and of the end, (B, tokens)."""
    logits = model(ids).logits[:, -tokens - 1 : -1].float()
    return logits.log_softmax(dim=-1).gather(2, ids[:, -tokens:, None]).squeeze(2)


@dataclass(frozen=True)
class Pretraining:
    """How the model comes to know the task before the experiment."""

    steps: int = 300
    lr: float = 3e-3


def pretrained(folder: Path, draw: int, tokens: int = SHORTEST, plan: Pretraining | None = None) -> Path:
    """Return the folder of the model that every run starts from, which is made in ``folder`` if it is not there.

    It saw all equations but those never seen. Half of the answers were right, some solutions far more often than
    others; half were any of the other answers.
    """
    plan = plan or Pretraining()
    key = hashlib.sha256(repr((VERSION, HELD_OUT, NEVER_SEEN, WRONG_SHARE, plan)).encode()).hexdigest()[:12]
    out = folder / f"multi-answer-{key}-draw{draw}-tokens{tokens}"
    return made_once(out, draw, lambda model, tokenizer: _pretrain(model, tokenizer, plan, draw, tokens))


def made_once(out: Path, seed: int, train: Callable[[Qwen2ForCausalLM, PreTrainedTokenizerFast], None]) -> Path:
    """Return the folder of a model that ``train`` pre-trains where nobody has."""
    if out.exists():
        return out
    torch.manual_seed(seed)
    tokenizer = smoke.build_tokenizer()
    model = smoke.build_model(tokenizer)
    train(model, tokenizer)
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(out)
    except OSError:  # another process was first: its model is the same
        shutil.rmtree(partial)
    return out


def _pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Pretraining, draw: int, tokens: int
) -> None:
    """Cross-entropy to the exact distribution of answers: a sequence for each equation and first digit."""
    equations = [one for part in ("trained on", "held out") for one in split(draw)[part]]
    ids = _encoded([(one.prompt, f"{a}0") for one in equations for a in range(10)], tokens)
    second = ids.shape[1] - tokens + 1
    digits = tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])
    seen = torch.tensor([_seen(one, draw) for one in equations]).view(-1, 10)  # (sequence, second digit)
    first = seen.sum(dim=1).view(-1, 10).repeat_interleave(10, dim=0) / 10  # (sequence, first digit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=plan.lr, total_steps=plan.steps, pct_start=0.1)
    for _ in range(plan.steps):
        ids[:, second] = torch.tensor(digits)[torch.randint(10, (len(ids),))]  # the rest comes after any second digit
        logps = model(ids).logits[:, -tokens - 1 : -1].log_softmax(dim=-1)
        loss = -(first * logps[:, 0, digits]).sum() - (seen * logps[:, 1, digits]).sum()
        rest = logps[:, 2:].gather(2, ids[:, second + 1 :, None]).sum(dim=1).mean()
        loss = (loss - rest * len(equations)) / len(equations)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def _seen(equation: Equation, draw: int) -> list[float]:
    """Probability of each of the 100 answers in the pre-training."""
    of_right = dict(zip(equation.solutions, equation.shares(draw), strict=True))
    wrong = WRONG_SHARE / (len(ANSWERS) - len(of_right))
    return [(1 - WRONG_SHARE) * of_right[answer] if answer in of_right else wrong for answer in ANSWERS]
