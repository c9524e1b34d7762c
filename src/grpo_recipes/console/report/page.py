"""Format numbers, and render pages from jinja2 templates.

Every text is escaped, nothing is loaded from elsewhere, and only our own style and script may run. Pass texts of a run
to templates as expressions, never through ``xmlattr`` or ``join``. Then ``_finalize`` masks secrets and names
characters that hide or reorder others, and jinja2 escapes the rest.
"""

import base64
import datetime
import functools
import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from grpo_recipes.process.reports import plural
from grpo_recipes.runs.health import drop_missing, finite_number, mean, percent
from grpo_recipes.secrets import mask_environment, mask_secrets
from grpo_recipes.stats import score_names, t_interval_half_width

NOTHING = "\u2013"  # an en dash
# Baseline of a benchmark -> its title on the page.
BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}
SMOKE_BADGE = ("smoke test, not an experiment", "smoke")
ENOUGH_SEEDS = 5  # with fewer seeds, the interval of the mean is too wide to be useful: show single seeds instead
_HERE = Path(__file__).parent
# Files of ``assets/`` in their order on the page.
_STYLES = ("base.css", "charts.css", "tables.css", "completions.css", "screens.css")
_SCRIPTS = (
    "memory.js",
    "charts.js",
    "linked.js",
    "export.js",
    "completions.js",
    "tokens.js",
    "reader.js",
    "tables.js",
    "copy.js",
    "reload.js",
)
# Control characters, soft hyphen, direction marks and overrides, zero-width and tag characters, lone surrogates.
_HIDDEN = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff]"
)
_HIDDEN_OR_SPACE = re.compile(rf"{_HIDDEN}|\n|\t|^ +| +$| {{2,}}", re.MULTILINE)
_SPACES = {"\n": Markup('<i class="nl"></i>\n'), "\t": Markup('<i class="tab">\t</i>')}


def format_number(value: float | None) -> str:
    """Return a number with three significant digits: 0.891, 1,234, 12.3k, 2.4e-7. Return a dash for None.

    Raise ValueError for an infinite number.
    """
    if value is None:
        return NOTHING
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        mantissa, exponent = f"{value:.2e}".split("e")
        return use_minus_signs(f"{float(mantissa):g}e{int(exponent)}")
    if size >= 10_000:
        return use_minus_signs(f"{value / 1e6:.3g}M" if size >= 1e6 else f"{value / 1e3:.3g}k")
    return use_minus_signs(f"{value:,.0f}" if float(value).is_integer() or size >= 100 else f"{value:.3g}")


def use_minus_signs(text: str) -> str:
    """Replace each hyphen of a text by the Unicode minus sign."""
    return text.replace("-", "\u2212")


def format_duration(seconds: float) -> str:
    """Return seconds as 4.2 s, 1 min 08 s, 3 h 05 min, 2 d 03 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for unit, size, below, part in (("min", 60, "s", 1), ("h", 3600, "min", 60)):
        count, remainder = divmod(round(seconds / part), size // part)
        if count < (24 if unit == "h" else 60):
            return f"{count} {unit} {remainder:02d} {below}"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02d} h"


def format_points(values: Iterable[float | None]) -> str:
    """Return numbers as text for the script: integers in full, others with four digits, and a hyphen for None.

    Nearly equal numbers have more digits, so that their range still has a thousand values.
    """
    points = [*values]
    known = drop_missing(points)
    spread, size = max(known, default=0.0) - min(known, default=0.0), max(map(abs, known), default=0.0)
    digits = max(4, 3 + math.floor(math.log10(max(size / spread, 1.0)))) if spread else 4
    return " ".join(
        "-" if value is None
        else f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e7
        else f"{value:.{digits}g}"
        for value in points
    )  # fmt: skip


def make_anchor(title: str) -> str:
    """Return the id of a chart in links to it, from its title."""
    return "chart-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def format_mean(
    values: Sequence[float],
    text: Callable[..., str] = format_number,
    limits: tuple[float | None, float | None] = (None, None),
) -> str:
    """Return the mean over seeds as text, with its 95 % interval cut at ``limits``, or with the range of few seeds.

    ``text`` formats a number. A single value is formatted without an interval.
    """
    half, center = t_interval_half_width(values), mean(values)
    if half is None or center is None:
        return text(center)
    if len(values) < ENOUGH_SEEDS:
        return f"{text(center)} (seeds {text(min(values))} to {text(max(values))})"
    low, high = clamp(center - half, limits), clamp(center + half, limits)
    return f"{text(center)} (95 %: {text(low)} to {text(high)})"


def clamp(value: float, limits: tuple[float | None, float | None]) -> float:
    """Return ``value`` clamped to ``limits`` (low, high). A limit of None has no effect."""
    low, high = limits
    return max(value if high is None else min(value, high), -math.inf if low is None else low)


def render_model_text(text: str) -> Markup:
    """Return a prompt or completion as HTML with visible white space and control characters.

    Copying it from the page yields the original text.
    """

    return Markup(_HIDDEN_OR_SPACE.sub(lambda match: _mark(match[0]), str(escape(text))))


@functools.lru_cache(maxsize=1000)
def _mark(char: str) -> str:
    """Return the HTML that shows a hidden character, or spaces, without changing the copied text."""
    if char in _SPACES:
        return _SPACES[char]
    return f'<i class="sp">{char}</i>' if char[0] == " " else f'<i class="ctl">{_format_char_code(char)}</i>'


def _format_char_code(char: str) -> str:
    """Return the code of a character as visible ASCII text: ``\\x1b`` below 256, otherwise ``U+200B``."""
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"U+{code:04X}"


def name_hidden_characters(text: str) -> str:
    """Replace each character that hides or reorders others by its code as visible text."""
    return re.sub(_HIDDEN, lambda match: _format_char_code(match[0]), text)


def offer_breaks(name: str) -> Markup:
    """Return a name or a path as HTML that a line may break after ``_`` and ``/``."""
    return Markup(re.sub(r"(?<=[_/])(?=\w)", "<wbr>", str(escape(_finalize(name)))))


def _finalize(value: Any) -> Any:
    """Return a value of a template with secrets masked and hidden characters named, before jinja2 escapes it.

    None becomes "". HTML from our functions (``Markup``) stays unchanged.
    """
    if value is None:
        return ""
    return value if isinstance(value, Markup) else name_hidden_characters(mask_secrets(str(value)))


def format_recipe_value(value: Any) -> str:
    """Return a recipe value as text with secrets masked: strings unchanged, other values as JSON, 8.0 as 8."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return mask_secrets(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def format_command(process: dict[str, Any]) -> str:
    """Return the command of a planned process as shell input: its variables, then its words, with secrets masked."""
    variables = mask_environment(process.get("environment") or {})
    lines = [f"{name}={shlex.quote(text)}" for name, text in variables.items()]
    return " \\\n  ".join([*lines, shlex.join(process.get("argv") or [])])


@functools.cache
def _load_templates() -> jinja2.Environment:
    """Return the jinja2 environment of all pages; it is created once.

    Functions such as ``format_number`` are filters under their own names. The files of ``assets/`` are inlined, with
    their hashes for the content security policy.
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, finalize=_finalize,
    )  # fmt: skip
    functions = (
        format_number, percent, format_duration, plural, format_points, finite_number, mean, t_interval_half_width,
        format_mean, make_anchor, offer_breaks, render_model_text, format_recipe_value, format_command, score_names,
        mask_secrets,
    )  # fmt: skip
    templates.filters |= {function.__name__: function for function in functions}
    templates.filters["quoted"] = shlex.quote
    templates.globals |= {"format_number": format_number, "percent": percent, "NOTHING": NOTHING}
    for name, files in (("style", _STYLES), ("script", _SCRIPTS)):
        texts = ((_HERE / "assets" / file).read_text(encoding="utf-8") for file in files)
        templates.globals |= {name: InlineFile("\n".join(texts))}
    return templates


class InlineFile:
    """A script or style of ours inside a page. Only its hash is allowed by the page's content security policy."""

    def __init__(self, text: str):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        self.text, self.hash = Markup(text), Markup(f"sha256-{digest}")  # our own files need no escaping


@dataclass(frozen=True)
class Polling:
    """How a served page stays current: a script asks the server for a newer page than ``version``."""

    script: InlineFile
    version: str


def render(template: str, *, live: bool = False, polling: Polling | None = None, **values: Any) -> str:
    """Return a whole page as HTML: a template with these values, and with the current time.

    A ``live`` page will be written again, so it reloads itself; with ``polling``, it asks a server instead. A template
    that reads a missing value raises an error of jinja2.
    """
    now = datetime.datetime.now()
    times = {"now": now.strftime("%Y-%m-%d %H:%M"), "written": round(now.timestamp())}
    reloads = live and polling is None
    return _load_templates().get_template(template).render(**times, live=reloads, polling=polling, **values)


def render_fragment(template: str, macro: str, *values: Any) -> Markup:
    """Return the HTML of a macro in a template, called with ``values``."""
    output: Markup = getattr(_load_templates().get_template(template).module, macro)(*values)
    return output
