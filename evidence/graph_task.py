"""Graph colouring of ModeBench as a task for a tiny model: other graphs before the training, exact metrics.

The problems and the reward are the project's own (``modebench:graph_coloring``, 8 vertices of which 5 are hidden). An
answer is 5 digits and the end, so the probability of every right answer is computed: no sampling noise in any metric.
The model was pre-trained on other graphs only, a tenth of the answers wrong, and of the right ones those with more of
colour 1 more often. So it colours the graphs of the experiment right now and then, with several answers to lose.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset
from multi_answer_task import METRICS, Task, made_once, scores
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from grpo_recipes import smoke
from grpo_recipes.extensions.problems.modebench.dataset import Settings, list_right_answers, make_rows, parse_problem
from grpo_recipes.extensions.problems.modebench.graph_coloring import COLORS, HIDDEN
from grpo_recipes.extensions.problems.rewards import modebench

VERSION = "1"  # raise it whenever anything below changes what `pretrained` writes
SETTINGS = Settings(
    prompts=4000, test_prompts=24, seed=0, min_modes=4, max_modes=12, numbers=3, largest_number=None, vertices=8,
    hidden=5,
)  # fmt: skip
TRAINED = 24  # graphs; those of the other prompts that are like none of them, nor held out, are pre-trained on
ANSWERS = tuple(map("".join, itertools.product(COLORS, repeat=SETTINGS.hidden)))
KEYS = {"max_completion_length": SETTINGS.hidden + 1, "per_device_train_batch_size": 128, "num_generations": 16}


@dataclass(frozen=True)
class Split:
    """Problems as JSON: no two of them have a graph or a prompt in common."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]
    others: tuple[str, ...]  # for the pre-training


@dataclass(frozen=True)
class Pretraining:
    """How the model comes to know the task before the experiment."""

    steps: int = 450
    batch: int = 128
    lr: float = 3e-3
    wrong_share: float = 0.1  # of the answers: any of the wrong ones
    preference: tuple[float, ...] = (0.5, 0.3, 0.2)  # for each colour; a right answer's share is the product


def graph(cache: Path, draw: int = 0, plan: Pretraining | None = None) -> Task:
    """Return the task; ``draw`` decides its graphs and the model, which is made in ``cache`` if it is not there."""
    problems = split(draw)
    prompts = [{"prompt": _chat(one), "answer": one} for one in problems.trained]
    parts: dict[str, Callable[[torch.nn.Module], dict[str, float]]] = {
        "trained on": Measure(problems.trained), "held out": Measure(problems.held_out)
    }  # fmt: skip
    return Task(pretrained(cache, draw, plan), Dataset.from_list(prompts), modebench, dict(KEYS), parts)


@cache
def split(draw: int = 0) -> Split:
    """Return the problems of a draw, all from the generator of ModeBench."""
    settings = Settings(**asdict(SETTINGS) | {"seed": draw})
    known: set[object] = set()
    found = []
    made = [row for part in ("test", "train") for row in make_rows("modebench:graph_coloring", part, settings)]
    for row in made:
        same = {prompt(row["answer"]), repr(parse_problem(row["answer"])["edges"])}
        if not same & known:
            known |= same
            found.append(row["answer"])
    held_out, end = SETTINGS.test_prompts, SETTINGS.test_prompts + TRAINED
    return Split(tuple(found[held_out:end]), tuple(found[:held_out]), tuple(found[end:]))


def prompt(answer: str) -> str:
    """Return what the model reads of a problem: two characters for each hidden vertex, so all are of one length.

    The first says which colours its shown neighbours have (1, 2 and 4 added up for colours 1, 2 and 3). The second says
    which hidden vertices before it are its neighbours (1 for the one just before, 2 for the second before, then 4 and
    8), in hexadecimal.
    """
    problem = parse_problem(answer)
    hidden = [vertex for vertex, color in enumerate(problem["partial"], 1) if color == HIDDEN]
    edges = {frozenset(edge) for edge in problem["edges"]}
    text = ""
    for place, vertex in enumerate(hidden):
        shown = {color for other, color in enumerate(problem["partial"], 1) if frozenset((vertex, other)) in edges}
        text += str(sum(1 << COLORS.index(color) for color in shown - {HIDDEN}))
        before = reversed(hidden[:place])
        text += f"{sum(1 << back for back, other in enumerate(before) if frozenset((vertex, other)) in edges):x}"
    return text


def _chat(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(answer)}]


class Measure:
    """What a model scores on some problems, exactly but for rounding; see ``multi_answer_task.Measure``.

    The right share leaves out what only the verifier's kindness takes: six tokens such as a blank before the digits.
    """

    def __init__(self, problems: Sequence[str]):
        right = [list_right_answers(one) for one in problems]
        self._counts = list(map(len, right))
        self._ids_BT = encoded([(one, text) for one, of_one in zip(problems, right, strict=True) for text in of_one])

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the mean of each metric over the problems."""
        training = model.training
        model.eval()
        scored = SETTINGS.hidden + 1
        logps_BTV = model(self._ids_BT, logits_to_keep=scored + 1).logits[:, :-1].double().log_softmax(dim=-1)
        logps_B = logps_BTV.gather(2, self._ids_BT[:, -scored:, None]).sum(dim=(1, 2))
        model.train(training)
        return _mean([of_one.exp().tolist() for of_one in logps_B.split(self._counts)])


def _mean(probabilities: Sequence[list[float]]) -> dict[str, float]:
    """Return the mean of each metric, from the probability of each right answer of each problem."""
    per_problem = [scores(of_one) for of_one in probabilities]
    return {name: math.fsum(one[name] for one in per_problem) / len(per_problem) for name in METRICS}


def encoded(pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Return the token ids of prompt, answer and end for each problem and answer, (B, T)."""
    tokenizer = smoke.build_tokenizer()
    texts = tokenizer.apply_chat_template([_chat(one) for one, _ in pairs], tokenize=False, add_generation_prompt=True)
    full = [f"{text}{answer}{smoke.END}" for text, (_, answer) in zip(texts, pairs, strict=True)]
    return torch.tensor(tokenizer(full).input_ids)


def guesser_scores(problems: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the metrics of guessers that have learned nothing about single graphs, and of the best there can be."""
    right = [list_right_answers(one) for one in problems]
    constant = max(ANSWERS, key=lambda answer: sum(answer in of_one for of_one in right))
    allowed = [math.prod(3 - int(shown).bit_count() or 3 for shown in prompt(one)[::2]) for one in problems]
    return {
        "uniform over all answers": _mean([[1 / len(ANSWERS)] * len(of_one) for of_one in right]),
        "best constant": _mean([[float(text == constant) for text in of_one] for of_one in right]),
        "colours that no shown neighbour has": _mean(
            [[1 / count] * len(of_one) for count, of_one in zip(allowed, right, strict=True)]
        ),
        "uniform over the right answers": _mean([[1 / len(of_one)] * len(of_one) for of_one in right]),
    }


def seen(answer: str, plan: Pretraining) -> list[float]:
    """Return the probability of each of ``ANSWERS`` in the pre-training on a problem."""
    right = set(list_right_answers(answer))
    weights = [math.prod(plan.preference[int(color) - 1] for color in text) for text in ANSWERS]
    total = math.fsum(weight for weight, text in zip(weights, ANSWERS, strict=True) if text in right)
    wrong = plan.wrong_share / (len(ANSWERS) - len(right))
    return [
        (1 - plan.wrong_share) * weight / total if text in right else wrong
        for weight, text in zip(weights, ANSWERS, strict=True)
    ]


def pretrained(folder: Path, draw: int = 0, plan: Pretraining | None = None) -> Path:
    """Return the folder of the model that every run of a draw starts from, made in ``folder`` if it is not there."""
    plan = plan or Pretraining()
    key = hashlib.sha256(repr((VERSION, SETTINGS, TRAINED, draw, plan)).encode()).hexdigest()[:12]
    out = folder / f"graph-{key}"
    return made_once(out, draw, lambda model, tokenizer: pretrain(model, tokenizer, split(draw).others, plan))


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str], plan: Pretraining,
    on_step: Callable[[int], None] = lambda step: None,
) -> None:  # fmt: skip
    """Train on answers drawn as ``seen`` says, each digit towards its exact distribution after those before it."""
    length = SETTINGS.hidden
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list(COLORS)))
    prompts_PT = encoded([(one, ANSWERS[0]) for one in problems])
    seen_PA = torch.tensor([seen(one, plan) for one in problems])
    answers_AT = torch.tensor([[int(color) - 1 for color in text] for text in ANSWERS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=plan.lr, total_steps=plan.steps, pct_start=0.1)
    for step in range(plan.steps):
        chosen = torch.randint(len(problems), (plan.batch,))
        left_BA = seen_PA[chosen]
        drawn_BT = answers_AT[torch.multinomial(left_BA, 1).squeeze(1)]
        ids_BT = prompts_PT[chosen]
        ids_BT[:, -length - 1 : -1] = digits[drawn_BT]
        logps_BTV = model(ids_BT, logits_to_keep=length + 2).logits[:, :-1].log_softmax(dim=-1)
        loss = -logps_BTV[:, length, ids_BT[0, -1]].mean()
        for place in range(length):
            left_B3A = left_BA.view(plan.batch, len(COLORS), -1)
            wanted = left_B3A.sum(dim=2) / left_B3A.sum(dim=(1, 2)).unsqueeze(1)
            loss = loss - (wanted * logps_BTV[:, place, digits]).sum(dim=1).mean()
            left_BA = left_B3A[torch.arange(plan.batch), drawn_BT[:, place]]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        on_step(step + 1)
