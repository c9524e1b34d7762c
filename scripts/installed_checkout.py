"""Print the checkout whose code an environment imports, or the folder of an installed copy of it.

Exit with 1 if grpo_recipes is not installed. Usage: ENVIRONMENT/bin/python -I scripts/installed_checkout.py
"""

import sys
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("grpo_recipes")
if spec is None or spec.origin is None:
    sys.exit(1)
package = Path(spec.origin).resolve().parent
checkout = package.parents[1]
print(checkout if (checkout / "scripts/setup.sh").is_file() else package)
