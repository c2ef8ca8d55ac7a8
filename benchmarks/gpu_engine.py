"""The offline engine with random weights of published shapes: ms a decode step, tokens per second, seconds to start.

The baseline is vLLM 0.26.0 on an H200, as it was measured on 2026-12-01 with the same shapes, lengths and token ids
(random ones below 49152, greedy, end of sequence ignored, no prefix cache); see PEER. Ratios from one run of both are
better: run vLLM's script on the same GPU right before or after.

latency     b prompts at once; the time of a step where all of them decode. The worker is wrapped by a clock that
            notes when each step's tokens are on the host, which is when the engine gets them. Counted are the steps
            after the first in which every prompt got a token, up to the last such step: prefill is over then, and the
            prompts that began first have not ended. Between two notes lies all that a step takes, the engine's own
            work included, and with steps in flight what the GPU and the host do at the same time counts once.
throughput  all prompts at once through LLM.generate, from the call to its return.
start       from the start of this program, imports included, until the first request could be submitted.

Without arguments: each model of STANDARD with its table, in a process of its own. On a CPU: --model tiny --device cpu.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.model_shapes import CONFIGS, write_model
from benchmarks.report import header, median_and_spread, row

if TYPE_CHECKING:
    from pagedray.engine import LLM
    from pagedray.engine.config import Config
    from pagedray.engine.executor import StepWorker
    from pagedray.engine.messages import RunnerOutput

PEER_NAME = "vLLM 0.26"
PEER_SOURCE = "vLLM 0.26.0, torch 2.11, one H200, 2026-12-01"
MAX_ID = 49151  # prompts are of ids that the peers' stand-in tokenizer has too


class Standard(NamedTuple):
    batch: str
    prompts: int
    input_len: int
    output_len: int


class Peer(NamedTuple):
    """What vLLM took, and what this project wants to take."""

    figure: float
    goal: float


STANDARD = {
    "llama-3.1-8b": Standard("1,8,32,64,128,256", 1024, 512, 129),
    "qwen3-0.6b": Standard("1,64,256", 2048, 256, 129),
}
DEFAULT, TINY = STANDARD["llama-3.1-8b"], Standard("1,2", 4, 8, 12)

# (model, input length) → batch → ms a step
PEER_STEP: dict[tuple[str, int], dict[int, Peer]] = {
    ("llama-3.1-8b", 512): {
        1: Peer(4.84, 4.5),
        8: Peer(5.08, 5.08),
        32: Peer(5.83, 5.83),
        64: Peer(6.60, 6.60),
        128: Peer(8.46, 8.46),
        256: Peer(13.4, 13.4),
    },
    ("qwen3-0.6b", 256): {1: Peer(1.48, 1.2), 64: Peer(2.64, 2.4), 256: Peer(5.86, 5.3)},
}
# (model, prompts, input length, output length) → output tokens per second, with 256 sequences
PEER_RATE: dict[tuple[str, int, int, int], Peer] = {
    ("llama-3.1-8b", 1024, 512, 129): Peer(7084, 7800),
    ("qwen3-0.6b", 2048, 256, 129): Peer(40887, 45000),
}
PEER_TOTAL_RATE = {("llama-3.1-8b", 1024, 512, 129): 35200.0}
PEER_START = {"llama-3.1-8b": Peer(75.0, 20.0)}


class StepClock:
    """A worker that notes when the tokens of each step arrived, and how many."""

    def __init__(self, worker: StepWorker):
        self._worker = worker
        self.load, self.submit, self.close = worker.load, worker.submit, worker.close
        self.steps: list[tuple[float, int]] = []

    def result(self, step: int) -> RunnerOutput:
        out = self._worker.result(step)
        self.steps.append((time.perf_counter(), sum(token_id >= 0 for token_id in out.token_ids)))
        return out


class NoText:
    """A tokenizer for token ids alone."""

    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise TypeError("this tokenizer has no words: give prompts as token ids")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def text_stream(self, skip_special_tokens: bool) -> NoText:
        return self

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Bench:
    """One started engine and the rows about it."""

    def __init__(self, args: argparse.Namespace, began_s: float):
        self.args = args
        self.model, self.input_len, self.output_len = args.model, args.input_len, args.output_len
        self.rng = random.Random(args.seed)
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(args.model, folder)
            self.llm, self.clock, seconds = _start(path, args, began_s)
        self.start_s = seconds["all"]
        facts = self.llm.facts
        self.phases = {"import": seconds["import"], **dict(facts.start_phases)}
        self.max_id = min(facts.vocab_size - 1, MAX_ID)
        self.details = {
            "model": args.model,
            "dtype": facts.dtype,
            "device": facts.device,
            "attention_backend": facts.attention_backend,
            "num_blocks": facts.num_blocks,
            "max_num_seqs": self.llm.config.scheduler.max_num_seqs,
            "max_num_batched_tokens": self.llm.config.scheduler.max_num_batched_tokens,
            "run_ahead": self.llm.config.scheduler.run_ahead,
            "cuda_graphs": self.llm.config.worker.cuda_graphs,
            "set": dict(args.set),
        }

    def row(self, op: str, case: str, ours: float, peer: float | None, goal: float | None = None, **more: Any) -> None:
        details = {**self.details, **more.pop("details", {})}
        if peer is not None:
            details["baseline_source"] = PEER_SOURCE
        ratio = None if peer is None or goal is None else max(goal / peer, peer / goal)
        row(
            op, f"{self.model} {case}", ours, peer, PEER_NAME, goal=ratio, details=details,
            json_lines=self.args.json_lines, **more,
        )  # fmt: skip

    def generate(self, num_prompts: int, output_len: int) -> tuple[float, bool]:
        """Seconds from the call to its return, and whether each prompt got all its tokens."""
        from pagedray.engine import GenerationParams

        prompts = [[self.rng.randint(3, self.max_id) for _ in range(self.input_len)] for _ in range(num_prompts)]
        params = GenerationParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        begin = time.perf_counter()
        found = self.llm.generate(prompts, params, progress=False)
        seconds = time.perf_counter() - begin
        return seconds, all(len(generation.choices[0].token_ids) == output_len for generation in found)

    def start(self) -> None:
        peer = PEER_START.get(self.model)
        print("phases: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items()), flush=True)
        phases = {name: round(seconds, 3) for name, seconds in self.phases.items()}
        figures = peer or (None, None)
        self.row("start", "to ready", self.start_s, *figures, unit="s", correct="-", details={"start_phases": phases})

    def latency(self, batch: int) -> None:
        rounds, is_complete = [], True
        for _ in range(self.args.repeats):
            self.clock.steps.clear()
            _, complete = self.generate(batch, self.output_len)
            is_complete &= complete
            rounds.append(step_seconds(self.clock.steps, batch))
        step_s, spread = median_and_spread(rounds)
        peer = PEER_STEP.get((self.model, self.input_len), {}).get(batch, (None, None))
        case = f"batch {batch}, {self.input_len} in"
        details = {"batch": batch, "input_len": self.input_len, "output_len": self.output_len, "tok_s": batch / step_s}
        self.row(
            "decode step", case, 1e3 * step_s, *peer, unit="ms", spread=spread, details=details,
            correct="yes" if is_complete else "no",
        )  # fmt: skip

    def throughput(self, num_prompts: int) -> None:
        rounds = [self.generate(num_prompts, self.output_len) for _ in range(self.args.throughput_repeats)]
        seconds, spread = median_and_spread([seconds for seconds, _ in rounds])
        key = (self.model, num_prompts, self.input_len, self.output_len)
        case = f"{num_prompts} x {self.input_len} -> {self.output_len}"
        common: dict[str, Any] = {
            "unit": "tok/s",
            "higher_is_better": True,
            "spread": spread,
            "correct": "yes" if all(complete for _, complete in rounds) else "no",
            "details": {"seconds": seconds, "input_len": self.input_len, "output_len": self.output_len},
        }
        output, prompt = num_prompts * self.output_len, num_prompts * self.input_len
        self.row("offline, output", case, output / seconds, *PEER_RATE.get(key, (None, None)), **common)
        self.row("offline, total", case, (output + prompt) / seconds, PEER_TOTAL_RATE.get(key), **common)


def step_seconds(steps: Sequence[tuple[float, int]], batch: int) -> float:
    """Seconds until each of `batch` sequences has its next token, over the steady part of a run.

    Args:
        steps: when each step's tokens arrived, and how many.
    """
    full = [index for index, (_, num_tokens) in enumerate(steps) if num_tokens >= batch]
    if len(full) < 2:
        raise ValueError(f"no two steps gave a token to all {batch} sequences; raise --output-len or max_num_seqs")
    first, last = full[0], full[-1]
    num_tokens = sum(num for _, num in steps[first + 1 : last + 1])
    return (steps[last][0] - steps[first][0]) * batch / num_tokens


def _start(path: Path, args: argparse.Namespace, began_s: float) -> tuple[LLM, StepClock, dict[str, float]]:
    """An engine, the clock at its worker, and seconds: of imports, and of everything since `began_s`."""
    from pagedray.engine import LLM
    from pagedray.engine.worker.worker import Worker

    imported_s = time.perf_counter()
    clocks: list[StepClock] = []

    def worker(config: Config) -> StepClock:
        clocks.append(StepClock(Worker(config)))
        return clocks[-1]

    settings = {"max_model_len": args.input_len + args.output_len + 8, "max_num_seqs": args.max_num_seqs}
    settings |= {"device": args.device, **dict(args.set)}
    llm = LLM(
        str(path),
        worker_class=worker,
        tokenizer=NoText(),  # type: ignore[arg-type]
        load_format="dummy",
        enable_prefix_caching=False,
        **{name: value for name, value in settings.items() if value is not None},
    )
    return llm, clocks[0], {"import": imported_s - began_s, "all": time.perf_counter() - began_s}


def measure(args: argparse.Namespace, began_s: float) -> None:
    bench = Bench(args, began_s)
    limit = bench.llm.config.scheduler.max_num_seqs
    with bench.llm:
        bench.start()
        batches = [int(part) for part in args.batch.split(",") if part and int(part)]
        # Whatever is compiled or allocated at its first use: a wide prefill, and decode steps of that many.
        bench.generate(max([*batches, min(args.prompts, 32), 1]), min(8, args.output_len))
        for batch in batches:
            if batch > limit:
                print(f"batch {batch} is left out: max_num_seqs is {limit}", flush=True)
            else:
                bench.latency(batch)
        if args.prompts:
            bench.throughput(args.prompts)


def setting(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not field=value")
    return field, value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Callable[..., Any] = parser.add_argument
    add("--model", choices=CONFIGS, help="default: all of " + ", ".join(STANDARD))
    add("--batch", help="latency: batch sizes, separated by commas; 0: none (default: the model's in STANDARD)")
    add("--prompts", type=int, help="throughput: so many prompts at once; 0: none")
    add("--input-len", type=int)
    add("--output-len", type=int)
    add("--max-num-seqs", type=int, help="default: the engine's")
    add("--repeats", type=int, default=3, help="rounds of each batch size; the median is reported")
    add("--throughput-repeats", type=int, default=1)
    add("--device", choices=("cpu", "cuda"))
    add("--set", type=setting, action="append", default=[], metavar="FIELD=VALUE", help="any setting of the engine")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--json-lines", type=Path, help="append the JSON lines to this file too")
    args = parser.parse_args(argv)
    standard = TINY if args.model == "tiny" else STANDARD.get(args.model or "", DEFAULT)
    for name, value in standard._asdict().items():
        if args.model is not None and getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    began_s = time.perf_counter()
    args = parse(argv)
    if args.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print("gpu_engine needs a GPU; on a CPU: --model tiny --device cpu")
            return
    if args.model is not None:
        header()
        measure(args, began_s)
        return
    # A fresh process each, for a start like any other and an empty GPU.
    rest = sys.argv[1:] if argv is None else list(argv)
    codes = [subprocess.call([sys.executable, "-m", "benchmarks.gpu_engine", "--model", m, *rest]) for m in STANDARD]
    if any(codes):
        raise SystemExit(f"gpu_engine failed for {sum(map(bool, codes))} of {len(codes)} models")


if __name__ == "__main__":
    main()
