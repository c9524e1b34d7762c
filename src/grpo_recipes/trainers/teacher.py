"""On-policy distillation: a frozen teacher adds advantages of tokens, on the policy's own samples.

The advantage of a token gains ``teacher_coef`` times its log-prob under the teacher minus its log-prob when it was
sampled. A teacher is held like a reference model: a copy on each rank, or a shard with ZeRO-3 and FSDP. It reads each
generation once, also with several iterations.

    teacher = Teacher(trainer)
    teacher.add_advantages(output)  # output["advantages"] is (B, T) afterwards
"""

from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, disable_dropout_in_model

from grpo_recipes.algorithms.objectives import compare_with_teacher
from grpo_recipes.errors import config_error
from grpo_recipes.recipe.teacher import FIX, KEY, describe_other_tokens
from grpo_recipes.trainers.advantages import replace_logged_advantages
from grpo_recipes.trainers.checks import compute_trainer_logps
from grpo_recipes.trainers.loss_inputs import sampled_logps, trained_mask
from grpo_recipes.trainers.model import as_config_error
from grpo_recipes.trainers.protocol import InnerTrainer


class Teacher:
    """The teacher of a trainer, ``args.teacher_model_name_or_path``, in the type of the forward pass.

    Raise ConfigError if it has fewer embeddings than the trained model.
    """

    def __init__(self, trainer: InnerTrainer):
        """Load the teacher, frozen and without dropout, and let DeepSpeed, FSDP or accelerate prepare it."""
        self._trainer, args = trainer, trainer.args
        kwargs = {"dtype": trainer.model.dtype, **(args.model_init_kwargs or {}), "device_map": None}
        kwargs.pop("revision", None)  # the trained model's
        if args.bf16 or args.fp16:
            kwargs["dtype"] = torch.bfloat16 if args.bf16 else torch.float16
        kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        model: Any = create_model_from_path(str(args.teacher_model_name_or_path), **kwargs)
        networks: tuple[Any, Any] = model, trainer.model
        size, needed = (network.config.get_text_config().vocab_size for network in networks)
        if size < needed:  # the trained model may sample tokens that the teacher does not know
            raise config_error(KEY, f"the teacher has {size} embeddings, but the trained model has {needed}", FIX)
        model.requires_grad_(False)
        disable_dropout_in_model(model)
        add_fused_lm_head(model, trainer.temperature)
        if trainer.is_deepspeed_enabled:
            model = prepare_deepspeed(model, trainer.accelerator)
        elif trainer.is_fsdp_enabled:
            model = prepare_fsdp(model, trainer.accelerator)
        else:
            model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
        self._model = model

    def add_advantages(self, output: dict[str, Any]) -> None:
        """Add the teacher's advantages of tokens to the loss inputs ``output``, and log ``teacher_kl``.

        ``output["advantages"]``, (B,) or (B, T), becomes (B, T). Masked tokens and tokens without a log-prob of the
        sampler get none. Tables show the mean over the tokens of a completion. Called by every rank.
        """
        trainer = self._trainer
        teacher_BT = compute_trainer_logps(trainer, output, self._model)
        sampled_BT = sampled_logps(output)
        if sampled_BT is None:  # transformers sampled, with the weights of this step
            sampled_BT = compute_trainer_logps(trainer, output)
        mask_BT = trained_mask(output).bool()
        distilled_BT = compare_with_teacher(teacher_BT, sampled_BT, mask_BT & ~sampled_BT.isnan())
        advantages = output["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        output["advantages"] = advantages = advantages + trainer.args.teacher_coef * distilled_BT
        sums = [values_BT.sum(dim=1) for values_BT in (advantages * mask_BT, distilled_BT, mask_BT)]
        sums_B3 = trainer.accelerator.gather(torch.stack(sums, dim=1).float())
        replace_logged_advantages(trainer, sums_B3[:, 0] / sums_B3[:, 2].clamp(min=1))
        _, distilled, tokens = sums_B3.sum(dim=0).tolist()
        trainer.add_metric("teacher_kl", -distilled / max(tokens, 1))


def check_teacher_tokenizer(name: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> None:
    """Raise ConfigError if the tokenizer of the teacher ``name`` gives a token of ``tokenizer`` another id."""
    with as_config_error((OSError, ValueError), KEY, "the teacher's tokenizer can't be loaded", FIX):
        teacher = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if difference := describe_other_tokens(teacher.get_vocab(), tokenizer.get_vocab()):
        raise config_error(KEY, difference, FIX)
