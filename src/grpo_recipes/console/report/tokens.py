"""The tokens of a sampled completion for the page, which assets/tokens.js colors and reads out.

A sample's ``token_view`` has the text of its first tokens, and lists of their other values as text. See also
trainers/samples.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.console.report.page import name_hidden_characters
from grpo_recipes.secrets import contains_secret


@dataclass(frozen=True)
class TokenView:
    """The first tokens of a completion."""

    text: str
    lengths: str  # characters of each token
    advantages: str  # stretches of tokens with equal advantages, such as "40:0.5 12:-"; a hyphen: not trained
    logprobs: str  # negated, in hundredths, for each token, or "-"; "" if unknown
    count: int  # number of these tokens


def read_tokens(sample: Mapping[str, Any], most: int = 64) -> TokenView | None:
    """Return at most ``most`` tokens of a sample of ``samples.jsonl``, or None if it has none.

    Control and zero-width characters become their code, such as ``U+200B``. Spaces, tabs and line breaks stay. Return
    None for a damaged view. Also return None for a text with a secret, because its tokens can't be masked.
    """
    view = sample.get("token_view")
    values = view if isinstance(view, dict) else {}
    text, *lists = (str(values.get(name, "")) for name in ("text", "lengths", "advantages", "logprobs"))
    lengths, stretches, logprobs = (part.split()[:most] for part in lists)
    if not lengths or not all(map(str.isdecimal, lengths)) or contains_secret(text):
        return None
    tokens, start = [], 0
    for length in map(int, lengths):
        tokens.append(name_hidden_characters(text[start : start + length]))
        start += length
    return TokenView(
        "".join(tokens),
        " ".join(str(len(token)) for token in tokens),
        " ".join(stretches),
        " ".join(map(_count_hundredths, logprobs)),
        len(tokens),
    )


def _count_hundredths(logprob: str) -> str:
    """Return a log-prob as short text for the script: "12" for -0.12, and "-" if it is not a finite number."""
    try:
        return str(-round(100 * float(logprob)))
    except (ValueError, OverflowError):
        return "-"
