"""Decide whether a lost process of a run is started again, with limits for each role."""

from collections import Counter
from dataclasses import dataclass, field, replace

from grpo_recipes.errors import EXIT_CONFIG_ERROR
from grpo_recipes.launch.processes import Ending


@dataclass
class Restarts:
    """The restarts of lost processes in an attempt, with limits for each role."""

    limit: int  # the recipe's server_restarts; 0 never restarts
    counts: Counter[str] = field(default_factory=Counter)
    idle: set[str] = field(default_factory=set)  # roles that were restarted after the last completed step
    stepped: bool = False  # whether a step was completed in this attempt

    def decide(self, ending: Ending, stopping: bool) -> Ending:
        """Decide whether the lost process may be restarted, and count the restart.

        If it may, return the ending unchanged. Otherwise return it without ``lost``, for example after a request to
        stop (``stopping``). If a limit forbids the restart, add the reason to its cause. A restart with a newer
        model (``renews``) is always allowed and not counted.
        """
        lost = ending.lost
        if ending.renews:
            return ending
        # With EXIT_CONFIG_ERROR a process rejects its arguments, which would be the same after a restart.
        if lost is None or lost.on_loss == "fail" or stopping or self.limit == 0 or ending.code == EXIT_CONFIG_ERROR:
            return replace(ending, lost=None)
        if ending.error and not self.stepped:
            reason = "before the first step, so a restart would fail again: it is not started again"
        elif self.counts[lost.role] >= self.limit:
            reason = f"{lost.called} was already started again {self.counts[lost.role]} times (server_restarts)"
        elif lost.role in self.idle:
            reason = f"no step was completed since {lost.called} was started again"
        else:
            self.counts[lost.role] += 1
            self.idle.add(lost.role)
            return ending
        return replace(ending, lost=None, cause=f"{ending.cause}; {reason}")
