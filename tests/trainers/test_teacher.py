"""On-policy distillation in real trainers: advantages of tokens, and TRL's losses with the same definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rank_processes import run_ranks
from transformers import AutoModelForCausalLM
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

from grpo_recipes import smoke
from grpo_recipes.algorithms.objectives import compare_with_teacher
from grpo_recipes.errors import ConfigError
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.teacher import check_teacher_tokenizer

from . import teacher_ranks
from .fixed_completions import GROUP, generation, make_trainer, rows_of
from .test_objectives import compute_logps
from .tiny_training import ON_CPU

NAN = math.nan
ALONE = {"reward_weights": [0.0]}


def read_logps(folder: str, rows: dict[str, Any], temperature: float) -> torch.Tensor:
    """Compute log-probs of completions, (B, T), with transformers' model and no code of ours."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids, attention_mask=mask).logits
    width = rows["completion_ids"].shape[1]
    logps = (logits[:, -width - 1 : -1] / temperature).log_softmax(dim=-1)
    return logps.gather(2, rows["completion_ids"].unsqueeze(2)).squeeze(2)


def test_a_token_gains_what_the_teacher_finds_it_more_likely(tmp_path: Path, model: str, teacher: str) -> None:
    keys = {"temperature": 0.7, "per_device_train_batch_size": 2 * GROUP}
    plain = generation(make_trainer(tmp_path / "plain", model, GRPOTrainer, **keys))
    trainer = make_trainer(
        tmp_path, model, GRPOTrainer, teacher_model_name_or_path=teacher, teacher_coef=0.5, **keys
    )  # fmt: skip
    rows = generation(trainer)
    mask = rows["completion_mask"]
    gains = (read_logps(teacher, rows, 0.7) - read_logps(model, rows, 0.7)) * mask
    expected = plain["advantages"].unsqueeze(1) + 0.5 * gains
    assert mask.min() == 0 and plain["advantages"].abs().max() > 0 and gains.abs().max() > 0.1
    torch.testing.assert_close(rows["advantages"], expected, rtol=0, atol=1e-5)
    lengths = mask.sum(1)
    assert list(trainer._logs["advantages"]) == pytest.approx(((expected * mask).sum(1) / lengths).tolist(), abs=1e-5)
    assert trainer._metrics["train"]["teacher_kl"] == pytest.approx([-float(gains.sum() / mask.sum())], abs=1e-5)


def test_the_samplers_log_probs_count_and_masked_tokens_get_none(tmp_path: Path, model: str, teacher: str) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, teacher_model_name_or_path=teacher, **ALONE)
    rows = generation(trainer)
    assert torch.equal(rows["advantages"] == 0, rows["completion_mask"] == 0)  # equal rewards of weight 0
    sampled = torch.full_like(rows["advantages"], -1.0)
    sampled[0, 0] = NAN  # vLLM has no log-prob for this token
    tools = torch.ones_like(rows["completion_mask"])
    tools[1] = 0  # not written by the policy
    mask = (rows["completion_mask"] * tools).bool()
    mask[0, 0] = False
    rows |= {"sampling_per_token_logps": sampled, "tool_mask": tools, "advantages": torch.full((2 * GROUP,), 0.25)}
    trainer._teacher.add_advantages(rows)
    gains = (read_logps(teacher, rows, 1.0) + 1.0).masked_fill(~mask, 0.0)
    torch.testing.assert_close(rows["advantages"], 0.25 + gains, rtol=0, atol=1e-5)


def test_golden_gains() -> None:
    teacher = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.25, NAN]])
    sampled = torch.tensor([[-1.5, -0.5, -0.5], [-1.0, NAN, -7.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert compare_with_teacher(teacher, sampled, mask).tolist() == [[0.5, -1.5, 0.0], [-2.0, 0.0, 0.0]]


@pytest.fixture
def make_trl_trainer(tmp_path: Path, model: str, teacher: str) -> Callable[[], IWOPDTrainer]:
    """Return a function that makes TRL's trainer for sampled on-policy distillation with the same two models.

    With ``iw_opd_gamma`` 0, all tokens have the weight 1, and its loss is minus the mean over tokens of log-prob times
    (teacher's log-prob - sampler's log-prob). CISPO's loss has the same form, with our advantages. TRL's
    DistillationTrainer and GKDTrainer sum over the vocabulary instead, and MiniLLM adds the gains of later tokens.
    """
    args = IWOPDConfig(
        output_dir=str(tmp_path / "trl"),
        distillation_objective="iw_opd",
        lmbda=1.0,
        iw_opd_gamma=0.0,
        max_completion_length=8,
        **{name: value for name, value in ON_CPU.items() if name != "gradient_checkpointing"},
    )
    return lambda: IWOPDTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher),
        args=args,
        train_dataset=Dataset.from_list([{"messages": [{"role": "user", "content": "1+1="}]}]),
        processing_class=smoke.build_tokenizer(),
    )


@pytest.mark.parametrize("loss", [{"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "dapo"}])
def test_loss_and_gradient_equal_those_of_trl(
    tmp_path: Path, model: str, teacher: str, make_trl_trainer: Callable[[], IWOPDTrainer], loss: dict[str, Any]
) -> None:
    keys = {**loss, "temperature": 1.0, "teacher_model_name_or_path": teacher, **ALONE}
    trainer = make_trainer(tmp_path, model, GRPOTrainer, **keys)
    rows = generation(trainer)
    actual = trainer._compute_loss(trainer.model, dict(rows))
    actual.backward()

    other = make_trl_trainer()
    other.model.train()
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    assert rows["prompt_mask"].min() == 1  # TRL reads where completions begin from the lengths
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : rows["prompt_ids"].shape[1]] = -100
    expected = other.compute_loss(other.model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    expected.backward()

    if loss["loss_type"] == "cispo":  # the loss of dapo has ratios instead of log-probs, with the same gradient
        assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = dict(other.model.named_parameters())
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)
    assert max(parameter.grad.abs().max() for parameter in trainer.model.parameters()) > 1e-3


def test_the_expected_gradient_is_that_of_the_reverse_kl(tmp_path: Path, model: str, teacher: str) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, teacher_model_name_or_path=teacher, **ALONE)
    rows = generation(trainer)
    vocabulary = trainer.model.config.vocab_size
    tokens = torch.arange(vocabulary).unsqueeze(1)  # every token after the first prompt
    every = {name: rows[name][:1].expand(vocabulary, -1) for name in ("prompt_ids", "prompt_mask")}
    every |= {"completion_ids": tokens, "completion_mask": torch.ones_like(tokens)}
    every |= {"advantages": torch.zeros(vocabulary), "num_items_in_batch": torch.tensor(vocabulary)}
    trainer._teacher.add_advantages(every)
    every["advantages"] *= vocabulary * compute_logps(trainer, every).detach().exp()  # the mean becomes the expectation
    trainer._compute_loss(trainer.model, every).backward()
    gradients = [parameter.grad.clone() for parameter in trainer.model.parameters()]
    trainer.model.zero_grad()

    logits = trainer.model(input_ids=rows["prompt_ids"][:1]).logits[:, -1:]
    with torch.no_grad():
        teacher_logits = AutoModelForCausalLM.from_pretrained(teacher)(input_ids=rows["prompt_ids"][:1]).logits[:, -1:]
    IWOPDTrainer.generalized_jsd_loss(logits, teacher_logits, beta=1.0).backward()  # reverse KL over the vocabulary
    for gradient, parameter in zip(gradients, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_generation_is_read_once_in_several_iterations(
    tmp_path: Path, model: str, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"num_iterations": 2, "max_steps": 4, "teacher_model_name_or_path": teacher, **ALONE}
    trainer = make_trainer(tmp_path, model, GRPOTrainer, **keys)
    read, add = [], trainer._teacher.add_advantages
    monkeypatch.setattr(trainer._teacher, "add_advantages", lambda rows: [read.append(trainer._step), add(rows)])
    before = [parameter.clone() for parameter in trainer._teacher._model.parameters()]
    trainer.train()
    assert len(read) == 2
    rows = rows_of(tmp_path)
    assert ["teacher_kl" in row for row in rows] == [True, False, True, False]
    assert all(row["grad_norm"] > 1e-3 for row in rows)
    assert all(map(torch.equal, before, trainer._teacher._model.parameters()))


def test_a_teacher_with_other_tokens_is_rejected_by_name(
    tmp_path: Path, model: str, teacher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more_tokens = smoke.build_tokenizer(smoke.MAFIA)
    message = r"^teacher_model_name_or_path: the teacher's tokenizer has no or another id for \d+ of \d+ tokens"
    with pytest.raises(ConfigError, match=message):
        check_teacher_tokenizer(teacher, more_tokens, False)
    more_tokens.save_pretrained(tmp_path / "more")
    check_teacher_tokenizer(str(tmp_path / "more"), smoke.build_tokenizer(), False)  # it knows all tokens of the model
    with pytest.raises(ConfigError, match="the teacher's tokenizer can't be loaded"):
        check_teacher_tokenizer(str(tmp_path), smoke.build_tokenizer(), False)

    smaller = AutoModelForCausalLM.from_pretrained(teacher)
    count = smaller.config.vocab_size
    smaller.resize_token_embeddings(count - 1)
    smaller.save_pretrained(tmp_path / "smaller")
    with pytest.raises(ConfigError, match=f"the teacher has {count - 1} embeddings, but the trained model has {count}"):
        make_trainer(tmp_path, model, GRPOTrainer, teacher_model_name_or_path=str(tmp_path / "smaller"))


def test_an_adapter_learns_from_a_teacher(tmp_path: Path, model: str, teacher: str) -> None:
    keys = {"teacher_model_name_or_path": teacher, "per_device_train_batch_size": 2 * GROUP, **ALONE}
    whole = generation(make_trainer(tmp_path / "whole", model, GRPOTrainer, **keys))
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path, model, GRPOTrainer, peft_config=adapter, **keys)
    torch.testing.assert_close(generation(trainer)["advantages"], whole["advantages"], rtol=0, atol=1e-5)
    trainer.train()
    assert all(row["grad_norm"] > 1e-3 for row in rows_of(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["zero3", "fsdp2", "multi_gpu"])
def test_ranks_that_share_a_teacher_take_the_steps_of_one(
    tmp_path: Path, model: str, teacher: str, accelerator: str
) -> None:
    expected = teacher_ranks.train(tmp_path / "one", model, teacher, ranks=1)
    outputs = run_ranks(
        "trainers.teacher_ranks", str(tmp_path / "two"), model, teacher, accelerator=accelerator, seconds=540
    )
    for output in outputs:
        logged = [list(map(float, line.split()[1:])) for line in output.splitlines() if line.startswith("logged ")]
        for values, row in zip(logged, expected, strict=True):
            assert values == pytest.approx([row[name] for name in ("teacher_kl", "loss", "grad_norm")], rel=1e-3)
    assert expected[0]["teacher_kl"] != pytest.approx(expected[-1]["teacher_kl"], rel=1e-2)  # the steps had an effect
