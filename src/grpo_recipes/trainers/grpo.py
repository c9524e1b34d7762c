"""GRPO: TRL's trainer with our weight bridges, the guard, complete checkpoints, and a row of metrics a step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import broadcast_object_list, is_peft_model

from grpo_recipes.plan.server import seeds_sampling, server_state_file
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.advantages import Weighing
from grpo_recipes.trainers.checkpoints import CompleteCheckpoints
from grpo_recipes.trainers.evaluation import Evaluation
from grpo_recipes.trainers.exact_resume import ExactResume
from grpo_recipes.trainers.finite import FiniteSteps
from grpo_recipes.trainers.kl_controller import Controllers
from grpo_recipes.trainers.lora import merged_parameters, refuse_shards
from grpo_recipes.trainers.metrics import MetricsRows
from grpo_recipes.trainers.preemption import Stopping
from grpo_recipes.trainers.reference import SyncedReference, loaded_by_every_rank
from grpo_recipes.trainers.samples import SampledTexts
from grpo_recipes.trainers.scoring import Scoring
from grpo_recipes.weights.bridges import bridge_in_place
from grpo_recipes.weights.client import ClientSettings
from grpo_recipes.weights.guard import TOLERANCES, WeightsDiffer, logprob_verdict


class GRPOTrainer(
    FiniteSteps,
    SampledTexts,
    Evaluation,
    Weighing,
    Scoring,
    Stopping,
    MetricsRows,
    Controllers,
    SyncedReference,
    CompleteCheckpoints,
    ExactResume,
    trl.GRPOTrainer,
):
    """TRL's ``GRPOTrainer``. Takes its arguments, with ``args`` a ``configs.GRPOConfig``, and those of its mixins.

    Among these is ``reward_max_no_verdict``, the share of a generation's completions without a verdict that ends the
    run (``trainers.scoring``), and ``stop``, the request to stop that is looked at (``trainers.stopping``).

    Args:
        run_dir: where ``metrics.jsonl``, ``eval.jsonl``, ``samples.jsonl`` and ``slow_rewards.jsonl`` go.
    """

    args: GRPOConfig
    _unproven = False

    def __init__(self, *, args: GRPOConfig, run_dir: Path, **kwargs: Any):
        with self._bridge(args, run_dir), loaded_by_every_rank(args):
            super().__init__(args=args, run_dir=run_dir, **kwargs)
        if is_peft_model(self.model):
            refuse_shards(self.accelerator)
            if self.use_vllm:
                self.vllm_generation._iter_named_params = partial(merged_parameters, self.vllm_generation.model)

    @staticmethod
    def _bridge(args: GRPOConfig, run_dir: Path) -> AbstractContextManager[None]:
        if not args.use_vllm or args.vllm_mode != "server":
            return nullcontext()
        settings = ClientSettings(
            served_name=os.environ["GRPO_RUN"],
            request_timeout=args.server_request_timeout,
            guard=args.weight_guard,
            seed=args.seed if seeds_sampling(args.seed_server, args.use_cpu) else None,
            sync_dir=Path(os.environ["GRPO_SYNC_DIR"]),
            state_file=server_state_file(run_dir),
            start_timeout=args.vllm_server_timeout,
        )
        return bridge_in_place(args.weight_sync, settings)

    @property
    def _guarded(self) -> bool:
        return self.use_vllm and self.args.vllm_mode == "server" and self.args.weight_guard

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample and score as TRL does, then have the guard look at the first batch after a weight sync."""
        synced = self._last_loaded_step if self.use_vllm else None
        self._name_generation()
        output = super()._generate_and_score_completions(inputs)
        if self._guarded and (self._last_loaded_step != synced or self._unproven):
            self._check_weights(output)
        return output

    def _name_generation(self) -> None:
        """Tell the client which generation this is: sampling seeds come from it."""
        client = getattr(getattr(self, "vllm_generation", None), "vllm_client", None)
        if client is not None:
            place = f"{self.state.global_step}/{self._step}"
            client.generation = place if self.model.training else f"eval/{self.state.global_step}/{self._eval_batch}"

    def _check_weights(self, output: dict[str, Any]) -> None:
        """Stop every rank unless the server holds and uses the trainer's weights.

        A batch without a scored token proves nothing: the next one is looked at too.

        Raises:
            WeightsDiffer: on every rank, before an update is computed from this batch.
        """
        held = self._checksum_verdict()
        difference = self._logprob_difference(output)
        self._unproven = difference is None
        verdict = held or logprob_verdict(self.args.weight_sync, difference or 0.0, self._logprob_tolerance())
        if verdict:
            raise WeightsDiffer(f"{verdict}; step {self.state.global_step} was not taken")

    def _checksum_verdict(self) -> str | None:
        """What the last sync's checksum said, on every rank."""
        verdicts = [self.vllm_generation.vllm_client.verdict if self.accelerator.is_main_process else None]
        broadcast_object_list(verdicts, from_process=0)
        return verdicts[0]

    def serve_final_weights(self) -> None:
        """After training, have whatever samples use the weights of the last step. Called by every rank.

        Raises:
            WeightsDiffer: on every rank, when the server does not hold them.
        """
        self.model.eval()
        if not self.use_vllm:
            return
        generation = self.vllm_generation
        asleep = generation.mode == "colocate" and generation.enable_sleep_mode
        if self._last_loaded_step != self.state.global_step or asleep:
            generation.sync_weights()
            self._last_loaded_step = self.state.global_step
            if self._guarded and (verdict := self._checksum_verdict()):
                raise WeightsDiffer(f"{verdict}; no benchmark was run on it")
        if asleep:
            generation.llm.wake_up(tags=["kv_cache"])

    def _logprob_difference(self, output: dict[str, Any]) -> float | None:
        """Mean |trainer - server| log-prob of the sampled tokens over all ranks.

        Returns:
            NaN when the server scored none of the tokens, None when there are none to look at.

        Raises:
            NotFinite: on every rank, when the trainer's own are not finite: the server is not to blame.
        """
        if (self.top_p, self.top_k, self.min_p or 0.0, self.repetition_penalty) != (1.0, 0, 0.0, 1.0):
            return 0.0  # the server's log-probs are those of a truncated distribution: nothing to compare
        logps = output.get("old_per_token_logps")
        if logps is None or self._drops_out:
            logps = self._trainer_logps(output)
        mask = output["completion_mask"].bool()
        own = logps[mask]
        delta = (own - output["sampling_per_token_logps"][mask]).abs()
        known = ~delta.isnan()
        counts = (known.sum(), (~known).sum(), (~own.isfinite()).sum())
        sums = torch.stack([delta[known].sum(), *(count.to(delta.dtype) for count in counts)])
        total, count, unscored, broken = self.accelerator.gather(sums.unsqueeze(0)).sum(dim=0).tolist()
        if broken:
            raise self.not_finite(
                f"{broken:.0f} log-probs of the trained model are not finite before step {self.state.global_step + 1}"
            )
        if count == 0:
            return math.nan if unscored else None
        return total / count

    @property
    def _drops_out(self) -> bool:
        return any(isinstance(layer, torch.nn.Dropout) and layer.p > 0 for layer in self.model.modules())

    def _trainer_logps(self, output: dict[str, Any]) -> torch.Tensor:
        """Log-probs of the completions, (B, T), which TRL computes only for its importance-sampling correction.

        Without dropout, as the server's: TRL's are those of a model in training.
        """
        prompt, completion = output["prompt_ids"], output["completion_ids"]
        with torch.no_grad(), _evaluating(self.model):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([prompt, completion], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                completion.size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return logps

    def _logprob_tolerance(self) -> float:
        if self.args.weight_guard_tolerance is not None:
            return self.args.weight_guard_tolerance
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        if dtype == "float32" and (self.args.bf16 or self.args.fp16):
            dtype = "bfloat16" if self.args.bf16 else "float16"
        return TOLERANCES[dtype]


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
