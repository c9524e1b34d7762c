"""Write the BENCHMARK SUMMARY of one run: duration, times of steps and weight syncs, and memory.

``write_benchmark`` writes ``benchmark.json`` and returns the text. All numbers come from ``metrics.jsonl`` and
``summary.json`` of the run. Step, sync and data fetch times do not overlap. To compare weight sync methods, compare the
summaries of runs.
"""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from grpo_recipes.recipe.converters import SYNC_METHOD_ALIASES
from grpo_recipes.runs.health import drop_missing, finite_number
from grpo_recipes.runs.rundir import Run, read_metrics, write_last_json

FILE = "benchmark.json"
_LINE = "=" * 70
_IN_PLACE = "shared"  # the method that moves no weights: its waiting time is part of the step
# Names of weight sync methods in the example trainer, the origin of this format.
_MODES = {bridge: name for name, bridge in reversed(SYNC_METHOD_ALIASES.items())}


def choose_mode_name(run: Run) -> str:
    """Return the ``mode`` of the summary: the example trainer's name for the run's weight sync method.

    A LoRA run with ``restart`` is ``lora_restart``. A method without such a name keeps its own name. A run without a
    sync method has its vLLM mode, for example ``colocate``.
    """
    bridge = run.plan.get("bridge")
    if bridge == "restart" and run.value("use_peft"):
        return "lora_restart"
    return _MODES.get(bridge, bridge) if bridge else str(run.plan.get("mode"))


def compute_numbers(run: Run) -> dict[str, Any]:
    """Sum up the run's ``metrics.jsonl``, and return the numbers of the summary by name, rounded as in the text.

    Times are in seconds and memory is in GB. Values that are not finite are left out. Memory is None if no row has
    it. ``weight_sync: shared`` moves no weights: it has no syncs, and its waiting time is part of the step time.
    """
    rows = read_metrics(run.folder, lenient=True)
    steps, in_place = len(rows), run.plan.get("bridge") == _IN_PLACE

    def total(*names: str) -> float:
        """Return the sum of these metrics over all rows, without missing values."""
        return math.fsum(drop_missing(finite_number(row.get(name)) for row in rows for name in names))

    step = total("seconds/update", *(["seconds/sync"] if in_place else []))
    sync, syncs = (0.0, 0) if in_place else (total("seconds/sync"), int(total("syncs")))
    fetch = total("seconds/sample", "seconds/score")
    # A killed launch did not record its duration, only the rows of its steps.
    total_seconds = max(finite_number(run.summary.get("launch_seconds")) or 0.0, total("seconds/step"))
    peaks, memory = (
        drop_missing(finite_number(row.get(name)) for row in rows) for name in ("memory/peak_gb", "memory/gb")
    )
    device = "process" if run.plan.get("flavour") == "cpu" else "gpu"
    numbers = {
        "total_time_seconds": total_seconds,
        "total_time_minutes": total_seconds / 60,
        "avg_step_time_seconds": step / max(steps, 1),
        "total_step_time_seconds": step,
        "avg_sync_time_seconds": sync / max(syncs, 1),
        "total_sync_time_seconds": sync,
        "avg_data_fetch_time_seconds": fetch / max(steps, 1),
        "total_data_fetch_time_seconds": fetch,
        f"peak_{device}_memory_gb": max(peaks, default=None),
        f"avg_{device}_memory_gb": fmean(memory) if memory else None,
    }
    rounded = {name: None if value is None else float(_format_number(value)) for name, value in numbers.items()}
    return {"mode": choose_mode_name(run), "total_steps": steps, "syncs": syncs, **rounded}


def format_summary(numbers: Mapping[str, Any]) -> list[str]:
    """Format the result of ``compute_numbers`` as the lines of the BENCHMARK SUMMARY."""
    text = {name: _format_number(value) for name, value in numbers.items() if isinstance(value, float)}
    device = "process" if "peak_process_memory_gb" in numbers else "gpu"
    peak, average = (text.get(f"{kind}_{device}_memory_gb", "unknown") for kind in ("peak", "avg"))
    device_label = "GPU" if device == "gpu" else device
    return [
        "",
        _LINE,
        f"BENCHMARK SUMMARY ({numbers['mode']})",
        _LINE,
        f"  Total training time:     {text['total_time_seconds']}s ({text['total_time_minutes']} min)",
        f"  Total steps:             {numbers['total_steps']}",
        "  ",
        "  TIMING BREAKDOWN:",
        f"    Avg step time:         {text['avg_step_time_seconds']}s",
        f"    Total step time:       {text['total_step_time_seconds']}s",
        f"    Avg sync time:         {text['avg_sync_time_seconds']}s (x{numbers['syncs']} syncs)",
        f"    Total sync time:       {text['total_sync_time_seconds']}s",
        f"    Avg data fetch time:   {text['avg_data_fetch_time_seconds']}s",
        f"    Total data fetch time: {text['total_data_fetch_time_seconds']}s",
        "  ",
        "  MEMORY:" if device == "gpu" else "  MEMORY (no GPU: RSS of the first training process):",
        f"    {f'Peak {device_label} memory:':<22} {peak} GB",
        f"    {f'Avg {device_label} memory:':<22} {average} GB",
        _LINE,
    ]


def write_benchmark(run: Run) -> list[str]:
    """Write the run's summary as ``benchmark.json`` into its directory, and return it as lines of text."""
    numbers = compute_numbers(run)
    write_last_json(run.folder / FILE, numbers)
    return format_summary(numbers)


def _format_number(value: float) -> str:
    """Format a number with two decimals; below 1 with three significant digits, so that averages add up to totals."""
    decimals = 2 if value >= 1 or value <= 0 else 2 - math.floor(math.log10(value))
    return f"{value:.{decimals}f}"
