"""Measure the time that digests add to a save, and the time to verify a checkpoint.

    python bench/checkpoint_digest.py [--rounds 40] [--out bench/results/checkpoint_digest.json]

Some digests are made while the process waits for the disk. This costs time if every core is busy: on a shared machine,
run this script with a higher priority (``nice -n -10`` as root).

A random model of 138 million parameters takes one real step, so that its checkpoint contains weights and Adam's state
in float32 (1.7 GB). Each round saves it once without digests and once with our digest, and every tenth round also with
each other candidate. The order is reversed from round to round, and the disk is idle before each save. A ratio compares
two saves of the same round, and the figure is the median ratio. ``cpu_seconds`` are the process's, over all threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import xxhash
from datasets import Dataset
from made_by import begin, write_record
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_recipes import smoke
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs import checkpoints as run_checkpoints
from grpo_recipes.runs.checkpoints import find_verified_checkpoint
from grpo_recipes.trainers import checkpoints
from grpo_recipes.trainers.grpo import GRPOTrainer

TARGET = 1.05  # largest ratio of a save with digests to one without
OURS = "xxh3_128"
WITHOUT = "without digests"
EVERY = 10  # rounds between measurements of the other candidates


class Crc32:
    """zlib's checksum with the two methods of a hash that are used."""

    def __init__(self, data: bytes = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: bytes) -> None:
        """Add bytes."""
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum."""
        return f"{self._value:08x}"


CANDIDATES: dict[str, Callable[[], Any]] = {
    OURS: xxhash.xxh3_128,
    "crc32": Crc32,
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/checkpoint_digest.json")
    options = parser.parse_args()
    origin = begin(options.out, "xxhash")
    with tempfile.TemporaryDirectory(dir=find_code_root()) as folder:  # a temporary folder may be in memory
        saves = Saves(Path(folder))
        rounds = _in_turn(saves, options.rounds)
        result = {
            "what": "seconds of a save by the trainer, one process on CPU",
            "checkpoint": {"parameters": saves.parameters, "bytes": saves.bytes, "largest_files": saves.largest()},
            "target": TARGET,
            "saves": _ratios(rounds),
            "gigabytes_per_second_of_one_thread": {name: saves.speed(make) for name, make in CANDIDATES.items()},
            "verification": saves.verification(),
            "niceness": os.nice(0),
        }
    write_record(options.out, result, origin)
    print(json.dumps(result, indent=1))


class Saves:
    """A trainer that has taken one step, and saves when asked."""

    def __init__(self, folder: Path) -> None:
        self._checkpoints = folder / "checkpoints"
        tokenizer = smoke.build_tokenizer()
        shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=32_000, num_key_value_heads=12, tie_word_embeddings=True, **shape, **ids)
        )
        rows = [{"prompt": [{"role": "user", "content": f"{a}+1="}], "answer": str(a + 1)} for a in range(4)]
        self._trainer = GRPOTrainer(
            model=model,
            reward_funcs=[lambda completions, **_: [float(index) for index, _ in enumerate(completions)]],
            args=GRPOConfig(
                output_dir=str(self._checkpoints), max_steps=1, per_device_train_batch_size=2, num_generations=2,
                max_completion_length=2, use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
                use_vllm=False, save_strategy="no", report_to="none",
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            run_dir=folder,
        )  # fmt: skip
        self._trainer.train()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.save(None)
        self.bytes = sum(path.stat().st_size for path in self._kept().rglob("*") if path.is_file())

    def _kept(self) -> Path:
        return self._checkpoints / "checkpoint-1"

    def save(self, make: Callable[[], Any] | None) -> tuple[float, float]:
        """Save as training does, with digests by ``make`` or without, and return seconds and CPU seconds."""
        shutil.rmtree(self._kept(), ignore_errors=True)
        os.sync()
        arm = _without_digests() if make is None else _digests_by(make)
        with arm:
            began, worked = time.perf_counter(), time.process_time()
            self._trainer._save_checkpoint(self._trainer.model, None)
            return time.perf_counter() - began, time.process_time() - worked

    def largest(self) -> dict[str, int]:
        """Return the two largest files of a checkpoint."""
        files = sorted(self._kept().iterdir(), key=lambda path: -path.stat().st_size)[:2]
        return {path.name: path.stat().st_size for path in files}

    def speed(self, make: Callable[[], Any]) -> float:
        """Return how fast one thread digests the largest file, in GB/s, from the page cache; the best of three."""
        name, size = next(iter(self.largest().items()))
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            with _digests_by(make):
                run_checkpoints.compute_digest(self._kept() / name)
            seconds.append(time.perf_counter() - began)
        return round(size / min(seconds) / 1e9, 2)

    def verification(self) -> dict[str, float]:
        """Return the seconds to verify a checkpoint, with and without its files in the page cache."""
        self.save(CANDIDATES[OURS])
        seconds = {}
        for name in ("not in the page cache", "in the page cache"):
            if name.startswith("not"):
                for path in self._kept().iterdir():
                    with path.open("rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            if find_verified_checkpoint(self._checkpoints, print) is None:
                raise SystemExit("the checkpoint is not there")
            seconds[f"seconds, {name}"] = round(time.perf_counter() - began, 3)
        return seconds


@contextmanager
def _digests_by(make: Callable[[], Any]) -> Iterator[None]:
    """Take another digest for the files that are read back, and for those that are digested while they are written."""
    with patch.object(run_checkpoints, "new_digest", make), patch.object(checkpoints, "new_digest", make):
        yield


@contextmanager
def _without_digests() -> Iterator[None]:
    written = patch.object(checkpoints, "collecting_digests", lambda folder: nullcontext({}))
    with written, patch.object(run_checkpoints, "compute_digest", lambda path: ""):
        yield


def _in_turn(saves: Saves, rounds: int) -> list[dict[str, tuple[float, float]]]:
    rounds_measured = []
    for index in range(rounds):
        candidates = CANDIDATES if index % EVERY == 0 else {OURS: CANDIDATES[OURS]}
        arms: dict[str, Callable[[], Any] | None] = {WITHOUT: None, **candidates}
        rounds_measured.append({name: saves.save(arms[name]) for name in (arms if index % 2 == 0 else reversed(arms))})
    return rounds_measured


def _ratios(rounds: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    statistics_by_arm: dict[str, Any] = {}
    for name in (WITHOUT, *CANDIDATES):
        measured = [row for row in rounds if name in row]
        statistics_by_arm[name] = {
            "median_seconds": round(statistics.median(row[name][0] for row in measured), 3),
            "median_cpu_seconds": round(statistics.median(row[name][1] for row in measured), 3),
        }
        if name != WITHOUT:
            ratios = sorted(row[name][0] / row[WITHOUT][0] for row in measured)
            margin = 0.98 * len(ratios) ** 0.5  # in ranks, by the normal approximation of the binomial distribution
            low, high = (round(len(ratios) / 2 + side * margin) for side in (-1, 1))
            statistics_by_arm[name] |= {
                "ratio_median": round(statistics.median(ratios), 4),
                "ratio_median_95": [round(ratios[max(low, 0)], 4), round(ratios[min(high, len(ratios) - 1)], 4)],
                "ratio_min_max": [round(ratios[0], 4), round(ratios[-1], 4)],
                "rounds": len(ratios),
            }
        statistics_by_arm[name]["raw_seconds"] = [round(row[name][0], 3) for row in measured]
    return statistics_by_arm


if __name__ == "__main__":
    main()
