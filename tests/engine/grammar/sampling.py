"""Random outputs of compiled grammars under a real vocabulary: what a model with no opinion would write."""

from __future__ import annotations

import functools
import random
import zlib

import numpy as np
import xgrammar

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.grammar.build import Builder
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.table import token_table
from pagedray.engine.grammar.vocabulary import Vocabulary, make_vocabulary
from pagedray.engine.grammar.wire import Job
from pagedray.engine.text.tokenizer import load_tokenizer

MAX_TOKENS = 1500
TOKENS_OF_FREEDOM = 60  # after so many, whatever closes something is preferred
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"null", b"0", b"false")


@functools.cache
def smollm2() -> Vocabulary:
    tokenizer = load_tokenizer(open_checkpoint(EMBEDDED_MODEL, None, False))
    return make_vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


@functools.cache
def byte_vocabulary() -> Vocabulary:
    """Ids 0 to 255 are bytes, 256 ends."""
    return Vocabulary(tokens=(*(bytes([i]) for i in range(256)), b""), special_ids=(256,), eos_ids=(256,))


class Sampler:
    """Compiles sources and writes outputs of them."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self._build = Builder(vocabulary)
        self._table = token_table(vocabulary)
        self._eos_id = vocabulary.eos_ids[0]
        self._closers = [i for i, token in enumerate(vocabulary.tokens) if token in CLOSERS]
        self._mask = np.zeros((1, (len(vocabulary.tokens) + 31) // 32), dtype=np.int32)

    def compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        """Raises: UserError when the source is refused."""
        data = self._build(Job(0, GrammarSource(kind, text, "param")))  # type: ignore[arg-type]
        return xgrammar.CompiledGrammar.deserialize_json(zlib.decompress(data).decode(), self._table)

    def sample(self, grammar: xgrammar.CompiledGrammar, choose: random.Random) -> str | None:
        """A complete output; None where none was found in MAX_TOKENS."""
        matcher = xgrammar.GrammarMatcher(grammar)
        output = bytearray()
        for step in range(MAX_TOKENS):
            self._mask.fill(-1)
            matcher.fill_next_token_bitmask(self._mask)
            bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: len(self.vocabulary.tokens)]
            ids = np.flatnonzero(bits)
            assert len(ids), f"dead end after {bytes(output)!r}"
            if bits[self._eos_id] and (len(ids) == 1 or choose.random() < 0.3 or step > TOKENS_OF_FREEDOM):
                return output.decode()
            closers = [i for i in self._closers if bits[i]]
            if closers and choose.random() < (0.2 if step < TOKENS_OF_FREEDOM else 0.9):
                token_id = choose.choice(closers)
            else:
                token_id = int(ids[choose.randrange(len(ids))])
            if token_id == self._eos_id:
                return output.decode()
            assert matcher.accept_token(token_id)
            output += self.vocabulary.tokens[token_id]
        return None


def accepts(grammar: xgrammar.CompiledGrammar, text: str) -> bool:
    """Whether a text is a complete output."""
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    if not text:
        return bool(matcher.is_completed())
    return matcher.accept_string(text) and bool(matcher.is_completed())
