"""The document as a page for people: one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}
code{font:13px ui-monospace,monospace}
h2{margin-top:3rem;border-bottom:1px solid #8886}
h3{margin-top:2rem}
table{border-collapse:collapse;width:100%;margin:.5rem 0}
td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8883}
summary{cursor:pointer}
.method{font-weight:bold;margin-right:.5rem}
.must{color:#c33}
"""

_MAX_VALUES = 12  # of an enum


def docs_page(document: dict[str, Any]) -> str:
    """Every operation, then every schema, with links between them."""
    title = f"{document['info']['title']} {document['info']['version']}"
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
            f"<h1>{_text(title)}</h1><p>{_text(document['info']['description'])}</p>",
            '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
            *_contents(document),
            *_operations(document),
            "<h2>Schemas</h2>",
            *(part for name, schema in document["components"]["schemas"].items() for part in _schema(name, schema)),
            "</body></html>",
        ]
    )


def _contents(document: dict[str, Any]) -> Iterator[str]:
    yield "<ul>"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            link = f'<a href="#{_text(operation["operationId"])}">{method.upper()} {_text(path)}</a>'
            yield f"<li>{link} {_text(operation['summary'])}</li>"
    yield "</ul>"


def _operations(document: dict[str, Any]) -> Iterator[str]:
    tag = None
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"<h2>{_text(tag)}</h2>"
            yield f'<h3 id="{_text(operation["operationId"])}"><span class="method">{method.upper()}</span>'
            yield f"<code>{_text(path)}</code></h3><p>{_text(operation['summary'])}</p>"
            if operation.get("security"):
                yield "<p>Needs an API key: <code>Authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>.</p>"
            if operation.get("parameters"):
                yield "<table><tr><th>Parameter</th><th>In</th><th>Type</th><th></th></tr>"
                for parameter in operation["parameters"]:
                    cells = (_text(parameter["in"]), _kind(parameter["schema"]), _text(parameter["description"]))
                    yield _row(_name(parameter["name"], parameter["required"]), *cells)
                yield "</table>"
            if "requestBody" in operation:
                (media,) = operation["requestBody"]["content"].values()
                yield f"<p>Body: {_kind(media['schema'])}</p>"
            yield "<table><tr><th>Status</th><th></th><th>Body</th></tr>"
            for status, response in operation["responses"].items():
                bodies = [
                    f"{_kind(media['schema'])} <code>{_text(kind)}</code>"
                    for kind, media in response["content"].items()
                ]
                yield _row(f"<code>{status}</code>", _text(response["description"]), "<br>".join(bodies))
            yield "</table>"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<details open id="{_text(name)}"><summary><code>{_text(name)}</code></summary>'
    if "description" in schema:
        yield f"<p>{_text(schema['description'])}</p>"
    if "properties" not in schema:
        yield f"<p>{_kind(schema)}</p>"
    else:
        yield "<table>"
        for field, inner in schema["properties"].items():
            is_needed = field in schema.get("required", ())
            yield _row(_name(field, is_needed), _kind(inner), _text(inner.get("description", "")))
        yield "</table>"
    yield "</details>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in one line."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for joint in ("anyOf", "oneOf"):
        if joint in schema:
            return " or ".join(_kind(part) for part in schema[joint])
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        shown = [f"<code>{_text(repr(value) if isinstance(value, str) else str(value))}</code>" for value in values]
        return " or ".join([*shown[:_MAX_VALUES], *(["…"] if len(shown) > _MAX_VALUES else [])])
    kind = schema.get("type")
    if kind == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    if kind == "object" and schema.get("properties"):
        fields = ", ".join(f"{_text(name)}: {_kind(inner)}" for name, inner in schema["properties"].items())
        return f"{{{fields}}}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
            ("maxLength", "length ≤"),
        )
        if key in schema
    ]
    return _text(" ".join([str(kind or "anything"), *bounds]))


def _name(name: str, is_needed: bool) -> str:
    return f"<code>{_text(name)}</code>" + (' <span class="must">required</span>' if is_needed else "")


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _text(text: str) -> str:
    return html.escape(text)
