r"""Normalize the notation of answers: LaTeX, Unicode, plain-text mathematics and Markdown.

``clean_answer`` prepares an answer for the exact comparison (``answers``), and ``to_latex`` prepares an expression for
the parser of math-verify. Both are pure text functions.

    from grpo_recipes.rewards.notation import clean_answer, to_latex

    clean_answer(r"The answer is $\boxed{½}$.")  # r"\frac{1}{2}"
    to_latex("2*sqrt(3)/2 + pi^10")  # r"2\cdot \sqrt{3}/2 + \pi ^{10}"
"""

# ruff: noqa: RUF001 (the tables below translate ambiguous characters)
from __future__ import annotations

import functools
import re

DOLLAR = "¤"  # replaces \$, which does not start a formula; also a unit

_FRACTIONS = {
    "½": "1 2", "⅓": "1 3", "⅔": "2 3", "¼": "1 4", "¾": "3 4", "⅕": "1 5", "⅖": "2 5", "⅗": "3 5", "⅘": "4 5",
    "⅙": "1 6", "⅚": "5 6", "⅛": "1 8", "⅜": "3 8", "⅝": "5 8", "⅞": "7 8",
}  # fmt: skip
_SYMBOLS = {
    "π": "pi", "θ": "theta", "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "λ": "lambda", "μ": "mu",
    "φ": "phi", "ω": "omega", "σ": "sigma", "∞": "infty", "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx",
    "×": "times", "·": "cdot", "⋅": "cdot", "∪": "cup", "∩": "cap", "∈": "in", "∅": "emptyset", "±": "pm", "∓": "mp",
    "⟨": "langle", "⟩": "rangle", "√": "sqrt", "∠": "angle", "⌊": "lfloor", "⌋": "rfloor", "…": "ldots",
}  # fmt: skip
_RAISED, _LOWERED, _PLAIN = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n"
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2014\ufe63\uff0d", "-")
    | dict.fromkeys("\u200b\ufeff", "")
    | dict.fromkeys("\u2009\u202f", r"\,")
    | dict.fromkeys("’′", "'")
    | {mark: "\\frac{{{}}}{{{}}}".format(*parts.split()) for mark, parts in _FRACTIONS.items()}
    | {mark: f"\\{name} " for mark, name in _SYMBOLS.items()}
    | {"°": " degrees ", "÷": "/", "∛": r"\sqrt[3]", "ℝ": r"\mathbb{R}"}
)
_SCRIPTS = tuple(
    (re.compile(f"[{marks}]+"), sign, str.maketrans(marks, _PLAIN)) for marks, sign in ((_RAISED, "^"), (_LOWERED, "_"))
)
# Commas and thin spaces that occur only inside a number: 1{,}000, 1,\!000, 1\,000.
_GROUPED_IN_LATEX = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:\s*\{\s*,\s*\}\s*|,\\!\s*|\\,)[0-9]{3})+(?![0-9])")
# Repeating decimals: 0.1\overline{6}, 0.\bar3, 0.(3), 0.333...
_REPEATING = re.compile(
    r"(?<![0-9.,])(?P<whole>[0-9]*)\.(?P<fixed>[0-9]*?)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(?P<block>[0-9]+)\s*\}|(?P<digit>[0-9]))"
    r"|\((?P<bracketed>[0-9]+)\)(?=\s*$)|(?:(?P<repeated>[0-9])(?P=repeated){2,}|(?P<pattern>[0-9]{2,}?)(?P=pattern)+)\s*(?:\.\.\.|\\l?dots(?![A-Za-z])))"
)
_NO_DIGITS = re.compile(r"[^0-9]+")
_DEGREES_IN_FUNCTION = r"(\\?(?:sin|cos|tan|cot|sec|csc)\s*)(?:\(\s*([0-9.]+)\s*degrees\s*\)|([0-9.]+)\s*degrees)"
_SET_BUILDER = r"^\s*\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![A-Za-z])|[|:])\s*(.+?)\s*\\\}\s*$"
# A text that every match contains (which saves most searches), the pattern, and its replacement.
_LATEX_REWRITES = tuple(
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in (
        (r"\$", r"(?<!\\)\\\$", DOLLAR),
        (r"\%", r"\\%", "%"),
        ("\\", r"(?<!\\)\\[()\[\],;: ]|\\q?quad(?![A-Za-z])", " "),
        ("\\", r"\\(?:left|right|displaystyle|limits|[Bb]igg?[lr]?)(?![A-Za-z])|(?<!\\)\\!", ""),
        (r"\circ", r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})", " degrees "),
        (r"\degree", r"\\degree(?![A-Za-z])", " degrees "),
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("frac", r"\\frac\s*([0-9])\s*(?=[0-9{])", r"\\frac{\1}"),
        ("frac", r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        (r"\varnothing", r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\choose", r"\{([^{}]+)\\choose([^{}]+)\}", r"\\binom{\1}{\2}"),
    )
)
_REWRITES = tuple(
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in (
        ("~", r"~", " "),
        ("*", r"(?<![^\s(])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w*])", r"\1"),
        ("$", r"\$\$?([^$]+)\$\$?", r" \1 "),
        (r"\{", _SET_BUILDER, r"\1"),
        ("degrees", _DEGREES_IN_FUNCTION, r"\1(\2\3\\pi/180)"),
        ("real", r"(?i)\ball (?:the )?real(?: number)?s\b", r"\\mathbb{R}"),
        ("^", r"\s+(?=\^)", ""),
        (".m", r"(?<=[0-9])\s*([ap])\.\s?m\.?(?![A-Za-z])", r" \1m"),
        ("M", r"(?<=[0-9])\s*([AP])\.?\s?M\.?(?![A-Za-z])", lambda match: f" {match[1].lower()}m"),
    )
)
_ALL_REWRITES = (*_LATEX_REWRITES, *_REWRITES)
_PAIRS = {"{}": re.compile(r"[{}]"), "()": re.compile(r"[()]"), "[]": re.compile(r"[\[\]]")}
_QUOTES = tuple("\"'*_`")
_QUOTED = re.compile(r"""^(["'*_`]+)(.+)\1\s*$""", re.DOTALL)
_DOUBLED = re.compile(r"\\(?=\\[A-Za-z])")  # commands escaped by JSON
_LINES = re.compile(r"(?<=[0-9])[ \t]*[\r\n]\s*(?=[0-9])")  # one number per line is a list
_COMMANDS = re.compile(
    r"\\(boxed|fbox|text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{"
)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z{])\s*(?!\{)")
_LEAD_IN = re.compile(
    r"(?i:(?:the\s+)?(?:final\s+)?answers?(?:\s+(?:is|are))?(?:\s*[:=]\s*|\s+)|(?:=|\\approx(?![A-Za-z]))\s*)(?=\S)"
)


def clean_answer(text: str) -> str:
    """Return an answer without formula signs, boxes, bold marks, introduction and final full stop.

    Unicode signs become LaTeX, and repeating decimals become fractions.
    """
    if not text.isascii():
        for pattern, sign, plain in _SCRIPTS:
            text = pattern.sub(functools.partial(_replace_scripts, sign, plain), text)
        text = text.translate(_CHARACTERS)
    latex = "\\" in text
    if latex and r"\\" in text and r"\begin" not in text:
        text = _DOUBLED.sub("", text)
    if latex or "{" in text:
        text = _GROUPED_IN_LATEX.sub(lambda match: _NO_DIGITS.sub("", match[0]), _unwrap_commands(text))
    for needed, pattern, replacement in _ALL_REWRITES if latex else _REWRITES:
        if needed in text:
            text = pattern.sub(replacement, text)
    if "." in text and ("\\" in text or "..." in text or text.endswith(")")):
        text = _REPEATING.sub(_convert_repeating_decimal, text)
    if text[:1] in _QUOTES:
        text = _QUOTED.sub(r"\2", text)
    text = " ".join(_LINES.sub(", ", text).split())
    introduction = _LEAD_IN.match(text)
    text = text[introduction.end() :] if introduction else text
    return strip_braces((text if text.endswith("..") else text.removesuffix(".")).strip())


def _convert_repeating_decimal(match: re.Match[str]) -> str:
    r"""Return the exact LaTeX fraction of a repeating decimal that ``_REPEATING`` matched: ``0.(3)`` as ``3/9``."""
    block = match["block"] or match["digit"] or match["bracketed"] or match["repeated"] or match["pattern"]
    start = match["whole"] + match["fixed"]
    above = int(start + block) - int(start or "0")
    return rf"\frac{{{above}}}{{{'9' * len(block)}{'0' * len(match['fixed'])}}}"


def _replace_scripts(sign: str, plain: dict[int, int], match: re.Match[str]) -> str:
    """Return the matched raised or lowered characters as LaTeX: ``²`` as ``^{2}``, ``₁₀`` as ``_{10}``.

    ``sign`` is ``^`` or ``_``, and ``plain`` maps each character to its plain form.
    """
    return f"{sign}{{{match[0].translate(plain)}}}"


def strip_braces(text: str) -> str:
    """Return a text without the pairs of braces that surround the whole text: ``5`` for ``{{5}}``."""
    while text.startswith("{") and find_closing_bracket(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _unwrap_commands(text: str) -> str:
    r"""Return a text with the content of ``\boxed{…}``, ``\text{…}`` and similar commands instead of the commands."""
    text, start = _BARE_BOX.sub(" ", text) if "box" in text else text, 0
    while match := _COMMANDS.search(text, start):
        end = find_closing_bracket(text, match.end() - 1)
        if end < 0:
            start = match.end()
            continue
        # A space separates the content: 5\text{eggs}, and 12\boxed{3} is not 123.
        gap = " " if match[1] in ("boxed", "fbox") or text[match.end()].isalnum() else ""
        text = text[: match.start()] + gap + text[match.end() : end] + gap + text[end + 1 :]
        start = match.start()
    return text


def find_closing_bracket(text: str, start: int, brackets: str = "{}") -> int:
    """Return the index of the bracket that closes the first bracket at or after ``start``. -1 if there is none.

    ``brackets`` is the pair to search: braces by default.
    """
    depth = 0
    for bracket in _PAIRS[brackets].finditer(text, start):
        depth += 1 if bracket[0] == brackets[0] else -1
        if depth == 0 and bracket[0] == brackets[1]:
            return bracket.start()
    return -1


# --- plain-text mathematics as LaTeX

_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan"}
_FUNCTIONS |= {"ln", "log", "exp", "min", "max", "gcd", "det", "lim"}
_OTHER_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_GREEK = {"alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "sigma", "phi", "omega", "Delta", "Omega"}
_CONSTANTS = {name: f"\\{name} " for name in (*_GREEK, "pi", "infty", "cup", "cap")}
_CONSTANTS |= dict.fromkeys(("infinity", "inf", "oo"), r"\infty ") | {"union": r"\cup ", "lcm": r"\operatorname{lcm}"}
_SIGNS = {"**": "^", "*": r"\cdot ", "<=": r"\le ", "=<": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "'": r"_{prime}"}
KNOWN_WORDS = _FUNCTIONS | set(_OTHER_NAMES) | set(_CONSTANTS) | {"sqrt", "cbrt", "abs", "floor", "ceil", "and", "or"}
_TOKEN = re.compile(
    r"\\begin\{\w+\}|\\end\{\w+\}|\\[A-Za-z]+|\\.|[A-Za-z]+|\*\*|<=|=<|>=|!=|[0-9]+(?:\.[0-9]+)?|.", re.DOTALL
)
_PIECE = re.compile(r"\s*(\\[A-Za-z]+|[0-9]+(?:\.[0-9]+)?|[A-Za-z])")
# The start of an argument after a function's name in plain letters, as in `sin(x)`, `sin^2 x` and `sin x`.
_ARGUMENT_START = re.compile(r"\s*[(|\\0-9]|\s*[\^_]|\s+[A-Za-z](?![A-Za-z])")
_ARGUMENT_END = re.compile(
    r"[-+=<>,;)\]}|&]|\\(?:\\|le|ge|cdot|times|sin|cos|tan|cot|sec|csc|ln|log|end)(?![A-Za-z])|$"
)
_AROUND = {"abs": ("|", "|"), "floor": (r"\lfloor ", r"\rfloor "), "ceil": (r"\lceil ", r"\rceil ")}
# Two numbers side by side are a product if the first is an exponent: 2^6 3^5.
_POWER_PRODUCT = re.compile(r"(\^\{[0-9]+\})\s+(?=[0-9])")


def to_latex(text: str) -> str:
    r"""Return cleaned mathematics as LaTeX, e.g. for ``sqrt(3)/2``, ``pi``, ``x**2``, ``\sin^2t`` and ``\frac ab``."""
    parts: list[str] = []
    index = 0
    while index < len(text):
        token = _TOKEN.match(text, index)
        assert token is not None
        part, index = _translate_token(token[0], text, token.end(), parts)
        parts.append(part)
    return _POWER_PRODUCT.sub(r"\1\\cdot ", "".join(parts))


def _translate_token(token: str, text: str, end: int, before: list[str]) -> tuple[str, int]:
    """Translate a token and its arguments to LaTeX; return it with the index in ``text`` after them.

    A token is for example a word, a sign, a number or a LaTeX command; a token without a rule is unchanged. ``end`` is
    the index after the token, and ``before`` has the LaTeX of earlier tokens.
    """
    name = _OTHER_NAMES.get(token.lstrip("\\"), token.lstrip("\\"))
    if name in ("sqrt", "cbrt"):
        degree = "[3]" if name == "cbrt" else ""
        if text.startswith("[", end) and (close := find_closing_bracket(text, end, "[]")) > 0:
            degree, end = text[end : close + 1], close + 1
        radicand, end = _translate_argument(text, end)
        return rf"\sqrt{degree}{{{radicand}}}", end
    if name == "frac" and token != name:
        above, end = _translate_argument(text, end)
        below, end = _translate_argument(text, end)
        return rf"\frac{{{above}}}{{{below}}}", end
    if name in _FUNCTIONS and (token != name or _ARGUMENT_START.match(text, end)):
        return _translate_function(name, text, end)
    if token in _AROUND and text.startswith("(", end) and (close := find_closing_bracket(text, end, "()")) > 0:
        return to_latex(text[end + 1 : close]).join(_AROUND[token]), close + 1
    if token in ("^", "**", "_"):
        return _translate_script("^" if token == "**" else token, text, end)
    if token == "U" and before and "".join(before).rstrip().endswith((")", "]", "}")):
        return r"\cup ", end
    return _CONSTANTS.get(token, _SIGNS.get(token, token)), end


def _translate_argument(text: str, start: int) -> tuple[str, int]:
    """Translate the argument at ``start`` to LaTeX, without its brackets; return it with the index after it.

    An argument is ``{…}``, ``(…)``, a number, a letter or a command. If there is none, return "" and ``start``.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    for brackets in ("{}", "()"):
        if text.startswith(brackets[0], start) and (close := find_closing_bracket(text, start, brackets)) > 0:
            return to_latex(text[start + 1 : close]), close + 1
    piece = _PIECE.match(text, start)
    if piece is None:
        return "", start
    return _translate_token(piece[1], text, piece.end(), [])


def _translate_script(sign: str, text: str, end: int) -> tuple[str, int]:
    """Translate an exponent or index to LaTeX with braces; return it with the index after it: ``^{-1}`` for ``^-1``.

    ``sign`` is ``^`` or ``_``, and ``end`` the index in ``text`` after it.
    """
    negative = re.match(r"\s*-\s*", text[end:])
    content, end = _translate_argument(text, end + (negative.end() if negative else 0))
    return f"{sign}{{{'-' if negative else ''}{content}}}", end


def _translate_function(name: str, text: str, end: int) -> tuple[str, int]:
    r"""Translate a function such as ``sin`` to LaTeX with its exponent or base; return it with the index after it.

    With an exponent or a base, the argument gets parentheses: ``\sin^{2}(t)`` for ``\sin^2t``. Without, the argument is
    not included. ``exp(x)`` becomes ``e^{x}``. ``end`` is the index in ``text`` after the name.
    """
    scripts = ""
    while match := re.match(r"\s*([\^_])", text[end:]):
        script, end = _translate_script(match[1], text, end + match.end())
        scripts += script
    if name == "exp" and not scripts and text.startswith("(", end):
        argument, end = _translate_argument(text, end)
        return f"e^{{{argument}}}", end
    following = text[end:].lstrip()
    if not scripts or not following or following[0] in "({":
        return f"\\{name}{scripts} ", end
    stop = _ARGUMENT_END.search(text, end)
    assert stop is not None
    return f"\\{name}{scripts}({to_latex(text[end : stop.start()].strip())})", stop.start()
