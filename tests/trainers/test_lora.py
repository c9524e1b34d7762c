"""LoRA: each key changes the training, a transfer keeps the base model, a run resumes, the model is merged."""

from __future__ import annotations

import copy
import inspect
import json
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from trl import get_peft_config
from trl.generation.vllm_generation import VLLMGeneration

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import GRPOConfig, ModelConfig
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest
from grpo_recipes.trainers.checks import compute_trainer_logps
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.trainers.model import (
    check_adapter,
    load_lora_config,
    merge_parameters,
    reject_shards,
    save_model,
)
from grpo_recipes.weights.generation import Generation

from .resumed_ranks import StopAt
from .tiny_training import HELD_OUT, SUMS, as_dataset, different_characters, save_random_model

LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"]}
WINDOW = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
ONE_STEP = {"max_steps": 1, "steps_per_generation": 1, "gradient_accumulation_steps": 1}
TIMED = ("seconds/", "tokens_per_second", "step_time", "memory/", "syncs")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random two-layer model with its tokenizer for a run."""
    return save_random_model(tmp_path_factory.mktemp("base"))


def make_trainer(
    base: Path, folder: Path, lora: dict[str, Any], stop_at: int | None = None, cls: type = GRPOTrainer,
    reward: Any = different_characters, **keys: Any,
) -> GRPOTrainer:  # fmt: skip
    folder.mkdir(exist_ok=True)
    stop_file(folder).unlink(missing_ok=True)
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
        max_completion_length=4,
        num_generations=4,
        **{
            "save_strategy": "no",
            "use_vllm": False,
            "gradient_checkpointing": False,
            "max_steps": 2,
            "learning_rate": 1e-2,
            **WINDOW,
            **keys,
        },
    )
    return cls(
        model=str(base),
        reward_funcs=[reward],
        args=args,
        train_dataset=as_dataset(SUMS),
        eval_dataset=as_dataset(HELD_OUT) if args.eval_strategy != "no" else None,
        processing_class=smoke.build_tokenizer(),
        peft_config=load_lora_config(ModelConfig(model_name_or_path=str(base), **lora), False),
        callbacks=[StopAt(folder, stop_at)],
        run_dir=folder,
    )


def trained(trainer: GRPOTrainer, folder: Path) -> list[dict[str, Any]]:
    """Train or resume, and return the metrics rows without times."""
    checkpoint = find_newest_complete(folder / "checkpoints")
    with suppress(StoppedOnRequest):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def merged(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in merge_parameters(model)}


def adapted(base: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> PeftModel:
    """Return the model with an adapter that changes its outputs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    config = get_peft_config(ModelConfig(**LORA | keys))
    model = get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        {"use_peft": False},
        {"lora_r": 2},
        {"lora_alpha": 64},
        {"lora_dropout": 0.5},
        {"lora_target_modules": ["v_proj"]},
        {"lora_modules_to_save": ["lm_head"]},
        {"use_rslora": True},
        {"use_dora": True},
    ],
    ids=lambda key: next(iter(key)),
)
def test_every_key_changes_what_is_trained(base: Path, tmp_path: Path, key: dict[str, Any], stock) -> None:
    trainer = make_trainer(base, tmp_path, LORA | key, **ONE_STEP)
    trained(trainer, tmp_path)
    model = trainer.model
    after = merged(model) if isinstance(model, PeftModel) else weights(model)
    assert after.keys() == stock.keys()
    assert any(not torch.equal(after[name], stock[name]) for name in stock)
    assert any(not torch.equal(after[name], before) for name, before in weights(plain(base)).items())


@pytest.fixture(scope="module")
def stock(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("stock")
    trainer = make_trainer(base, folder, LORA, **ONE_STEP)
    trained(trainer, folder)
    return merged(trainer.model)


def plain(base: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.mark.parametrize(
    "keys",
    [{}, {"use_dora": True}, {"lora_modules_to_save": ["norm", "lm_head", "mlp"]}, {"lora_target_modules": ["o_proj"]}],
    ids=["plain", "dora", "modules-to-save", "one-layer"],
)
def test_merged_parameters_are_trls_and_leave_no_trace(base: Path, keys: dict[str, Any]) -> None:
    model = adapted(base, **keys)
    before = weights(model)
    sent = merged(model)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())

    # TRL would send these tensors: merged into the base weights, under the same names.
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model = model
    generation._dist = NotShared()
    expected = {name: tensor.clone() for name, tensor in VLLMGeneration._iter_named_params(generation)}
    assert list(sent) == list(expected) == [name for name, _ in plain(base).named_parameters()]
    assert all(torch.equal(sent[name], expected[name]) for name in sent)
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())  # the drift


class NotShared:
    """Stand-in for TRL's view of one process."""

    is_fsdp = False

    @staticmethod
    def gather_params(_: Any) -> Any:
        return torch.no_grad()


def test_trl_streams_through_the_method_that_is_replaced() -> None:
    assert list(inspect.signature(VLLMGeneration._iter_named_params).parameters) == ["self"]
    assert inspect.getsource(VLLMGeneration.sync_weights).count("self._iter_named_params()") == 4


class FakeGeneration(Generation):
    """Replace TRL's generation object, the owner of the server's client."""

    mode, tensor_parallel_size = "colocate", 1

    def __init__(self, model: PeftModel, **_: Any):
        self.model = model

    def sync_weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._iter_named_params())


def test_the_trainer_streams_merged_weights_to_vllm(base: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("grpo_recipes.weights.colocated.ColocatedGeneration", FakeGeneration)
    trainer = make_trainer(base, tmp_path, LORA, use_vllm=True, vllm_mode="colocate")
    sent = trainer.vllm_generation.sync_weights()
    assert [name for name, _ in sent] == [name for name, _ in plain(base).named_parameters()]


@pytest.mark.parametrize("keys", [{"use_dora": True}, {"lora_modules_to_save": ["embed_tokens", "mlp"]}])
def test_the_saved_model_computes_what_base_and_adapter_compute(base: Path, tmp_path: Path, keys) -> None:
    trainer = make_trainer(base, tmp_path, LORA | keys)
    trained(trainer, tmp_path)

    save_model(trainer, tmp_path / "model")

    assert sorted(path.name for path in tmp_path.glob("*model*")) == ["model"]
    assert not list((tmp_path / "model").glob("adapter*"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    parts = PeftModel.from_pretrained(plain(base), tmp_path / "adapter").eval()
    tokens = torch.arange(4, 44).view(4, 10)
    with torch.no_grad():
        logits, of_parts, of_base = (model(tokens).logits for model in (whole, parts, plain(base).eval()))
    torch.testing.assert_close(logits, of_parts, atol=1e-5, rtol=1e-5)
    assert (logits - of_base).abs().max() > 1e-2
    assert all(torch.equal(value, weights(whole)[name]) for name, value in merged(trainer.model).items())


@pytest.mark.parametrize("stop_at", [3, 4], ids=lambda step: f"step-{step}")
def test_a_resumed_run_equals_the_uninterrupted_one(base: Path, tmp_path: Path, uninterrupted, stop_at: int) -> None:
    keys = {"max_steps": 6, "beta": 0.1}
    first = make_trainer(base, tmp_path, RESUMED, stop_at, **keys)
    assert len(trained(first, tmp_path)) == stop_at
    saved = {path.name for path in (tmp_path / "checkpoints" / f"checkpoint-{stop_at}").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved

    second = make_trainer(base, tmp_path, RESUMED, **keys)

    rows, after = uninterrupted
    assert trained(second, tmp_path) == rows
    assert all(torch.equal(value, after[name]) for name, value in weights(second.model).items())


RESUMED = {**LORA, "lora_dropout": 0.1, "use_dora": True, "lora_modules_to_save": ["norm"]}


@pytest.fixture(scope="module")
def uninterrupted(base: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(base, folder, RESUMED, max_steps=6, beta=0.1)
    return trained(trainer, folder), weights(trainer.model)


@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        pytest.param(GRPOTrainer, {"beta": 0.1}, id="grpo"),
        pytest.param(
            MaxEntGRPOTrainer,
            {"maxent_objective": "weighted_mle", "maxent_beta": 1.0, "maxent_tau": 0.5},
            id="maxent",
        ),
    ],
)
def test_the_reference_is_the_base_model(base: Path, tmp_path: Path, cls: type, keys: dict[str, Any]) -> None:
    trainer = make_trainer(base, tmp_path, LORA | {"lora_modules_to_save": ["norm"]}, cls=cls, **keys)
    assert trainer.ref_model is None
    calls = []
    stock = trainer._get_per_token_logps_and_entropies

    def watched(model: Any, ids: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = stock(model, ids, mask, *args, **kwargs)
        if not result[0].requires_grad:
            calls.append((ids, mask, result[0]))
        return result

    trained(trainer, tmp_path)  # the adapter is not the one it began with
    trainer._get_per_token_logps_and_entropies = watched
    trainer.model.train()
    trainer._generate_and_score_completions([dict(trainer.train_dataset[0]) for _ in range(4)])

    ids, mask, reference = calls[-1]
    length = reference.size(1)
    with torch.no_grad():
        logits = plain(base)(ids, attention_mask=mask).logits[:, -length - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, ids[:, -length:, None]).squeeze(-1)
    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "tied", "message"),
    [
        ({"lora_target_modules": ["q_proj", "v_prj"]}, False, "lora_target_modules: the model has no layer 'v_prj'"),
        ({"lora_modules_to_save": ["head"]}, False, "lora_modules_to_save: the model has no layer 'head'"),
        ({"lora_target_modules": ["q_proj", "norm"]}, False, "PEFT can't add the adapter to this model"),
        ({"lora_modules_to_save": ["lm_head"]}, True, "'lm_head' shares its weights"),
        ({"lora_modules_to_save": ["embed_tokens"]}, True, "'embed_tokens' shares its weights"),
    ],
)
def test_an_adapter_that_does_not_fit_the_model_is_refused(keys: dict[str, Any], tied: bool, message: str) -> None:
    model = smoke.build_model(smoke.build_tokenizer(), tied=tied)
    with pytest.raises(ConfigError, match=message):
        check_adapter(model, get_peft_config(ModelConfig(**LORA | keys)))


@pytest.mark.parametrize(
    ("names", "layers"), [(["all-linear"], 14), (["q_proj"], 2), (["layers.1.mlp.up_proj", "v_proj"], 3), (None, 4)]
)
def test_which_layers_get_an_adapter(names: list[str] | None, layers: int) -> None:
    config = get_peft_config(ModelConfig(**LORA | {"lora_target_modules": names}))
    before = copy.deepcopy(config)
    assert check_adapter(smoke.build_model(smoke.build_tokenizer()), config) == layers
    assert config == before


def test_a_typo_is_told_before_weights_are_read(base: Path) -> None:
    model_args = ModelConfig(model_name_or_path=str(base), **LORA | {"lora_target_modules": ["qproj"]})
    with pytest.raises(
        ConfigError, match=r"no layer 'qproj'\. Fix: its linear layers are down_proj, gate_proj, k_proj"
    ):
        load_lora_config(model_args, False)


@pytest.mark.parametrize(
    ("kind", "stage", "refused"),
    [
        (DistributedType.MULTI_GPU, None, False),
        (DistributedType.DEEPSPEED, 2, False),
        (DistributedType.DEEPSPEED, 3, True),
        (DistributedType.FSDP, None, True),
    ],
)
def test_shards_that_a_file_of_the_users_own_asks_for_are_refused(kind, stage, refused) -> None:
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    accelerator = SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(ValueError, match="CONFIG_FILE") if refused else nullcontext():
        reject_shards(accelerator)


def test_the_guard_compares_log_probs_without_dropout(base: Path, tmp_path: Path) -> None:
    trainer = make_trainer(base, tmp_path, LORA | {"lora_dropout": 0.5}, disable_dropout=False)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    trainer.model.train()
    output = trainer._generate_and_score_completions([dict(trainer.train_dataset[0]) for _ in range(4)])
    first, second = compute_trainer_logps(trainer, output), compute_trainer_logps(trainer, output)
    assert torch.equal(first, second) and trainer.model.training

    # Log-probs of a server with the merged weights, and of TRL's pass with the adapter's dropout.
    output |= {"sampling_per_token_logps": first, "old_per_token_logps": first + 1.0}
    assert trainer.checks.measure_logprob_difference(output) == 0.0
    for layer in trainer.model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    assert trainer.checks.measure_logprob_difference(output) == pytest.approx(1.0)


def test_gradient_checkpointing_reaches_the_adapter(base: Path, tmp_path: Path, stock) -> None:
    trainer = make_trainer(base, tmp_path, LORA, gradient_checkpointing=True, **ONE_STEP)
    trained(trainer, tmp_path)
    torch.testing.assert_close(merged(trainer.model), stock)
