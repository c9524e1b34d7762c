"""The trackers in ``report_to``: their packages and secrets, and the address that they need. No torch.

The trainer writes to them with transformers' callbacks (``trainers.trackers``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Tracker:
    """A tracker that ``report_to`` accepts."""

    title: str  # in messages
    package: str  # for pip, with a limit if transformers' callback does not work with newer versions
    module: str
    secrets: tuple[str, ...] = ()  # variables that only the trainers get
    project: tuple[str, ...] = ()  # variables of its project: the key project sets the first, unless one is exported
    without_network: str = ""  # the fix if the address does not answer

    def address(self, environment: Environment) -> str | None:
        """Return the address that the tracker needs in this environment; None if it writes to local files."""
        match self.module:
            case "wandb":
                disabled = environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes")
                if disabled or environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
                    return None
                return environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
            case "trackio":
                if environment.get("TRACKIO_SPACE_ID"):  # a space of the hub
                    return environment.get("HF_ENDPOINT") or "https://huggingface.co"
                return environment.get("TRACKIO_SERVER_URL") or None
            case "mlflow":
                uri = environment.get("MLFLOW_TRACKING_URI", "")
                return uri if uri.startswith(("http:", "https:")) else None
            case "swanlab":
                if environment.get("SWANLAB_MODE") in ("local", "offline", "disabled"):
                    return None
                return environment.get("SWANLAB_API_HOST") or "https://api.swanlab.cn"
            case "comet_ml":
                if environment.get("COMET_START_ONLINE", "").lower() in ("0", "false"):
                    return None
                return environment.get("COMET_URL_OVERRIDE") or "https://www.comet.com"
        return None


# Trackers that compare runs, and so have their files next to the run directory -> the folder's name.
SHARED_FOLDERS = {"trackio": "trackio", "mlflow": "mlruns"}
NONE = "report_to: none"
TRACKERS = {
    "tensorboard": Tracker("TensorBoard", "tensorboard", "tensorboard"),
    "wandb": Tracker(
        "W&B", "wandb", "wandb", ("WANDB_API_KEY",),
        without_network=f"export WANDB_MODE=offline and run wandb sync later, or set {NONE}",
    ),
    "trackio": Tracker(
        "Trackio", "trackio", "trackio", ("TRACKIO_WRITE_TOKEN",),
        without_network=f"unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to log to files, or set {NONE}",
    ),
    "mlflow": Tracker(
        "MLflow", "mlflow", "mlflow", ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
        ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"),
        f"unset MLFLOW_TRACKING_URI to log to files, or set {NONE}",
    ),
    "swanlab": Tracker(
        "SwanLab", "swanlab<0.8", "swanlab", ("SWANLAB_API_KEY",), ("SWANLAB_PROJECT",),
        f"export SWANLAB_MODE=offline, or set {NONE}",
    ),
    "comet_ml": Tracker(
        "Comet", "comet-ml", "comet_ml", ("COMET_API_KEY", "COMET_EXPERIMENT_KEY"), ("COMET_PROJECT_NAME",),
        f"export COMET_START_ONLINE=0, or set {NONE}",
    ),
}  # fmt: skip


def remote_trackers(names: list[str], environment: Environment) -> Iterator[tuple[Tracker, str]]:
    """Yield each tracker in ``names`` that needs the network in this environment, with its address."""
    for tracker in (TRACKERS[name] for name in names if name in TRACKERS):
        if address := tracker.address(environment):
            yield tracker, address
