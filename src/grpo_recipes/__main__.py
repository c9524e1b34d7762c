from grpo_recipes.cli import main

raise SystemExit(main())
