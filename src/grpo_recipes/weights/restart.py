"""The bridge ``restart``: a complete model on disk, and a new server that is started with it."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.runs.rundir import NEWEST_MODEL, read_json
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors
from grpo_recipes.weights.file import write_weights
from grpo_recipes.weights.guard import differing


class RestartClient(BridgeClient):
    """The launcher ends the server and starts it with the model that a link names, whenever that link is another.

    It needs nothing from the server but that it loads a model: for a vLLM, or an architecture, that cannot take weights
    while it runs. With the guard, a server that has the weights already is not started again.
    """

    bridge = "restart"

    def __init__(self, **kwargs: Any):
        self._files: list[Any] = []  # what writes the other files of a model: configuration, tokenizer
        super().__init__(**kwargs)

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, when it is started."""

    def attach(self, trainer: Any) -> None:
        """Remember what is to stand beside the weights."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._files = [model.config, model.generation_config, trainer.processing_class]

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        folder = self._folder(self._sync + 1)
        write_weights(folder, metadata, named_params, self._sync + 1)
        if self._args.weight_guard and not differing(self._sent_values(), self._through_restarts(self._reports)):
            shutil.rmtree(folder)
            return
        self._sync += 1
        for part in self._files:
            part.save_pretrained(str(folder))
        link = folder.with_name(f".{NEWEST_MODEL}")
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        link.replace(folder.with_name(NEWEST_MODEL))
        self._resend()
        shutil.rmtree(self._folder(self._sync - 1), ignore_errors=True)

    def _folder(self, number: int) -> Path:
        return Path(os.environ["GRPO_SYNC_DIR"]).resolve() / f"model-{number}"

    def _resend(self) -> None:
        """Wait for the server that was started with the newest model."""
        self._wait_for_server(self._has_newest)

    def _has_newest(self) -> bool:
        return self._server_ready() and (read_json(self._state_file) or {}).get("model") == str(
            self._folder(self._sync)
        )
