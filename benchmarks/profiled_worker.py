"""A worker that profiles some of its own decode steps and writes what it saw beside the model's config.json.

It works as `engine.worker.worker.Worker`, in one process or named by `module:name` under Ray. Workers get nothing but
the configuration, so its orders (`Plan`) and its findings are files in the folder of the model, which is a folder of
the benchmark's own. Steady are steps in which all sequences of the batch decode one token each. Of those, in a row:

    num_settle    are let pass,
    num_plain     are timed without a profiler, from one mark on the device's stream to another,
    num_profiled  are recorded by torch.profiler. The device is drained before, so that what it records is all work of
                  exactly these steps, kernels inside of replayed graphs included.

Profiling slows the host, and the GPU between the kernels of a graph: gaps are wider and steps are longer under it, but
the time that kernels take is nearly the same. On a CPU the profiler records operators; that serves to test this file.
Kineto's line "ERROR: External init callback must run in same thread" means its daemon mode alone, which isn't used.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.messages import SchedulerOutput
from pagedray.engine.worker.runner import PendingOutput
from pagedray.engine.worker.worker import Worker

log = logging.getLogger(__name__)

PLAN_FILE, FINDINGS_FILE = "profile_plan.json", "profile_findings.json"
COPIES = ("Memcpy", "Memset")
WAITS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event")  # recorded for the device, but no work
GAP_EDGES_US = (2, 5, 20)
NUM_LISTED, NAME_LEN = 5, 60
NUM_EDGE_STEPS = 2  # at both ends: the device was drained before the first, and nothing follows the last


class Plan(NamedTuple):
    batch: int
    num_settle: int = 8
    num_plain: int = 32
    num_profiled: int = 40
    prime: bool = False  # run an empty profile before CUDA is used

    @property
    def num_steps(self) -> int:
        return self.num_settle + self.num_plain + self.num_profiled

    def write(self, folder: Path) -> None:
        (folder / PLAN_FILE).write_text(json.dumps(self._asdict()), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        return cls(**json.loads((folder / PLAN_FILE).read_text(encoding="utf-8")))


class Span(NamedTuple):
    """Something that ran on the device."""

    name: str
    start_ns: int
    end_ns: int


class Gap(NamedTuple):
    ns: int
    before: str  # what ended last
    after: str  # what began then


class ProfiledWorker(Worker):
    def __init__(self, config: Config, rank: int = 0):
        super().__init__(config, rank)
        self._folder = Path(config.model.model)
        self._plan = Plan.read(self._folder)
        self._is_gpu = config.worker.device == "cuda"
        self._is_done = rank != 0
        self._num_steady = 0  # launched in a row
        self._marks: list[torch.cuda.Event | float] = []
        self._launch_s = self._plain_launch_s = 0.0  # of all steps since a mark; of the plain ones
        self._profile: profile | None = None
        self._facts: EngineFacts

    def _load(self, on_phase: Callable[[str, float], None]) -> EngineFacts:
        if self._plan.prime:
            with new_profile(self._is_gpu):
                pass
        self._facts = super()._load(on_phase)
        return self._facts

    def _launch(self, out: SchedulerOutput) -> PendingOutput:
        if self._is_done:
            return super()._launch(out)
        self._guard(self._before_launch, out)
        began_s = time.perf_counter()
        pending = super()._launch(out)
        self._launch_s += time.perf_counter() - began_s
        if not self._is_done:
            self._guard(self._after_launch, out)
        return pending

    def _guard(self, do: Callable[[SchedulerOutput], None], out: SchedulerOutput) -> None:
        """Requests go on if the profiler fails; the benchmark learns of it from the file."""
        try:
            do(out)
        except Exception:
            log.exception("profiling failed")
            self._is_done, self._profile = True, None
            self._write({"error": traceback.format_exc()})

    def _before_launch(self, out: SchedulerOutput) -> None:
        plan = self._plan
        if not is_steady(out, plan.batch):
            if self._profile is not None:
                self._profile.stop()
                self._profile = None
            self._num_steady = 0
            self._marks.clear()
            return
        if self._num_steady == plan.num_settle:
            self._marks.append(_mark(self._is_gpu))
            self._launch_s = 0.0
        elif self._num_steady == plan.num_settle + plan.num_plain:
            self._marks.append(_mark(self._is_gpu))
            self._plain_launch_s = self._launch_s
            if self._is_gpu:
                torch.cuda.synchronize()
            self._profile = new_profile(self._is_gpu)
            self._profile.start()

    def _after_launch(self, out: SchedulerOutput) -> None:
        plan = self._plan
        if not is_steady(out, plan.batch):
            return
        self._num_steady += 1
        if self._num_steady < plan.num_steps or self._profile is None:
            return
        self._profile.stop()  # drains the device
        events = events_of(self._profile)
        self._profile, self._is_done = None, True
        device = DeviceType.CUDA if self._is_gpu else DeviceType.CPU
        calls = Counter(event.name() for event in events if event.device_type() != device)
        self._write(
            {
                "plain_ms": _ms_between(*self._marks) / plan.num_plain,
                "launch_ms": 1e3 * self._plain_launch_s / plan.num_plain,
                "profiled": summarize(spans_of(events, device), plan.num_profiled),
                "host_calls_per_step": {name[:NAME_LEN]: n / plan.num_profiled for name, n in calls.most_common(8)},
                "dtype": self._facts.dtype,
                "device": self._facts.device,
                "attention_backend": self._facts.attention_backend,
            }
        )

    def _write(self, findings: dict[str, Any]) -> None:
        file = self._folder / FINDINGS_FILE
        part = file.with_suffix(".part")
        part.write_text(json.dumps(findings), encoding="utf-8")
        part.replace(file)  # who looks for it never sees a part


def is_steady(out: SchedulerOutput, batch: int) -> bool:
    """Whether this step decodes one token of each of `batch` sequences, and does nothing else."""
    return (
        len(out.scheduled) == batch
        and not out.added
        and all(seq.num_tokens == 1 and seq.samples for seq in out.scheduled)
    )


def new_profile(is_gpu: bool) -> profile:
    # Without this some versions detach from CUDA when a profile ends, which captured graphs have not always survived.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    return profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU])


def events_of(ended: profile) -> list[Any]:
    """All events as Kineto gives them. `profile.events()` would make a tree of them first, which takes seconds."""
    assert ended.profiler is not None and ended.profiler.kineto_results is not None
    return list(ended.profiler.kineto_results.events())


def spans_of(events: Iterable[Any], device: DeviceType) -> list[Span]:
    return [
        Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == device
        and event.name() not in WAITS
        and not getattr(event, "is_user_annotation", lambda: False)()
    ]


def summarize(spans: Sequence[Span], num_steps: int) -> dict[str, Any]:
    """What the device did in a step, over whole steps; it was drained before the first of them.

    Args:
        spans: all that ran in these steps, on any stream.
    """
    if not spans:
        raise ValueError("the profiler recorded nothing that ran on the device")
    spans = sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    marks = step_starts(spans, num_steps)
    is_whole = bool(marks)
    if is_whole:
        edge = NUM_EDGE_STEPS if num_steps > 2 * NUM_EDGE_STEPS + 1 else 0
        marks = marks[edge : len(marks) - edge]
        num_steps = len(marks) - 1
    else:
        marks = [spans[0].start_ns, max(span.end_ns for span in spans)]
    begin_ns, end_ns = marks[0], marks[-1]
    inside = [span for span in spans if begin_ns <= span.start_ns < end_ns]
    busy_ns, gaps = busy_and_gaps(spans, begin_ns, end_ns)
    counts = [0] * (len(marks) - 1)
    at = 0
    for span in inside:
        while span.start_ns >= marks[at + 1]:
            at += 1
        counts[at] += not span.name.startswith(COPIES)
    long = [gap.ns for gap in gaps if gap.ns > 20_000]
    us = 1e3 * num_steps  # nanoseconds of all steps / us = microseconds of one
    return {
        "is_whole": is_whole,  # else the window is all that was recorded
        "num_steps": num_steps,
        "step_ms": (end_ns - begin_ns) / 1e6 / num_steps,
        "busy_ms": busy_ns / 1e6 / num_steps,
        "idle_share": 1 - busy_ns / (end_ns - begin_ns),
        "kernels_per_step": sum(counts) / num_steps,
        "kernels_least_most": [min(counts), max(counts)],
        "copies_per_step": (len(inside) - sum(counts)) / num_steps,
        "top": _totals(((span.name, span.end_ns - span.start_ns) for span in inside), num_steps),
        "long_gaps": {
            "per_step": len(long) / num_steps,
            "us_per_step": sum(long) / us,
            "longest_us": max(long, default=0) / 1e3,
        },
        "gaps_us_per_step": _by_size(gaps, us),
        "top_gaps": _totals(
            ((f"{gap.before[:NAME_LEN]} -> {gap.after[:NAME_LEN]}", gap.ns) for gap in gaps),
            num_steps,
            2 * NAME_LEN + 4,
        ),
    }


def step_starts(spans: Sequence[Span], num_steps: int) -> list[int]:
    """One moment of each step, always the same one in it; none if nothing ran equally often in each.

    It is the start of what runs once a step, or of every k-th run of what runs k times; by number, so that it needs no
    clock of the host. Copies are the last choice: those of results run beside the steps.
    """
    counts = Counter(span.name for span in spans)
    fitting = [name for name, count in counts.items() if count % num_steps == 0]
    if not fitting:
        return []
    name = min(fitting, key=lambda name: (name.startswith(COPIES), counts[name]))
    return [span.start_ns for span in spans if span.name == name][:: counts[name] // num_steps]


def busy_and_gaps(spans: Iterable[Span], begin_ns: int, end_ns: int) -> tuple[int, list[Gap]]:
    """How long at least one of the spans ran between these moments, and when none did.

    Args:
        spans: in order of their starts.
    """
    busy_ns, gaps = 0, []
    until_ns, last = begin_ns, ""
    for span in spans:
        start_ns, stop_ns = max(span.start_ns, begin_ns), min(span.end_ns, end_ns)
        if span.start_ns >= end_ns:
            gaps += [Gap(end_ns - until_ns, last, span.name)] if until_ns < end_ns else []
            break
        if stop_ns <= until_ns:
            continue
        if start_ns > until_ns:
            gaps.append(Gap(start_ns - until_ns, last, span.name))
        busy_ns += stop_ns - max(start_ns, until_ns)
        until_ns, last = stop_ns, span.name
    return busy_ns, gaps


def _totals(items: Iterable[tuple[str, int]], num_steps: int, name_len: int = NAME_LEN) -> list[dict[str, Any]]:
    """The names with the most nanoseconds."""
    total, count = defaultdict[str, int](int), Counter[str]()
    for name, ns in items:
        total[name] += ns
        count[name] += 1
    most = sorted(total, key=lambda name: -total[name])[:NUM_LISTED]
    return [
        {
            "name": name[:name_len],
            "us_per_step": round(total[name] / 1e3 / num_steps, 2),
            "per_step": round(count[name] / num_steps, 2),
        }
        for name in most
    ]


def _by_size(gaps: Sequence[Gap], us: float) -> dict[str, float]:
    out, least = {}, 0.0
    for most in (*GAP_EDGES_US, float("inf")):
        total = sum(gap.ns for gap in gaps if least * 1e3 < gap.ns <= most * 1e3)
        out[f"{least:g}-{most:g} us" if most < float("inf") else f"over {least:g} us"] = round(total / us, 2)
        least = most
    return out


def _mark(is_gpu: bool) -> torch.cuda.Event | float:
    """Now, by the device's clock behind all that is queued; on a CPU, which queues nothing, in milliseconds."""
    if not is_gpu:
        return 1e3 * time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms_between(first: torch.cuda.Event | float, last: torch.cuda.Event | float) -> float:
    if isinstance(first, float) or isinstance(last, float):
        assert isinstance(first, float) and isinstance(last, float)
        return last - first
    return float(first.elapsed_time(last))
