"""Documents and search results as the model reads them, and what is said about those that can't be read."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.anthropic.history import read_history

TEXT = {"type": "text", "media_type": "text/plain", "data": "It rains."}
DOCUMENT = {"type": "document", "source": TEXT}
RESULT = {
    "type": "search_result",
    "source": "https://a.example",
    "title": "Weather",
    "content": [{"type": "text", "text": "It rains."}, {"type": "text", "text": "A lot."}],
}


def content_of(*blocks: dict[str, Any]) -> Any:
    return read_history(None, [{"role": "user", "content": list(blocks)}]).messages[0]["content"]


def test_the_text_of_a_document() -> None:
    assert content_of(DOCUMENT) == "<document>\nIt rains.\n</document>"
    named = {**DOCUMENT, "title": "Report", "context": "Monday", "citations": {"enabled": False}}
    told = "<document>\n<title>Report</title>\n<context>Monday</context>\nIt rains.\n</document>"
    assert content_of(named) == told
    for content in ("It rains.", [{"type": "text", "text": "It rains."}]):
        parts = {**named, "source": {"type": "content", "content": content}}
        assert content_of(parts, {"type": "text", "text": "So?"})[0]["text"] == told


def test_the_text_of_a_search_result() -> None:
    told = (
        "<search_result>\n<source>https://a.example</source>\n<title>Weather</title>\nIt rains.\nA lot.\n"
        "</search_result>"
    )
    assert content_of(RESULT) == told
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [RESULT, DOCUMENT]}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [found]},
    ]
    assert read_history(None, messages).messages[-1]["content"] == f"{told}\n<document>\nIt rains.\n</document>"


def test_a_mark_for_the_cache_counts() -> None:
    marked = {**DOCUMENT, "cache_control": {"type": "ephemeral"}}
    assert read_history(None, [{"role": "user", "content": [marked]}]).marks_cache


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "document"}, "source: is required"),
        ({**DOCUMENT, "source": {"type": "poem"}}, "source.type: must be text or content, not 'poem'"),
        ({**DOCUMENT, "source": {}}, "source.type: must be text or content, not null"),
        (
            {**DOCUMENT, "source": {**TEXT, "media_type": "text/html"}},
            "source.media_type: Input should be 'text/plain'",
        ),
        ({**DOCUMENT, "source": {**TEXT, "data": 3}}, "source.data: Input should be a valid string"),
        ({**DOCUMENT, "title": 3}, "title: Input should be a valid string"),
        ({**RESULT, "title": None}, "title: Input should be a valid string"),
        ({**RESULT, "content": "It rains."}, "content: Input should be a valid list"),
    ],
)
def test_what_is_malformed(block: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        content_of(block)
    assert str(caught.value) == f"messages.0.content.0.{message}"


@pytest.mark.parametrize(
    "block",
    [
        {**DOCUMENT, "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
        {**DOCUMENT, "source": {"type": "url", "url": "https://a.example/b.pdf"}},
        {**DOCUMENT, "source": {"type": "file", "file_id": "f"}},
        {**DOCUMENT, "citations": {"enabled": True}},
        {**RESULT, "citations": {"enabled": True}},
    ],
)
def test_what_is_not_implemented(block: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=r"^messages\.0\.content\.0\..* not implemented"):
        content_of(block)
