"""The smoke recipe's own model and data: what `grpo_recipes.smoke` writes."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from grpo_recipes import smoke  # noqa: E402 - after the skips

FEW_STEPS = tuple(phase._replace(steps=2) for phase in smoke.PHASES)
TEXTS = [
    "Natalia sold 48/2 = <<48/2=24>>24 clips.\n\n#### 72",
    "".join(map(chr, range(128))),
    "na\u00efve \u00bd \u2014 \U0001f600 e\u0301",
    "a <answer> 7 </answer> b",
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("quick") / "made"
    smoke.make_smoke_task(out_dir, phases=FEW_STEPS)
    return out_dir


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("real") / "made"
    smoke.make_smoke_task(out_dir)
    return out_dir


def weights_hash(out_dir: Path) -> str:
    return hashlib.sha256((out_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def read_rows(out_dir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out_dir / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", range(5))
def test_splits_are_disjoint_and_cover_all_sums(seed):
    train, test = ({row["problem"] for row in rows} for rows in smoke.split_sums(seed))
    assert (len(train), len(test)) == (80, 20)
    assert train | test == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert all(f"{b}+{a}=" in train for a, b in (problem.strip("=").split("+") for problem in test))


def test_rows(quick):
    assert (read_rows(quick, "train"), read_rows(quick, "test")) == smoke.split_sums()
    for row in read_rows(quick, "train") + read_rows(quick, "test"):
        a, b = row["problem"].removesuffix("=").split("+")
        assert row["answer"] == str(int(a) + int(b))


def test_rows_of_programs_have_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "make_smoke_task", functools.partial(smoke.make_smoke_task, phases=FEW_STEPS))
    smoke.main([str(tmp_path / "made"), "--programs"])
    rows = read_rows(tmp_path / "made", "train") + read_rows(tmp_path / "made", "test")
    answers = {row["problem"]: row["answer"] for row in rows}
    assert answers["9+8="] == '{"inputs": [""], "outputs": ["17"]}'
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made" / "model")
    assert len(tokenizer("17".join(smoke.PROGRAM_TAGS)).input_ids) == 4


def test_made_once(quick, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # takes seconds to import, so it is imported only if needed
    before = (quick / "model" / "model.safetensors").stat().st_mtime_ns
    smoke.make_smoke_task(quick, phases=FEW_STEPS)
    assert (quick / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in quick.parent.iterdir()) == ["made"], "left a temporary folder behind"


def test_refuses_what_others_made(quick, tmp_path):
    with pytest.raises(FileExistsError, match="other settings"):
        smoke.make_smoke_task(quick, seed=1, phases=FEW_STEPS)
    (tmp_path / "precious").write_text("")
    with pytest.raises(OSError):
        smoke.make_smoke_task(tmp_path, phases=FEW_STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_second_maker_keeps_the_first_result(quick, tmp_path, monkeypatch):
    """Two makers at once: the one that finishes last finds the folder taken, and is content with it."""
    out_dir, save = tmp_path / "made", smoke._save_model

    def save_late(*arguments):
        shutil.copytree(quick, out_dir)
        save(*arguments)

    monkeypatch.setattr(smoke, "_save_model", save_late)
    before = (quick / "model" / "model.safetensors").stat().st_mtime_ns
    smoke.make_smoke_task(out_dir, phases=FEW_STEPS)
    assert (out_dir / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_same_seed_same_weights(quick, tmp_path):
    for seed in (0, 1):
        smoke.make_smoke_task(tmp_path / str(seed), seed=seed, phases=FEW_STEPS)
    assert weights_hash(tmp_path / "0") == weights_hash(quick) != weights_hash(tmp_path / "1")


def test_fingerprint_depends_on_every_setting():
    keys = [
        smoke.hash_settings(),
        smoke.hash_settings(seed=1),
        smoke.hash_settings(tied=True),
        smoke.hash_settings(dtype="bfloat16"),
        smoke.hash_settings(phases=FEW_STEPS),
        smoke.hash_settings(name=smoke.MAFIA),
        smoke.hash_settings(name=smoke.PROGRAMS),
    ]
    assert len(set(keys)) == len(keys)


def test_untrained_weights_are_those_of_the_seed(tmp_path):
    smoke.main([str(tmp_path / "made"), "--untrained", "--seed", "3"])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        drawn = smoke.build_model(smoke.build_tokenizer()).state_dict()
    weights = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "model").state_dict()
    assert weights.keys() == drawn.keys() and all(torch.equal(weights[name], drawn[name]) for name in drawn)


def test_tied_bfloat16_variant(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "make_smoke_task", functools.partial(smoke.make_smoke_task, phases=FEW_STEPS))
    smoke.main([str(tmp_path / "made"), "--tie-word-embeddings", "--dtype", "bfloat16"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "model", dtype="auto")
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_progress_of_the_training_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(smoke, "_PROGRESS_SECONDS", 0.0)
    assert [step for _, step in smoke.track_steps(FEW_STEPS)] == [0, 1, 0, 1]
    lines = [f"grpo: smoke model: {finished} of 4 steps, 0 s" for finished in range(4)]
    assert capsys.readouterr().out.splitlines() == [*lines, "grpo: trained the smoke model: 4 steps in 0 s"]


def test_sigterm_leaves_no_incomplete_folder(tmp_path):
    command = [sys.executable, "-m", "grpo_recipes.smoke", str(tmp_path / "made")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "grpo: smoke model: 0 of 520 steps, 0 s\n"
        assert len(list(tmp_path.iterdir())) == 1
        program.terminate()
    assert program.returncode == 128 + signal.SIGTERM and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(quick, text):
    written = smoke.build_tokenizer()
    loaded = transformers.AutoTokenizer.from_pretrained(quick / "model")
    ids = loaded(text).input_ids
    assert ids == written(text).input_ids
    assert loaded.decode(ids, skip_special_tokens=True) == unicodedata.normalize("NFC", text)


def test_tokenizer_fits_model(quick):
    tokenizer = transformers.AutoTokenizer.from_pretrained(quick / "model")
    config = transformers.AutoConfig.from_pretrained(quick / "model")
    assert len(tokenizer) == config.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (config.pad_token_id, config.eos_token_id)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert [len(tokenizer(tag).input_ids) for tag in ("<answer>", "</answer>", "12")] == [1, 1, 2]
    assert config.max_position_embeddings >= 2048


def test_chat_template(quick):
    tokenizer = transformers.AutoTokenizer.from_pretrained(quick / "model")
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4="}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>Add.<|im_end|><|user|>3+4=<|im_end|><|assistant|>"
    chat.append({"role": "assistant", "content": "<answer>7</answer>"})
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert whole == prompt + "<answer>7</answer><|im_end|>"


def accuracy(out_dir: Path, rows: list[dict], **generation) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(out_dir / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(out_dir / "model")
    chats = [[{"role": "user", "content": row["problem"]}] for row in rows]
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    output = model.generate(**inputs, max_new_tokens=8, **generation)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text == f"<answer>{row['answer']}</answer>" for text, row in zip(texts, rows, strict=True)]
    return sum(right) / len(right)


@pytest.mark.slow
def test_knows_the_sums_but_samples_them_half_of_the_time(real):
    train, test = read_rows(real, "train"), read_rows(real, "test")
    assert 0.45 <= accuracy(real, train * 20, do_sample=True, temperature=1.0, top_k=0) <= 0.60
    assert accuracy(real, test, do_sample=False) >= 0.8


# --- SecretMafia -----------------------------------------------------------------------------------------------------


def test_the_model_of_secret_mafia_reads_the_game_in_a_few_tokens(tmp_path, monkeypatch):
    pytest.importorskip("textarena")
    from grpo_recipes.extensions.environments.load import load_environment
    from grpo_recipes.extensions.environments.smoke_games import pretrain

    few = tuple(phase._replace(steps=2, copies=2) for phase in smoke.MAFIA_PHASES)
    monkeypatch.setattr(smoke, "MAFIA_GAMES", 4)
    smoke.make_smoke_task(tmp_path / "made", phases=few, name=smoke.MAFIA, on_episodes=pretrain)
    assert [path.name for path in sorted((tmp_path / "made").iterdir())] == ["COMPLETE", "model"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made" / "model")
    assert len(tokenizer) == transformers.AutoConfig.from_pretrained(tmp_path / "made" / "model").vocab_size
    assert [len(tokenizer(word).input_ids) for word in smoke.MAFIA_WORDS] == [1] * len(smoke.MAFIA_WORDS)
    text = load_environment("textarena:SecretMafia-v0", smoke.MAFIA_GAME).reset(1).messages[0]["content"]
    ids = tokenizer(text).input_ids
    assert len(ids) < 30 < len(text) and tokenizer.decode(ids) == text
    folder, command = smoke.smoke_command("smoke:mafia", {"CACHE_ROOT": str(tmp_path)})
    assert folder.name.startswith("mafia-") and folder != smoke.smoke_folder(
        "smoke:sums", {"CACHE_ROOT": str(tmp_path)}
    )
    assert command[-2:] == ["grpo_recipes.extensions.environments.smoke_games", str(folder)]


def test_the_model_of_secret_mafia_saw_well_formed_moves_and_is_flattened(monkeypatch):
    pytest.importorskip("textarena")
    monkeypatch.setattr(smoke, "MAFIA_GAMES", 60)
    from grpo_recipes.extensions.environments.smoke_games import _make_games, pretrain

    tokenizer = smoke.build_tokenizer(smoke.MAFIA)
    games = _make_games(tokenizer, 0)
    moves = [tokenizer.decode([label for label in labels if label >= 0]).split(smoke.END)[:-1] for _, labels in games]
    assert all(re.fullmatch(r"\[[0-5]\]", move) for game in moves for move in game) and all(moves)
    assert all(len(ids) == len(labels) for ids, labels in games)
    model = smoke.build_model(tokenizer)
    before = model.lm_head.weight.detach().clone()
    pretrain(model, tokenizer, 0, ())
    assert torch.equal(model.lm_head.weight, before / smoke.MAFIA_TEMPERATURE)


def test_the_recipe_plays_the_game_that_the_model_saw():
    from grpo_recipes.paths import find_code_root
    from grpo_recipes.recipe import read_recipe

    recipe = read_recipe(find_code_root() / "recipes/environments/secret_mafia_smoke.yaml")
    assert recipe["model_name_or_path"] == "smoke:mafia"
    assert smoke.MAFIA_GAME.items() <= recipe["environment_args"].items()
