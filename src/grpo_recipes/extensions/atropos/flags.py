"""The tables of ``flags.yaml``: flags and variables of trainers for Atropos.

``main`` makes its parser and its help from them, ``flag_keys`` translates them, and a page of the docs lists them.
"""

from pathlib import Path

from grpo_recipes.recipe.converters.table import Row, read_table

_FILE, _FUNCTIONS = Path(__file__).with_suffix(".yaml"), "grpo_recipes.extensions.atropos.flag_keys"
FLAGS = read_table(_FILE, "flags", _FUNCTIONS)
FIELDS = read_table(_FILE, "fields", _FUNCTIONS)  # of an environment
VARIABLES = read_table(_FILE, "variables", _FUNCTIONS)
MODE = "--weight-bridge-mode"
AUTO, SHARED = "auto", "shared_vllm"
ADAPTERS = ("lora_only", "lora_restart")
COMMAND = "python src/atropos_grpo.py"
SCRIPT = "run_atropos_grpo.sh"


def help_of(row: Row) -> str:
    """Return the line of a flag in the help, with its default."""
    default = "" if row.default is None else f" (default {row.default})"
    return f"{row.help or row.fix}{default}{f'; {row.remark}' if row.remark else ''}"


def flag_rows() -> list[tuple[str, str, str]]:
    """Return each flag with its default and its meaning, in Markdown, for a page."""
    rows = [
        (
            ", ".join(f"`{name}`" for name in row.names),
            "" if row.default is None else f"`{row.default}`",
            f"refused: {row.fix}" if row.rejected else "; ".join(filter(None, (row.help, row.remark))),
        )
        for row in FLAGS.rows
    ]
    rows.append(("`--benchmark`", "", "ends with the benchmark summary"))
    for row in FIELDS.rows:
        rows.append((f"`{row.name}`", "", f"the key `{next(iter(row.sets))}`" if row.sets else f"refused: {row.fix}"))
    return [*rows, ("`--env.FIELD`", "", "any other field of the environment's configuration")]


def variable_rows() -> list[tuple[str, str, str]]:
    """Return each variable with its default and its meaning, in Markdown, for a page."""
    rows = []
    for row in VARIABLES.rows:
        flag = f" (`{row.variable}`)" if row.variable else ""
        reader = f", read by {SCRIPT}" if row.script else ""
        rows.append((f"`{row.name}`", f"`{row.default}`" if row.default else "", f"{row.help}{flag}{reader}"))
    return rows
