"""Train with GRPO: TRL's trainer with our steps, in the order of a training step: sample, score, weigh, update, sync.

    bash training.sh                 # or: grpo launch RECIPE

This class overrides each changed method of TRL and transformers once, with the same signature. Helpers do the work.
They use the trainer through ``protocol.InnerTrainer`` and do not know each other. TRL's loss and optimizer step stay.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import trl
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput
from trl.trainer.utils import RepeatSampler

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.rollouts.source import Source
from grpo_recipes.runs.stop_request import Stopped, StopRequest
from grpo_recipes.trainer_protocol import Mode
from grpo_recipes.trainers.advantages import estimate_advantages, replace_advantages, replace_logged_advantages
from grpo_recipes.trainers.ahead import make_inner_rollouts
from grpo_recipes.trainers.best import BestModel, TrainingEnded, repeat_owed_evaluation
from grpo_recipes.trainers.callbacks import Compute, LossCallback
from grpo_recipes.trainers.checkpoints import Checkpoints, Preemption, begin_epoch, ended_by_callback
from grpo_recipes.trainers.checks import Checks, Scoring
from grpo_recipes.trainers.controllers import make_kl_controller, update_beta
from grpo_recipes.trainers.dynamic_sampling import DynamicSampling
from grpo_recipes.trainers.evaluation import CountedStream, Evaluation
from grpo_recipes.trainers.geometric_mean import compute_geometric_mean_loss
from grpo_recipes.trainers.metrics import MetricsRows, to_json_number
from grpo_recipes.trainers.micro_batches import MicroBatches
from grpo_recipes.trainers.model import configured_reference, loaded_by_every_rank, merge_parameters, reject_shards
from grpo_recipes.trainers.passes import SharedComputation, compute_in_trimmed_passes
from grpo_recipes.trainers.protocol import Computed, Controller
from grpo_recipes.trainers.rank import keep_outputs_as_computed
from grpo_recipes.trainers.samples import write_samples
from grpo_recipes.trainers.sampling import building_vllm_client, changing_sampling
from grpo_recipes.trainers.teacher import Teacher
from grpo_recipes.trainers.temperatures import compute_at_own_temperatures
from grpo_recipes.weights.guard import WeightsDiffer


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's ``GRPOTrainer`` that verifies the weights in vLLM, saves complete checkpoints, and logs to ``run_dir``.

    ``stop`` is polled for a stop request, by default ``run_dir``'s. A larger unscored fraction of a training generation
    than ``reward_max_no_verdict`` ends the run. ``source`` replaces TRL's sampler in training.
    """

    args: GRPOConfig
    # Narrower types than in TRL and transformers.
    model: PreTrainedModel
    num_generations: int
    num_generations_eval: int
    max_completion_length: int
    vllm_generation: Any  # a subclass of TRL's, built by weights.bridges or weights.colocated
    processing_class: PreTrainedTokenizerBase
    chat_template_kwargs: dict[str, Any]
    _buffered_inputs: Any

    def __init__(
        self, *, args: GRPOConfig, run_dir: Path, stop: StopRequest | None = None, reward_max_no_verdict: float = 0.5,
        source: Source | None = None, **kwargs: Any,
    ):  # fmt: skip
        args.logging_nan_inf_filter = False  # a loss that is not finite must reach the checks
        if args.trim_padding:  # cuDNN's attention would make a plan for each shape of the passes
            torch.backends.cuda.enable_cudnn_sdp(False)
        stop = stop or StopRequest(run_dir)
        self._kl_controller = controller = make_kl_controller(args)
        self.controllers: dict[str, Controller] = {"kl": controller} if controller else {}
        self.checkpoints = Checkpoints(self)
        self.checks = Checks(self)
        self.preemption = Preemption(self, self.checkpoints, stop)
        self.scoring = Scoring(self, run_dir, reward_max_no_verdict)
        self.evaluation = Evaluation(self, run_dir)
        self.source = source
        if source is not None:
            kwargs["rollout_func"] = source
        self.sampler: RepeatSampler | None = None  # the order of the prompts; None for a stream
        self.temperature_B: torch.Tensor | None = None  # (B,) for the current rows, if they differ from the recipe's
        self._shared_logps = SharedComputation()
        self._completion_ids: list[list[int]] = []  # tokens of the rank's last batch
        self._samples_file = run_dir / "samples.jsonl"
        with building_vllm_client(args, run_dir, stop), loaded_by_every_rank(args), configured_reference(args):
            super().__init__(args=args, **kwargs)
            self._teacher = Teacher(self) if args.teacher_model_name_or_path else None
        if args.advantage_estimator == "reinforce_plus_plus":
            self.scale_rewards = "batch"  # for the metric frac_reward_zero_std: groups of equal rewards teach
        self.rows = MetricsRows(self, run_dir, args.process_index)
        self.best = BestModel(self, run_dir)
        self.dynamic_sampling = DynamicSampling(self) if args.dynamic_sampling else None
        self.micro_batches = MicroBatches(self)
        self.rollouts = make_inner_rollouts(self)
        if self.use_vllm:
            self.vllm_generation.attach(self)
            self.vllm_generation.wrap_sync(self.rows.phase("sync"))
        if is_peft_model(self.model):
            reject_shards(self.accelerator)
            if self.use_vllm:
                self.vllm_generation.stream_parameters_from(partial(merge_parameters, self.vllm_generation.model))
        if source is not None:
            source.attach(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and let FSDP2 return log-probs in float32."""
        super().create_accelerator_and_postprocess()
        keep_outputs_as_computed(self.accelerator)

    # --- for other objects: trainer_protocol.Trainer, protocol.InnerTrainer ----------------------------------------

    def note_loaded_step(self, step: int) -> None:
        """Store the optimizer step of the weights that vLLM now has."""
        self._last_loaded_step = step

    def add_metric(self, name: str, value: float, mode: Mode = "train") -> None:
        """Add a value to a metric. TRL logs the mean of its values over a step or an evaluation."""
        self._metrics[mode][name].append(value)

    @contextmanager
    def with_settings(self, **settings: Any) -> Iterator[None]:
        """Set these attributes of the trainer in the block, and restore them afterwards."""
        outer_settings = {name: getattr(self, name) for name in settings}
        vars(self).update(settings)
        try:
            yield
        finally:
            vars(self).update(outer_settings)

    def sampling_with(
        self, *, temperature: float | None = None, top_p: float | None = None, max_completion_length: int | None = None
    ) -> AbstractContextManager[None]:
        """Sample with these settings in the block. ``None`` keeps the value that the training uses."""
        settings = {"temperature": temperature, "top_p": top_p, "max_completion_length": max_completion_length}
        return changing_sampling(self, {name: value for name, value in settings.items() if value is not None})

    # --- a training: epochs of steps -------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as in transformers. On a stop request, save the last completed step and raise StoppedOnRequest."""
        with suppress(Stopped):  # its traceback would hold memory that saving needs
            return super().train(*args, **kwargs)
        raise self.preemption.save_last_step()

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Build TRL's sampler of prompts, and store it: checkpoints and sampling ahead need its order."""
        sampler: Any = super()._get_train_sampler(dataset)
        self.sampler = sampler
        return sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch with an order of prompts that depends only on its number.

        Run nothing if the last step was taken (transformers would take one more) or a callback had ended the training.
        """
        epoch, checkpoint = kwargs["epoch"], kwargs["resume_from_checkpoint"]
        is_over = ended_by_callback(checkpoint) or self.state.global_step >= self.state.max_steps
        self.control.should_training_stop |= is_over
        if self.control.should_training_stop:
            return
        begin_epoch(self.sampler, epoch)
        is_resumed = checkpoint is not None and epoch == kwargs["epochs_trained"]
        skips_data = is_resumed and not self.args.ignore_data_skip
        self.rollouts.begin_epoch(epoch, kwargs["steps_trained_in_current_epoch"] if skips_data else 0)
        with suppress(TrainingEnded):
            super()._run_epoch(*args, **kwargs)
        self.preemption.record_completed_step()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a micro-step as in TRL: sample, score and weigh first if a generation has been used up. Return the loss.

        First repeat an evaluation that a stop request ended. After the last micro-step of a step, move beta and tau.
        """
        if self.evaluation.owed:
            repeat_owed_evaluation(self)
        self.rows.begin_update()
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:  # the last use of this optimizer step's coefficients
            self.move_controllers()
        return loss

    # --- sample, score, weigh --------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Generate and score completions as TRL does, and check that the sampler has the trainer's weights.

        In training, also replace TRL's advantages if ``weigh`` returns others, add the teacher's, and write rewards and
        some samples to ``samples.jsonl``. Return the inputs of TRL's loss. Raise WeightsDiffer if the check fails.
        """
        is_training, transfers, step = self.model.training, self.rollouts.transfers, self.state.global_step
        name = f"{step}/{self._step}" if is_training else f"eval/{step}/{self.evaluation.batch}"
        self.rollouts.seeds.name_generation(name)
        if self.source is not None:
            self.source.start_generation(inputs, name)
        if self.dynamic_sampling is not None and is_training:
            self.dynamic_sampling.start_generation(inputs, name)
        output = self.sample_and_score(inputs)
        if is_training:
            self.rows.record_prompt_values(inputs)
            with self.rows.span("weigh"):
                advantages_PG = self.weigh(output)
            if advantages_PG is not None:
                replace_advantages(self, output, advantages_PG)
            if self._teacher is not None:
                with self.rows.span("teacher"):
                    self._teacher.add_advantages(output)
            if self.accelerator.is_main_process and self.args.report_samples > 0:
                episodes = self.source.records if self.source else None
                answers = [row.get("answer") for row in inputs]
                write_samples(self._samples_file, self, answers, self._completion_ids, output, episodes)
        self.checks.check_server(output, synced=self.rollouts.transfers != transfers)
        if self.source is not None:
            self.source.finish_generation(output)
        return output

    def sample_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample and score this rank's prompts. Return TRL's inputs of the loss, with missing completions masked."""
        output = super()._generate_and_score_completions(inputs)
        self.rollouts.mask_failed(output)
        if self.source is not None:
            self.source.annotate(self, output)
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        """Generate as in TRL, and replace groups of equal rewards. Return a source's messages instead of texts."""
        generated = super()._generate(prompts)
        if self.dynamic_sampling is not None and self.model.training:
            self.dynamic_sampling.replace_groups(prompts, generated, super()._generate)
        self._completion_ids = generated[1]
        if self.source is None:
            return generated
        self.temperature_B = self.source.temperatures
        prompt_ids, completion_ids, tool_mask, _, *extra_fields = generated
        return prompt_ids, completion_ids, tool_mask, self.source.completions(), *extra_fields

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Send vLLM the new weights if it lacks them; return completions' ids and log-probs. A stop raises Stopped."""
        with self.preemption.sampling(), self.rows.phase("sample"):
            ids_and_logprobs = self.rollouts.generate(partial(super()._generate_single_turn, *args, **kwargs))
        self.preemption.stop_if_agreed()
        return ids_and_logprobs

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        """Return all ranks' rewards of the completions, (B, rewards); an unscored completion's whole row is NaN."""
        if self.dynamic_sampling is not None and (scored_BR := self.dynamic_sampling.take_rewards()) is not None:
            self.rewards_BR = scored_BR
            return scored_BR
        self.scoring.begin(len(prompts))
        with self.preemption.cutting_short(), self.rows.phase("score"):
            rewards_BR: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.preemption.stop_if_agreed()
        self.scoring.mark_failed(rewards_BR)
        self.scoring.mark_unscored(rewards_BR, prompts, completions)
        if self.evaluation.rewards is not None:
            self.evaluation.add(rewards_BR, completions)
        self.rewards_BR = rewards_BR
        return rewards_BR

    def weigh(self, output: dict[str, Any]) -> torch.Tensor | None:
        """Set the estimator's or the source's advantages in ``output``; return None. Subclasses may return (P, G)."""
        if self.args.advantage_estimator != "group":
            replace_advantages(self, output, estimate_advantages(self))
        if self.source is not None and (advantages := self.source.token_advantages(self, output)) is not None:
            output["advantages"], rows_B = advantages
            replace_logged_advantages(self, rows_B)
        return None

    # --- update ----------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return the rows of a micro-batch. After a generation, sort the rows of each step by length first."""
        earlier = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is earlier:  # nothing was generated, or in an evaluation
            return inputs
        self._buffered_inputs = self.micro_batches.sort(self._buffered_inputs)
        inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute TRL's loss of a micro-batch, each row at its own temperature. A LossCallback may replace it."""
        with self.with_settings(temperature_B=inputs.get("temperature")):
            compute = super()._compute_loss
            if self.args.loss_type == "gmpo":
                compute = partial(compute_geometric_mean_loss, self, self._shared_logps, compute)
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, LossCallback) and model.training:
                    compute = partial(callback.loss, self, compute)
            loss: torch.Tensor = compute(model, inputs)
        self.micro_batches.weight_token_means(self._metrics["train"], inputs)
        return loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, *args: Any, **kwargs: Any,
    ) -> Computed:  # fmt: skip
        """Return TRL's log-probs of completions, (B, T), with little padding and each row at its own temperature."""
        if self.evaluation.rewards is not None:  # the sampler's batch is too large for one forward pass
            batch_size = self.args.per_device_train_batch_size
        compute = super()._get_per_token_logps_and_entropies
        if self.args.trim_padding:
            compute = partial(compute_in_trimmed_passes, self, compute)
        if self.temperature_B is not None:
            compute = partial(compute_at_own_temperatures, self, self.temperature_B, compute)
        rows = model, input_ids, attention_mask, logits_to_keep
        return self._shared_logps.reuse(partial(compute, *rows, batch_size, compute_entropy, *args, **kwargs))

    def loss_and_policy_gradient_term(
        self, compute: Compute, model: Any, rows: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return TRL's loss of a micro-batch, and the same loss without KL divergence and entropy bonus.

        Both use the same log-probs. The second computation logs no metrics.
        """
        only_policy_gradient = {
            "beta": 0.0, "_entropy_bonus_enabled": False, "aux_loss_enabled": False,
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        }  # fmt: skip
        with self._shared_logps.shared():
            loss = compute(model, rows)
            with torch.no_grad(), self.with_settings(**only_policy_gradient):
                return loss, compute(model, rows)

    def move_controllers(self) -> None:
        """Adjust ``beta`` so that the KL divergence approaches ``kl_target``. Without a target, do nothing.

        The metric ``beta`` gets the value that this step used.
        """
        if self._kl_controller:
            self.add_metric("beta", self.beta)
            self.beta = update_beta(self, self._kl_controller)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """Return the gradient norm as a number; None without one. Raise NotFinite if it or the loss is not finite."""
        return self.checks.check_gradient(super()._get_grad_norm(model, grad_norm=grad_norm))

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Log, save and evaluate after a step. Save too if a callback ends the training. NotFinite for bad weights.

        Then raise Stopped if a stop was requested. At the end of an epoch, ``_run_epoch`` does that.
        """
        self.checks.check_weights()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            self._save_checkpoint(model, trial)
            self.checkpoints.mark_ended()
        if self.state.epoch != int(self.state.epoch):  # at the end of an epoch, an evaluation follows
            self.preemption.record_completed_step()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as in TRL, and add a row to ``metrics.jsonl`` for every optimizer step.

        The table of completions of a step belongs to the training, so evaluations write none.
        """
        log_completions = self.log_completions
        self.log_completions = log_completions and not self.evaluation.is_running
        try:
            super().log(logs, start_time)
        finally:
            self.log_completions = log_completions
        # It becomes trainer_state.json.
        self.state.log_history[-1] = {key: to_json_number(value) for key, value in self.state.log_history[-1].items()}
        if "loss" in logs:
            self.rows.write(logs)

    # --- sync ------------------------------------------------------------------------------------------------------
    # Before each generation TRL sends the weights of a new step; _generate_and_score_completions checks them.

    def serve_final_weights(self) -> None:
        """Set the model to eval; send vLLM the last weights if it lacks them. Raise WeightsDiffer if others arrive."""
        self.model.eval()
        sent = self.rollouts.serve_weights()
        if sent and self.rollouts.guarded and (error := self.checks.check_final_weights()):
            raise WeightsDiffer(f"{error}; no benchmark was run")

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint with transformers' method, in a folder that is renamed once it is complete."""
        with self.rows.phase("save"):
            self.checkpoints.save(partial(super()._save_checkpoint, model, trial))

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder that transformers writes checkpoints to: during a save, the folder for incomplete ones."""
        return str(self.checkpoints.staging or super()._get_output_dir(trial))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states, and the state that transformers does not save."""
        super()._save_rng_state(output_dir)
        self.checkpoints.save_unsaved(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimizer, scheduler, reference and controllers on every resume, also with ``ignore_data_skip``."""
        if checkpoint is not None:
            load = partial(super()._load_optimizer_and_scheduler, checkpoint)
            self.checkpoints.load_optimizer(Path(checkpoint), load)
            if self._kl_controller:
                self.beta = self._kl_controller.beta

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore this rank's random and other state. Raise FileNotFoundError or ValueError if a part is missing."""
        if checkpoint is not None:
            self.checkpoints.load_random_states(Path(checkpoint), partial(super()._load_rng_state, checkpoint))

    # --- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate a set, or each set of a dict, as in transformers, and add a row for each to ``eval.jsonl``.

        Rows of sets other than ``self.eval_dataset`` have ``set`` (key or prefix) and ``eval_<set>_reward``. If a
        stop request ends it, write no row and return {}. Sets in ``earlier_metrics`` are not evaluated again.
        """
        name = self.evaluation.get_set_name(eval_dataset, metric_key_prefix)
        if name in self.evaluation.earlier_metrics:
            return dict(self.evaluation.earlier_metrics[name])
        metrics: dict[str, float] = {}
        with self.evaluation.running(name):
            self.preemption.stop_if_agreed()  # saving comes first, because only seconds may be left
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as in transformers, with the metrics of ``evaluate``. Write no row. After a stop, they are {}."""
        nothing: Any = None
        output = PredictionOutput(predictions=nothing, label_ids=None, metrics={})
        with self.evaluation.running():
            output = super().predict(*args, **kwargs)
        return output

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Run the evaluation that is due at this step, and return its metrics.

        If a stop request ends it, return {}, and the resumed run repeats it. ``eval_on_start`` evaluates only before
        the first step, not when a run resumes.
        """
        on_start = skip_scheduler  # transformers sets it only for eval_on_start, also in a resumed run
        metrics: dict[str, float] = {}
        if on_start and self.state.global_step > 0:
            return metrics
        if on_start:
            self.evaluation.read_earlier_metrics()
        with self.evaluation.owed_if_stopped():
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if on_start:
            self.preemption.stop_if_agreed()  # before the first step: nothing is saved
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Update the best metric as in transformers. Return False, without an error, after a stopped evaluation."""
        return self.best.update(metrics, partial(super()._determine_best_metric, metrics, trial))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the training as in transformers, which loads the best model if the recipe says so."""
        self.best.finish()
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint with transformers' method, after its files were verified."""
        self.best.load(super()._load_best_model)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Run transformers' loop over a set, and average rewards over every completion once, also in the last batch."""
        options = (prediction_loss_only, ignore_keys, metric_key_prefix)
        run = partial(super().evaluation_loop, dataloader, description, *options)
        return self.evaluation.loop(run, dataloader, description, metric_key_prefix)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count the batch and evaluate it."""
        self.evaluation.start_batch()
        return super().prediction_step(*args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Build TRL's loader, always a new one for a Dataset: transformers would reuse the loader of an earlier set."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            return super().get_eval_dataloader(eval_dataset)
        loaders, self._eval_dataloaders = getattr(self, "_eval_dataloaders", {}), {}
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self._eval_dataloaders = loaders

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Build the loader of an evaluation for ``predict``. transformers' own does not repeat a stream's prompts."""
        return self.get_eval_dataloader(test_dataset)

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Build transformers' loader. In an evaluation, count the rows of a stream, whose length is unknown."""
        if description == "Evaluation" and isinstance(dataset, datasets.IterableDataset):
            dataset = CountedStream(dataset)
        return super()._get_dataloader(dataset, description, *args, **kwargs)
