"""How long the GPU waits in a decode step, offline and through Ray Serve: at most 3 % of the step is the budget.

Each case runs in a process of its own: b random prompts at once, of which the worker (`profiled_worker.py`) times some
steps in which all b decode, then records some more with torch.profiler. Two figures come of that, since profiling slows
the host, and the GPU between kernels as well:

idle           1 - busy / step: busy is the time of a step in which at least one kernel or copy ran, as it was recorded;
               step is the time of one without a profiler, right before in the same run. The budget is this one's. If
               kernels take longer under the profiler, it is too low, even negative (then the row has 0.01, and is
               not correct below -2).
idle profiled  1 - busy / step, both from the profile: it includes what profiling costs.

Below the rows: the kernels with the most time in a step, and where the widest gaps are, both as profiled. `launch` is
the time in which the host queues a step; a step can't be shorter than that. JSON lines hold more.

    python -m benchmarks.gpu_idle --model llama-3.1-8b --batch 1,256 --path engine,ray

On a CPU, to try the program itself: --model tiny --device cpu --batch 1,2 --input-len 8.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import io
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import gpu_served
from benchmarks.gpu_engine import MAX_ID, NoText, setting
from benchmarks.model_shapes import CONFIGS, write_model
from benchmarks.report import header, row

ROOT = Path(__file__).resolve().parents[1]
BUDGET_PERCENT = 3.0
PATHS = ("engine", "ray")
WORKER = "benchmarks.profiled_worker:ProfiledWorker"
WARM_UP_LEN = 8
FINDINGS_S = 10.0  # to wait for the worker's file after the last token
READY_S = 60.0  # from a running application to its first answer over HTTP

Generate = Callable[[int], None]  # the whole batch, so many tokens of each


def settings(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    batch = int(args.batch)
    return {
        "model": str(path),
        "device": args.device,
        "load_format": "dummy",
        "max_model_len": args.input_len + 2 * args.output_len + 8,  # a second try takes twice as many tokens
        "max_num_seqs": max(batch, 256),
        **dict(args.set),
    }


@contextmanager
def engine(args: argparse.Namespace, path: Path, folder: Path) -> Iterator[Generate]:
    """The engine in this process."""
    from benchmarks.profiled_worker import ProfiledWorker
    from pagedray.engine import LLM, GenerationParams

    rng = random.Random(args.seed)
    max_id = _max_id(args.model)

    def generate(output_len: int) -> None:
        prompts = [[rng.randint(3, max_id) for _ in range(args.input_len)] for _ in range(int(args.batch))]
        params = GenerationParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        llm.generate(prompts, params, progress=False)

    tokenizer: Any = NoText()
    with LLM(worker_class=ProfiledWorker, tokenizer=tokenizer, **settings(args, path)) as llm:
        yield generate


@contextmanager
def ray_serve(args: argparse.Namespace, path: Path, folder: Path) -> Iterator[Generate]:
    """The application on a Ray and a Serve of its own, as `pagedray serve` sets them up, and clients beside it."""
    from pagedray.deployments.build import APP, Parts, application, num_cpus
    from pagedray.deployments.proxy import end_haproxy, listener
    from pagedray.engine.config import load_config

    served = {"served_model_name": (args.model,), "host": "127.0.0.1", "port": 0, "haproxy": not args.no_haproxy}
    config = load_config(overrides={**settings(args, path), **served})
    listen, trouble = listener(config.server, folder)
    if trouble is not None:
        print(f"without HAProxy: {trouble}", flush=True)
    # Ray and Serve read these while they are imported, and hand them on to their processes.
    os.environ.update(listen.environment)
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_TMPDIR=str(folder), RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(RAY_worker_niceness="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import ray
    from ray import serve

    tokenizer = None if args.tokenizer else "benchmarks.gpu_engine:NoText"
    host, port = listen.reachable_host, listen.port
    client = argparse.Namespace(
        url=f"http://{host}:{port}", model=args.model, input_len=args.input_len, max_token_id=_max_id(args.model)
    )

    def generate(output_len: int) -> None:
        batch = int(args.batch)
        gpu_served.run_all(client, batch, batch, output_len, f"{args.seed}-{time.time_ns()}")

    context: Any = ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus(config))),
        num_gpus=1 if args.device == "cuda" else 0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=100 * 2**20,
    )
    logs = Path(context.address_info["session_dir"], "logs")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": listen.host, "port": port})
        serve.run(application(config, Parts(WORKER, tokenizer)), name=APP, route_prefix="/")
        _await_health(host, port)
        yield generate
    except BaseException:
        _print_errors(logs)
        raise
    finally:
        unheard = io.StringIO()  # what Ray has to say of processes that end
        with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard):
            serve.shutdown()
            ray.shutdown()
        end_haproxy(folder)


def _await_health(host: str, port: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(host, port, timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"http://{host}:{port}/health has not answered 200 for {READY_S:g} s")
        time.sleep(0.2)


def _print_errors(logs: Path) -> None:
    """Ends of the logs that speak of errors, before they are deleted."""
    for file in [*logs.glob("serve/*.log"), *logs.glob("worker-*.err")]:
        text = file.read_text(errors="replace")
        if "Traceback" in text or "ERROR" in text:
            print(f"--- {file.name}", *text.splitlines()[-25:], sep="\n", file=sys.stderr, flush=True)


def _max_id(model: str) -> int:
    return min(int(CONFIGS[model]["vocab_size"]) - 1, MAX_ID)


def findings(folder: Path) -> dict[str, Any] | None:
    """What the worker wrote; None if it hasn't.

    Raises:
        RuntimeError: the profiler failed, in the worker's words.
    """
    from benchmarks.profiled_worker import FINDINGS_FILE

    deadline_s = time.monotonic() + FINDINGS_S
    while not (folder / FINDINGS_FILE).exists():
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.1)
    found: dict[str, Any] = json.loads((folder / FINDINGS_FILE).read_text(encoding="utf-8"))
    if "error" in found:
        raise RuntimeError(f"the profiler failed in the worker:\n{found['error']}")
    return found


def measure(args: argparse.Namespace) -> None:
    """The one path and batch of these arguments, in this process."""
    from benchmarks.profiled_worker import Plan

    plan = Plan(int(args.batch), args.num_settle, args.num_plain, args.num_profiled, args.prime)
    if args.output_len <= plan.num_steps:
        raise SystemExit(f"--output-len must be above {plan.num_steps}, the number of steps that the worker counts")
    start = {"engine": engine, "ray": ray_serve}[args.path]
    found = None
    # Short names: Ray's sockets are in there.
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp", ignore_cleanup_errors=True) as name:
        path = write_model(args.model, name, args.tokenizer)
        plan.write(path)
        with start(args, path, Path(name)) as generate:
            generate(min(WARM_UP_LEN, plan.num_settle))  # too short for the worker to begin
            for output_len in (args.output_len, 2 * args.output_len):
                generate(output_len)
                if (found := findings(path)) is not None:
                    break
    if found is None:
        raise SystemExit(
            f"{args.path}, batch {args.batch}: all sequences never decoded together for {plan.num_steps} steps; "
            "raise --output-len"
        )
    report(args, plan._asdict(), found)


def report(args: argparse.Namespace, plan: dict[str, Any], found: dict[str, Any]) -> None:
    profiled = found["profiled"]
    num_layers = CONFIGS[args.model]["num_hidden_layers"]
    if profiled["kernels_per_step"] < num_layers:
        raise SystemExit(
            f"only {profiled['kernels_per_step']:g} kernels a step were recorded, the model has {num_layers} layers: "
            "those inside of graphs are missing; try --prime, or --set cuda_graphs=false"
        )
    idle = 100 * (1 - profiled["busy_ms"] / found["plain_ms"])
    case = f"{args.model} batch {args.batch}, {args.input_len} in"
    common: dict[str, Any] = {
        "correct": "yes" if profiled["is_whole"] and idle > -2 else "no",
        "json_lines": args.json_lines,
    }
    details = {
        "model": args.model,
        "path": args.path,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "plan": plan,
        "set": dict(args.set),
        "idle_percent": idle,
        **found,
    }
    row(
        f"idle, {args.path}", case, max(idle, 0.01), BUDGET_PERCENT, "budget", unit="%", goal=1.0, details=details,
        **common,
    )  # fmt: skip
    brief = {"model": args.model, "path": args.path}
    row(
        f"idle profiled, {args.path}", case, 100 * profiled["idle_share"], None, "", unit="%", details=brief,
        **common,
    )  # fmt: skip
    row(
        f"step, {args.path}", case, found["plain_ms"], profiled["step_ms"], "profiled", unit="ms", details=brief,
        **common,
    )  # fmt: skip
    gaps, least_most = profiled["long_gaps"], profiled["kernels_least_most"]
    sizes = ", ".join(f"{us:g} us in gaps of {size}" for size, us in profiled["gaps_us_per_step"].items())
    print(
        f"busy {profiled['busy_ms']:.3f} ms of a step, launch {found['launch_ms']:.3f} ms; "
        f"{profiled['kernels_per_step']:.1f} kernels ({least_most[0]} to {least_most[1]}) and "
        f"{profiled['copies_per_step']:.1f} copies a step, {profiled['num_steps']} steps\n"
        f"{sizes}; over 20 us: {gaps['per_step']:.2f} a step, the longest {gaps['longest_us']:.0f} us"
    )
    for title, entries in (("kernel", profiled["top"]), ("gap", profiled["top_gaps"])):
        for entry in entries:
            print(f"  {title:<7}{entry['us_per_step']:>10.1f} us a step {entry['per_step']:>7.1f} x  {entry['name']}")
    calls = ", ".join(f"{n:.1f} {name}" for name, n in found["host_calls_per_step"].items())
    print(f"  host calls a step: {calls or '-'}", flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--model", choices=CONFIGS, default="llama-3.1-8b")
    add("--batch", default="1,256", help="numbers of sequences, separated by commas")
    add("--path", default=",".join(PATHS), help="engine: in one process; ray: through Ray Serve and HTTP")
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=129)
    add("--num-settle", type=int, default=8, help="steady steps before anything is measured")
    add("--num-plain", type=int, default=32, help="steps to time without a profiler")
    add("--num-profiled", type=int, default=40, help="steps to record")
    add("--prime", action="store_true", help="run an empty profile before CUDA is used")
    add("--device", choices=("cpu", "cuda"), default="cuda")
    add("--tokenizer", type=Path, metavar="FOLDER", help="a checkpoint's, for the Ray path; default: one without text")
    add("--no-haproxy", action="store_true", help="use Serve's Python proxy")
    add("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE", help="any setting of the engine")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--limit-s", type=float, default=300.0, help="longest run of one case, where there are several")
    add("--json-lines", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args(argv)
    if min(args.num_settle, args.num_plain, args.num_profiled) < 1:
        parser.error("--num-settle, --num-plain and --num-profiled must be at least 1")
    unknown = set(args.path.split(",")) - set(PATHS)
    if unknown:
        parser.error(f"--path: unknown {', '.join(sorted(unknown))}; known: {', '.join(PATHS)}")
    return args


def _run(command: list[str], limit_s: float) -> int:
    """Exit status of a process that is interrupted, then killed, when it takes longer."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"not done after {limit_s:g} s: {' '.join(command)}", flush=True)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            return 1


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("gpu_idle needs a GPU; on a CPU: --model tiny --device cpu --batch 1,2 --input-len 8")
            return
    cases = [(path, batch) for path in args.path.split(",") for batch in args.batch.split(",")]
    if "ray" in args.path and importlib.util.find_spec("ray") is None:
        print("the path through Ray is left out: ray is not installed", flush=True)
        cases = [case for case in cases if case[0] != "ray"]
    if len(cases) == 1:
        args.path, args.batch = cases[0]
        header()
        measure(args)
        return
    # A fresh process each: a profiler and a Ray of its own, and an empty GPU.
    rest = sys.argv[1:] if argv is None else list(argv)
    command = [sys.executable, "-m", "benchmarks.gpu_idle", *rest]
    codes = [_run([*command, "--path", path, "--batch", batch], args.limit_s) for path, batch in cases]
    if any(codes):
        raise SystemExit(f"gpu_idle failed for {sum(map(bool, codes))} of {len(codes)} cases")


if __name__ == "__main__":
    main()
