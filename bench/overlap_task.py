"""The two tasks of ``overlap.py``: the smoke sums, and countdown problems of ModeBench for a tiny model."""

from __future__ import annotations

import hashlib
import random
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset

from grpo_recipes import smoke
from grpo_recipes.extensions.problems.modebench.dataset import Settings, list_right_answers, make_rows, parse_problem
from grpo_recipes.extensions.problems.rewards import modebench
from grpo_recipes.rewards.functions import pure_accuracy_math

SETTINGS = Settings(
    prompts=64, test_prompts=16, seed=0, min_modes=2, max_modes=24, numbers=3, largest_number=12, vertices=8, hidden=5
)
WRONG_SHARE = 0.6  # fraction of pre-training answers that are well-formed but wrong
STEPS, COPIES, RATE = 500, 4, 2e-3  # pre-training: steps, copies of every problem in a batch, learning rate
VERSION = "1"  # raise it whenever anything below changes what `countdown` writes


@dataclass(frozen=True)
class Task:
    """A model, prompts, a reward, and the keys of its runs."""

    model: str
    dataset: Dataset
    reward: Any
    keys: dict[str, Any]


def sums(cache: Path) -> Task:
    """Return the task of recipes/smoke/grpo.yaml."""
    folder = cache / f"sums-{smoke.hash_settings()}"
    smoke.make_smoke_task(folder)
    rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
    prompts = rows.map(lambda row: {"prompt": _chat(row["problem"])}, remove_columns=["problem"])
    return Task(str(folder / "model"), prompts, pure_accuracy_math, {"max_completion_length": 8})


def countdown(cache: Path) -> Task:
    """Return problems of ``modebench:countdown`` with its verifier; the prompt is short, as the model is of bytes."""
    train = make_rows("modebench:countdown", "train", SETTINGS)
    key = hashlib.sha256(repr((VERSION, asdict(SETTINGS), WRONG_SHARE, STEPS, COPIES, RATE)).encode()).hexdigest()[:12]
    folder = cache / f"overlap-countdown-{key}"
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        _pretrain([row["answer"] for row in train], partial)
        shutil.move(partial, folder)
    prompts = [{"prompt": _chat(_prompt(row["answer"])), "answer": row["answer"]} for row in train]
    return Task(str(folder), Dataset.from_list(prompts), modebench, {"max_completion_length": 12})


TASKS = {"smoke": sums, "modebench": countdown}


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _prompt(answer: str) -> str:
    problem = parse_problem(answer)
    return f"{' '.join(map(str, problem['numbers']))}={problem['target']}"


def _any_expression(answer: str, rng: random.Random) -> str:
    """Return a well-formed expression of the numbers, which is seldom right."""
    first, second, third = rng.sample(list(map(str, parse_problem(answer)["numbers"])), 3)
    operator, second_operator = rng.choices("+-*/", k=2)
    return rng.choice(
        [f"{first}{operator}{second}{second_operator}{third}", f"({first}{operator}{second}){second_operator}{third}"]
    )


def _pretrain(answers: list[str], folder: Path) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    model = smoke.build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    prompts = [tokenizer.apply_chat_template(_chat(_prompt(answer)), add_generation_prompt=True) for answer in answers]
    prompts = [prompt["input_ids"] if not isinstance(prompt, list) else prompt for prompt in prompts]
    right_by_problem = [list_right_answers(answer) for answer in answers]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for step in range(STEPS):
        chosen = [place for place in range(len(answers)) for _ in range(COPIES)]
        texts = [
            _any_expression(answers[place], rng) if rng.random() < WRONG_SHARE else rng.choice(right_by_problem[place])
            for place in chosen
        ]
        ids = [[*prompts[place], *tokenizer(text)["input_ids"], end] for place, text in zip(chosen, texts, strict=True)]
        longest = max(map(len, ids))
        rows_BT = torch.tensor([row + [pad] * (longest - len(row)) for row in ids])
        labels_BT = rows_BT.clone()
        for row, place in enumerate(chosen):
            labels_BT[row, : len(prompts[place])] = -100
            labels_BT[row, len(ids[row]) :] = -100
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - step / STEPS)
        logits = model(rows_BT).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
