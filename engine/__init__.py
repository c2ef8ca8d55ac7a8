"""The engine: which tokens to compute next, and the workers that compute them. `LLM` runs it without Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedray.engine.generation import GenerationParams
    from pagedray.engine.grammar.source import GrammarSource
    from pagedray.engine.llm import LLM

__all__ = ["LLM", "GenerationParams", "GrammarSource"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import pagedray.engine` loads neither torch nor a tokenizer."""
    if name == "LLM":
        from pagedray.engine.llm import LLM

        return LLM
    if name == "GenerationParams":
        from pagedray.engine.generation import GenerationParams

        return GenerationParams
    if name == "GrammarSource":
        from pagedray.engine.grammar.source import GrammarSource

        return GrammarSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
