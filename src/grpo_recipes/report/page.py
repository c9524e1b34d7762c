"""Pages from jinja2 templates: every text is escaped, nothing is loaded, and only our own style and script may run.

Pass texts of a run to templates as expressions, never through ``xmlattr`` or ``join``: ``_finalize`` then names the
characters that hide or reorder others, and jinja2 escapes what is left.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from grpo_recipes.runs.health import percent

if TYPE_CHECKING:
    import jinja2

NOTHING = "\u2013"  # an en dash
TIMES = "\u00d7"
# Control characters, soft hyphen, direction marks and overrides, zero-width and tag characters, lone surrogates.
_HIDDEN = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff]"
)
_HIDDEN_OR_SPACE = re.compile(rf"{_HIDDEN}|\n|\t|^ +| +$| {{2,}}", re.MULTILINE)
_SPACES = {"\n": Markup('<i class="nl"></i>\n'), "\t": Markup('<i class="tab">\t</i>')}
Section = tuple[str, Markup | None]


def short(value: float | None) -> str:
    """Return three digits that count: 0.891, 1,234, 12.3k, 2.4e-7."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        return scientific(value)
    if size >= 10_000:
        scale, suffix = scale_of(size)
        return minus(f"{value / scale:.3g}{suffix}")
    if float(value).is_integer() or size >= 100:
        return minus(f"{value:,.0f}")
    return minus(f"{value:.3g}")


def signed(value: float | None) -> str:
    """Return ``short`` with a plus before what is above 0."""
    return f"+{short(value)}" if value is not None and value > 0 else short(value)


def duration(seconds: float) -> str:
    """Return seconds as 4.2 s, 1 min 08 s, 3 h 05 min, 2 d 03 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        whole, rest = divmod(round(seconds / small), size // small)
        if whole:
            return f"{whole} {unit} {rest:02d} {small_unit}"
    raise AssertionError(seconds)


def minus(text: str) -> str:
    """Return a text with a real minus sign for each hyphen."""
    return text.replace("-", "\u2212")


def scientific(value: float) -> str:
    """Return 2.4e-7, or 0."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return minus(f"{float(mantissa):g}e{int(exponent)}") if value else "0"


def scale_of(size: float) -> tuple[float, str]:
    """Return by what numbers of this size are divided, and the letter that says so."""
    if size >= 1e6:
        return 1e6, "M"
    return (1e3, "k") if size >= 1e4 else (1.0, "")


def compact(value: float) -> str:
    """Return a number in few characters, four digits, as page.js reads it."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def compact_all(values: Iterable[float | None]) -> str:
    """Return numbers as page.js reads them."""
    return " ".join("-" if value is None else compact(value) for value in values)


def plural(count: float, name: str) -> str:
    """Return "1 step" or "2,000 steps"."""
    return f"{count:,.0f} {name}{'s' * (count != 1)}"


def model_text(text: str) -> Markup:
    """Return a prompt or completion with white space and control characters made visible; a copy of it is the text."""

    def marked(match: re.Match[str]) -> str:
        found = match[0]
        if found in _SPACES:
            return _SPACES[found]
        return f'<i class="sp">{found}</i>' if found[0] == " " else f'<i class="ctl">{_name(found)}</i>'

    return Markup(_HIDDEN_OR_SPACE.sub(marked, str(escape(text))))


def _name(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"U+{code:04X}"


def _finalize(value: Any) -> Any:
    """Return what an expression of a template writes, before jinja2 escapes it."""
    if value is None:
        return ""
    return value if isinstance(value, Markup) else re.sub(_HIDDEN, lambda match: _name(match[0]), str(value))


@functools.cache
def _templates() -> jinja2.Environment:
    import jinja2  # every command imports this module, few write a page

    here = Path(__file__).parent / "templates"
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=_finalize,
    )  # fmt: skip
    filters = (short, signed, percent, duration, plural, compact_all, model_text)
    templates.filters |= {function.__name__: function for function in filters}
    return templates


def fragment(template: str, macro: str, *values: Any, **named: Any) -> Markup:
    """Return what a macro of a template writes."""
    made: Markup = getattr(_templates().get_template(template).module, macro)(*values, **named)
    return made


def page(title: str, heading: Markup, sections: Sequence[Section]) -> str:
    """Return a whole page; sections without content are left out."""
    # Files of ours need no escape. Their hashes let them run, and nothing else.
    style, script = (Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))
                     for name in ("page.css", "page.js"))  # fmt: skip
    return _templates().get_template("page.html.j2").render(
        title=title, heading=heading, sections=[(name, content) for name, content in sections if content],
        style=style, script=script, style_hash=_hash(style), script_hash=_hash(script),
        now=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
    )  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> Markup:
    """Return a table that scrolls where it is wider than the screen."""
    return fragment("parts.html.j2", "table", head, rows, kind)


def chart_grid(charts: Sequence[Markup | None], *, wide: bool = False) -> Markup | None:
    """Return charts beside one another, three in a row, or two wide ones."""
    present = [chart for chart in charts if chart]
    return fragment("charts.html.j2", "grid_of", present, wide) if present else None


def stacked(*parts: Markup | None) -> Markup | None:
    """Return parts one under the other, or None."""
    return Markup("").join(part for part in parts if part) or None


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
