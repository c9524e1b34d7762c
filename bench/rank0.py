"""Measure what rank 0 does with the completions of a step while the model waits.

    python bench/rank0.py [--rounds 3] [--completions 256 1024 4096] [--out bench/results/rank0.json]

Takes the server's answers from memory and makes the micro-batches of a step from them, with the trainer's own methods.
One process does it for all completions.

* ``read``: decode, check and join the server's answers;
* ``hand on``: pickle them for the other ranks, and unpickle them;
* ``samples``: write a row of ``samples.jsonl``;
* ``unpack``: make lists of the arrays;
* ``decode``: completions as text;
* ``score``: ``pure_accuracy_math``, which runs in this process;
* ``tensors``: everything else from prompts to sorted micro-batches, with TRL's metrics.

All are CPU seconds of this process, with one thread of torch. The completions are pieces of the documentation with
2,048 tokens each, of a tokenizer that is trained on it, in groups of 16. Half of them end with a right answer.

``rank0`` are the seconds of rank 0 if 8 processes train: the first three parts, and an eighth of the others, because
each rank unpacks, decodes and scores only its own completions. ``fraction`` divides them by an assumed step: 7.6
billion parameters on 8 H100 that reach 40 % of their peak, one forward pass for the log-probs and an update with
gradient checkpointing. Sampling and weight syncs are left out, so a real step is longer. Sockets and the gathers of
ranks are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset
from made_by import begin, write_record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_recipes import smoke
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.rewards.score import load_reward
from grpo_recipes.server.wire import Completions, join_completions, pack_completions, unpack_completions
from grpo_recipes.trainers import grpo
from grpo_recipes.weights.transport import check_completions

TOKENS, GROUP, MICRO_BATCH = 2048, 16, 16
VOCABULARY = 8000
ONLY_RANK0 = ("read", "hand on", "samples")
ANSWER = "42"
TARGET = 0.03  # largest fraction of a step
PARAMETERS, RANKS, PEAK, REACHED = 7.6e9, 8, 989e12, 0.4  # of the assumed step; the peak in bfloat16 FLOP per second
PASSES = 2 + 8  # FLOP for a parameter and a token: a forward pass, and an update that repeats its forward pass


class Clock:
    """The CPU seconds of each part, without the parts inside it."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self._name, self._inside = "", 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block to a part. In a part of rank 0, its parts are not separated."""
        if self._name in ONLY_RANK0:
            yield
            return
        outer_name, outer, self._name, self._inside = self._name, self._inside, name, 0.0
        began = time.process_time()
        try:
            yield
        finally:
            spent = time.process_time() - began
            self.seconds[name] += spent - self._inside
            self._name, self._inside = outer_name, outer + spent

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose calls are added to a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call


class Answers:
    """A server's answers in memory, instead of the trainer's connection to vLLM."""

    def __init__(self, bodies: list[bytes], clock: Clock):
        self._bodies, self._clock = bodies, clock

    def generate(self, **_: Any) -> tuple[None, list[list[int]], list[list[list[float]]], None]:
        """Return ids and log-probs of all answers, read as by the client, handed on and sliced as by TRL."""
        with self._clock.part("read"):
            answers = list[Completions]()
            for body in self._bodies:
                answers.append(unpack_completions(body))
                check_completions(answers[-1], GROUP, TOKENS, VOCABULARY, 0)
            rows = join_completions(answers).rows()
        with self._clock.part("hand on"):
            ids, logprobs = pickle.loads(pickle.dumps(rows))
        with self._clock.part("unpack"):
            return None, ids[:], logprobs[:], None


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--completions", type=int, nargs="+", default=[256, 1024, 4096], help="of a step")
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/rank0.json")
    options = parser.parse_args()
    origin = begin(options.out, "tokenizers")
    torch.set_num_threads(1)
    sizes = {str(rows): measure(rows, options.rounds) for rows in options.completions}
    result = {
        "what": f"CPU seconds of rank 0 for the completions of a step, {TOKENS} tokens each",
        "target_fraction": TARGET,
        "assumed_step": {"parameters": PARAMETERS, "ranks": RANKS, "peak_flops": PEAK, "reached": REACHED},
        "completions": sizes,
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    write_record(options.out, result, origin)
    print(json.dumps(result, indent=1))


def measure(rows: int, rounds: int) -> dict[str, Any]:
    """Make the micro-batches of a step several times; return the seconds of each part. A first round is left out."""
    tokenizer, texts = build_tokenizer()
    draw = random.Random(rows)
    text_ids = tokenizer.encode(texts)
    bodies = [answer_of(tokenizer, text_ids, draw) for _ in range(rows // GROUP)]
    question = [{"role": "user", "content": texts[:400]}]
    inputs = [{"prompt": question, "answer": ANSWER} for _ in range(rows)]
    raw = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(Path(folder), tokenizer, rows)
        for _ in range(rounds + 1):
            clock = Clock()
            with measured(trainer, bodies, clock), clock.part("tensors"):
                trainer._prepare_inputs(inputs)
            assert trainer.rewards_BR.mean() == 0.5 and trainer.rewards_BR.shape == (rows, 1)
            raw.append({name: round(seconds, 4) for name, seconds in clock.seconds.items()})
        assert len((Path(folder) / "samples.jsonl").read_text().splitlines()) == rounds + 1
    seconds = {name: statistics.median(row[name] for row in raw[1:]) for name in sorted(raw[0])}
    rank0 = sum(value if name in ONLY_RANK0 else value / RANKS for name, value in seconds.items())
    step = PASSES * PARAMETERS * rows * TOKENS / (RANKS * PEAK * REACHED)
    return {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "rank0": round(rank0, 3),
        "assumed_step_seconds": round(step, 1),
        "fraction": round(rank0 / step, 4),
        "raw": raw[1:],
    }


def build_tokenizer() -> tuple[PreTrainedTokenizerFast, str]:
    """Train a byte-level BPE tokenizer on the documentation, and return both."""
    texts = "\n".join(path.read_text() for path in sorted((find_code_root() / "docs").glob("*.md")))
    texts = texts.replace("<think>", "")  # an answer after it does not count
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [smoke.PAD, smoke.END, *smoke.ROLES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [texts], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=smoke.PAD, eos_token=smoke.END, chat_template=smoke.CHAT_TEMPLATE
    )
    return tokenizer, texts


def answer_of(tokenizer: PreTrainedTokenizerFast, text_ids: list[int], draw: random.Random) -> bytes:
    """Return a server's answer: a group of completions from random places of the text, half of them right."""
    rows = list[list[int]]()
    for number in range(GROUP):
        start = draw.randrange(len(text_ids) - TOKENS)
        end = tokenizer.encode(f" <answer>{ANSWER if number % 2 else draw.randrange(100, 999)}</answer>")
        rows.append(text_ids[start : start + TOKENS - len(end)] + end)
    assert {len(row) for row in rows} == {TOKENS}
    logprobs = -np.random.default_rng(draw.getrandbits(32)).exponential(0.3, GROUP * TOKENS).astype(np.float32)
    lengths = np.full(GROUP, TOKENS, np.int32)
    return pack_completions(Completions(lengths, np.array(rows, np.int32).ravel(), logprobs))


def build_trainer(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: int) -> grpo.GRPOTrainer:
    """Return a trainer of a model that is never called, with this number of completions in a step."""
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"), max_steps=1, per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=rows // MICRO_BATCH, num_generations=GROUP, max_completion_length=TOKENS,
        use_cpu=True, bf16=False, gradient_checkpointing=False, use_vllm=False, disable_tqdm=True,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    trainer = grpo.GRPOTrainer(
        model=Qwen2ForCausalLM(config),
        reward_funcs=[load_reward("pure_accuracy_math", None)],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "?", "answer": ANSWER}]),
        processing_class=tokenizer,
        run_dir=folder,
    )
    trainer.model.train()
    return trainer


@contextmanager
def measured(trainer: grpo.GRPOTrainer, bodies: list[bytes], clock: Clock) -> Iterator[None]:
    """Let the trainer get these answers in the block as if from vLLM, and time its parts. The model is not called."""
    trainer.note_loaded_step(0)
    tokenizer: Any = trainer.processing_class
    trainer.vllm_generation = Answers(bodies, clock)
    with trainer.with_settings(use_vllm=True, vllm_importance_sampling_correction=False), ExitStack() as patches:
        for name, owner, method in (
            ("decode", tokenizer, "batch_decode"),
            ("score", trainer, "_calculate_rewards"),
            ("samples", grpo, "write_samples"),
        ):
            patches.enter_context(patch.object(owner, method, clock.timed(name, getattr(owner, method))))
        yield


if __name__ == "__main__":
    main()
