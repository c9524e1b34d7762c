"""Send weights by ``weight_sync: restart``: save the model, and let the launcher restart the server with it.

The client writes the complete model to the sync folder and points a link to it. When the link changes, the launcher
ends the server and starts it with the new model. The client waits until the new server is ready. With the weight guard,
a server that already has the weights is not restarted.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.runs.rundir import NEWEST_MODEL, read_json
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors
from grpo_recipes.weights.file import write_weights
from grpo_recipes.weights.guard import find_differences


class RestartClient(BridgeClient):
    """Point a link to the new model. When the link changes, the launcher restarts the server with that model.

    The server only has to load a model, so this works for vLLM versions and architectures that cannot reload weights.
    With the guard, a server that already has the weights is not restarted.
    """

    bridge = "restart"
    _saved_parts: Sequence[Any] = ()  # objects with ``save_pretrained``: configurations and tokenizer

    def attach(self, trainer: Trainer) -> None:
        """Store the model's configs and the tokenizer, which each sync saves next to the weights."""
        super().attach(trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._saved_parts = [model.config, model.generation_config, trainer.processing_class]

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Write the complete model to a new folder, point the link to it, and wait for the restarted server.

        With the weight guard, delete the folder and do nothing if the server already has these weights.
        """
        folder = self._folder(self._sync + 1)
        write_weights(folder, metadata, named_params, self._sync + 1)
        if self._args.weight_guard:
            replicas, sent = self._repeat_through_restarts(self._request_reports), self._sent_values()
            if not any(find_differences(sent, reports) for reports in replicas):
                shutil.rmtree(folder)
                return
        self._sync += 1
        for part in self._saved_parts:
            part.save_pretrained(str(folder))
        link = folder.with_name(f".{NEWEST_MODEL}")
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        link.replace(folder.with_name(NEWEST_MODEL))
        self._resend()
        shutil.rmtree(self._folder(self._sync - 1), ignore_errors=True)

    def _folder(self, number: int) -> Path:
        """Return the path of the model folder of the sync with this number."""
        return Path(os.environ["GRPO_SYNC_DIR"]).resolve() / f"model-{number}"

    def _resend(self) -> None:
        """Wait for the server that is started with the newest model."""
        self._wait_for_server(self._serves_newest_model)

    def _serves_newest_model(self) -> bool:
        """Return whether the server is ready and was started with the newest model."""
        newest = str(self._folder(self._sync))
        return self._adopt_ready_server() and (read_json(self._state_file) or {}).get("model") == newest
