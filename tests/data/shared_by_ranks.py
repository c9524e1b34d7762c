"""Load prompts in one rank of ``test_sharing.py`` and record the prompts and the files that it opened.

python shared_by_ranks.py FOLDER '[{"dataset_name": ...}, ...]'    # one attempt for each mapping of recipe keys
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import datasets
import torch.distributed
from accelerate import PartialState

from grpo_recipes import smoke
from grpo_recipes.data import Prompts, load_eval_prompts, load_prompts, problems
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import ScriptArguments

OPENED: list[str] = []
read = problems.read_rows
problems.read_rows = lambda source, *arguments, **keys: (
    OPENED.append(Path(source).stem),
    read(source, *arguments, **keys),
)[1]


def attempt(keys: dict) -> dict:
    OPENED.clear()
    tokenizer, args = smoke.build_tokenizer(), ScriptArguments(**keys)
    try:
        run = Path(os.environ["GRPO_RUN_DIR"])
        loaded = [load_prompts(args, tokenizer, seed=3, run=run), load_eval_prompts(args, tokenizer, 3, run=run)]
    except (ConfigError, RuntimeError, ZeroDivisionError) as error:
        return {"opened": [*OPENED], "error": [type(error).__name__, str(error)]}
    train, evaluation = (seen(prompts) for prompts in loaded)
    files = sorted(path.name for path in (Path(os.environ["GRPO_RUN_DIR"]) / "prompts").iterdir())
    return {
        "opened": [*OPENED],
        "train": train,
        "eval": evaluation,
        "template": tokenizer.chat_template,
        "left": files,
    }


def seen(loaded: Prompts) -> dict:
    (folder,) = {Path(entry["filename"]).parent.name for entry in loaded.dataset.cache_files}
    return {
        "rows": loaded.dataset.to_list(),
        "said": str(loaded),
        "example": loaded.example,
        "folder": folder,
    }


def main(folder: Path, attempts: list[dict]) -> None:
    os.environ["GRPO_RUN_DIR"] = str(folder / "run")
    datasets.config.HF_DATASETS_CACHE = folder / "hf"
    PartialState(cpu=True)
    assert torch.distributed.get_world_size() == 2
    outcomes = []
    for keys in attempts:
        (folder / "run" / "prompts" / "train-killed").mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        outcomes.append(attempt(keys))
        torch.distributed.barrier()
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
