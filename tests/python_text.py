"""Run a text like ``python -c`` in a process of `rank_processes`: python -m python_text TEXT ARGUMENTS."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
