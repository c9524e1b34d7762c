"""Describe how the report draws a column of ``metrics.jsonl``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """The title, note and style of a column's chart."""

    title: str
    note: str = ""  # a few words under the title
    shares: bool = False  # values are shares, printed in percent
    band: tuple[str, str, str] | None = (
        None  # columns of the lowest and highest value of a step, drawn on a run's page, and their label
    )
    smooth: bool = True  # draw a moving mean; False for columns without noise
    compared: bool = True  # also drawn on the page that compares runs
    infinite: str = ""  # the meaning of infinite values; empty if they are a fault
    unit: str = ""  # title of the vertical axis, if it differs from the metric's title
