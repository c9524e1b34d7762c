"""``weight_sync: lora``: send only the adapter; the server loads it under one name next to its base model."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from grpo_recipes.server.plugin import ADAPTER_WEIGHTS, SYNC, fingerprint
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.guard import checksum_error, differing, sent_fingerprint
from grpo_recipes.weights.transport import ADAPTER

_PEFT_NAME = "default"  # name of the adapter in the trained model
_LOAD_PATH = "/v1/load_lora_adapter"


class LoraClient(BridgeClient):
    """Sample from the adapter. A request for the base model still gets the base model.

    The server knows the adapter by a link to the newest folder. vLLM's own request loads it once, and afterwards each
    worker loads it: if that request sets ``load_inplace``, vLLM reads the adapter again in every forward pass.
    """

    bridge = "lora"
    streams = False
    samples_base = False  # whether completions come from the base model

    def __init__(self, **kwargs: Any) -> None:
        self._model: PeftModel | None = None
        self._lora_id = 0  # the adapter's id in the workers
        self._proven = 0  # number of the server with a verified base model
        super().__init__(**kwargs)

    @property
    def model(self) -> str:
        """Return the model name for requests."""
        return os.environ["GRPO_RUN"] if self.samples_base else self._served

    @model.setter
    def model(self, name: str) -> None:
        self._served = name

    @contextmanager
    def using_base_model(self) -> Iterator[None]:
        """Sample from the untrained base model inside."""
        outside, self.samples_base = self.samples_base, True
        try:
            yield
        finally:
            self.samples_base = outside

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files."""

    def sync_model(self, model: nn.Module) -> None:
        """Write the adapter, let the server load it, and verify it."""
        assert isinstance(model, PeftModel)
        with self._ignoring_failures_while_stopping():
            self._model = model
            self._sync += 1
            self._write(model, self._folder(self._sync))
            self._through_restarts(self._resend)
            self._through_restarts(self._verify)
            shutil.rmtree(self._folder(self._sync - 1), ignore_errors=True)

    @property
    def _link(self) -> Path:
        return Path(os.environ["GRPO_SYNC_DIR"]) / "adapter"

    def _folder(self, number: int) -> Path:
        return self._link.with_name(f"adapter-{number}")

    def _write(self, model: PeftModel, folder: Path) -> None:
        """Write the adapter's files into a new folder, then point the link to it."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / ADAPTER_WEIGHTS, {SYNC: str(self._sync)})
        model.peft_config[_PEFT_NAME].save_pretrained(str(folder))
        link = self._link.with_name(".adapter")
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._link)

    def _resend(self) -> None:
        """Let the server load the link's target. A server that does not know the adapter first learns its name."""
        if ADAPTER not in (self.served_names() or ()):
            self._register_adapter()
        self.call_workers("grpo_load_adapter", folder=str(self._link), lora_id=self._lora_id)

    def _register_adapter(self) -> None:
        """Load the adapter by vLLM's own request, which gives it its name and id."""
        request = {"lora_name": ADAPTER, "lora_path": str(self._link)}
        answer = self.session.post(f"{self.base_url}{_LOAD_PATH}", json=request)  # the answer is plain text
        if answer.status_code != 200:
            text = " ".join(answer.text[:500].split())
            raise self._bad_answer(_LOAD_PATH, f"answered {answer.status_code}: {text}")
        with self._parsing("/collective_rpc"):
            self._lora_id = max(self.call_workers("grpo_adapters")[0])
        self.model = ADAPTER

    def _verify(self) -> None:
        """Verify the server's adapter, and once for each server its base model."""
        if not self._args.weight_guard:
            return
        assert self._model is not None
        wrong: list[str] = []
        if self._proven != self._epoch:
            reports = self._reports()
            base = {name: sent_fingerprint(name, tensor, reports[0]) for name, tensor in base_parameters(self._model)}
            wrong += differing({name: int(value) for name, value in base.items()}, reports)
        reports = self.call_workers("grpo_adapter_weights", lora_id=self._lora_id)
        with self._parsing("/collective_rpc"):
            dtype = getattr(torch, next(iter(reports[0]["parameters"].values()))[1])
            sent = {name: int(fingerprint(tensor)) for name, tensor in _served_adapter(self._model, dtype)}
            wrong += differing(sent, reports)
            self.checksum_error = checksum_error(self.bridge, wrong, self._sync, reports)
        self._proven = 0 if wrong else self._epoch


def base_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters under the adapter, by their names in the model without an adapter."""
    for name, parameter in model.named_parameters():
        if model.prefix not in name and "original_module" not in name:
            yield base_name(name), parameter


def base_name(name: str) -> str:
    """Return the name that a layer or parameter has in the model without an adapter."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _served_adapter(model: PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield both factors of each adapted layer as vLLM stores them: in its dtype, the second with the scaling."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            factors: Any = (layer.lora_A[_PEFT_NAME], layer.lora_B[_PEFT_NAME])
            first, second = (factor.weight.detach().to(dtype) for factor in factors)
            yield f"{base_name(name)}.lora_a", first
            yield f"{base_name(name)}.lora_b", second * layer.scaling[_PEFT_NAME]
