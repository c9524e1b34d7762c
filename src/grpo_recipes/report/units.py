"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
NOTHING = "\u2013"  # an en dash
TIMES = "\u00d7"


@dataclass(frozen=True)
class Axis:
    """A range and the round numbers marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where ``value`` stands between low (0) and high (1); what is beyond stands at the end."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def labels(self) -> list[str]:
        """A label for each tick, all with the same digits."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        largest = max(abs(tick) for tick in self.ticks)
        if largest and (largest < 1e-3 or largest >= 1e9):
            return [_scientific(tick) for tick in self.ticks]
        scale, suffix = _scale(largest) if step >= 10 else (1.0, "")
        digits = _digits(step / scale)
        return [minus(f"{tick / scale:,.{digits}f}{suffix if tick else ''}") for tick in self.ticks]


def axis(low: float, high: float, wanted: int = 4, *, whole: bool = False) -> Axis:
    """A range that holds ``low`` and ``high``, with about ``wanted`` steps; ``whole`` marks integers alone."""
    if low == high:
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in _STEPS if power * factor >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks)  # a tick may be 1e-16 short of the value


def step_axis(steps: Sequence[float], wanted: int = 5) -> Axis:
    """The axis of optimizer steps: it ends where the data end, and marks whole numbers."""
    low, high = min(steps), max(steps)
    if low == high:
        return Axis(low - 0.5, high + 0.5, (low,))
    marks = axis(low, high, wanted, whole=all(float(step).is_integer() for step in steps)).ticks
    inside = [mark for mark in marks if low <= mark <= high]
    gap = 0.6 * (marks[1] - marks[0])
    first = [low] if not inside or inside[0] - low > gap else []
    last = [high] if not inside or high - inside[-1] > gap else []
    return Axis(low, high, (*first, *inside, *last))


def short(value: float | None) -> str:
    """Three digits that count: 0.891, 1,234, 12.3k, 2.4e-7."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e9):
        return _scientific(value)
    if size >= 10_000:
        scale, suffix = _scale(size)
        return minus(f"{value / scale:.3g}{suffix}")
    if float(value).is_integer() or size >= 100:
        return minus(f"{value:,.0f}")
    return minus(f"{value:.3g}")


def signed(value: float | None) -> str:
    """``short`` with a plus before what is above 0."""
    return f"+{short(value)}" if value is not None and value > 0 else short(value)


def percent(share: float) -> str:
    """0.25 as 25 %."""
    return f"{short(round(100 * share, 1))} %"


def duration(seconds: float) -> str:
    """Seconds as 4.2 s, 1 min 08 s, 3 h 05 min, 2 d 03 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for size, unit, small, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        whole, rest = divmod(round(seconds / small), size // small)
        if whole:
            return f"{whole} {unit} {rest:02d} {small_unit}"
    raise AssertionError(seconds)


def minus(text: str) -> str:
    """A real minus sign for the hyphen."""
    return text.replace("-", "\u2212")


def _scientific(value: float) -> str:
    if not value:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return minus(f"{float(mantissa):g}e{int(exponent)}")


def _scale(size: float) -> tuple[float, str]:
    if size >= 1e6:
        return 1e6, "M"
    return (1e3, "k") if size >= 1e4 else (1.0, "")


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9) + (0 if _is_round(step) else 1))


def _is_round(step: float) -> bool:
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    return abs(mantissa - round(mantissa)) < 1e-6
