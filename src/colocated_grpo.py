"""GRPO with vLLM inside the training processes: its flags become one `grpo launch`.

    python run_colocated_grpo.py --gpus 4 --dry-run        # at the root of the repository; it runs this file

Any Python 3 runs this file, that of the system too: it looks for the environment of `make setup`, as training.sh does,
and goes on in it with ``grpo_recipes.extensions.colocated.main``, which reads the flags.
"""

import importlib.util
import os
import subprocess
import sys

REPOSITORY = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
OWN = ("ENV_ACTIVATE", "CONDA_ENV")  # which name an environment of the user's own: it is used as it is


def find_environment():
    """Return the Python of the environment, and where it was looked for; the Python is None where there is none."""
    folder = os.path.abspath(os.environ.get("ENV_DIR") or os.path.join(REPOSITORY, ".venv"))
    python = os.path.join(folder, "bin", "python")
    active = any(os.environ.get(name) for name in OWN)
    if not active and os.access(python, os.X_OK) and os.path.isfile(os.path.join(folder, "bin", "grpo")):
        return python, folder
    return (sys.executable if importlib.util.find_spec("trl") else None), folder


def need_environment():
    """Return the Python of the environment; exit with 2 where there is none."""
    python, folder = find_environment()
    if python is None:
        own = next((name for name in OWN if os.environ.get(name)), None)
        what = f"{own} is set, and this Python has no packages of it" if own else f"there is none in {folder}"
        fix = f"run make setup in {REPOSITORY}, or export ENV_DIR=DIR of an environment that it made"
        sys.stderr.write(f"grpo: environment: {what}. Fix: {'activate it, or unset ' + own if own else fix}\n")
        sys.exit(2)
    refuse_other_checkout(python)
    return python


def refuse_other_checkout(python):
    """Exit with 2 if the environment imports the code of another checkout than this file's."""
    script = os.path.join(REPOSITORY, "scripts", "installed_checkout.py")
    code = subprocess.run([python, "-I", script], stdout=subprocess.PIPE, text=True).stdout.strip()
    if code and not os.path.samefile(code, REPOSITORY):
        what = f"{python} runs the code of {code}, not of {REPOSITORY}"
        fix = f"ENV_DIR={os.path.join(REPOSITORY, '.venv')} make -C {REPOSITORY} setup, then set the same ENV_DIR here"
        sys.stderr.write(f"grpo: environment: {what}. Fix: {fix}\n")
        sys.exit(2)


def main(module="grpo_recipes.extensions.colocated.main"):
    """Go on in the environment, with a ``module`` that reads the flags."""
    python = need_environment()
    # Packages of the login shell must not reach into the environment.
    variables = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    os.execve(python, [python, "-P", "-s", "-m", module, *sys.argv[1:]], variables)


if __name__ == "__main__":
    main()
