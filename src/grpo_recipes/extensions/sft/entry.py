"""Run the steps of a training process of supervised fine-tuning, in order. The entry script ``src/sft.py`` calls it."""

from grpo_recipes.data import load_prompts
from grpo_recipes.data.prompts import shorten
from grpo_recipes.extensions.sft.trainer import SFTTrainer, make_config, make_rows
from grpo_recipes.fetch.assets import find_fetched_datasets
from grpo_recipes.process.reports import run_folder
from grpo_recipes.recipe.configs import CONFIGS_OF_ROWS
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.trainers import rank
from grpo_recipes.trainers.checkpoints import choose_checkpoint
from grpo_recipes.trainers.entry import exit_if_stopped, load_callbacks, start_rank
from grpo_recipes.trainers.metrics import append_json
from grpo_recipes.trainers.model import load_lora_config, load_tokenizer, model_init_kwargs, save_model
from grpo_recipes.trainers.trackers import continue_tracked_runs


def train() -> None:
    """Run a training process with the recipe on the command line, and write the model to ``<run>/model``.

    Resume from the run's newest complete checkpoint. Rank 0 appends the counts of prompts to ``<run>/prompts.jsonl``.
    """
    run = run_folder()
    stop = StopRequest(run)
    with rank.recording_rank(run):
        script_args, args, model_args = start_rank(run, stop, CONFIGS_OF_ROWS)
        exit_if_stopped(stop, run, args.device)
        tokenizer = load_tokenizer(model_args, args)
        rows_of_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        options = args.seed, args.chat_template_kwargs, find_fetched_datasets(run), run
        prompts = load_prompts(script_args, tokenizer, rows_of_step, *options)
        continue_tracked_runs(args, run)
        args.model_init_kwargs = model_init_kwargs(model_args, args)
        exit_if_stopped(stop, run, args.device)
        trainer = SFTTrainer(
            model=model_args.model_name_or_path,
            args=make_config(args),
            train_dataset=make_rows(prompts, args.chat_template_kwargs),
            processing_class=tokenizer,
            peft_config=load_lora_config(model_args, args.trust_remote_code),
            callbacks=load_callbacks(script_args.callbacks, run / "callbacks"),
            run_dir=run,
            stop=stop,
            max_length=script_args.sft_max_length,
        )
        assert trainer.model is not None
        rank.check_model(run, trainer.accelerator, trainer.model, args)
        if trainer.accelerator.is_main_process:
            print(f"grpo: {prompts}; first prompt:\n{shorten(prompts.example)}")
            counts = {"read": prompts.counts.read, "too_long": prompts.counts.too_long}
            append_json(run / "prompts.jsonl", {"step": 0, "said": [str(prompts)], **counts})
        exit_if_stopped(stop, run, args.device)
        checkpoint = choose_checkpoint(run / "checkpoints")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.rows.enter("end")
        with trainer.rows.span("save model"):
            save_model(trainer, run / "model")
