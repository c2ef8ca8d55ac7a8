"""Documents and search results of a message as text, which the model reads between tags.

Documents whose text lies in a file (PDF) or elsewhere (URL, file id) are not read.
"""

from __future__ import annotations

from typing import Any, Literal

from pagedray.engine.errors import Unsupported, UserError
from pagedray.serving.anthropic.schema import CacheControl, Wire, validated
from pagedray.serving.limits import json_type

ELSEWHERE = ("base64", "url", "file")


class Citations(Wire):
    enabled: bool | None = None


class TextPart(Wire):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class PlainText(Wire):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class Parts(Wire):
    type: Literal["content"]
    content: str | list[TextPart]


class Document(Wire):
    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class SearchResult(Wire):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextPart]
    citations: Citations | None = None
    cache_control: CacheControl | None = None


def document_text(block: dict[str, Any], path: str) -> str:
    """
    Raises:
        UserError: the block is malformed.
        Unsupported: its text isn't in it, or it asks for citations.
    """
    document = validated(Document, block, path)
    _check_citations(document.citations, path)
    at = f"{path}.source"
    kind = document.source.get("type")
    if kind in ELSEWHERE:
        raise Unsupported(f"{at}.type: documents of type {kind!r} are not implemented, only text and content", at)
    if kind == "text":
        text = validated(PlainText, document.source, at).data
    elif kind == "content":
        content = validated(Parts, document.source, at).content
        text = content if isinstance(content, str) else _joined(content)
    else:
        found = repr(kind[:64]) if isinstance(kind, str) else json_type(kind)
        raise UserError(f"{at}.type: must be text or content, not {found}", f"{at}.type")
    return _tagged("document", text, title=document.title, context=document.context)


def search_result_text(block: dict[str, Any], path: str) -> str:
    """Raises UserError, Unsupported as above."""
    result = validated(SearchResult, block, path)
    _check_citations(result.citations, path)
    return _tagged("search_result", _joined(result.content), source=result.source, title=result.title)


def _check_citations(citations: Citations | None, path: str) -> None:
    if citations is not None and citations.enabled:
        raise Unsupported(f"{path}.citations: are not implemented", f"{path}.citations")


def _joined(parts: list[TextPart]) -> str:
    return "\n".join(part.text for part in parts)


def _tagged(tag: str, text: str, **about: str | None) -> str:
    lines = [f"<{name}>{value}</{name}>" for name, value in about.items() if value is not None]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])
