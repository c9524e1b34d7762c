"""GRPO on a recipe's prompts, one process of those `grpo launch` starts.

    grpo launch recipes/smoke/grpo.yaml        # or: bash training.sh, sbatch training.sh

The launcher starts this file under accelerate, beside a vLLM server, with the frozen recipe of the run directory.
"""

import os

from grpo_recipes.launch.prctl import die_with_parent

die_with_parent(os.getppid())  # before the imports, which take seconds

from trl import TrlParser  # noqa: E402

from grpo_recipes.configs import CONFIGS  # noqa: E402
from grpo_recipes.data import load_eval_prompts, load_prompts  # noqa: E402
from grpo_recipes.evaluate.benchmarks import run_benchmarks  # noqa: E402
from grpo_recipes.fetch.sources import fetched_sets  # noqa: E402
from grpo_recipes.launch.checkpoints import newest_complete  # noqa: E402
from grpo_recipes.launch.rundir import stop_file  # noqa: E402
from grpo_recipes.rewards.load import load_rewards  # noqa: E402
from grpo_recipes.trainers.callbacks import load_callbacks  # noqa: E402
from grpo_recipes.trainers.grpo import GRPOTrainer  # noqa: E402
from grpo_recipes.trainers.model import load_tokenizer, model_init_kwargs, save_model  # noqa: E402
from grpo_recipes.trainers.rank import (  # noqa: E402
    allow_fsdp_on_cpu,
    check_sharing,
    check_world,
    rank_record,
    run_folder,
)
from grpo_recipes.trainers.stop import StopOnRequest, StoppedOnRequest  # noqa: E402


def main() -> None:
    """Train, and leave the model in ``<run>/model``."""
    run = run_folder()
    with rank_record(run):
        script_args, args, model_args = TrlParser(CONFIGS, allow_abbrev=False).parse_args_and_config()
        check_world(run, args.world_size, args.device.type)
        allow_fsdp_on_cpu()
        tokenizer = load_tokenizer(model_args, args)
        least = args.generation_batch_size // args.num_generations
        fetched = fetched_sets(run)
        prompts = load_prompts(script_args, tokenizer, least, args.seed, args.chat_template_kwargs, fetched)
        held_out = None
        if args.eval_strategy != "no":
            held_out = load_eval_prompts(script_args, tokenizer, args.seed, args.chat_template_kwargs, fetched)
        args.model_init_kwargs = model_init_kwargs(model_args, args)
        stop = StopOnRequest(run)
        trainer = GRPOTrainer(
            model=model_args.model_name_or_path,
            reward_funcs=load_rewards(script_args, args, run),
            reward_max_no_verdict=script_args.reward_max_no_verdict,
            args=args,
            train_dataset=prompts.dataset,
            eval_dataset=held_out.dataset if held_out else None,
            processing_class=tokenizer,
            callbacks=[stop, *load_callbacks(script_args.callbacks, run / "callbacks")],
            run_dir=run,
        )
        dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
        check_sharing(run, trainer.accelerator.distributed_type.name, dtype)
        checkpoint = newest_complete(run / "checkpoints")
        if trainer.accelerator.is_main_process:
            print(f"grpo: {prompts}; first prompt:\n{prompts.example}")
            if held_out:
                print(f"grpo: {held_out}")
            if checkpoint is not None and args.ignore_data_skip:
                print("grpo: ignore_data_skip: the order of the data restarts")
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if stop.stopped:
            raise StoppedOnRequest(trainer.state.global_step)
        save_model(trainer, run / "model")
        run_benchmarks(trainer, script_args, run, stop_file(run).exists, fetched)


if __name__ == "__main__":
    main()
