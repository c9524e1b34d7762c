"""The file of accelerate that a run is launched with: TRL's for each way of sharing the model, or the user's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import config_error, translate

ACCELERATE_FILES = {
    "single": "single_gpu", "ddp": "multi_gpu", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp2"
}  # fmt: skip


def _sizes_in(content: Any) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers in an accelerate file, with their keys."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, int):
            yield str(name), value
        yield from _sizes_in(value)


def accelerate_file(accelerator: str, environment: Mapping[str, str]) -> str:
    """Return the file of CONFIG_FILE, which must exist, or TRL's packaged accelerate file."""
    if given := environment.get("CONFIG_FILE"):
        if not Path(given).is_file():
            what = f"there is no accelerate file '{given}'"
            raise config_error("CONFIG_FILE", what, "unset it, or name an existing file")
        fix = "name a file that accelerate config wrote"
        with translate(yaml.YAMLError, lambda _: config_error("CONFIG_FILE", f"'{given}' is not YAML", fix)):
            content = yaml.safe_load(Path(given).read_text(errors="replace"))
        for name, size in _sizes_in(content):
            if name.endswith(("cp_size", "sp_size", "context_parallel_size", "sequence_parallel_size")) and size > 1:
                what = f"{name} {size} in '{given}' splits sequences, while GRPO's loss needs whole completions"
                raise config_error("CONFIG_FILE", what, f"remove {name}; accelerator: zero3 saves memory too")
        return str(Path(given).absolute())
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        raise config_error("environment", "trl is not installed", "run make setup")
    return str(Path(trl.origin).with_name("accelerate_configs") / f"{ACCELERATE_FILES[accelerator]}.yaml")
