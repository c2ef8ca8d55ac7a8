"""One choice's tokens to the text a client may see: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pagedray.engine.text.stop_strings import StopMatcher
from pagedray.engine.text.text_stream import TextStream


class Vocabulary(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def text_stream(self, skip_special_tokens: bool) -> TextStream: ...


class TextDelta(msgspec.Struct, frozen=True):
    """What some tokens add to the text.

    Attributes:
        text: safe to show: no later token changes it or makes it part of a stop string.
        stop: the stop string that was found; the choice is complete then, and later deltas are empty.
        num_tokens: how many of the fed tokens count: all, or up to the one that completed the stop string.
    """

    text: str
    stop: str | None
    num_tokens: int


class Detokenizer:
    """Text of one choice, incrementally. Cutting the tokens into feeds differently changes neither text nor stop.

    All deltas joined are `tokenizer.decode(ids, skip_special_tokens)`, cut where the first stop string begins. First
    means: it ends first, and of several that end at the same character it is the longest.

    Args:
        stop: strings that end the text. They may lie anywhere in tokens or across them.
        include_stop: the stop string, or the text of the id that ended generation, stays in the text.
        skip_special_tokens: special tokens give no text.
        output_ids: tokens whose text the client already has, when a request is moved; continues exactly after it.
        min_tokens: a stop string that ends within the first so many tokens is ordinary text.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        output_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        self._stream = tokenizer.text_stream(skip_special_tokens)
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # the end of the text, not shown: it may be the beginning of a stop string
        self._stop: str | None = None
        self.feed(output_ids)

    def feed(self, token_ids: Sequence[int], finished: bool = False, stop_id: int | None = None) -> TextDelta:
        """Take the next tokens.

        Args:
            finished: no more will come; what was held back is given out.
            stop_id: the eos or stop id that ended generation; it is the last of token_ids. It counts as a token, but
                gives no text unless include_stop.
        """
        if self._stop is not None:
            return TextDelta("", self._stop, 0)
        parts: list[str] = []
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if stop_id is not None and i == last and not self._include_stop:
                break
            text = self._stream.feed(token_id)
            if text and self._take(text, parts):
                return TextDelta("".join(parts), self._stop, i + 1)
        if finished and not self._take(self._stream.flush(), parts):
            parts.append(self._held)
            self._held = ""
        return TextDelta("".join(parts), self._stop, len(token_ids))

    def _take(self, text: str, parts: list[str]) -> bool:
        """Append what may be shown to `parts`; True when a stop string is complete."""
        if self._matcher is None:
            parts.append(text)
            return False
        if self._num_tokens <= self._min_tokens:
            self._matcher.skip(text)
            match = None
        else:
            match = self._matcher.find(text)
        seen = self._held + text
        if match is not None:
            self._stop, end = match
            end += len(self._held)
            parts.append(seen[: end if self._include_stop else end - len(self._stop)])
            self._held = ""
            return True
        # With include_stop the text goes on to the end of a match, so its beginning can be shown at once.
        shown = len(seen) if self._include_stop else len(seen) - self._matcher.num_held
        parts.append(seen[:shown])
        self._held = seen[shown:]
        return False
