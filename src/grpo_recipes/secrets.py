"""Recognize and mask secrets, which must never be written or printed.

A name or a value decides: variables like HF_TOKEN, and texts that look like a known kind of token.
"""

import re
from collections.abc import Mapping

MASK = "********"
_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL)", re.IGNORECASE)
_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|wandb_v1_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abp]-[A-Za-z0-9-]{10,})"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")
# Names that contain one of the words above but are public.
_PUBLIC_NAMES = frozenset({"TOKENIZERS_PARALLELISM", "GRPO_TOKEN_FILE"})


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret: it contains TOKEN, KEY, SECRET, PASSWORD or CREDENTIAL.

    Two public variables with such a name are exceptions.
    """
    return name.upper() not in _PUBLIC_NAMES and bool(_NAME.search(name))


def contains_secret(value: object) -> bool:
    """Return whether a value or a part of it looks like a token, or is a text in a mapping under a secret's name."""
    if isinstance(value, Mapping):
        named = any(is_secret_name(str(name)) and isinstance(part, str) for name, part in value.items())
        return named or any(contains_secret(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(contains_secret(part) for part in value)
    return isinstance(value, str) and bool(_VALUE.search(value) or _URL_PASSWORD.search(value))


def mask_secrets(text: str) -> str:
    """Return ``text`` with asterisks instead of tokens, and of user names and passwords in URLs."""
    return _URL_PASSWORD.sub(MASK, _VALUE.sub(MASK, text))


def mask_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of ``environment`` that may be printed: values of secret variables, and tokens, are masked."""
    return {name: MASK if is_secret_name(name) else mask_secrets(value) for name, value in environment.items()}
