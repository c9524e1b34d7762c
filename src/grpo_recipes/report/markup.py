"""HTML and SVG put together so that nothing of a run can become markup: every text is escaped on its way in."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = frozenset({"meta", "input", "br"})
_DRAWN = frozenset({"path", "line", "rect"})
# Control characters, soft hyphen, direction marks and overrides, zero-width and tag characters, lone surrogates.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff]"
)
_SPACES = re.compile(r"\n|\t|^ +| +$| {2,}", re.MULTILINE)


class Html(str):
    """Markup that may stand in a page as it is."""

    __slots__ = ()


def escape(text: object) -> Html:
    """``text`` as it is read: markup escaped, characters that hide or reorder others named."""
    if isinstance(text, Html):
        return text
    return Html(_HIDDEN.sub(lambda match: _name(match[0]), html.escape(str(text))))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """``<name attributes>children</name>``.

    Args:
        name: of the element.
        children: markup, or texts that are escaped.
        attributes: ``class_`` is ``class``, other underscores become hyphens; None and False leave one out.
    """
    written = "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    if name in _DRAWN and not children:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{together(children)}</{name}>")


def together(parts: Iterable[object]) -> Html:
    """Parts one after another; None is left out."""
    return Html("".join(escape(part) for part in parts if part is not None))


def model_text(text: str) -> Html:
    """A prompt or completion with its white space and control characters made visible; copying it gives the text."""
    pieces: list[object] = []
    for line in re.split(f"({_HIDDEN.pattern})", text):
        if _HIDDEN.fullmatch(line):
            pieces.append(element("i", _name(line), class_="ctl"))
        else:
            pieces.append(_with_spaces(line))
    return together(pieces)


def _with_spaces(text: str) -> Html:
    pieces: list[object] = []
    end = 0
    for match in _SPACES.finditer(text):
        pieces.append(text[end : match.start()])
        kind = {"\n": "nl", "\t": "tab"}.get(match[0], "sp")
        mark = element("i", "" if kind == "nl" else match[0], class_=kind)
        pieces.extend([mark, Html("\n")] if kind == "nl" else [mark])
        end = match.end()
    return together([*pieces, text[end:]])


def _name(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"U+{code:04X}"


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
