"""Keys of the reward ``code_tests``. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import key
from grpo_recipes.recipe.sections import Key, Section


# fmt: off
@dataclass
class CodeArguments:
    """Keys of the reward ``code_tests``."""

    code_sandbox: str = key("bwrap",
        "Sandbox that runs the programs: bubblewrap on the training nodes, or the service at code_server_url.",
        ["bwrap", "piston", "sandbox_fusion"])
    code_server_url: str | None = key(None, "Address of the service with code_sandbox: piston or sandbox_fusion.")
    code_score: str = key("fraction",
        "Reward of a program: the fraction of passed tests, or 1 only if it passes all of them.", ["fraction", "all"])
# fmt: on


class CodeKeys(Section):
    """The keys of the reward ``code_tests`` that code reads, with their types."""

    sandbox = Key[str]("code_sandbox")
    server_url = Key[str | None]("code_server_url")
