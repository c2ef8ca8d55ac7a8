"""`Builder`: a source to a compiled grammar, tried out. Runs in the compiler's workers only.

This module loads xgrammar, and with it torch.
"""

from __future__ import annotations

import random
import time
import zlib

import numpy as np
import xgrammar

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.table import token_table
from pagedray.engine.grammar.translate import Tag, translate
from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.grammar.wire import Job

MAX_TEXT_BYTES = 16 * 2**20  # which a worker reads in a quarter of a second
NUM_WALKS, MAX_STEPS = 4, 48
MAX_MASK_S = 0.2  # of processor time for one mask: all other requests of a step wait for it
COMPRESSION = 1  # a fifth of the size in a millisecond; level 6 takes 10 for a seventh


class Builder:
    """Compiles sources for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._table = token_table(vocabulary)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._eos_ids = frozenset(vocabulary.eos_ids)

    def __call__(self, job: Job) -> bytes:
        """Serialized and compressed. Raises: UserError when the source can't be used."""
        if self._compiler is None:  # not before the fork: it may have threads
            self._compiler = xgrammar.GrammarCompiler(self._table, max_threads=1, cache_enabled=False)
        source = translate(job.source, self._vocabulary)
        try:
            if isinstance(source, Tag):
                compiled = self._compiler.compile_structural_tag(source.json)
            else:
                compiled = self._compiler.compile_grammar(source.text)
            text = compiled.serialize_json().encode()
        except RuntimeError as error:
            raise UserError(_reason(error)) from error
        if len(text) > MAX_TEXT_BYTES:
            raise UserError(f"it compiles to {len(text)} bytes, the limit is {MAX_TEXT_BYTES}; make it smaller")
        self._try_out(text)
        return zlib.compress(text, COMPRESSION)

    def _try_out(self, text: bytes) -> None:
        """Do with it what a worker will do, along random outputs: what hangs or crashes there does so here."""
        compiled = xgrammar.CompiledGrammar.deserialize_json(text.decode(), self._table)
        mask = np.zeros((1, (len(self._vocabulary.tokens) + 31) // 32), dtype=np.int32)
        choose = random.Random(len(text))
        for _ in range(NUM_WALKS):
            matcher = xgrammar.GrammarMatcher(compiled)
            for step in range(MAX_STEPS):
                mask.fill(-1)
                start_s = time.process_time()
                matcher.fill_next_token_bitmask(mask)
                if (took_s := time.process_time() - start_s) > MAX_MASK_S:
                    raise UserError(
                        f"one token takes {took_s:.2f} s to find, the limit is {MAX_MASK_S} s; repeat simpler things"
                    )
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                ids = allowed[allowed < len(self._vocabulary.tokens)]
                if not len(ids):
                    at = "at its start" if step == 0 else f"after {step} tokens"
                    raise UserError(f"it comes to a dead end {at}: no token of this model can follow")
                token_id = int(ids[choose.randrange(len(ids))])
                if token_id in self._eos_ids:
                    break
                if not matcher.accept_token(token_id):
                    raise UserError(f"its matcher refuses a token that it allowed, after {step} tokens")


def _reason(error: RuntimeError) -> str:
    """xgrammar's message without the place in its own source that it begins with."""
    lines = str(error).strip().splitlines() or ["it can't be compiled"]
    return " ".join(lines)[-500:]
