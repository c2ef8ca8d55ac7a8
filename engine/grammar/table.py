"""A vocabulary as xgrammar wants it. Compiler and workers must agree on it, or compiled grammars can't be read.

This module loads xgrammar, and with it torch: only workers and the compiler's own process may import it.
"""

from __future__ import annotations

import xgrammar

from pagedray.engine.grammar.vocabulary import Vocabulary


def token_table(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """The table of a vocabulary; takes about 0.1 s for 50,000 tokens.

    Special tokens have bytes in it that no text has: a grammar that allows the text "<|im_end|>" doesn't allow that
    token for it. Structural tags name them by id; without any bytes xgrammar would accept them nowhere.
    """
    tokens = list(vocabulary.tokens)
    for token_id in vocabulary.special_ids:
        tokens[token_id] = b"\xff" + tokens[token_id]
    for token_id in vocabulary.eos_ids:
        tokens[token_id] = b""
    return xgrammar.TokenizerInfo(
        tokens,
        xgrammar.VocabType.RAW,
        vocab_size=len(tokens),
        stop_token_ids=list(vocabulary.eos_ids),
    )
