"""`bad_words`: words that must not be generated, as tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagedray.engine.errors import UserError
from pagedray.engine.generation import GenerationParams
from pagedray.engine.messages import Constraint
from pagedray.engine.text.tokenizer import Tokenizer


def with_bad_words(params: GenerationParams, words: Sequence[str] | None, tokenizer: Tokenizer) -> GenerationParams:
    """The parameters with the words of one token among their `bad_token_ids`, the others in their constraint.

    Raises:
        UserError: a word is empty.
    """
    if not words:
        return params
    sequences = bad_sequences(words, tokenizer)
    ids = dict.fromkeys((*params.bad_token_ids, *(sequence[0] for sequence in sequences if len(sequence) == 1)))
    longer = tuple(sequence for sequence in sequences if len(sequence) > 1)
    constraint = params.constraint
    if longer:
        constraint = msgspec.structs.replace(constraint or Constraint(), bad_sequences=longer)
    return msgspec.structs.replace(params, bad_token_ids=tuple(ids), constraint=constraint)


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, and those of the word behind a space if there are no more of them.

    The same text may be written with other tokens too; these stay possible. Source: what vLLM documents of bad_words.
    """
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        if not word.strip():
            raise UserError(f"bad_words[{i}] is empty", f"bad_words[{i}]")
        own, spaced = (tuple(tokenizer.encode(text, False)) for text in (word, f" {word.lstrip()}"))
        found[own] = None
        if len(spaced) <= len(own):
            found[spaced] = None
    return tuple(found)
