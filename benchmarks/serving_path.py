"""What the way through Ray Serve costs: an engine whose model takes a fixed time per step, offline and served.

Rates: 64 and 256 streams at 20 ms a step, with 1 and 2 ingress replicas; tokens per second at the client beside the
same engine in one process. Latency: time to first token of one stream on an idle server whose step takes no time,
beside the engine's own. Clients share the machine's cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import header, row
from pagedray.deployments.build import Parts
from pagedray.deployments.proxy import PYTHON_PROXY, free_port, haproxy_environment
from pagedray.engine import LLM, GenerationParams
from pagedray.engine.config import Config, EngineFacts, load_config
from pagedray.engine.messages import RunnerOutput, SchedulerOutput
from tests.fakes import ByteTokenizer, FakeWorker

PROMPT = list(b"The quick brown fox jumps over the lazy dog. " * 3)
STEP_S = 0.02
RATE_GOAL, ADDED_GOAL_MS = 0.95, 5.0
SETTINGS = {"max_num_seqs": 256, "max_num_batched_tokens": 65536, "num_kv_blocks": 16384, "max_model_len": 2048}


class PacedWorker(FakeWorker):
    """Like a device: a step begins when the one before it has ended, or when it is submitted, and takes STEP_S."""

    def load(self, *args: Any) -> EngineFacts:
        self.end_s: dict[int, float] = {}
        self.last_end_s = 0.0
        return super().load(*args)

    def submit(self, out: SchedulerOutput) -> None:
        if out.step not in self.end_s:
            self.last_end_s = self.end_s[out.step] = max(self.last_end_s, time.monotonic()) + STEP_S
        super().submit(out)

    def result(self, step: int) -> RunnerOutput:
        time.sleep(max(0.0, self.end_s[step] - time.monotonic()))
        return super().result(step)


class InstantWorker(FakeWorker):
    step_s = 0.0


def settings(**more: object) -> Config:
    return load_config(overrides={**SETTINGS, **more})


async def stream(port: int, num_tokens: int) -> tuple[float, int]:
    """Run one completion; seconds to its first event with text, and the server's own count of tokens."""
    body = json.dumps(
        {
            "model": "fake",
            "prompt": PROMPT,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    first, tail = 0.0, b""
    while chunk := await reader.read(65536):
        if not first and b"data:" in chunk:
            first = time.perf_counter() - start
        tail = (tail + chunk)[-4096:]
    writer.close()
    mark = tail.rfind(b'"completion_tokens":')
    if mark < 0:
        raise RuntimeError(f"the stream ended without a usage: {tail[-500:]!r}")
    return first, int(tail[mark:].split(b":", 1)[1].split(b",", 1)[0].split(b"}", 1)[0])


async def served_rate(port: int, num_streams: int, num_tokens: int) -> float:
    start = time.perf_counter()
    results = await asyncio.gather(*(stream(port, num_tokens) for _ in range(num_streams)))
    counts = [count for _, count in results]
    if counts != [num_tokens] * num_streams:
        raise RuntimeError(f"token counts differ from {num_tokens}: {sorted(set(counts))}")
    return sum(counts) / (time.perf_counter() - start)


async def served_first_token_s(port: int, rounds: int) -> float:
    return statistics.median([(await stream(port, 1))[0] for _ in range(rounds)])


def offline(worker_class: type[FakeWorker], num_streams: int, num_tokens: int, rounds: int = 1) -> float:
    """Median seconds of one batch through the engine in this process."""
    config = {**SETTINGS, "enable_prefix_caching": True}
    params = GenerationParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
    with LLM("fake", worker_class=worker_class, tokenizer=ByteTokenizer(), **config) as llm:  # type: ignore[arg-type]
        llm.generate([PROMPT], params, progress=False)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            llm.generate([PROMPT] * num_streams, params, progress=False)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@contextmanager
def server(config: Config, worker: str) -> Iterator[int]:
    """The application on a Ray and a Serve of its own; gives the HTTP port."""
    import ray
    from ray import serve

    from pagedray.deployments.build import application

    port = free_port()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        parts = Parts(worker=worker, tokenizer="tests.fakes:ByteTokenizer")
        serve.run(application(config, parts), name="bench", route_prefix="/")
        wait_until_it_answers(port)
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_until_it_answers(port: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            asyncio.run(stream(port, 2))
            return
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def rates(num_ingresses: int, streams: list[int], num_tokens: int) -> None:
    with server(settings(num_ingress_replicas=num_ingresses), "benchmarks.serving_path:PacedWorker") as port:
        for num_streams in streams:
            base = num_streams * num_tokens / offline(PacedWorker, num_streams, num_tokens)
            rate = asyncio.run(served_rate(port, num_streams, num_tokens))
            case = f"{num_streams} streams, {num_ingresses} ingress, {STEP_S * 1e3:g} ms steps"
            row("served tokens", case, rate, base, "offline", unit="tok/s", higher_is_better=True, goal=RATE_GOAL)


def latency(rounds: int) -> None:
    with server(settings(), "benchmarks.serving_path:InstantWorker") as port:
        asyncio.run(served_first_token_s(port, 10))
        own = offline(InstantWorker, 1, 1, rounds)
        served = asyncio.run(served_first_token_s(port, rounds))
    added = 1e3 * (served - own)
    row("time to first token", "idle, 1 stream, instant model", 1e3 * served, 1e3 * own, "engine alone", unit="ms")
    row("added to first token", "budget 5 ms", added, ADDED_GOAL_MS, "budget", unit="ms", goal=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--ingresses", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--no-haproxy", action="store_true", help="use Serve's Python proxy")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as folder:
        # Ray reads its environment when it is imported
        os.environ.update(PYTHON_PROXY if args.no_haproxy else haproxy_environment(Path(folder)))
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_TMPDIR=folder)
        header()
        for num_ingresses in args.ingresses:
            rates(num_ingresses, args.streams, args.tokens)
        latency(args.rounds)


if __name__ == "__main__":
    main()
