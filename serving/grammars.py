"""`Grammars`: an ingress's grammar compiler, for the vocabulary of whichever model its engines have."""

from __future__ import annotations

import asyncio

from pagedray.engine.config import EngineFacts
from pagedray.engine.grammar.compiler import GrammarCompiler
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.vocabulary import make_vocabulary
from pagedray.engine.messages import CompiledGrammar
from pagedray.engine.text.tokenizer import Tokenizer


class Grammars:
    """
    Args:
        timeout_s: longest run of one compilation.
    """

    def __init__(self, tokenizer: Tokenizer, timeout_s: float):
        self._tokenizer, self._timeout_s = tokenizer, timeout_s
        self._making: dict[tuple[int, tuple[int, ...]], asyncio.Task[GrammarCompiler]] = {}

    async def compile(self, source: GrammarSource, facts: EngineFacts) -> CompiledGrammar:
        """Raises what `GrammarCompiler.compile` does."""
        return await (await self._compiler(facts)).compile(source)

    async def close(self) -> None:
        for made in await asyncio.gather(*self._making.values(), return_exceptions=True):
            if isinstance(made, GrammarCompiler):
                await made.close()

    async def _compiler(self, facts: EngineFacts) -> GrammarCompiler:
        key = (facts.vocab_size, facts.eos_ids)
        making = self._making.get(key)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making[key] = asyncio.create_task(self._make(facts))
        return await asyncio.shield(making)

    async def _make(self, facts: EngineFacts) -> GrammarCompiler:
        vocabulary = await asyncio.to_thread(make_vocabulary, self._tokenizer, facts.vocab_size, facts.eos_ids)
        return GrammarCompiler(vocabulary, self._timeout_s)
