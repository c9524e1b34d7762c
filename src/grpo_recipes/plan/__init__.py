"""Plan a run from its recipe and the devices there are: pure, without torch and without a socket."""
