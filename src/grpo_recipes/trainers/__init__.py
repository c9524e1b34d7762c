"""TRL's trainer plus the few overrides that need it."""
