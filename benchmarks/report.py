"""Rows of a benchmark table: ours beside a baseline measured in the same run, and a JSON line per row for history.

    op            case            ours      baseline           ratio   correct
    add_rms_norm  T=8192 N=5120   41.0 us   63.0 us torch      1.54x   yes

The ratio is above 1 when ours is better. `correct` is yes, no, or what was compared.
"""

from __future__ import annotations

import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

WIDTHS = (26, 34, 18, 30, 8)


def header() -> None:
    _line("op", "case", "ours", "baseline", "ratio", "correct")


def row(
    op: str,
    case: str,
    ours: float,
    baseline: float | None,
    baseline_name: str,
    *,
    unit: str,
    higher_is_better: bool = False,
    correct: str = "yes",
    goal: float | None = None,
    spread: float | None = None,
    details: Mapping[str, object] | None = None,
    json_lines: Path | None = None,
) -> None:
    """Print one row and its JSON line.

    Args:
        ours, baseline: medians, in `unit`; without a baseline the row has no ratio.
        goal: the ratio that this row should reach, if there is one.
        spread: (max - min) / median of our rounds.
        details: more for the JSON line.
        json_lines: a file to append the JSON line to.
    """
    ratio = None if baseline is None else ours / baseline if higher_is_better else baseline / ours
    verdict = "" if goal is None or ratio is None else f"  goal {goal:.3g}x {'met' if ratio >= goal else 'MISSED'}"
    beside = "-" if baseline is None else f"{baseline:.4g} {unit} {baseline_name}"
    _line(op, case, f"{ours:.4g} {unit}", beside, "-" if ratio is None else f"{ratio:.2f}x", correct + verdict)
    record = {
        "op": op,
        "case": case,
        "ours": ours,
        "baseline": baseline,
        "baseline_name": baseline_name,
        "unit": unit,
        "ratio": None if ratio is None else round(ratio, 4),
        "goal": goal,
        "spread": spread,
        "correct": correct,
        "date": time.strftime("%Y-%m-%d"),
        **_surroundings(),
        "gpu": _gpu(),
        **(details or {}),
    }
    line = json.dumps(record)
    print(line, flush=True)
    if json_lines is not None:
        json_lines.parent.mkdir(parents=True, exist_ok=True)
        with json_lines.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@functools.cache
def _surroundings() -> dict[str, object]:
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu() -> str | None:
    """Its name, where this process uses torch and there is one."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None


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
