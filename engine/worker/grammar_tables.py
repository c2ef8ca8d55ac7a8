"""What constraints need of a model's vocabulary and of the grammars in use. One thread makes and reads it."""

from __future__ import annotations

import functools
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from pagedray.engine.grammar.vocabulary import Vocabulary
from pagedray.engine.messages import CompiledGrammar, Constraint
from pagedray.engine.worker.bad_sequences import BadSequences
from pagedray.engine.worker.output_rules import OutputRules
from pagedray.engine.worker.reasoning import ReasoningTracker, SpanTokens
from pagedray.engine.worker.token_index import TokenIndex

if TYPE_CHECKING:
    import xgrammar

KEPT_BYTES = 2**28  # of grammars that nobody may need any more
LARGEST_BYTES = 2**28  # of one grammar's serialization
KEPT_SPANS = 16


class GrammarTables:
    """
    Args:
        kept_bytes: of grammars that are kept for outputs to come, by what xgrammar says they take.
    """

    def __init__(self, vocabulary: Vocabulary, kept_bytes: int = KEPT_BYTES):
        from pagedray.engine.grammar.table import token_table  # loads xgrammar, which takes most of a second

        self._vocabulary, self._kept_bytes = vocabulary, kept_bytes
        self._table = token_table(vocabulary)
        self._grammars: OrderedDict[bytes, xgrammar.CompiledGrammar] = OrderedDict()  # last used last
        self._num_bytes = 0
        self._span_tokens = functools.lru_cache(KEPT_SPANS)(self._make_span_tokens)

    def rules(self, constraint: Constraint, stop_ids: tuple[int, ...]) -> OutputRules:
        """Of an output at its beginning.

        Args:
            stop_ids: end the output where the model has no EOS id.

        Raises:
            Exception: the grammar is broken, or made for another vocabulary.
        """
        span, tracker, matcher, bad = constraint.reasoning, None, None, None
        if span is not None:
            tracker = ReasoningTracker(span, self._span_tokens(span.begin, span.end))
        if constraint.grammar is not None:
            import xgrammar

            stops = None if self._vocabulary.eos_ids else list(stop_ids)
            matcher = xgrammar.GrammarMatcher(self._grammar(constraint.grammar), override_stop_tokens=stops)
        if constraint.bad_sequences:
            bad = BadSequences(constraint.bad_sequences, len(self._vocabulary.tokens))
        return OutputRules(tracker, matcher, bad)

    def _make_span_tokens(self, begin: bytes, end: bytes) -> SpanTokens:
        return SpanTokens(self._index, begin, end, self._vocabulary.eos_ids)

    @functools.cached_property
    def _index(self) -> TokenIndex:
        return TokenIndex(self._vocabulary.tokens)

    def _grammar(self, compiled: CompiledGrammar) -> xgrammar.CompiledGrammar:
        grammar = self._grammars.pop(compiled.key, None)
        if grammar is None:
            grammar = self._read(compiled.data)
            self._num_bytes += grammar.memory_size_bytes
        self._grammars[compiled.key] = grammar
        while self._num_bytes > self._kept_bytes and len(self._grammars) > 1:
            _, oldest = self._grammars.popitem(last=False)
            self._num_bytes -= oldest.memory_size_bytes
        return grammar

    def _read(self, data: bytes) -> xgrammar.CompiledGrammar:
        import xgrammar

        reader = zlib.decompressobj()
        text = reader.decompress(data, LARGEST_BYTES)
        if not reader.eof:
            raise ValueError(f"a compiled grammar is cut off, or larger than {LARGEST_BYTES} bytes")
        return xgrammar.CompiledGrammar.deserialize_json(text.decode(), self._table)
