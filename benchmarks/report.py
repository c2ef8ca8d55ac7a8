"""Rows of a benchmark table: ours beside a baseline measured in the same run, and a JSON line per row for history.

    op            case            ours      baseline           ratio   correct
    add_rms_norm  T=8192 N=5120   41.0 us   63.0 us torch      1.54x   yes

The ratio is above 1 when ours is better. `correct` is yes, no, or what was compared.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

WIDTHS = (26, 34, 18, 30, 8)


def header() -> None:
    _line("op", "case", "ours", "baseline", "ratio", "correct")


def row(
    op: str,
    case: str,
    ours: float,
    baseline: float,
    baseline_name: str,
    *,
    unit: str,
    higher_is_better: bool = False,
    correct: str = "yes",
    goal: float | None = None,
    spread: float | None = None,
) -> None:
    """Print one row and its JSON line.

    Args:
        ours, baseline: medians, in `unit`.
        goal: the ratio that this row should reach, if there is one.
        spread: (max - min) / median of our rounds.
    """
    ratio = ours / baseline if higher_is_better else baseline / ours
    verdict = "" if goal is None else f"  goal {goal:g}x {'met' if ratio >= goal else 'MISSED'}"
    _line(op, case, f"{ours:.4g} {unit}", f"{baseline:.4g} {unit} {baseline_name}", f"{ratio:.2f}x", correct + verdict)
    record = {
        "op": op,
        "case": case,
        "ours": ours,
        "baseline": baseline,
        "baseline_name": baseline_name,
        "unit": unit,
        "ratio": round(ratio, 4),
        "goal": goal,
        "spread": spread,
        "correct": correct,
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    print(json.dumps(record), flush=True)


def alternate(
    ours: Callable[[], object], baseline: Callable[[], object], *, rounds: int = 5
) -> tuple[list[float], list[float]]:
    """Seconds of each round of both, run in turn after one warm-up of each, so that a slow moment hits both."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds + 1):
        for function, out in zip((ours, baseline), times, strict=True):
            start = time.perf_counter()
            function()
            if index:
                out.append(time.perf_counter() - start)
    return times


def median_and_spread(values: list[float]) -> tuple[float, float]:
    median = statistics.median(values)
    return median, (max(values) - min(values)) / median


def _line(*cells: str) -> None:
    print("".join(f"{cell:<{width}}" for cell, width in zip(cells, (*WIDTHS, 0), strict=True)).rstrip(), flush=True)
