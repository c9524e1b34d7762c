"""Continue a resumed run in its trackers, record their addresses, and close them before a process exits early.

transformers' callbacks write to the trackers. W&B continues a run by its variables, and Trackio by the run's name.
MLflow needs the id that it gave the run, so ``tracked.json`` records it. Only trackers that are imported are touched.
"""

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.trackers import SHARED_FOLDERS, TRACKERS
from grpo_recipes.runs.rundir import CELLS, TRACKED, read_json

_KEY_LENGTH, _SWANLAB_LENGTH = 32, 21  # characters of the ids that Comet and SwanLab accept
_CLOSING = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml")  # modules of trackers that have a run to end


def continue_tracked_runs(args: GRPOConfig, run_dir: Path) -> None:
    """Set the environment variables that let MLflow, SwanLab and Comet continue this run. Exported ones stay.

    Trackio continues a run by its name, so ``args.run_name`` of a trial becomes SWEEP-TRIAL. Also make the folders
    of trackers next to the run. Call this before the trainer is built.
    """
    if "trackio" in (args.report_to or []) and run_dir.parent.name == CELLS:
        args.run_name = f"{run_dir.parents[1].name}-{run_dir.name}"
    for tracker, name in SHARED_FOLDERS.items():
        if tracker in (args.report_to or []):
            (run_dir.parent / name).mkdir(mode=0o700, exist_ok=True)  # only the user may read completions
    if run_id := read_json(run_dir / TRACKED).get("mlflow"):
        os.environ.setdefault("MLFLOW_RUN_ID", run_id)
    identity = read_json(run_dir / "run.json")
    text = "-".join(str(identity.get(key)) for key in ("run_name", "timestamp", "wandb_id"))
    key = hashlib.sha256(text.encode()).hexdigest()
    if TRACKERS["comet_ml"].address(os.environ):  # offline, a second file would replace the first
        os.environ.setdefault("COMET_EXPERIMENT_KEY", key[:_KEY_LENGTH])
    if "SWANLAB_RUN_ID" not in os.environ:
        os.environ |= {"SWANLAB_RUN_ID": key[:_SWANLAB_LENGTH], "SWANLAB_RESUME": "allow"}


def find_tracked_runs() -> dict[str, str]:
    """Return the address or the id of this process's run by tracker: the URL in W&B, the id in MLflow.

    A tracker without an active run is left out.
    """
    runs = {"wandb": lambda wandb: wandb.run.url, "mlflow": lambda mlflow: mlflow.active_run().info.run_id}
    tracked: dict[str, str] = {}
    for name, read in runs.items():
        if (module := sys.modules.get(name)) is not None:
            with suppress(AttributeError):  # no active run
                tracked |= {name: value} if (value := read(module)) else {}
    return tracked


def close_trackers(code: int) -> None:
    """Send the trackers' buffered data, and end their runs. Called before ``os._exit``.

    MLflow marks the run as stopped or failed, depending on the exit code ``code``. An error of a tracker is
    printed: it must not hide how the run ended.
    """
    for name in _CLOSING:
        tracker: Any = sys.modules.get(name)
        if tracker is None:
            continue
        try:
            match name:
                case "wandb" if tracker.run is not None:
                    tracker.finish()
                case "trackio" if tracker.context_vars.current_run.get() is not None:
                    tracker.finish()
                case "mlflow" if tracker.active_run() is not None:
                    tracker.flush_async_logging()
                    tracker.end_run("KILLED" if code == EXIT_STOPPED else "FAILED")
                case "swanlab" if tracker.get_run() is not None:
                    tracker.finish()
                case "comet_ml" if (experiment := tracker.get_running_experiment()) is not None:
                    experiment.end()
        except Exception as error:
            print(f"grpo: {name} was not closed ({type(error).__name__}: {error})", flush=True)
