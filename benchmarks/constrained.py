"""Constrained generation beside the same without constraints, on one engine in the same run.

32 prompts of the embedded model at once, 64 tokens each, greedy, prompts included. The ratio is what of its speed is
left with a grammar in every row, in half of them, and in none but one. `correct`: every constrained output keeps to the
grammar, and unconstrained ones beside it are what they are alone.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence

from benchmarks.report import alternate, header, median_and_spread, row
from pagedray.engine import LLM, GenerationParams
from pagedray.engine.grammar.compiler import GrammarCompiler
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.vocabulary import make_vocabulary
from pagedray.engine.messages import CompiledGrammar, Constraint

NUM_SEQS, NUM_OUT = 32, 64
PATTERN = r"[a-z ,.]*QZX"  # a model hardly ever begins that end, so outputs have equal lengths
KEPT = re.compile(r"[a-z ,.]*Q?Z?X?")
SHARES = {"every row": 1, "every other row": 2, "one row": NUM_SEQS}  # one of so many rows is constrained


async def compiled(llm: LLM) -> CompiledGrammar:
    vocabulary = make_vocabulary(llm.tokenizer, llm.facts.vocab_size, llm.facts.eos_ids)
    compiler = GrammarCompiler(vocabulary, timeout_s=60.0)
    try:
        return await compiler.compile(GrammarSource("regex", PATTERN, "pattern"))
    finally:
        await compiler.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-out", type=int, default=NUM_OUT)
    args = parser.parse_args(argv)
    free = GenerationParams(temperature=0, max_tokens=args.num_out, ignore_eos=True)
    with LLM(device=args.device, enable_prefix_caching=False, max_model_len=1024, max_num_seqs=NUM_SEQS) as llm:
        bound = GenerationParams(
            temperature=0, max_tokens=args.num_out, constraint=Constraint(asyncio.run(compiled(llm)))
        )
        prompts = [llm.tokenizer.encode(f"Chapter {i}. It was a cold morning, and") for i in range(NUM_SEQS)]

        def generate(params: list[GenerationParams]) -> list[list[int]]:
            found = llm.generate(prompts, params, progress=False)
            return [list(answer.choices[0].token_ids) for answer in found]

        alone = generate([free] * NUM_SEQS)
        header()
        for name, share in SHARES.items():
            params = [free if i % share else bound for i in range(NUM_SEQS)]
            found = generate(params)
            is_right = all(
                ids == alone[i] if i % share else KEPT.fullmatch(llm.tokenizer.decode(ids)) is not None
                for i, ids in enumerate(found)
            )
            ours, baseline = alternate(
                lambda params=params: generate(params),  # type: ignore[misc]
                lambda: generate([free] * NUM_SEQS),
                rounds=args.rounds,
            )
            seconds, spread = median_and_spread(ours)
            row(
                "constrained step",
                f"S={NUM_SEQS} {name}",
                1e3 * seconds / args.num_out,
                1e3 * median_and_spread(baseline)[0] / args.num_out,
                "unconstrained",
                unit="ms",
                correct="yes" if is_right and all(len(ids) == args.num_out for ids in found) else "no",
                spread=spread,
            )


if __name__ == "__main__":
    main()
