"""How a column of ``metrics.jsonl`` is drawn and described."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """How a column of ``metrics.jsonl`` is drawn."""

    title: str
    note: str = ""  # a few words on it
    shares: bool = False  # values are shares, marked in per cent
    band: tuple[str, str, str] | None = None  # columns of a step's least and greatest, on a run's own page; their label
    smooth: bool = True  # its line is a moving mean; without, it has no noise
    compared: bool = True  # the page that compares runs draws it too
    infinite: str = ""  # the meaning of infinite values; empty where they are a fault
    unit: str = ""  # title of the vertical axis, where it is not the metric's own
