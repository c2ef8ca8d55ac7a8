"""Offline generation of the embedded model beside transformers' generate with the same weights, in one process.

Two cases per dtype, greedy, end of sequence ignored, every prompt its own random ids:
many streams (64 prompts at once) and a single stream, 128 tokens in and 64 out. `correct` counts prompts whose tokens
are transformers' own; in bfloat16 near ties may fall either way.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import alternate, header, median_and_spread, row
from pagedray.engine import LLM, GenerationParams
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.worker.weights import load_weights

NUM_IN, NUM_OUT = 128, 64
GOALS = {64: 1.5, 1: 1.0}  # ratio to reach, by number of prompts


class Reference:
    """transformers' model with the checkpoint's weights."""

    def __init__(self, dtype: torch.dtype):
        checkpoint = open_checkpoint(EMBEDDED_MODEL)
        self.model = LlamaForCausalLM(LlamaConfig(**checkpoint.config)).to(dtype).eval()
        load_weights(self, checkpoint, torch.device("cpu"))

    def weight_slots(self) -> dict[str, torch.Tensor]:
        return {n: p.data for n, p in self.model.named_parameters() if n != "lm_head.weight"}

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_OUT,
                min_new_tokens=NUM_OUT,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return out[:, ids.shape[1] :].tolist()


def compare(llm: LLM, reference: Reference, num_prompts: int, rounds: int, dtype: str) -> None:
    rng = random.Random(num_prompts)
    prompts = [[rng.randrange(100, llm.facts.vocab_size) for _ in range(NUM_IN)] for _ in range(num_prompts)]
    params = GenerationParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    ours: list[list[int]] = []
    theirs: list[list[int]] = []

    def run_ours() -> None:
        ours[:] = [list(g.choices[0].token_ids) for g in llm.generate(prompts, params, progress=False)]

    def run_theirs() -> None:
        theirs[:] = reference.generate(prompts)

    our_times, their_times = alternate(run_ours, run_theirs, rounds=rounds)
    seconds, spread = median_and_spread(our_times)
    their_seconds, _ = median_and_spread(their_times)
    tokens = num_prompts * NUM_OUT
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
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
        reference = Reference(getattr(torch, dtype))
        # caching would spare ours the prompts from the second round on
        with LLM(dtype=dtype, enable_prefix_caching=False, max_model_len=1024) as llm:
            for num_prompts in args.prompts:
                compare(llm, reference, num_prompts, args.rounds, dtype)


if __name__ == "__main__":
    main()
