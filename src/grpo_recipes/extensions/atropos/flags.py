"""The tables of ``flags.yaml``: flags and variables of Atropos trainers.

``main`` builds its parser from them, ``flag_keys`` translates them to recipe keys, and a page of the docs lists them.
"""

from pathlib import Path

from grpo_recipes.recipe.converters.table import Row, read_table

_FILE, _FUNCTIONS = Path(__file__).with_suffix(".yaml"), "grpo_recipes.extensions.atropos.flag_keys"
FLAGS = read_table(_FILE, "flags", _FUNCTIONS)
FIELDS = read_table(_FILE, "fields", _FUNCTIONS)  # flags of an environment
VARIABLES = read_table(_FILE, "variables", _FUNCTIONS)
MODE = "--weight-bridge-mode"
AUTO, SHARED = "auto", "shared_vllm"
ADAPTERS = ("lora_only", "lora_restart")
COMMAND = "python src/atropos_grpo.py"
SCRIPT = "run_atropos_grpo.sh"


def format_flag_help(row: Row) -> str:
    """Return the text of ``--help`` for a flag: its meaning, or its replacement if not supported, then its default."""
    default = "" if row.default is None else f" (default {row.default})"
    return f"{row.help or row.fix}{default}{f'; {row.remark}' if row.remark else ''}"


def list_flag_rows() -> list[tuple[str, str, str]]:
    """Return the rows of the docs' table of flags, in Markdown: names, default, and meaning or, if rejected, the fix.

    Flags of environments, ``--benchmark`` and ``--env.FIELD`` follow the trainer's flags.
    """
    rows = [
        (
            ", ".join(f"`{name}`" for name in row.names),
            "" if row.default is None else f"`{row.default}`",
            f"not supported: {row.fix}" if row.rejected else "; ".join(filter(None, (row.help, row.remark))),
        )
        for row in FLAGS.rows
    ]
    rows.append(("`--benchmark`", "", "ends with the benchmark summary"))
    for row in FIELDS.rows:
        rows.append(
            (f"`{row.name}`", "", f"the key `{next(iter(row.sets))}`" if row.sets else f"not supported: {row.fix}")
        )
    return [*rows, ("`--env.FIELD`", "", "any other field of the environment's configuration")]


def list_variable_rows() -> list[tuple[str, str, str]]:
    """Return the rows of the docs' table of variables: name, default and meaning, in Markdown."""
    rows = []
    for row in VARIABLES.rows:
        flag = f" (`{row.variable}`)" if row.variable else ""
        reader = f", read by {SCRIPT}" if row.script else ""
        rows.append((f"`{row.name}`", f"`{row.default}`" if row.default else "", f"{row.help}{flag}{reader}"))
    return rows
