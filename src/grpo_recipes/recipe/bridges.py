"""What each weight bridge can do."""

from __future__ import annotations

# Bridges whose client can go on with a restarted server: it gives it the weights it sent last.
RECONNECTING = frozenset({"file"})
