"""Train the small test model that calls tools; takes about a minute.

    python -m grpo_recipes.extensions.environments.smoke_tools OUT_DIR

It is trained on answers to "3 pear", the cost of three pears. With tools in its prompt, it looks up the price and
multiplies in one half of the episodes, and guesses in the other half. Without tools it always guesses. Prices are drawn
for each episode, so that it learns to copy them and knows none.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes import smoke
from grpo_recipes.extensions.environments.smoke_games import Example, imitate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

# The chat template of the recipe with tools: results are messages of the user, as in Qwen's templates.
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}<tool_call><|im_end|>"
    "{% endif %}{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{{ message['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TOOLS: list[Any] = [{"function": {"name": name}} for name in ("price", "multiply")]
_SHOWN_SHARE = 0.75  # fraction of episodes with tools in the prompt


def make_episode(rng: random.Random, guess_share: float) -> list[dict[str, str]]:
    """Return the messages of an episode: a question, with or without calls of tools, and an answer.

    In 3/4 of the episodes the prompt shows tools: then the first message has the role ``tools``, and ``guess_share`` is
    the fraction of episodes that guess instead of calling them. Episodes without tools always guess.
    """
    item, count, price = rng.choice(smoke.SHOP_ITEMS), rng.randint(2, 9), rng.randint(2, 9)
    shows_tools = rng.random() < _SHOWN_SHARE
    texts = [f"{count} {item}"]
    if shows_tools and rng.random() >= guess_share:
        before_item, after_item, before_a, before_b, after_b = smoke.SHOP_CALLS
        texts += [f"{before_item}{item}{after_item}", str(price)]
        texts += [f"{before_a}{count}{before_b}{price}{after_b}", str(count * price)]
        answer = count * price
    else:
        answer = rng.randint(2, 9) * rng.randint(2, 9)
    texts.append(str(answer).join(smoke.ANSWER_TAGS))
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return [{"role": "tools", "content": ""}] * shows_tools + messages


def _encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> Example:
    """Return the tokens of an episode, and its labels: the tokens of the model's turns, and -100 for all others."""
    tools = _TOOLS if messages[0]["role"] == "tools" else None
    messages = messages[1:] if tools else messages
    ids, labels, rendered = list[int](), list[int](), ""
    for index in range(1, len(messages), 2):
        texts = [
            str(
                tokenizer.apply_chat_template(
                    messages[:end], tools=tools, chat_template=TEMPLATE, tokenize=False,
                    add_generation_prompt=end == index,
                )
            )
            for end in (index, index + 1)
        ]  # fmt: skip
        prompt_ids = tokenizer(texts[0][len(rendered) :]).input_ids
        action_ids = tokenizer(texts[1][len(texts[0]) :]).input_ids
        ids, labels, rendered = ids + prompt_ids + action_ids, labels + [-100] * len(prompt_ids) + action_ids, texts[1]
    return ids, labels


def pretrain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, phases: smoke.Phases) -> None:
    """Train the model in place on episodes; ``wrong_share`` of a phase is the fraction of guesses."""
    rng = random.Random(seed)
    imitate(
        model, phases, lambda count, guesses: [_encode(tokenizer, make_episode(rng, guesses)) for _ in range(count)]
    )


if __name__ == "__main__":
    smoke.exit_on_sigterm()
    smoke.make_smoke_task(Path(sys.argv[1]), phases=smoke.SHOP_PHASES, name=smoke.TOOLS, on_episodes=pretrain)
