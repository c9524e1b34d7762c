"""Make the smoke model of SecretMafia, which takes a minute or two.

    python -m grpo_recipes.extensions.environments.smoke_games OUT_DIR

It learns from games of a detective who plays a script, and in the end its logits are divided by ``MAFIA_TEMPERATURE``:
its most probable moves are then the script's, but it samples others often enough that GRPO has something to do.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes import smoke
from grpo_recipes.extensions.environments.games import Game

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


def _games(tokenizer: PreTrainedTokenizerFast, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of scripted games of SecretMafia and their labels, which leave out what the game says."""
    game, rng, found = Game("SecretMafia-v0", smoke.MAFIA_GAME), random.Random(seed), []
    for number in range(smoke.MAFIA_GAMES):
        turn, ids, labels = game.reset(number), list[int](), list[int]()
        while not turn.done:
            action = game.scripted(rng)
            text = tokenizer.apply_chat_template(turn.messages, add_generation_prompt=True, tokenize=False)
            read: list[int] = tokenizer(text).input_ids
            written: list[int] = tokenizer(action + smoke.END).input_ids
            ids, labels = ids + read + written, labels + [-100] * len(read) + written
            turn = game.step(action)
        found.append((ids, labels))
    return found


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, phases: smoke.Phases) -> None:
    """Train on games, whose moves alone have a part in the loss, then flatten what the model samples."""
    import torch

    rng, games = random.Random(seed), _games(tokenizer, seed)
    for steps, copies, _, lr, weight_decay in phases:
        optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=weight_decay)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / steps)
            batch = rng.sample(games, copies)
            ids, labels = (
                torch.nn.utils.rnn.pad_sequence([torch.tensor(game[part]) for game in batch], True, padding)
                for part, padding in ((0, 0), (1, -100))
            )
            seen = labels[:, 1:] != -100
            logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1][seen])
            torch.nn.functional.cross_entropy(logits, labels[:, 1:][seen]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model.lm_head.weight /= smoke.MAFIA_TEMPERATURE


if __name__ == "__main__":
    smoke.make(Path(sys.argv[1]), phases=smoke.MAFIA_PHASES, on_games=pretrain)
