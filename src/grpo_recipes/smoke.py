"""Make the built-in smoke models: tiny chat models, their tokenizers, and a dataset of single-digit sums.

``python -m grpo_recipes.smoke OUT_DIR`` writes ``model/``, ``train.jsonl`` and ``test.jsonl`` within a minute on a
single CPU core. GRPO can improve the model: it knows the right answers, but samples them only half of the time.
``smoke_folder`` and ``smoke_command`` find and make a built-in task. The tasks ``smoke:mafia`` and ``smoke:tools`` have
no dataset; an extension trains their models on episodes.

The model of sums was trained only on the 80 training sums, first with right answers, then with nearly half of the
answers wrong, drawn again for every batch. It never saw a held-out sum. Every held-out sum ``a+b`` has its mirror
image ``b+a`` among the training sums, so the test score only measures whether the model adds independently of the order
of the operands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_recipes.errors import config_error
from grpo_recipes.paths import cache_root, module_command
from grpo_recipes.process.reports import say
from grpo_recipes.process.terminal import OUTPUT

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

VERSION = "1"  # raise it whenever anything below changes what `make_smoke_task` writes

TEST_SIZE = 20
MAX_SUM = 18
MAX_POSITIONS = 4096
SMOKE_SCHEME = "smoke:"  # begins a model_name_or_path or a dataset_name
UNTRAINED = "smoke:untrained"  # random weights; its rows have a third column for supervised fine-tuning
PROGRAMS = "smoke:programs"  # answers with a program that prints the sum; the solutions are tests of programs
SMOKE_DATA = ("smoke:sums", "smoke:sums-tied", UNTRAINED, PROGRAMS)  # models with rows
MAFIA, TOOLS = "smoke:mafia", "smoke:tools"  # models that the extension of environments trains on its episodes
_EPISODES = {
    MAFIA: "grpo_recipes.extensions.environments.smoke_games",
    TOOLS: "grpo_recipes.extensions.environments.smoke_tools",
}
_PROGRESS_SECONDS = 10.0  # between two lines without a terminal
Row = dict[str, str]

PAD, END = "<|endoftext|>", "<|im_end|>"  # Qwen's tokens
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
ANSWER_TAGS = ("<answer>", "</answer>")
PROGRAM_TAGS = ("```python\nprint(", ")\n```")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Phase(NamedTuple):
    """One stretch of the pre-training."""

    steps: int
    copies: int  # copies of every training sum in a batch
    wrong_share: float
    lr: float
    weight_decay: float


Phases = tuple[Phase, ...]

# The game of SecretMafia's model, with the settings of secret_mafia_smoke.yaml, and its words, one token each.
MAFIA_GAME = {
    "num_players": 6, "mafia_ratio": 0.2, "discussion_rounds": 1, "player": "Detective", "opponents": "crowd",
    "observation": "brief",
}  # fmt: skip
MAFIA_WORDS = (
    "Night-Detective", "Day-Discussion", "Day-Voting", ". You are Player ", ", Detective", ". Not Mafia:",
    ". Named today:", ". Alive:", ". Valid:", "Your action was not valid: ", " takes one target in brackets, not ",
    " is no target in ", "; valid: ",
    *(f"[{player}]" for player in range(10)), *(f". Mafia: {player}" for player in range(6)),
)  # fmt: skip
MAFIA_GAMES = 2400
MAFIA_PHASES = (Phase(steps=1000, copies=16, wrong_share=0.0, lr=3e-3, weight_decay=0.1),)  # copies: games in a batch
MAFIA_TEMPERATURE = 2.2  # flat enough that it wins about as often as moves drawn at random

# The model with tools: its items and its calls, as words of one token each.
SHOP_ITEMS = ("apple", "bean", "corn", "date", "fig", "grape", "kiwi", "leek", "mango", "nut", "olive", "pear")
SHOP_CALLS = (
    '<tool_call>{"name": "price", "arguments": {"item": "', '"}}</tool_call>',
    '<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>",
)  # fmt: skip
SHOP_WORDS = (*SHOP_CALLS, *SHOP_ITEMS, "price", "multiply", "<tool_call>")
SHOP_PHASES = (Phase(steps=400, copies=32, wrong_share=0.5, lr=3e-3, weight_decay=0.1),)  # copies: episodes in a batch
_WORDS = {MAFIA: MAFIA_WORDS, TOOLS: SHOP_WORDS, PROGRAMS: PROGRAM_TAGS}

# Strong weight decay on clean answers makes the model add instead of memorising; the second phase only flattens its
# answers, gently enough to keep that. It samples right answers a little less often than it saw them: a wrong share of
# 0.45 gives a sampled accuracy of about 0.5.
PHASES = (
    Phase(steps=400, copies=1, wrong_share=0.0, lr=2e-3, weight_decay=2.0),
    Phase(steps=120, copies=2, wrong_share=0.45, lr=5e-4, weight_decay=0.1),
)


def hash_settings(
    seed: int = 0, tied: bool = False, dtype: str = "float32", phases: Phases = PHASES, name: str = ""
) -> str:
    """Hash all settings that decide the files of ``make_smoke_task``; return 12 hex digits, the key of its cache."""
    decided = (
        VERSION,
        seed,
        tied,
        dtype,
        phases,
        *((MAFIA_GAME, MAFIA_WORDS, MAFIA_GAMES, MAFIA_TEMPERATURE) if name == MAFIA else ()),
        *((_WORDS[name],) if name in (TOOLS, PROGRAMS) else ()),
    )
    return hashlib.sha256(repr(decided).encode()).hexdigest()[:12]


def make_smoke_task(
    out_dir: Path, seed: int = 0, *, tied: bool = False, dtype: str = "float32", phases: Phases = PHASES,
    name: str = "", on_episodes: Callable[[Qwen2ForCausalLM, PreTrainedTokenizerFast, int, Phases], None] | None = None,
) -> None:  # fmt: skip
    """Write the model and the data to `out_dir`, atomically; do nothing if they exist.

    ``tied`` shares the embeddings of input and output. Empty ``phases`` leave the weights random and add solutions
    to the rows. ``on_episodes`` trains the model ``name`` of an extension instead, which has no data. An OSError is
    raised if `out_dir` was made with other settings or can't be written.
    """
    key = hash_settings(seed, tied, dtype, phases, name)
    if _is_complete(out_dir, key):
        return
    import torch

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.with_name(f".{out_dir.name}.{secrets.token_hex(16)}")
    partial.mkdir()
    threads = torch.get_num_threads()
    try:
        train, test = split_sums(seed, solutions=not phases, programs=name == PROGRAMS)
        for split, rows in () if on_episodes else (("train", train), ("test", test)):
            (partial / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = build_tokenizer(name)
        torch.set_num_threads(1)  # the order of a sum over threads changes its last bits
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(tokenizer, tied)
            if on_episodes:
                on_episodes(model, tokenizer, seed, phases)
            else:
                _pretrain(model, tokenizer, train, phases, _WORDS.get(name, ANSWER_TAGS))
        _save_model(model, tokenizer, dtype, partial / "model")
        (partial / "COMPLETE").write_text(key + "\n")
        os.rename(partial, out_dir)
    except OSError:  # another process may have finished first; its result is used
        if not _is_complete(out_dir, key):
            raise
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(partial, ignore_errors=True)


def _is_complete(out_dir: Path, key: str) -> bool:
    """Return whether a finished task is in `out_dir`; raise FileExistsError if it has other settings than ``key``."""
    marker = out_dir / "COMPLETE"
    if marker.exists() and (old_key := marker.read_text().strip()) != key:
        raise FileExistsError(f"{out_dir} was made with other settings ({old_key}, not {key}); remove it first")
    return marker.exists()


def split_sums(seed: int = 0, solutions: bool = False, programs: bool = False) -> tuple[list[Row], list[Row]]:
    """Return training and held-out rows: `TEST_SIZE` sums held out at random, never both a+b and b+a, never a+a.

    With ``solutions``, rows have the whole completion too. With ``programs``, answers are tests of a program as JSON.
    """
    rng = random.Random(seed)
    unordered = [(a, b) for a in range(10) for b in range(a)]
    test = [rng.choice([(a, b), (b, a)]) for a, b in rng.sample(unordered, TEST_SIZE)]
    train = [(a, b) for a in range(10) for b in range(10) if (a, b) not in test]
    rng.shuffle(train)
    rows = [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a, b in train + test]
    if solutions:
        rows = [{**row, "solution": row["answer"].join(ANSWER_TAGS)} for row in rows]
    if programs:
        rows = [{**row, "answer": json.dumps({"inputs": [""], "outputs": [row["answer"]]})} for row in rows]
    return rows[: len(train)], rows[len(train) :]


def build_tokenizer(name: str = "") -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges: one token per ASCII character, lossless for text in NFC.

    Special tokens, each of ``ANSWER_TAGS`` and each word of the model ``name`` are also one token.

    AutoTokenizer may load it as a `Qwen2Tokenizer`, because of the model's type. That class normalizes to NFC and
    requires a token `<|endoftext|>`. This tokenizer does both, so that both classes encode alike.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, END, *ROLES)])
    # One token each, but ordinary ones: they must survive decoding with skip_special_tokens.
    backend.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (*ANSWER_TAGS, *_WORDS.get(name, ()))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, padding_side="left", chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast, tied: bool = False) -> Qwen2ForCausalLM:
    """Return a two-layer Qwen2 with random weights; heads of 64, a size that every attention kernel takes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def track_steps(phases: Phases) -> Iterator[tuple[Phase, int]]:
    """Yield each phase with each of its steps, and print the progress: a live line, or a line every ten seconds."""
    steps = [(phase, step) for phase in phases for step in range(phase.steps)]
    start, next_line = time.monotonic(), 0.0
    try:
        for finished, phase_and_step in enumerate(steps):
            now = time.monotonic()
            progress = f"smoke model: {finished} of {len(steps)} steps, {now - start:.0f} s"
            OUTPUT.show_live(f"grpo: {progress}")
            if now >= next_line and not sys.stdout.isatty():
                say(progress)
                next_line = now + _PROGRESS_SECONDS
            yield phase_and_step
    finally:
        OUTPUT.show_live("")
    if steps:
        say(f"trained the smoke model: {len(steps)} steps in {time.monotonic() - start:.0f} s")


def _pretrain(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, train: list[Row], phases: Phases, tags: Sequence[str]
) -> None:
    """Train the model on answers between two ``tags``."""
    import torch

    chats = [[{"role": "user", "content": row["problem"]}] for row in train]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = torch.tensor(tokenizer(texts).input_ids)  # all have the same length
    answers = [f"{str(n).join(tags)}{END}" for n in range(MAX_SUM + 1)]
    encoded = tokenizer(answers, padding=True, padding_side="right", return_tensors="pt")
    completions = encoded.input_ids.masked_fill(encoded.attention_mask == 0, -100)
    sums = torch.tensor([sum(map(int, row["problem"].strip("=").split("+"))) for row in train])
    for phase, step in track_steps(phases):
        if step == 0:
            inputs, right = prompts.repeat(phase.copies, 1), sums.repeat(phase.copies)
            optimizer = make_optimizer(model, phase)
        warmup, cosine = min(1.0, (step + 1) / 20), (1 + math.cos(math.pi * step / phase.steps)) / 2
        optimizer.param_groups[0]["lr"] = phase.lr * (warmup * cosine)
        wrong = (right + torch.randint(1, MAX_SUM + 1, right.shape)) % (MAX_SUM + 1)  # uniform over the wrong sums
        labels = completions[torch.where(torch.rand(right.shape) < phase.wrong_share, wrong, right)]
        # Right padding may be any token under causal attention; cross_entropy skips its label of -100.
        logits = model(torch.cat([inputs, labels.clamp(min=0)], dim=1)).logits[:, inputs.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make_optimizer(model: Qwen2ForCausalLM, phase: Phase) -> torch.optim.AdamW:
    """Return the optimizer of a phase of the pre-training."""
    import torch

    return torch.optim.AdamW(model.parameters(), phase.lr, betas=(0.9, 0.98), weight_decay=phase.weight_decay)


def _save_model(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, dtype: str, folder: Path) -> None:
    """Write model and tokenizer to `folder`; the model given is converted to ``dtype`` in place."""
    import torch

    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


def list_smoke_tasks() -> tuple[str, ...]:
    """Return the names of the built-in models. Models of episodes need the extension of environments."""
    has_episodes = (Path(__file__).parent / "extensions/environments").is_dir()
    return (*SMOKE_DATA, *_EPISODES) if has_episodes else SMOKE_DATA


def smoke_folder(name: str, environment: Mapping[str, str]) -> Path:
    """Return the cache folder of a built-in smoke task; it may not exist. Raise ConfigError for an unknown name."""
    if name not in list_smoke_tasks():
        message = f"there is no built-in '{name}'"
        raise config_error("model_name_or_path", message, f"write {' or '.join(list_smoke_tasks())}")
    task = name.removeprefix(SMOKE_SCHEME)
    phases = {UNTRAINED: (), MAFIA: MAFIA_PHASES, TOOLS: SHOP_PHASES}.get(name, PHASES)
    key = hash_settings(tied=task.endswith("-tied"), phases=phases, name=name)
    return cache_root(environment) / "smoke" / f"{task}-{key}"


def smoke_command(name: str, environment: Mapping[str, str]) -> tuple[Path, list[str]]:
    """Return the folder of a built-in smoke task, and the command that makes it there (a minute; needs torch).

    Raise ConfigError if the task does not exist.
    """
    folder = smoke_folder(name, environment)
    if name in _EPISODES:
        return folder, module_command(_EPISODES[name], str(folder))
    flags = {"smoke:sums-tied": ["--tie-word-embeddings"], UNTRAINED: ["--untrained"], PROGRAMS: ["--programs"]}
    return folder, module_command("grpo_recipes.smoke", str(folder), *flags.get(name, []))


def exit_on_sigterm() -> None:
    """Exit with code 143 after SIGTERM, so that ``make_smoke_task`` removes its incomplete folder."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main(argv: list[str] | None = None) -> None:
    """Make the smoke recipe's model and data."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie-word-embeddings", action="store_true", help="share the input and output embeddings")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the saved weights"
    )
    parser.add_argument(
        "--untrained", action="store_true", help="leave the weights random: a second instead of a minute"
    )
    parser.add_argument("--programs", action="store_true", help="write answers as programs, and solutions as tests")
    args = parser.parse_args(argv)
    options: dict[str, Any] = {"phases": ()} if args.untrained else {"name": PROGRAMS} if args.programs else {}
    make_smoke_task(args.out_dir, args.seed, tied=args.tie_word_embeddings, dtype=args.dtype, **options)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
