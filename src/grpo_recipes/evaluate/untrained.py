"""ModeBench of the model before its first step: what training is to be held against.

    trainer.add_callback(UntrainedBenchmarks(trainer, script_args, run, stop_requested))

Written to ``benchmarks/untrained.json`` once in the life of a run; the results after training quote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.evaluate.benchmarks import UNTRAINED, Runner
from grpo_recipes.evaluate.scoring import MODEBENCH
from grpo_recipes.modebench.dataset import TASKS
from grpo_recipes.recipe.configs import ScriptArguments


class UntrainedBenchmarks(TrainerCallback):
    """Runs the recipe's ModeBench benchmarks when training begins at step 0, and leaves no trace in the training.

    The model is wrapped by then, and the server there; a resumed run, or one that has these results, does nothing.

    Args:
        trainer: a ``GRPOTrainer``.
        script_args: names the benchmarks.
        run: the run directory.
        stop_requested: looked at by rank 0.
    """

    def __init__(self, trainer: Any, script_args: ScriptArguments, run: Path, stop_requested: Callable[[], bool]):
        self._trainer = trainer
        self._names = [name for name in script_args.benchmarks if name in TASKS]
        self._runner = Runner(trainer, script_args, run, stop_requested, MODEBENCH, None, UNTRAINED)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Run them.

        Raises:
            BenchmarkFailed: on every rank; nothing is trained yet.
            StoppedInBenchmarks: a stop request came.
        """
        if self._names and state.global_step == 0:
            with self._trainer._undisturbed(), _weights_to_send_again(self._trainer):
                self._runner.run_missing(self._names)


@contextmanager
def _weights_to_send_again(trainer: Any) -> Iterator[None]:
    """Let the first generation sync and be guarded as it is without a benchmark before it."""
    if not trainer.use_vllm:
        yield
        return
    loaded, generation = trainer._last_loaded_step, trainer.vllm_generation
    try:
        yield
    finally:
        trainer._last_loaded_step = loaded
        if generation.mode == "colocate" and generation.enable_sleep_mode:
            generation.llm.sleep(level=2)  # as TRL leaves it after every generation
