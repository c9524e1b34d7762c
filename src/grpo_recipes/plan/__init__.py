"""Plan a run from its recipe and the available devices: pure, without torch and without sockets."""
