"""GRPO with vLLM inside the training processes: its flags become one `grpo launch`.

    python run_colocated_grpo.py --gpus 4 --dry-run        # at the root of the repository; it runs this file

Any Python 3 runs this file, that of the system too: it looks for the environment of `make setup`, as training.sh does,
and goes on in it with ``grpo_recipes.cli.colocated``, which reads the flags.
"""

import importlib.util
import os
import sys

REPOSITORY = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def find_environment():
    """Return the Python of the environment, and where it was looked for; the Python is None where there is none."""
    folder = os.path.abspath(os.environ.get("ENV_DIR") or os.path.join(REPOSITORY, ".venv"))
    python = os.path.join(folder, "bin", "python")
    active = os.environ.get("ENV_ACTIVATE") or os.environ.get("CONDA_ENV")  # one of the user's own, used as it is
    if not active and os.access(python, os.X_OK) and os.path.isfile(os.path.join(folder, "bin", "grpo")):
        return python, folder
    return (sys.executable if importlib.util.find_spec("trl") else None), folder


def main():
    """Go on in the environment; exit with 2 where there is none."""
    python, folder = find_environment()
    if python is None:
        fix = f"run make setup in {REPOSITORY}, or export ENV_DIR=DIR of an environment that it made"
        sys.stderr.write(f"grpo: environment: there is none in {folder}. Fix: {fix}\n")
        sys.exit(2)
    # Packages of the login shell must not reach into the environment.
    variables = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    os.execve(python, [python, "-P", "-s", "-m", "grpo_recipes.cli.colocated", *sys.argv[1:]], variables)


if __name__ == "__main__":
    main()
