from __future__ import annotations

import pytest

from pagedray.deployments.commands.event_stream import event_data

STREAM = 'event: x\r\ndata: {"a": "é\u2028\x85"}\r\n\r\n: a comment\ndata:1\ndata: 2\nid: 7\n\ndata: [DONE]'.encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_body_is_cut(size: int) -> None:
    chunks = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert list(event_data(chunks)) == ['{"a": "é\u2028\x85"}'.encode(), b"1\n2", b"[DONE]"]


def test_an_event_is_given_as_soon_as_it_is_complete() -> None:
    def chunks():  # type: ignore[no-untyped-def]
        yield b"data: 1\n\nda"
        raise AssertionError("the next chunk was waited for")

    assert next(event_data(chunks())) == b"1"
