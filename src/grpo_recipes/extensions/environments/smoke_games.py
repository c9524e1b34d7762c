"""Train the small test model that plays SecretMafia; takes one to two minutes.

    python -m grpo_recipes.extensions.environments.smoke_games OUT_DIR

It is trained on games of a scripted detective. Then its logits are divided by ``MAFIA_TEMPERATURE``: its most probable
moves remain the scripted moves, but it samples other moves often enough for GRPO to improve it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes import smoke
from grpo_recipes.extensions.environments.games import Game

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM


Example = tuple[list[int], list[int]]  # tokens of an episode, and its labels: -100 except for actions


def _make_games(tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Example]:
    """Play SecretMafia with scripted moves; return (tokens, labels) of each game, with label -100 for game messages."""
    game, rng = Game("SecretMafia-v0", smoke.MAFIA_GAME), random.Random(seed)
    examples = []
    for game_seed in range(smoke.MAFIA_GAMES):
        turn, ids, labels = game.reset(game_seed), list[int](), list[int]()
        while not turn.done:
            action = game.choose_scripted_move(rng)
            text = tokenizer.apply_chat_template(turn.messages, add_generation_prompt=True, tokenize=False)
            prompt_ids: list[int] = tokenizer(text).input_ids
            action_ids: list[int] = tokenizer(action + smoke.END).input_ids
            ids, labels = ids + prompt_ids + action_ids, labels + [-100] * len(prompt_ids) + action_ids
            turn = game.step(action)
        examples.append((ids, labels))
    return examples


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, phases: smoke.Phases) -> None:
    """Train the model in place on the moves of scripted games, then divide its logits by ``MAFIA_TEMPERATURE``."""
    import torch

    rng, games = random.Random(seed), _make_games(tokenizer, seed)
    imitate(model, phases, lambda count, _: rng.sample(games, count))
    with torch.no_grad():
        model.lm_head.weight /= smoke.MAFIA_TEMPERATURE


def imitate(model: Qwen2ForCausalLM, phases: smoke.Phases, draw: Callable[[int, float], list[Example]]) -> None:
    """Train the model in place on the actions of episodes; ``draw(count, fraction)`` returns the episodes of a step.

    Each phase is (steps, episodes per step, ``fraction``, learning rate, weight decay). The learning rate rises over 20
    steps and falls to 0.
    """
    import torch

    for phase, step in smoke.track_steps(phases):
        if step == 0:
            optimizer = smoke.make_optimizer(model, phase)
        optimizer.param_groups[0]["lr"] = phase.lr * min(1.0, (step + 1) / 20) * (1 - step / phase.steps)
        batch = draw(phase.copies, phase.wrong_share)
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence([torch.tensor(episode[part]) for episode in batch], True, padding)
            for part, padding in ((0, 0), (1, -100))
        )
        is_action_BT = labels[:, 1:] != -100
        logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1][is_action_BT])
        torch.nn.functional.cross_entropy(logits, labels[:, 1:][is_action_BT]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    smoke.exit_on_sigterm()
    smoke.make_smoke_task(Path(sys.argv[1]), phases=smoke.MAFIA_PHASES, name=smoke.MAFIA, on_episodes=pretrain)
