"""The drawing of trained tokens has the tokens of an episode with the smoke model."""

from __future__ import annotations

import html
import re

from doc_pages import REPOSITORY

from grpo_recipes import smoke
from grpo_recipes.rollouts.renderer import Renderer
from grpo_recipes.rollouts.turns import Turn

OWN, ADDED = "b", "em"  # i and span: of the template and of the environment
DRAWN = re.compile(r"<(i|span|b|em)>([^<]+)</\1>")


def read(tokens: list[str]) -> list[tuple[str, str]]:
    """Return tokens that the policy reads, each with how it is drawn."""
    return [("i" if token.startswith("<|") else "span", token) for token in tokens]


def test_the_drawing_has_the_tokens_of_an_episode() -> None:
    page = (REPOSITORY / "docs/environments.md").read_text()
    rows = re.findall(r'<p class="tokens">(.*?)</p>', page, re.DOTALL)
    tokenizer = smoke.build_tokenizer()
    renderer, name = Renderer(tokenizer, {}), tokenizer.convert_ids_to_tokens
    prompt = name(renderer.prompt(Turn([{"role": "user", "content": "5+9="}])))
    second = tokenizer("<answer>10</answer><|im_end|>").input_ids
    whole = tokenizer("<answer>14</answer><|im_end|>").input_ids
    for row, first in zip(rows, (whole, whole[:3]), strict=True):
        between = name(renderer.between([{"role": "user", "content": "2+8="}], first))
        added = [] if first == whole else [(ADDED, between.pop(0))]
        expected = [*read(prompt), *((OWN, token) for token in name(first)), *added, *read(between)]
        expected += [(OWN, token) for token in name(second)]
        assert [(tag, html.unescape(text)) for tag, text in DRAWN.findall(row)] == expected
