"""R3: a head_dim that vLLM's attention on CPU lacks is rejected by check: the engine would die at the first request."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.model_kind import CPU_HEAD_SIZES, head_size

CONFIG = {"hidden_size": 64, "num_attention_heads": 4}


def model(folder: Path, **config: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 16), ({"head_dim": 64}, 64), ({"text_config": {"head_dim": 80}}, 80), ({"kv_lora_rank": 512}, None),
        ({"num_attention_heads": 0}, None), ({"num_attention_heads": "x"}, None),
    ],
)  # fmt: skip
def test_the_size_of_a_head_is_read(tmp_path: Path, config: dict, size: int | None) -> None:
    model(tmp_path / "model", **config)
    assert head_size(tmp_path / "model") == size
    assert head_size(tmp_path) is None


def test_a_head_that_the_cpu_lacks_is_rejected_there_only(tmp_path: Path, read) -> None:
    recipe = read(model_name_or_path=model(tmp_path / "model"))
    (problem,) = [problem for problem in check(recipe, {}, "cpu") if "head_dim" in problem.what]
    assert problem.what.startswith("head_dim is 16, but vLLM's attention on CPU supports only 32, 64, ")
    assert problem.fix == "use a model with one of these, or set use_vllm: false"
    assert not [problem for problem in check(recipe, {}, "cuda") if "head_dim" in problem.what]
    for fixed in (
        read(model_name_or_path=recipe["model_name_or_path"], use_vllm=False),
        read(model_name_or_path=model(tmp_path / "other", head_dim=32)),
    ):
        assert not [problem for problem in check(fixed, {}, "cpu") if "head_dim" in problem.what]


def test_the_sizes_are_those_of_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(spec.origin).parent / "v1/attention/backends/cpu_attn.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (sizes,) = [node.body[-1].value for node in functions if node.name == "get_supported_head_sizes"]
    assert tuple(ast.literal_eval(sizes)) == CPU_HEAD_SIZES
