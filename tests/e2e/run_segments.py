"""The shared-memory segments of a run, to check that it left none.

Python names segments at random, so other runs on the machine have segments with similar names. A segment belongs to a
run if a process of the run has mapped it.
"""

from __future__ import annotations

import threading

from real_runs import Launch

from grpo_recipes.process import scratch

_PAUSE = 0.5  # seconds between two looks at the processes of a run


class RunSegments:
    """Collect the segments of a run in a thread, until it has no process or ``find_left`` is called.

    Attributes:
        inodes: of the files in shared memory that processes of the run have mapped so far.
    """

    def __init__(self, run: Launch) -> None:
        """Look at the processes of the run now, and then again and again."""
        self.inodes: set[int] = set()
        self._run = run
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._look()
        self._thread.start()

    def _look(self) -> bool:
        processes = self._run.processes()
        self.inodes |= scratch._find_mapped_inodes(process.pid for process in processes)
        return bool(processes)

    def _collect(self) -> None:
        while self._look() and not self._stopped.wait(_PAUSE):
            pass

    def find_left(self) -> set[str]:
        """Return the names of the run's segments that still exist. The run must have ended."""
        self._stopped.set()
        self._thread.join()
        return {name for inode, name in scratch._list_segments().items() if inode in self.inodes}
