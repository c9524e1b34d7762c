"""Which files of a repository are downloaded: listings as the hub has them."""

from __future__ import annotations

from grpo_recipes.fetch.download import wanted_files

SMALL, LARGE = 1000, 5 * 10**9


def test_safetensors_without_the_copies_in_other_formats() -> None:
    llama = {
        ".gitattributes": SMALL,
        "LICENSE": SMALL,
        "README.md": SMALL,
        "config.json": SMALL,
        "generation_config.json": SMALL,
        "model-00001-of-00002.safetensors": LARGE,
        "model-00002-of-00002.safetensors": LARGE,
        "model.safetensors.index.json": SMALL,
        "original/consolidated.00.pth": LARGE,
        "original/params.json": SMALL,
        "special_tokens_map.json": SMALL,
        "tokenizer.json": 9 * 10**6,
        "tokenizer_config.json": SMALL,
    }
    left_out = {".gitattributes", "README.md", "original/consolidated.00.pth", "original/params.json"}
    assert wanted_files(llama) == sorted(llama.keys() - left_out)


def test_of_two_formats_of_one_library_the_one_that_is_trained() -> None:
    mistral = ["config.json", "consolidated.safetensors", "model.safetensors", "params.json", "tekken.json"]
    assert wanted_files(dict.fromkeys(mistral, LARGE // 1000)) == ["config.json", "model.safetensors", "tekken.json"]


def test_old_repositories_have_pickles_alone() -> None:
    files = ["config.json", "merges.txt", "pytorch_model.bin", "tf_model.h5", "training_args.bin", "vocab.json"]
    wanted = ["config.json", "merges.txt", "pytorch_model.bin", "vocab.json"]
    assert wanted_files(dict.fromkeys(files, SMALL)) == wanted
    assert wanted_files(dict.fromkeys([*files, "model.safetensors"], SMALL)) == sorted(
        {*wanted, "model.safetensors"} - {"pytorch_model.bin"}
    )


def test_tokenizers_of_every_kind_are_small_files() -> None:
    kinds = ["chat_template.jinja", "qwen.tiktoken", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"]
    assert wanted_files(dict.fromkeys(kinds, SMALL)) == kinds
    assert wanted_files({"tokenizer.model": SMALL, "model.Q4_K_M.gguf": LARGE, "dump": LARGE}) == ["tokenizer.model"]
    assert wanted_files({"additional_chat_templates/rag.jinja": SMALL, "onnx/config.json": SMALL}) == [
        "additional_chat_templates/rag.jinja"
    ]


def test_python_files_come_with_trust_remote_code_alone() -> None:
    files = {"config.json": SMALL, "modeling_own.py": SMALL, "model.safetensors": LARGE}
    assert "modeling_own.py" not in wanted_files(files)
    assert "modeling_own.py" in wanted_files(files, code=True)
