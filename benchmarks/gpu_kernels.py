"""Every Triton kernel beside torch's own op, and FlashInfer where it is installed, at shapes of published models.

Correctness first, against the op's reference. Then ours and each baseline in turn, in CUDA graphs of many calls, whose
inputs rotate beyond the L2 cache unless they are so small that they stay in it within a model's step as well. The GPU's
events measure; a row has the medians of its rounds. A baseline that can't be captured is called eagerly and says so.

Kernels are compiled beforehand by several processes, through Triton's cache on disk. On a CPU: --device cpu, which
takes tiny shapes and proves only that everything runs. FlashInfer compiles for a minute or so at its first use on a
machine (it keeps what it compiled); --no-flashinfer spares that.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.util
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.kernel_work import TINY, WORKS, Axes, Call, Job, Maker, Shape, Work, jobs_of
from benchmarks.report import header, median_and_spread, row

SHAPES = ("llama-3.1-8b", "qwen3-0.6b", "mixtral-8x7b", "qwen3-30b-a3b")
GRAPH_S, SLOW_GRAPH_S, MAX_CALLS = 1e-3, 5e-3, 300
Round = Callable[[], float]  # seconds a call


def num_calls(call: Call, work: Work) -> int:
    """So many that a graph takes about a millisecond, by what the hardware could do; each copy equally often.

    Fewer where a call, which was made once before, is slow.
    """
    estimate_s = 3e-6 + work.num_bytes / 3e12 + work.flops / 5e14
    calls = min(math.ceil(GRAPH_S / estimate_s), MAX_CALLS)
    calls = math.ceil(calls / work.num_copies) * work.num_copies
    return min(calls, math.ceil(SLOW_GRAPH_S / timed(lambda: call(0), 1)))


def on_cpu(call: Call, work: Work) -> Round:
    def one_round() -> float:
        begin = time.perf_counter()
        for i in range(work.num_copies):
            call(i)
        return (time.perf_counter() - begin) / work.num_copies

    return one_round


def in_graph(call: Call, work: Work) -> Round:
    """Captured by hand: torch.cuda.graph collects garbage and empties caches, which takes longer than all else here."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        call(0)  # whatever is loaded or planned at its first use
        torch.cuda.synchronize()
        calls = num_calls(call, work)
        graph.capture_begin()
        try:
            for i in range(calls):
                call(i % work.num_copies)
        finally:
            graph.capture_end()
    return functools.partial(timed, graph.replay, calls)


def eagerly(call: Call, work: Work) -> Round:
    call(0)
    calls = num_calls(call, work)

    def run() -> None:
        for i in range(calls):
            call(i % work.num_copies)

    return functools.partial(timed, run, calls)


def timed(run: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)), 1e-3) * 1e-3 / calls


def prepared(call: Call, work: Work, device: str) -> tuple[Round, str]:
    """How a round is run, and what to add to its name."""
    if device == "cpu":
        return on_cpu(call, work), ""
    try:
        return in_graph(call, work), ""
    except Exception:
        torch.cuda.synchronize()
        return eagerly(call, work), " eager"


@torch.inference_mode()
def measure(job: Job, device: str, args: argparse.Namespace) -> None:
    maker = Maker(Shape.of(job.shape), device, device == "cuda", args.flashinfer)
    work = WORKS[job.op](maker, *job.axes)
    correct = "yes" if work.is_correct() else "no"
    runs = {"": prepared(work.ours, work, device)}
    runs |= {name: prepared(call, work, device) for name, call in work.baselines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(args.rounds + 1):
        for name, (one_round, _) in runs.items():
            took = one_round()
            if index:
                seconds[name].append(took)
    ours, spread = median_and_spread(seconds[""])
    backend = work.backend if device == "cuda" else "torch"
    for name in work.baselines:
        baseline, baseline_spread = median_and_spread(seconds[name])
        details = {
            "shape": job.shape,
            "backend": backend + runs[""][1],
            "baseline_spread": baseline_spread,
            "gb_per_s": work.num_bytes / ours / 1e9,
            "tflop_per_s": work.flops / ours / 1e12,
            "num_copies": work.num_copies,
        }
        ran = "" if backend == "triton" else f" ({backend})"
        row(
            job.op,
            f"{job.shape} {job.case}{ran}",
            1e6 * ours,
            1e6 * baseline,
            name + runs[name][1],
            unit="us",
            correct=correct,
            goal=work.goal if name != "flashinfer" else None,
            spread=spread,
            details=details,
            json_lines=args.json_lines,
        )
    for reason in work.skipped:
        print(f"{job.op} {job.shape} {job.case}: no row for {reason}", flush=True)


@torch.inference_mode()
def compile_one(job: Job, flashinfer: bool) -> str | None:
    """In a process of its own; says what went wrong."""
    try:
        WORKS[job.op](Maker(Shape.of(job.shape), "cuda", False, flashinfer), *job.axes).ours(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        return f"{job.op} {job.shape} {job.case}: {type(error).__name__}: {str(error)[:300]}"
    return None


def compile_all(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(len(os.sched_getaffinity(0)) - 2, 12, len(jobs)))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        problems = list(pool.map(compile_one, jobs, [args.flashinfer] * len(jobs)))
    print(f"compiled {len(jobs)} cases with {workers} processes in {time.perf_counter() - begin:.0f} s", flush=True)
    for problem in filter(None, problems):
        print(problem, flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="ops, separated by commas: " + ", ".join(WORKS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-flashinfer", dest="flashinfer", action="store_false")
    parser.add_argument("--no-precompile", dest="precompile", action="store_false")
    parser.add_argument(
        "--budget-s", type=float, default=60, help="once compiled, leave out rows that remain after so long"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json-lines", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args(argv)
    unknown = set((args.only or "").split(",")) - {"", *WORKS}
    if unknown:
        parser.error(f"unknown ops {', '.join(sorted(unknown))}; known: {', '.join(WORKS)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    begin, args = time.perf_counter(), parse(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_kernels needs a GPU; on a CPU, only to see that it runs: --device cpu")
        return
    on_gpu = args.device == "cuda"
    if args.flashinfer and (not on_gpu or importlib.util.find_spec("flashinfer") is None):
        args.flashinfer = False
        print("flashinfer is left out: " + ("it is not installed" if on_gpu else "it needs a GPU"))
    shapes = args.shapes.split(",") if on_gpu else ["tiny", "tiny-moe"]
    jobs = [job for shape in shapes for job in jobs_of(shape, Axes() if on_gpu else TINY)]
    if args.only:
        jobs = [job for job in jobs if job.op in args.only.split(",")]
    if on_gpu and args.precompile:
        compile_all(jobs, args)
    header()
    failed, left_out, stop_s = 0, [], time.perf_counter() + args.budget_s
    for job in jobs:
        if time.perf_counter() > stop_s:
            left_out.append(f"{job.op} {job.shape} {job.case}")
            continue
        try:
            measure(job, args.device, args)
        except Exception as error:  # a kernel that fails shouldn't hide the others' rows
            failed += 1
            print(f"{job.op} {job.shape} {job.case}: FAILED, {type(error).__name__}: {str(error)[:300]}", flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    if left_out:
        print(f"left out after {args.budget_s:g} s: {'; '.join(left_out)}")
    print(f"{len(jobs) - failed - len(left_out)} of {len(jobs)} cases in {time.perf_counter() - begin:.0f} s")
    if failed:
        raise SystemExit(f"gpu_kernels: {failed} cases failed")


if __name__ == "__main__":
    main()
