"""The bridge ``lora``: the adapter alone travels, and the server changes it under one name beside its base model."""

import os
import shutil
from collections.abc import Iterator
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

_PEFT_NAME = "default"  # the adapter's in the trained model
_LOAD = "/v1/load_lora_adapter"


class LoraClient(BridgeClient):
    """Completions are asked from the adapter; a request for the base model gets the base model.

    The server knows the adapter by a link to the newest folder. It is loaded once by vLLM's own request, and from then
    on by each worker: an adapter for which that request said ``load_inplace`` is read again in every forward pass.
    """

    bridge = "lora"
    streams = False
    samples_base = False  # whether completions come from the base model, set by the trainer

    def __init__(self, **kwargs: Any):
        self._model: PeftModel | None = None
        self._lora_id = 0  # the adapter's in the workers
        self._proven = 0  # the server whose base model was compared with the trainer's
        super().__init__(**kwargs)

    @property
    def model(self) -> str:
        """Return the model of a request."""
        return os.environ["GRPO_RUN"] if self.samples_base else self._served

    @model.setter
    def model(self, name: str) -> None:
        self._served = name

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files."""

    def sync_model(self, model: nn.Module) -> None:
        """Write the adapter, have the server load it, and compare what it then holds."""
        assert isinstance(model, PeftModel)
        with self._excused_when_stopping():
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
        contiguous = {name: one.detach().cpu().contiguous() for name, one in tensors.items()}
        save_file(contiguous, folder / ADAPTER_WEIGHTS, {SYNC: str(self._sync)})
        model.peft_config[_PEFT_NAME].save_pretrained(str(folder))
        link = self._link.with_name(".adapter")
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._link)

    def _resend(self) -> None:
        """Have the server load what the link points to; a server that does not know the adapter learns its name."""
        if ADAPTER not in (self._served_names() or ()):
            self._name_adapter()
        self.call_workers("grpo_load_adapter", folder=str(self._link), lora_id=self._lora_id)

    def _name_adapter(self) -> None:
        asked = {"lora_name": ADAPTER, "lora_path": str(self._link)}
        answer = self.session.post(f"{self.base_url}{_LOAD}", json=asked)  # answered in plain text
        if answer.status_code != 200:
            raise self._bad(_LOAD, f"answered {answer.status_code}: {' '.join(answer.text[:500].split())}")
        with self._reading("/collective_rpc"):
            self._lora_id = max(self.call_workers("grpo_adapters")[0])
        self.model = ADAPTER

    def _verify(self) -> None:
        """Compare the adapter with what was written, and the base model once with each server."""
        if not self._args.weight_guard:
            return
        assert self._model is not None
        wrong: list[str] = []
        if self._proven != self._epoch:
            reports = self._reports()
            base = {name: sent_fingerprint(name, one, reports[0]) for name, one in base_parameters(self._model)}
            wrong += differing({name: int(value) for name, value in base.items()}, reports)
        reports = self.call_workers("grpo_adapter_weights", lora_id=self._lora_id)
        with self._reading("/collective_rpc"):
            dtype = getattr(torch, next(iter(reports[0]["parameters"].values()))[1])
            sent = {name: int(fingerprint(one)) for name, one in _served_adapter(self._model, dtype)}
            wrong += differing(sent, reports)
            self.checksum_error = checksum_error(self.bridge, wrong, self._sync, reports)
        self._proven = 0 if wrong else self._epoch


def base_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters under the adapter, by the names that they have without one."""
    for name, parameter in model.named_parameters():
        if model.prefix not in name and "original_module" not in name:
            yield base_name(name), parameter


def base_name(name: str) -> str:
    """Return the name of a layer, or of a parameter, of the model under an adapter."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _served_adapter(model: PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield both factors of each adapted layer as vLLM keeps them: in its dtype, the second one times the scaling."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            first, second = (side[_PEFT_NAME].weight.detach().to(dtype) for side in (layer.lora_A, layer.lora_B))
            yield f"{base_name(name)}.lora_a", first
            yield f"{base_name(name)}.lora_b", second * layer.scaling[_PEFT_NAME]
