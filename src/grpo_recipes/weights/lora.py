"""Send weights by ``weight_sync: lora``: only the adapter is sent, and the server loads it next to its base model."""

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

from grpo_recipes.recipe.registry import ADAPTER
from grpo_recipes.server.plugin import ADAPTER_WEIGHTS, SYNC, fingerprint
from grpo_recipes.server.wire import WORKERS_PATH
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.guard import compute_sent_fingerprint, describe_checksum_error, find_differences

_PEFT_NAME = "default"  # name of the adapter in the trained model
_LOAD_PATH = "/v1/load_lora_adapter"


class LoraClient(BridgeClient):
    """Write the LoRA adapter to a folder, let the server load it, and sample from it.

    The server knows the adapter by a link to the newest folder. vLLM's own request loads it once, and afterwards each
    worker loads it: if that request sets ``load_inplace``, vLLM reads the adapter again in every forward pass. A
    request for the base model still gets the base model.
    """

    bridge = "lora"
    streams = False
    samples_base = False  # whether completions come from the base model
    _model: PeftModel | None = None
    _lora_id = 0  # the adapter's id in the workers
    _proven = 0  # number of the server with a verified base model

    @property
    def model(self) -> str:
        """Return the model name for requests."""
        return os.environ["GRPO_RUN"] if self.samples_base else self._served

    @model.setter
    def model(self, name: str) -> None:
        """Set the model name for requests outside of ``using_base_model``."""
        self._served = name

    @contextmanager
    def using_base_model(self) -> Iterator[None]:
        """Sample from the untrained base model in the block."""
        outside, self.samples_base = self.samples_base, True
        try:
            yield
        finally:
            self.samples_base = outside

    def sync_model(self, model: nn.Module) -> None:
        """Write the adapter, let the server load it, verify it, and delete the previous adapter's folder."""
        assert isinstance(model, PeftModel)
        with self._ignoring_failures_while_stopping():
            self._model = model
            self._sync += 1
            self._write_adapter(model, self._folder(self._sync))
            self._repeat_through_restarts(self._resend)
            self._repeat_through_restarts(self._verify)
            shutil.rmtree(self._folder(self._sync - 1), ignore_errors=True)

    @property
    def _link(self) -> Path:
        """The link in ``GRPO_SYNC_DIR`` that points to the newest adapter folder."""
        return Path(os.environ["GRPO_SYNC_DIR"]) / "adapter"

    def _folder(self, number: int) -> Path:
        """Return the path of the adapter folder of the sync with this number."""
        return self._link.with_name(f"adapter-{number}")

    def _write_adapter(self, model: PeftModel, folder: Path) -> None:
        """Write the adapter's weights and config into a new folder, then point the link to it."""
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
        """Let the server load the adapter that the link points to; on a new server, first register its name.

        vLLM's own request assigns name and id, which later requests use. Raise BadAnswer if the server rejects it, or
        if its workers use different ids.
        """
        if ADAPTER not in (self.served_names() or ()):
            request = {"lora_name": ADAPTER, "lora_path": str(self._link)}
            answer = self.session.post(f"{self.base_url}{_LOAD_PATH}", json=request)  # the answer is plain text
            if answer.status_code != 200:
                text = " ".join(answer.text[:500].split())
                raise self._make_bad_answer(_LOAD_PATH, f"answered {answer.status_code}: {text}")
            with self._translate_parse_errors(WORKERS_PATH):
                ids = {max(ids) for workers in self.call_workers("grpo_adapters") for ids in workers}
                if len(ids) > 1:
                    raise ValueError(f"the adapter has the ids {sorted(ids)} in different workers")
                (self._lora_id,) = ids
            self.model = ADAPTER
        self.call_workers("grpo_load_adapter", folder=str(self._link), lora_id=self._lora_id)

    def _verify(self) -> None:
        """With the guard, compare the adapter and, once per server, the base model, and set ``checksum_error``."""
        if not self._args.weight_guard:
            return
        assert self._model is not None
        wrong: list[list[str]] = [[] for _ in range(self._replicas)]
        if self._proven != self._epoch:
            replicas = self._request_reports()
            base: dict[str, torch.Tensor] = {}
            for name, parameter in self._model.named_parameters():
                if self._model.prefix not in name and "original_module" not in name:  # not of the adapter
                    base_name = get_base_name(name)
                    base[base_name] = compute_sent_fingerprint(base_name, parameter, replicas[0][0])
            sent = {name: int(value) for name, value in base.items()}
            wrong = [find_differences(sent, reports) for reports in replicas]
        replicas = self.call_workers("grpo_adapter_weights", lora_id=self._lora_id)
        with self._translate_parse_errors(WORKERS_PATH):
            dtype = getattr(torch, next(iter(replicas[0][0]["parameters"].values()))[1])
            sent = {name: int(fingerprint(tensor)) for name, tensor in _iterate_served_adapter(self._model, dtype)}
            wrong = [names + find_differences(sent, reports) for names, reports in zip(wrong, replicas, strict=True)]
            self.checksum_error = describe_checksum_error(self.bridge, wrong, self._sync, replicas)
        self._proven = 0 if any(wrong) else self._epoch


def get_base_name(name: str) -> str:
    """Return a layer's or parameter's name in the model without an adapter, given its name in the PEFT model."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _iterate_served_adapter(model: PeftModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield both LoRA factors of each adapted layer as vLLM stores them: in ``dtype``, the second times the scaling."""
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            factors: Any = (layer.lora_A[_PEFT_NAME], layer.lora_B[_PEFT_NAME])
            first, second = (factor.weight.detach().to(dtype) for factor in factors)
            yield f"{get_base_name(name)}.lora_a", first
            yield f"{get_base_name(name)}.lora_b", second * layer.scaling[_PEFT_NAME]
