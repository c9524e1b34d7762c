"""What of a checkpoint is pushed, kept safe from pruning while it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo_recipes.runs.checkpoints import is_complete

_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")


def model_files(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint that make the model: weights, configuration, tokenizer. Empty without whole weights."""
    found = [path for path in checkpoint.iterdir() if path.is_file() and path.name.endswith(_MODEL_SUFFIXES)]
    files = [path for path in found if path.name != "trainer_state.json"]
    return sorted(files) if any(path.name.endswith(".safetensors") for path in files) else []


def stage(checkpoint: Path, folder: Path, strategy: str) -> dict[str, str]:
    """Link a checkpoint's files into ``folder``, where no pruning reaches them.

    Returns:
        Local folder -> folder in the repository; empty when the checkpoint holds nothing to push, or was pruned
        meanwhile.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folders = {str(folder / "model"): ""} if _link(model_files(checkpoint), checkpoint, folder / "model") else {}
        if strategy in ("checkpoint", "all_checkpoints"):
            everything = [path for path in checkpoint.rglob("*") if path.is_file()]
            _link(everything, checkpoint, folder / "checkpoint")
            folders[str(folder / "checkpoint")] = "last-checkpoint" if strategy == "checkpoint" else checkpoint.name
    except FileNotFoundError:
        folders = {}
    if folders and is_complete(checkpoint):
        return folders
    shutil.rmtree(folder, ignore_errors=True)
    return {}


def _link(files: list[Path], root: Path, folder: Path) -> bool:
    for path in files:
        target = folder / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links, or with too few: each says so in another way
            shutil.copy2(path, target)
    return bool(files)
