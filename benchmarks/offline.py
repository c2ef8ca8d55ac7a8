"""Offline generation of the embedded model beside transformers' generate with the same weights, in the same run.

Each side has a process of its own and they take turns: in one process there would be two teams of OpenMP threads, more
threads than cores, and libgomp then puts waiting threads to sleep at once, which halves the speed of both.

Two cases per dtype, greedy, end of sequence ignored, every prompt its own random ids: many streams (64 prompts at once)
and a single stream, 128 tokens in and 64 out. `correct` counts prompts whose tokens are transformers' own; in bfloat16
near ties may fall either way.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import header, median_and_spread, row
from pagedray.engine import LLM, GenerationParams
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.layers.slot import Slot
from pagedray.engine.worker.weights import load_weights

NUM_IN, NUM_OUT = 128, 64
VOCAB_SIZE = 49152
GOALS = {64: 1.5, 1: 1.0}  # ratio to reach, by number of prompts


Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts], list[list[int]]]
MakeSide = Callable[[str], contextlib.AbstractContextManager[Generate]]


@contextlib.contextmanager
def transformers_side(dtype: str) -> Iterator[Generate]:
    """transformers' model with the checkpoint's weights."""
    checkpoint = open_checkpoint(EMBEDDED_MODEL)
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).to(getattr(torch, dtype)).eval()
    slots = {name: Slot(weight.data) for name, weight in model.named_parameters() if name != "lm_head.weight"}
    load_weights(SimpleNamespace(weight_slots=lambda: slots), checkpoint, torch.device("cpu"))

    def generate(prompts: Prompts) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_OUT,
                min_new_tokens=NUM_OUT,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return out[:, ids.shape[1] :].tolist()

    yield generate


@contextlib.contextmanager
def our_side(dtype: str) -> Iterator[Generate]:
    params = GenerationParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    # caching would spare ours the prompts from the second round on
    with LLM(dtype=dtype, enable_prefix_caching=False, max_model_len=1024, device="cpu") as llm:
        yield lambda prompts: [list(g.choices[0].token_ids) for g in llm.generate(prompts, params, progress=False)]


class Side:
    """One side in its process. `generate` returns its tokens and the seconds that they took there."""

    def __init__(self, make: MakeSide, dtype: str):
        self._connection, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_answer, args=(make, dtype, other), daemon=True)
        self._process.start()
        other.close()

    def generate(self, prompts: Prompts) -> tuple[list[list[int]], float]:
        self._connection.send(prompts)
        tokens, seconds = self._connection.recv()
        return tokens, seconds

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def _answer(make: MakeSide, dtype: str, connection: Connection) -> None:
    with make(dtype) as generate:
        while (prompts := connection.recv()) is not None:
            generate(prompts[:1])  # what lay idle during the other's turn comes back into the caches
            begun_s = time.perf_counter()
            tokens = generate(prompts)
            connection.send((tokens, time.perf_counter() - begun_s))


def compare(ours: Side, theirs: Side, num_prompts: int, rounds: int, dtype: str) -> None:
    rng = random.Random(num_prompts)
    prompts = [[rng.randrange(100, VOCAB_SIZE) for _ in range(NUM_IN)] for _ in range(num_prompts)]
    turns = [(ours.generate(prompts), theirs.generate(prompts)) for _ in range(rounds + 1)]
    seconds, spread = median_and_spread([our_turn[1] for our_turn, _ in turns[1:]])
    their_seconds, _ = median_and_spread([their_turn[1] for _, their_turn in turns[1:]])
    tokens = num_prompts * NUM_OUT
    (our_tokens, _), (their_tokens, _) = turns[-1]
    same = sum(a == b for a, b in zip(our_tokens, their_tokens, strict=True))
    row(
        "offline generate",
        f"{EMBEDDED_MODEL} {dtype} {num_prompts} x {NUM_IN} -> {NUM_OUT}",
        tokens / seconds,
        tokens / their_seconds,
        "transformers",
        unit="tok/s",
        higher_is_better=True,
        correct=f"{same}/{num_prompts} equal",
        goal=GOALS.get(num_prompts),
        spread=spread,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[64, 1])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    header()
    for dtype in args.dtype:
        ours, theirs = Side(our_side, dtype), Side(transformers_side, dtype)
        for num_prompts in args.prompts:
            compare(ours, theirs, num_prompts, args.rounds, dtype)
        ours.close(), theirs.close()


if __name__ == "__main__":
    main()
