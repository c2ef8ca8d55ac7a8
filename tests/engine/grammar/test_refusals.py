"""Nothing that is broken, contradictory, unsupported or too much gets through, and its client learns what is wrong."""

from __future__ import annotations

import pytest

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.compiler import MAX_SOURCE_CHARS
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.translate import translate
from tests.engine.grammar.hostile import HOSTILE, Hostile, slow
from tests.engine.grammar.sampling import byte_vocabulary

TOO_SLOW = slow()
# What the process that compiles refuses without xgrammar; the compiler refuses texts that are too long before that.
CHECKED = [case for case in HOSTILE if case not in TOO_SLOW and len(case.text) <= MAX_SOURCE_CHARS]


def test_there_are_enough_and_all_differ() -> None:
    assert len(HOSTILE) > 200
    assert len({(case.kind, case.text) for case in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: f"{case.kind}-{case.text[:40]}")
def test_a_hostile_source_is_refused_by_name(case: Hostile) -> None:
    try:
        translated = translate(GrammarSource(case.kind, case.text, "p"), byte_vocabulary())  # type: ignore[arg-type]
    except RecursionError:
        return  # which the compiler's process tells as a nesting that is too deep
    except UserError as error:
        assert case.names in error.message
        return
    assert not case.names, f"not refused: {translated}"
