"""Keys of the reward ``code_tests``. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import key
from grpo_recipes.recipe.sections import Key, Section

E2B, E2B_KEY = "e2b", "E2B_API_KEY"  # a value of code_sandbox, and the variable with its key


# fmt: off
@dataclass
class CodeArguments:
    """Keys of the reward ``code_tests``."""

    code_sandbox: str = key("bwrap",
        "Sandbox that runs the programs: bubblewrap on the training nodes, or a service.",
        ["bwrap", "piston", "sandbox_fusion", "e2b"])
    code_server_url: str | None = key(None,
        "Address of the service that code_sandbox names. The default exists only for e2b, https://api.e2b.app.")
    code_score: str = key("fraction",
        "Reward of a program: the fraction of passed tests, or 1 only if it passes all of them.", ["fraction", "all"])
# fmt: on


class CodeKeys(Section):
    """The keys of the reward ``code_tests`` that code reads, with their types."""

    sandbox = Key[str]("code_sandbox")
    server_url = Key[str | None]("code_server_url")
