"""How the profile of a run of steps is read, on made-up ones; and the benchmark as a whole, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_idle
from benchmarks.profiled_worker import Gap, Plan, Span, busy_and_gaps, is_steady, step_starts, summarize
from pagedray.engine.messages import NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput


def steps(num_steps: int, period_us: int) -> list[Span]:
    """Each: a copy in, two layers of 30 us with 1 us between them, 3 us later a sampler; a copy out beside the next."""
    spans = []
    for step in range(num_steps):
        t = step * period_us
        parts = [
            ("Memcpy HtoD", 0, 2),
            ("layer", 2, 32),
            ("layer", 33, 63),
            ("sample", 66, 76),
            ("Memcpy DtoH", 77, 80),
        ]
        spans += [Span(name, 1000 * (t + begin), 1000 * (t + end)) for name, begin, end in parts]
    return spans


def test_time_counts_as_busy_once_and_gaps_have_neighbours() -> None:
    spans = [Span("a", 0, 10), Span("b", 5, 20), Span("c", 8, 12), Span("d", 25, 30), Span("e", 40, 50)]
    assert busy_and_gaps(spans, 0, 40) == (25, [Gap(5, "b", "d"), Gap(10, "d", "e")])
    assert busy_and_gaps(spans, 0, 50) == (35, [Gap(5, "b", "d"), Gap(10, "d", "e")])
    assert busy_and_gaps(spans, 7, 27) == (15, [Gap(5, "b", "d")])  # parts of a, b and d are inside
    assert busy_and_gaps(spans, 21, 24) == (0, [Gap(3, "", "d")])


def test_a_step_begins_where_something_runs_equally_often_in_each() -> None:
    spans = steps(4, 100)
    assert step_starts(spans, 4) == [66_000, 166_000, 266_000, 366_000]
    without = [span for span in spans if span.name != "sample"]
    assert step_starts(without, 4) == [2_000, 102_000, 202_000, 302_000]  # every second layer
    assert step_starts(without, 3) == []


def test_a_profile_is_summed_up_over_whole_steps() -> None:
    found = summarize(steps(10, 100), 10)
    assert found["is_whole"]
    assert found["num_steps"] == 5  # between 6 marks: two are left out at each end
    assert found["step_ms"] == pytest.approx(0.1)
    assert found["busy_ms"] == pytest.approx(0.075)
    assert found["idle_share"] == pytest.approx(0.25)
    assert (found["kernels_per_step"], found["kernels_least_most"], found["copies_per_step"]) == (3, [3, 3], 2)
    assert found["top"][:2] == [
        {"name": "layer", "us_per_step": 60.0, "per_step": 2.0},
        {"name": "sample", "us_per_step": 10.0, "per_step": 1.0},
    ]
    assert found["gaps_us_per_step"] == {"0-2 us": 2.0, "2-5 us": 3.0, "5-20 us": 20.0, "over 20 us": 0.0}
    assert found["long_gaps"] == {"per_step": 0, "us_per_step": 0, "longest_us": 0}
    assert found["top_gaps"][0] == {"name": "Memcpy DtoH -> Memcpy HtoD", "us_per_step": 20.0, "per_step": 1.0}
    slow = summarize(steps(10, 200), 10)
    assert slow["idle_share"] == pytest.approx(0.625)
    assert slow["long_gaps"] == pytest.approx({"per_step": 1, "us_per_step": 120, "longest_us": 120})


def test_without_whole_steps_the_window_is_everything() -> None:
    found = summarize(steps(10, 100)[1:-3], 10)  # some records were lost
    assert not found["is_whole"]
    assert found["step_ms"] == pytest.approx(0.0930)
    assert found["kernels_per_step"] == pytest.approx(2.8)
    with pytest.raises(ValueError, match="recorded nothing"):
        summarize([], 10)


def test_steady_is_a_step_that_decodes_the_whole_batch_and_no_more() -> None:
    def out(*num_tokens: int, samples: bool = True, added: tuple[NewSeq, ...] = ()) -> SchedulerOutput:
        scheduled = tuple(ScheduledSeq(str(i), i, 9, n, samples, ()) for i, n in enumerate(num_tokens))
        return SchedulerOutput(0, added, scheduled, ())

    assert is_steady(out(1, 1), 2)
    assert not is_steady(out(1), 2)
    assert not is_steady(out(1, 5), 2)
    assert not is_steady(out(1, 1, samples=False), 2)
    new = NewSeq("0", 0, (5,), 1, SamplingParams(max_tokens=3, seed=0), ())
    assert not is_steady(out(1, 1, added=(new,)), 2)


def run(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    file = tmp_path / "rows.jsonl"
    tiny = "--model tiny --device cpu --input-len 8 --set num_kv_blocks=64 --set cpu_threads=1"
    gpu_idle.main([*tiny.split(), *options, "--json-lines", str(file)])
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_benchmark_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    short = "--path engine --batch 2 --output-len 24 --num-settle 2 --num-plain 4 --num-profiled 8"
    found = run(tmp_path, *short.split())
    assert [row["op"] for row in found] == ["idle, engine", "idle profiled, engine", "step, engine"]
    assert {row["correct"] for row in found} == {"yes"}
    assert found[0]["plan"] == {"batch": 2, "num_settle": 2, "num_plain": 4, "num_profiled": 8, "prime": False}
    assert found[0]["profiled"]["num_steps"] == 3
    assert 0 < found[0]["profiled"]["busy_ms"] <= found[0]["profiled"]["step_ms"]
    assert 0 < found[0]["launch_ms"] <= found[0]["plain_ms"] * 1.5
    assert "kernel " in capfd.readouterr().out


def test_a_profiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no profiler here")

    monkeypatch.setattr("benchmarks.profiled_worker.new_profile", fail)
    short = "--path engine --batch 1 --output-len 24 --num-settle 2 --num-plain 4 --num-profiled 8"
    with pytest.raises(RuntimeError, match="no profiler here"):
        run(tmp_path, *short.split())


def test_a_batch_that_is_never_steady_for_long_enough_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_idle, "FINDINGS_S", 0.1)
    short = "--path engine --batch 2 --output-len 16 --num-settle 2 --num-plain 4 --num-profiled 8"
    with pytest.raises(SystemExit, match="raise --output-len"):
        run(tmp_path, *short.split(), "--set", "max_num_seqs=1")
    with pytest.raises(SystemExit, match="must be above 14"):
        run(tmp_path, *short.replace("16", "14").split())


def test_plans_travel_as_files(tmp_path: Path) -> None:
    plan = Plan(3, num_plain=5)
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan
    assert plan.num_steps == 8 + 5 + 40
