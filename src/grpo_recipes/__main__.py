"""Run the command `grpo` by ``python -m grpo_recipes``."""

from grpo_recipes.cli import main

raise SystemExit(main())
