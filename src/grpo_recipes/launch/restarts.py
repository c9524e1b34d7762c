"""What follows when the server of a run is lost: nothing, a new server, or a new server and new trainers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from grpo_recipes.launch.supervisor import Ending
from grpo_recipes.recipe.registry import RECONNECTING


class Next(enum.Enum):
    """What is done next."""

    END = "end"
    SERVER = "the server alone is started again"
    BOTH = "server and trainers are started again from the newest checkpoint"


@dataclass
class Restarts:
    """Restarts of the server in one attempt, and their bounds.

    Attributes:
        most: the recipe's ``server_restarts``; 0 never restarts.
        bridge: how weights reach the server: it says whether the trainers can go on with a new one.
        done: restarts so far.
        stepped: whether a step was completed since the last of them.
    """

    most: int
    bridge: str | None
    done: int = 0
    stepped: bool = True

    def after(self, ending: Ending, stopping: bool) -> tuple[Next, Ending]:
        """What follows an ending.

        Args:
            ending: how the processes ended.
            stopping: whether the run was asked to save and end.

        Returns:
            What to do, and the ending with the reason why the server is not started again.
        """
        if not ending.of_server or stopping or self.most == 0:
            return Next.END, ending
        if self.done >= self.most:
            why = f"the server was started again {self.done} times already (server_restarts)"
            return Next.END, replace(ending, cause=f"{ending.cause}; {why}")
        if not self.stepped:
            why = "no step was completed since the server was started again"
            return Next.END, replace(ending, cause=f"{ending.cause}; {why}")
        self.done += 1
        self.stepped = False
        return (Next.SERVER if self.bridge in RECONNECTING else Next.BOTH), ending
