"""Find the environment of `make setup` from any Python, and continue in it. Entry scripts import this module.

The environment is ENV_DIR, or .venv in this repository. If ENV_ACTIVATE or CONDA_ENV is set, the Python that runs this
file must have the packages itself. This file and the entry scripts stay valid for Python 3.6, the oldest system Python
on login nodes.

    python3 scripts/find_environment.py        # print the Python of the environment
"""

import importlib.util
import os
import subprocess
import sys

REPOSITORY = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
USER_VARIABLES = ("ENV_ACTIVATE", "CONDA_ENV")  # set by users who activate an environment themselves


def find_environment():
    """Return the Python of the environment, or None, and the folder that was searched."""
    folder = os.path.abspath(os.environ.get("ENV_DIR") or os.path.join(REPOSITORY, ".venv"))
    python = os.path.join(folder, "bin", "python")
    active = any(os.environ.get(name) for name in USER_VARIABLES)
    if not active and os.access(python, os.X_OK) and os.path.isfile(os.path.join(folder, "bin", "grpo")):
        return python, folder
    return (sys.executable if importlib.util.find_spec("trl") else None), folder


def need_environment():
    """Return the Python of the environment; exit with 2 if there is none or if it runs another checkout's code."""
    python, folder = find_environment()
    if python is None:
        variable = next((name for name in USER_VARIABLES if os.environ.get(name)), None)
        if variable:
            fail(f"{variable} is set, and this Python has no packages of it", f"activate it, or unset {variable}")
        setup = f"run make setup in {REPOSITORY}, or export ENV_DIR=DIR of an environment that it made"
        fail(f"there is none in {folder}", setup)
    checkout = installed_checkout(python)
    if checkout and not os.path.samefile(checkout, REPOSITORY):
        folder = os.path.join(REPOSITORY, ".venv")
        setup = f"ENV_DIR={folder} make -C {REPOSITORY} setup, then set the same ENV_DIR here"
        fail(f"{python} runs the code of {checkout}, not of {REPOSITORY}", setup)
    return python


def installed_checkout(python):
    """Return the checkout that an environment imports, or "" if grpo_recipes is not installed there."""
    script = os.path.join(REPOSITORY, "scripts", "installed_checkout.py")
    return subprocess.run([python, "-I", script], stdout=subprocess.PIPE).stdout.decode().strip()


def fail(problem, fix):
    """Print a problem with its fix, and exit with 2."""
    sys.stderr.write(f"grpo: environment: {problem}. Fix: {fix}\n")
    sys.exit(2)


def continue_in_environment(module):
    """Replace this process by the environment's Python, which runs ``module`` with the same arguments."""
    python = need_environment()
    # Packages of the login shell must not reach into the environment.
    variables = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    os.execve(python, [python, "-P", "-s", "-m", module, *sys.argv[1:]], variables)


if __name__ == "__main__":
    print(need_environment())
