"""Workers that say what a test wants said."""

from __future__ import annotations

from collections.abc import Sequence

from pagedray.engine.messages import NewSeq
from tests.fakes import EOS_ID, FakeWorker, scripted


def says(*outputs: str) -> type[FakeWorker]:
    """A worker whose first request is answered with the first output, and so on; the last one repeats. A request with
    a `fake_grammar` gets what that says; a real grammar is taken to allow the output."""
    scripts = [[*output.encode(), EOS_ID] for output in outputs]
    numbers: dict[str, int] = {}

    def choose(token_ids: Sequence[int], seq: NewSeq) -> int:
        grammar = None if seq.params.constraint is None else seq.params.constraint.grammar
        if grammar is not None and grammar.key.startswith(b"fake "):
            return scripted(token_ids, seq)
        number = numbers.setdefault(seq.seq_id, len(numbers))
        script = scripts[min(number, len(scripts) - 1)]
        return script[min(len(token_ids) - seq.num_prompt_tokens, len(script) - 1)]

    return type("ScriptedWorker", (FakeWorker,), {"choose": staticmethod(choose)})


def says_by_choice(*outputs: str) -> type[FakeWorker]:
    """A worker whose choices of one request get one output each."""

    def choose(token_ids: Sequence[int], seq: NewSeq) -> int:
        script = [*outputs[int(seq.seq_id.rpartition("-")[2])].encode(), EOS_ID]
        return script[min(len(token_ids) - seq.num_prompt_tokens, len(script) - 1)]

    return type("ScriptedWorker", (FakeWorker,), {"choose": staticmethod(choose)})
