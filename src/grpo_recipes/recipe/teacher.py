"""Check before a launch whether a teacher fits the trained model, by their files on this machine. No torch."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.chat_template import find_model_folder, model_folder

KEY, FIX = "teacher_model_name_or_path", "set a teacher with the tokenizer of the trained model"


def teacher_problems(recipe: Recipe, environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if the teacher lacks tokens or embeddings of the trained model.

    Models that are not on this machine, or have no tokenizer.json, are not compared.
    """
    if not (name := recipe.loss.teacher_model_name_or_path):
        return
    teacher, model = find_model_folder(name, "main", environment), model_folder(recipe, environment)
    ids, vocabulary = _read_vocabulary(teacher), _read_vocabulary(model)
    if ids and (difference := describe_other_tokens(ids, vocabulary)):
        yield recipe.problem(KEY, difference, FIX)
    has, needs = _count_embeddings(teacher), _count_embeddings(model)
    if has is not None and needs is not None and has < needs:
        yield recipe.problem(KEY, f"the teacher has {has} embeddings, but the trained model has {needs}", FIX)


def describe_other_tokens(ids: Mapping[str, int], vocabulary: Mapping[str, int]) -> str:
    """Return how many tokens of ``vocabulary`` have no or another id in the teacher's ``ids``; empty if none has."""
    others = [token for token, index in vocabulary.items() if ids.get(token) != index]
    if not others:
        return ""
    count = f"{len(others)} of {len(vocabulary)} tokens"
    return f"the teacher's tokenizer has no or another id for {count}, for example {others[0]!r}"


def _read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the tokens of a folder's tokenizer.json with their ids; empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        content = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = content["model"]["vocab"]
        if isinstance(tokens, list):  # Unigram: tokens with their scores
            tokens = {token: index for index, (token, _) in enumerate(tokens)}
        return {**tokens, **{token["content"]: token["id"] for token in content.get("added_tokens") or []}}
    return {}


def _count_embeddings(folder: Path) -> int | None:
    """Return the number of embeddings in a folder's config.json; None if it is unknown."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        config = json.loads((folder / "config.json").read_bytes())
        count = (config.get("text_config") or config).get("vocab_size")
        return count if isinstance(count, int) else None
    return None
