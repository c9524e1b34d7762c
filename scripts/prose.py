"""Check that pages, messages and docstrings are in plain English: at most 4 stilted constructions in 1,000 words.

    python scripts/prose.py               # README, docs/ and the texts in src/; make lint calls this
    python scripts/prose.py FILE...       # print every finding in these files

Readers of this project had to read these constructions twice. The script only finds patterns: a page without findings
can still be unclear.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MOST = 4.0  # findings in 1,000 words
# A stilted construction -> the plain one.
CONSTRUCTIONS = {
    r"[Ww]here (?:no|nothing|none|there|it|they|you|a|the|one|some)\b": "if, when",
    r"(?:that|those) of\b": "repeat the noun",
    r"\w+ alone\b": "only",
    r"[Bb]eside\b": "next to, in addition to",
    r"[Mm]eanwhile\b": "at the same time",
    r"(?:go|goes|went|gone|going) on\b": "continue, resume",
    r"(?:is|are|was|were) no (?!longer|more|less)\w+": "is not a, does not",
    r"of (?:its|their|our|your|his) own\b": "its own, your own",
    r"(?:some|no|any|every)body\b": "name the role",
    r"but for\b": "except, without",
    r"in (?:the|its|their) place of\b": "instead of",
    r"(?:anew|whose|whatever|thereof)\b": "reword",
    r"wants?\b": "needs, must",
    r"left alone\b": "uninterrupted, unchanged",
    r"(?:of|by|from|with|to|in|at|for) (?:which|whom)\b": "a second sentence",
    r"(?:nor|so) (?:is|are|does|do) (?:it|they|the|a)\b": "reword",
    r"what (?:is|was|are|were|a|an|the|it|they) \w+": "a noun",
}
_FINDINGS = [(re.compile(rf"\b{pattern}"), plain) for pattern, plain in CONSTRUCTIONS.items()]


def main() -> int:
    """Check the repository, or print the findings of the files on the command line."""
    if names := sys.argv[1:]:
        for name in names:
            print(*findings_of(Path(name)), sep="\n")
        return 0
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    parts = {str(page.relative_to(REPOSITORY)): [page] for page in pages}
    parts["src"] = sorted((REPOSITORY / "src").rglob("*.py"))
    failed = False
    for name, files in parts.items():
        words = sum(len(text.split()) for file in files for _, text in texts_of(file))
        findings = [finding for file in files for finding in findings_of(file)]
        if len(findings) > max(MOST * words / 1000, 2):  # a short page may have two
            failed = True
            print(f"{name}: {len(findings)} stilted constructions in {words} words, at most {MOST:g} in 1,000:")
            print(*(f"  {finding}" for finding in findings[:20]), sep="\n")
    return int(failed)


def findings_of(file: Path) -> list[str]:
    """Return a line for each stilted construction in a file: place, words and the plain construction."""
    name = file.relative_to(REPOSITORY) if file.is_relative_to(REPOSITORY) else file
    return [
        f"{name}:{line}: {match[0]!r}: {plain}"
        for line, text in texts_of(file)
        for pattern, plain in _FINDINGS
        for match in pattern.finditer(text)
    ]


def texts_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a Markdown file, or the sentences in strings of a Python file, with their line numbers."""
    if file.suffix == ".py":
        yield from _strings_of(file)
        return
    in_code = False
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("|", "    ", "<")):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", line)


def _strings_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a Python file that have at least four words: docstrings and messages."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3:
            yield node.lineno, re.sub(r"`[^`]*`", " ", node.value)


if __name__ == "__main__":
    sys.exit(main())
