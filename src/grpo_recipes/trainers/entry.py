"""Run the steps of a training process, in order. The entry scripts choose the trainer class.

Load data, model and rewards, resume from the newest checkpoint, train, save the model, and run the benchmarks:

    train(GRPOTrainer)
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import TrlParser

from grpo_recipes.data import load_eval_prompts, load_prompts
from grpo_recipes.data.problems import Fetched
from grpo_recipes.data.prompts import Prompts, make_renderer, shorten
from grpo_recipes.errors import config_error
from grpo_recipes.evaluate.benchmarks import UntrainedBenchmarks, run_benchmarks
from grpo_recipes.fetch.assets import find_fetched_datasets
from grpo_recipes.process.reports import run_folder
from grpo_recipes.recipe.configs import CONFIGS, GRPOConfig, ScriptArguments
from grpo_recipes.recipe.sources import rollout_class, source_of
from grpo_recipes.recipe.user_code import load_object
from grpo_recipes.rewards.load import load_rewards
from grpo_recipes.rollouts.source import Source
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.runs.trace import Trace
from grpo_recipes.trainers import rank
from grpo_recipes.trainers.checkpoints import (
    any_rank_requests_stop,
    choose_checkpoint,
    make_stop_before_first_step,
)
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.metrics import append_json
from grpo_recipes.trainers.model import load_lora_config, load_tokenizer, model_init_kwargs, save_model
from grpo_recipes.trainers.reward_models import load_reward_models
from grpo_recipes.trainers.teacher import check_teacher_tokenizer
from grpo_recipes.trainers.trackers import continue_tracked_runs


def start_rank(run: Path, stop: StopRequest, configs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Listen for stop requests, parse the command line and wait for all ranks; return an object for each config.

    Raise RuntimeError if the processes or the device differ from the plan of ``run``.
    """
    stop.listen()
    rank.skip_shared_memory_operator()
    script_args, args, *others = TrlParser(configs, allow_abbrev=False).parse_args_and_config()
    rank.check_world(run, args.world_size, args.device.type)
    rank.wait_for_all_ranks(run, args.device)
    rank.allow_fsdp_on_cpu()
    return script_args, args, *others


def train(trainer_class: type[GRPOTrainer]) -> None:
    """Run a training process with the recipe on the command line, and write the model to ``<run>/model``.

    Resume from the run's newest complete checkpoint. At the end, run the recipe's benchmarks.
    """
    run = run_folder()
    stop = StopRequest(run)
    with rank.recording_rank(run):
        script_args, args, model_args = start_rank(run, stop, CONFIGS)
        # The next steps need memory and fail for a broken model, which the server reports better. So wait for it now.
        rank.wait_for_first_server(run, args.vllm_server_timeout, stop)
        exit_if_stopped(stop, run, args.device)
        tokenizer = load_tokenizer(model_args, args)
        if teacher := args.teacher_model_name_or_path:
            check_teacher_tokenizer(teacher, tokenizer, args.trust_remote_code)
        source_class = rollout_class(partial(getattr, script_args))
        source: Source | None = source_class(script_args, args, run) if source_class else None
        fetched = find_fetched_datasets(run)
        prompts, held_out = _load_datasets(script_args, args, tokenizer, fetched, source, run)
        continue_tracked_runs(args, run)
        args.model_init_kwargs = model_init_kwargs(model_args, args)
        exit_if_stopped(stop, run, args.device)
        trace = Trace(f"rank_{args.process_index}", run)
        rewards = load_rewards(script_args, args, run, prompts.counts.left_out, trace)
        reward_funcs, reward_tokenizers = load_reward_models(rewards, run, args)
        trainer = trainer_class(
            model=model_args.model_name_or_path,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_tokenizers,
            reward_max_no_verdict=script_args.reward_max_no_verdict,
            args=args,
            train_dataset=prompts.dataset,
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            peft_config=load_lora_config(model_args, args.trust_remote_code),
            callbacks=load_callbacks(script_args.callbacks, run / "callbacks"),
            run_dir=run,
            stop=stop,
            source=source,
        )
        rank.check_model(run, trainer.accelerator, trainer.model, args)
        checkpoint = choose_checkpoint(run / "checkpoints")
        if trainer.accelerator.is_main_process:
            print(f"grpo: {prompts}; first prompt:\n{shorten(prompts.example)}")
            if held_out:
                print(f"grpo: {held_out}")
            summaries = [str(dataset) for dataset in (prompts, held_out) if dataset]
            counts = {
                "read": prompts.counts.read,
                "too_long": prompts.counts.too_long,
                "filter_values": prompts.counts.filter_values,
            }
            # The terminal and the report read this row.
            append_json(run / "prompts.jsonl", {"step": 0, "said": summaries, **counts})
            if checkpoint is not None and args.ignore_data_skip:
                print("grpo: ignore_data_skip: the order of the data restarts")
        trainer.add_callback(UntrainedBenchmarks(trainer, script_args, run, stop.requested))
        exit_if_stopped(stop, run, args.device)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.rows.enter("end")
        with trainer.rows.span("save model"):
            save_model(trainer, run / "model")
        run_benchmarks(trainer, script_args, run, stop.requested, fetched)


def _load_datasets(
    script_args: ScriptArguments, args: GRPOConfig, tokenizer: PreTrainedTokenizerBase, fetched: Fetched,
    source: Source | None, run: Path,
) -> tuple[Prompts, Prompts | None]:  # fmt: skip
    """Return the prompts to train on and to evaluate on, from the recipe's datasets or its source of rollouts.

    The second is None if ``eval_strategy`` is ``no``.
    """
    least, evaluates = args.generation_batch_size // args.num_generations, args.eval_strategy != "no"
    if source is None or source_of(partial(getattr, script_args)) is None:
        common = args.seed, args.chat_template_kwargs, fetched, run
        prompts = load_prompts(script_args, tokenizer, least, *common)
        return prompts, load_eval_prompts(script_args, tokenizer, *common) if evaluates else None
    make_renderer(script_args.chat_template, tokenizer, args.chat_template_kwargs)
    prompts = source.training_prompts(script_args, args.seed, least)
    return prompts, source.evaluation_prompts(script_args) if evaluates else None


def exit_if_stopped(stop: StopRequest, run: Path, device: torch.device) -> None:
    """Raise StoppedOnRequest on all ranks, before the first step, if any rank has seen a stop request."""
    if any_rank_requests_stop(stop, device):
        raise make_stop_before_first_step(run / "checkpoints")


def load_callbacks(specs: Iterable[str], copies: Path | None = None) -> list[TrainerCallback]:
    """Load the callback classes of a recipe, ``module:Class`` or ``file.py:Class``, and return an object of each.

    With the folder ``copies``, files run from the copies in it, which the launch made. Raise ConfigError for an object
    that is not a subclass of TrainerCallback, or needs arguments.
    """
    callbacks: list[TrainerCallback] = []
    for spec in specs:
        callback_class = load_object(spec, copies)
        if not (isinstance(callback_class, type) and issubclass(callback_class, TrainerCallback)):
            problem = f"'{spec}' is not a subclass of transformers.TrainerCallback"
            raise config_error("callbacks", problem, "derive the class from TrainerCallback")
        try:
            callbacks.append(callback_class())
        except TypeError as error:
            fix = "remove the required arguments of its __init__"
            raise config_error("callbacks", f"'{spec}' can't be created ({error})", fix) from error
    return callbacks
