"""A client of any OpenAI-compatible server: random prompts to /v1/completions, so many streams at a time.

    python -m benchmarks.gpu_served --url http://127.0.0.1:8000 --model NAME --concurrency 1,32,256

Every request: `input-len` random token ids in, exactly `output-len` tokens out (greedy, end of sequence ignored), as a
stream of events. Each stream sends its next request when the last has ended. Times are the client's: to the first token
from before the connection is made; per output token from the first token's event to the last one's, over the tokens
after those of the first event. Events carry token ids, so that tokens without text count when they come, as with random
weights and a stand-in tokenizer most have none. There is one client process for every 64 streams.

The baseline is vLLM 0.26.0's server on an H200, 2026-12-01, with its own client; this one measures its server as well:
give its --url and --label vllm.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.report import header, row

STREAMS_PER_PROCESS = 64
PEER_NAME = "vLLM 0.26"
PEER_SOURCE = "vLLM 0.26.0 serve and its bench client, one H200, 2026-12-01"
# (shape, input length, output length) → concurrency → figure, and what this project wants to reach where it said so
PEER_RATE = {("llama-3.1-8b", 512, 128): {1: (200.0, 210.0), 32: (3648.0, 3900.0), 256: (6916.0, 7400.0)}}
PEER_FIRST_MS = {("llama-3.1-8b", 512, 128): {1: (22.5, 22.0), 32: (340.0, None), 256: (979.0, None)}}
PEER_TOKEN_MS = {("llama-3.1-8b", 512, 128): {1: (4.84, None), 32: (6.2, None), 256: (29.0, None)}}


class Load(NamedTuple):
    """What one client process does."""

    url: str
    model: str
    input_len: int
    output_len: int
    num_streams: int
    num_requests: int
    max_id: int
    seed: str
    start_s: float  # on the monotonic clock, which the processes of a machine share


class Answer(NamedTuple):
    sent_s: float
    first_s: float
    last_s: float  # of the last event with a token
    end_s: float
    num_first: int  # tokens of the first event
    num_tokens: int


async def body_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Status line and headers are read; lines of the body, whatever pieces it comes in.

    Raises:
        RuntimeError: the status isn't 200.
    """
    status = await reader.readline()
    headers = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    is_chunked = headers.get(b"transfer-encoding") == b"chunked"
    rest = b""
    if status.split()[1:2] != [b"200"]:
        text = await reader.read(2000)
        raise RuntimeError(
            f"the server answered {status.decode().strip() or 'nothing'}: {text.decode(errors='replace')}"
        )
    while True:
        if is_chunked:
            size = int((await reader.readline()).split(b";")[0] or b"0", 16)
            piece = await reader.readexactly(size) if size else b""
            await reader.readline()
        else:
            piece = await reader.read(65536)
        if not piece:
            return
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


async def complete(load: Load, prompt: Sequence[int], output_len: int) -> Answer:
    """One request.

    Raises:
        RuntimeError: the server refused it, or gave another number of tokens than asked for.
    """
    parts = urlsplit(load.url)
    body = json.dumps(
        {
            "model": load.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ).encode()
    head = (
        f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    sent_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=2**22)
    first_s = last_s = 0.0
    first = usage = b""
    try:
        writer.write(head.encode() + body)
        async for line in body_lines(reader):
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            if b'"choices":[]' in line or b'"choices": []' in line:
                usage = line
            else:
                last_s = time.perf_counter()
                if not first:
                    first_s, first = last_s, line
    finally:
        writer.close()
    end_s = time.perf_counter()
    if not usage or not first:
        raise RuntimeError(f"the stream ended without {'usage' if first else 'a token'}: {(usage or first)[:500]!r}")
    num_tokens = json.loads(usage[5:])["usage"]["completion_tokens"]
    if num_tokens != output_len:
        raise RuntimeError(f"{num_tokens} tokens came, {output_len} were asked for")
    num_first = len(json.loads(first[5:])["choices"][0].get("token_ids") or [0])
    return Answer(sent_s, first_s, last_s, end_s, num_first, num_tokens)


async def run(load: Load) -> list[Answer]:
    """All requests of one process."""
    rng = random.Random(load.seed)
    prompts = iter([[rng.randint(3, load.max_id) for _ in range(load.input_len)] for _ in range(load.num_requests)])
    answers: list[Answer] = []

    async def stream() -> None:
        for prompt in prompts:
            answers.append(await complete(load, prompt, load.output_len))

    await asyncio.sleep(max(0.0, load.start_s - time.perf_counter()))
    await asyncio.gather(*(stream() for _ in range(load.num_streams)))
    return answers


def run_in_process(load: Load) -> list[Answer]:
    return asyncio.run(run(load))


def run_all(args: argparse.Namespace, concurrency: int, num_requests: int, output_len: int, seed: str) -> list[Answer]:
    """Answers of all processes, each of which has an equal share of the streams, or one more."""
    num_processes = -(-concurrency // STREAMS_PER_PROCESS)
    streams = [concurrency // num_processes + (i < concurrency % num_processes) for i in range(num_processes)]
    requests = [num_requests * n // concurrency for n in streams]
    requests[0] += num_requests - sum(requests)
    # Time for the processes to start and to draw their prompts.
    start_s = time.perf_counter() + (0.0 if num_processes == 1 else 3.0)
    common = args.url, args.model, args.input_len, output_len
    loads = [
        Load(*common, n, count, args.max_token_id, f"{seed}-{i}", start_s)
        for i, (n, count) in enumerate(zip(streams, requests, strict=True))
    ]
    if num_processes == 1:
        return run_in_process(loads[0])
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        return [answer for part in pool.map(run_in_process, loads) for answer in part]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def measure(args: argparse.Namespace, concurrency: int) -> None:
    seed = f"{args.seed}-{concurrency}"
    run_all(args, min(concurrency, 32), min(concurrency, 32), min(args.output_len, 8), seed + "-warm")
    answers = run_all(args, concurrency, concurrency * args.requests_per_stream, args.output_len, seed)
    elapsed_s = max(a.end_s for a in answers) - min(a.sent_s for a in answers)
    num_tokens = sum(a.num_tokens for a in answers)
    first_ms = [1e3 * (a.first_s - a.sent_s) for a in answers]
    token_ms = [1e3 * (a.last_s - a.first_s) / max(a.num_tokens - a.num_first, 1) for a in answers]
    op = f"served, {args.label}"
    case = f"c={concurrency} {args.input_len} -> {args.output_len}"
    key = (args.shape, args.input_len, args.output_len)
    details: dict[str, Any] = {
        "model": args.model,
        "concurrency": concurrency,
        "num_requests": len(answers),
        "input_len": args.input_len,
        "output_len": args.output_len,
        "elapsed_s": round(elapsed_s, 4),
        "first_token_ms": {"median": statistics.median(first_ms), "p99": percentile(first_ms, 0.99)},
        "per_token_ms": {"median": statistics.median(token_ms), "p99": percentile(token_ms, 0.99)},
        "total_tok_s": (num_tokens + len(answers) * args.input_len) / elapsed_s,
        "seed": args.seed,
    }

    def line(name: str, ours: float, figures: tuple[float, float | None] | None, unit: str) -> None:
        peer, goal = figures or (None, None)
        more = {} if peer is None else {"baseline_source": PEER_SOURCE}
        ratio = None if peer is None or goal is None else max(goal / peer, peer / goal)
        row(
            op,
            f"{case} {name}",
            ours,
            peer,
            PEER_NAME,
            unit=unit,
            higher_is_better=unit == "tok/s",
            goal=ratio,
            details={**details, **more},
            json_lines=args.json_lines,
        )

    line("output", num_tokens / elapsed_s, PEER_RATE.get(key, {}).get(concurrency), "tok/s")
    line("first token", statistics.median(first_ms), PEER_FIRST_MS.get(key, {}).get(concurrency), "ms")
    line("first, p99", percentile(first_ms, 0.99), None, "ms")
    line("per token", statistics.median(token_ms), PEER_TOKEN_MS.get(key, {}).get(concurrency), "ms")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of the server, without /v1")
    parser.add_argument("--model", help="its name at the server")
    parser.add_argument("--shape", help="whose figures to compare with; default: the last part of the model's name")
    parser.add_argument("--label", default="pagedray", help="what is served, for the table")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--concurrency", default="1,32,256")
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--max-token-id", type=int, default=49151, help="prompts are of ids from 3 to this")
    parser.add_argument("--seed", type=int, help="default: another each time, since the server may cache prompts")
    parser.add_argument("--json-lines", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args(argv)
    if args.url is not None and args.model is None:
        parser.error("--model is needed with --url")
    if args.url is not None and urlsplit(args.url).scheme != "http":
        parser.error(f"--url must begin with http://, got {args.url}")
    args.shape = args.shape or Path(args.model or "").name.lower()
    args.seed = time.time_ns() if args.seed is None else args.seed
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.url is None:
        print("gpu_served needs a running server: give --url http://HOST:PORT --model NAME, see --help")
        return
    header()
    for concurrency in map(int, args.concurrency.split(",")):
        measure(args, concurrency)


if __name__ == "__main__":
    main()
