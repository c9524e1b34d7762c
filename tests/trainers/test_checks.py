"""Non-finite numbers or samples from other weights end the run with a reason, before anything is saved."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from grpo_recipes.runs.checkpoints import list_complete_checkpoints
from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.trainers.checks import MOST_SKIPPED, Checks, NotFinite, choose_logprob_tolerance
from grpo_recipes.trainers.model import get_local_shard
from grpo_recipes.weights.guard import WeightsDiffer

from .tiny_training import train


class Poison(TrainerCallback):
    """At the start of a step, set the weights to NaN (and so the loss), or add a hook that makes gradients infinite."""

    def __init__(self, step: int, part: str):
        self._step, self._part = step, part
        self.before: list[torch.Tensor] = []

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step + 1 != self._step:
            return
        self.model = model
        first = next(model.parameters())
        if self._part == "loss":
            first.data.fill_(math.nan)
        else:
            first.register_hook(lambda gradient: gradient * math.inf)
        self.before = [parameter.detach().clone() for parameter in model.parameters()]

    def on_optimizer_step(self, args, state, control, **_):
        assert state.global_step + 1 != self._step, "the update was taken"


@pytest.mark.parametrize(("part", "values"), [("loss", "loss nan, gradient norm nan"), ("gradient", "norm nan")])
@pytest.mark.parametrize("cut", [1.0, 0.0])
def test_a_step_that_is_not_finite_is_not_taken(tmp_path: Path, part: str, values: str, cut: float) -> None:
    poison = Poison(4, part)
    with pytest.raises(NotFinite) as told:
        train(
            tmp_path / "run", callbacks=(poison,), save_strategy="steps", save_steps=2, max_grad_norm=cut,
            logging_nan_inf_filter=True,
        )  # fmt: skip
    message = str(told.value)
    assert (
        values in message and "in step 4, which was not taken; the last complete checkpoint is checkpoint-2" in message
    )
    assert "lower learning_rate (now 0.001)" in message and ("max_grad_norm: 1.0" in message) == (cut == 0)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert [path.name for path in list_complete_checkpoints(tmp_path / "run/checkpoints")] == ["checkpoint-2"]
    for now, before in zip(poison.model.parameters(), poison.before, strict=True):
        torch.testing.assert_close(now.detach(), before, equal_nan=True, rtol=0, atol=0)


def test_weights_that_a_step_made_infinite_are_never_saved(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=r"weights are not finite after step 1 \(norm inf\); there is no checkpoint"):
        train(tmp_path / "run", optim="sgd", learning_rate=1e38, max_grad_norm=0.0, save_strategy="steps", save_steps=1)
    assert list_complete_checkpoints(tmp_path / "run/checkpoints") == []


def test_a_model_that_was_never_finite_is_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match=r"there is no checkpoint yet\. Fix: no step was taken: check the model's"):
        train(tmp_path / "run", callbacks=(Poison(1, "gradient"),))


def checks(folder: Path, norms: list[float | None] = (), loss: float = 0.5, **keys: object) -> Checks:
    """Make checks that have received the gradient norms of some steps."""
    args = {"fp16": False, "learning_rate": 1e-6, "max_grad_norm": 1.0, "output_dir": str(folder), **keys}
    state = SimpleNamespace(global_step=3)
    trainer_checks = Checks(SimpleNamespace(args=SimpleNamespace(**args), state=state, _tr_loss=torch.tensor(loss)))
    for norm in norms:
        trainer_checks.check_gradient(None if norm is None else torch.tensor(norm))
    return trainer_checks


def test_fp16_may_skip_steps_but_not_for_ever(tmp_path: Path) -> None:
    assert checks(tmp_path, [math.inf] * MOST_SKIPPED + [1.0] + [math.nan] * MOST_SKIPPED, fp16=True)
    with pytest.raises(NotFinite, match="set bf16: true instead of fp16"):
        checks(tmp_path, [math.inf] * (MOST_SKIPPED + 1), fp16=True)
    with pytest.raises(NotFinite):
        checks(tmp_path, [math.inf])


def test_a_loss_that_is_no_number_is_no_skipped_step(tmp_path: Path) -> None:
    checks(tmp_path, [1.0, None], fp16=True)  # DeepSpeed may have no norm
    with pytest.raises(NotFinite, match=r"loss nan, gradient norm 1\.0 in step 4"):
        checks(tmp_path, [1.0], loss=math.nan, fp16=True)


def test_the_norm_is_handed_on_as_a_number_so_that_the_device_is_asked_once(tmp_path: Path) -> None:
    trainer_checks = checks(tmp_path)
    assert trainer_checks.check_gradient(torch.tensor(0.25)) == 0.25 and trainer_checks.check_gradient(None) is None


def test_of_a_sharded_parameter_each_process_checks_its_own_part() -> None:
    whole, shard = torch.nn.Parameter(torch.zeros(4)), torch.ones(2)
    assert get_local_shard(whole).data_ptr() == whole.data_ptr()
    whole.ds_tensor = shard  # ZeRO-3
    assert get_local_shard(whole) is not whole and torch.equal(get_local_shard(whole), shard)
    distributed = SimpleNamespace(to_local=lambda: shard)  # FSDP2
    assert get_local_shard(SimpleNamespace(detach=lambda: distributed)) is shard  # type: ignore[arg-type]


def test_the_guard_does_not_blame_the_server_for_the_trainers_own_numbers() -> None:
    with pytest.raises(NotFinite, match="2 log-probs of the trained model are not finite before step 3"):
        difference([[-1.0, -1.0]], [[1, 1]], trainer_logp=math.nan)


# --- log-probs of trainer and server ---------------------------------------------------------------------------------

NAN = math.nan


def difference(
    server: list[list[float]], mask: list[list[int]], trainer_logp: float = -1.0, evaluates: bool = False,
    otherwise: bool = False, **sampling: Any,
) -> float | None:  # fmt: skip
    """Return the log-prob difference for a trainer that computes ``trainer_logp`` for every token."""
    trainer = SimpleNamespace(
        evaluation=SimpleNamespace(has_own_sampling=otherwise),
        accelerator=SimpleNamespace(gather=lambda tensor: tensor),
        model=torch.nn.Identity().train(not evaluates),
        rollouts=SimpleNamespace(probes=False),
        state=SimpleNamespace(global_step=2),
        args=SimpleNamespace(output_dir="nowhere", fp16=False, learning_rate=1.0, max_grad_norm=1.0),
        **{"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, **sampling},
    )
    output = {
        "old_per_token_logps": torch.full((len(server), len(server[0])), trainer_logp),
        "sampling_per_token_logps": torch.tensor(server),
        "completion_mask": torch.tensor(mask),
    }
    return Checks(trainer).measure_logprob_difference(output)


@pytest.mark.parametrize(
    ("server", "mask", "expected"),
    [
        ([[-1.0, -1.5]], [[1, 1]], 0.25),
        ([[-1.0, -9.0]], [[1, 0]], 0.0),  # padding does not count
        ([[-1.5, NAN]], [[1, 1]], 0.5),  # one token the server could not score
        ([[-1.5, -1.0]], [[0, 0]], None),  # every completion masked: nothing was proved
    ],
)
def test_the_difference_is_a_mean_over_scored_tokens(server, mask, expected):
    assert difference(server, mask) == expected


def test_a_server_that_scores_nothing_proves_nothing_right():
    assert math.isnan(difference([[NAN, NAN]], [[1, 1]]))


def test_truncated_sampling_is_not_compared():
    assert difference([[-5.0, -5.0]], [[1, 1]], top_p=0.9) == 0.0


@pytest.mark.parametrize(
    ("dtype", "keys", "expected"),
    [
        (torch.float32, {}, 1e-3),
        (torch.bfloat16, {}, 5e-2),
        (torch.float32, {"bf16": True}, 5e-2),  # autocast computes in bfloat16
        (torch.float32, {"weight_guard_tolerance": 0.7}, 0.7),
    ],
)
def test_the_tolerance_follows_the_dtype_unless_the_recipe_names_one(dtype, keys, expected):
    args = SimpleNamespace(**{"weight_guard_tolerance": None, "bf16": False, "fp16": False, **keys})
    trainer = SimpleNamespace(args=args, model=torch.nn.Linear(1, 1, dtype=dtype))
    assert choose_logprob_tolerance(trainer) == expected


def test_the_tolerance_of_float32_on_gpus_allows_for_tf32():
    parameter = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    args = SimpleNamespace(weight_guard_tolerance=None, bf16=False, fp16=False)
    trainer = SimpleNamespace(args=args, model=SimpleNamespace(parameters=lambda: iter([parameter])))
    assert choose_logprob_tolerance(trainer) == 2e-2


def test_an_evaluation_that_samples_otherwise_is_not_compared_and_leaves_the_weights_unproven() -> None:
    """The server's log-probs use the evaluation's temperature, the trainer's use the training's temperature."""
    for otherwise, expected in ((True, None), (False, 0.25)):
        assert difference([[-1.0, -1.5]], [[1, 1]], evaluates=True, otherwise=otherwise) == expected
    assert difference([[-1.0, -1.5]], [[1, 1]], otherwise=True) == 0.25  # a training


def test_a_server_that_drifts_after_healthy_syncs_is_stopped_below_the_dtypes_tolerance() -> None:
    args = SimpleNamespace(weight_guard_tolerance=None, weight_sync="file", bf16=True, fp16=False)
    trainer = SimpleNamespace(
        args=args, model=torch.nn.Linear(1, 1), state=SimpleNamespace(global_step=4),
        rollouts=SimpleNamespace(guarded=True, bridge="file", checksum_error=lambda: None),
    )  # fmt: skip
    checks = Checks(trainer)
    differences = iter([1e-3, 2e-3, 1e-3, 1.5e-2, 3e-2])
    checks.measure_logprob_difference = lambda output: next(differences)  # type: ignore[method-assign]
    for _ in range(4):
        checks.check_server({}, synced=True)
    with pytest.raises(WeightsDiffer, match=r"0\.03 on the first batch exceeds 0\.02 \(weight_guard_tolerance\)"):
        checks.check_server({}, synced=True)
    args.weight_guard_tolerance = 0.5  # the recipe's own is not touched
    checks.measure_logprob_difference = lambda output: 0.4  # type: ignore[method-assign]
    checks.check_server({}, synced=True)
