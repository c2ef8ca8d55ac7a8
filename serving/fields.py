"""Every field of requests, and what becomes of it, as tables: `python -m pagedray.serving.fields [README.md]`.

It is made of the classes and lists that requests are checked by, so it can't tell anything else than the server does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel

from pagedray.serving.anthropic import schema as anthropic
from pagedray.serving.openai import schema as openai
from pagedray.serving.openai.responses import schema as responses

BEGIN, END = "<!-- fields -->\n", "<!-- end of fields -->\n"

Refused = Mapping[str, tuple[str, tuple[Any, ...]]]


class Api(msgspec.Struct, frozen=True):
    """A route, and all that its requests may have.

    Args:
        refused: name → reason, and values that ask for nothing and are accepted.
        echoed: fields of the request that are checked and come back in the answer, without another effect.
    """

    route: str
    request: type[BaseModel]
    ignored: Mapping[str, str]
    refused: Refused
    echoed: Mapping[str, str] = {}


APIS = (
    Api("POST /v1/chat/completions", openai.ChatRequest, openai.IGNORED, openai.REFUSED),
    Api("POST /v1/completions", openai.CompletionRequest, openai.IGNORED, openai.REFUSED),
    Api("POST /v1/responses", responses.ResponseRequest, responses.IGNORED, responses.REFUSED, responses.ECHOED),
    Api("POST /v1/messages", anthropic.MessagesRequest, anthropic.IGNORED, anthropic.REFUSED),
)


def tables() -> str:
    """Markdown, a table for each API."""
    return "\n".join(f"`{api.route}`\n\n| field | |\n| --- | --- |\n{''.join(_rows(api))}" for api in APIS)


def _rows(api: Api) -> Iterator[str]:
    applied = {
        field.alias or name: field.description
        for name, field in api.request.model_fields.items()
        if name not in api.echoed and name not in api.ignored
    }
    plain = ", ".join(f"`{name}`" for name, text in applied.items() if not text)
    yield f"| {plain} | applied |\n"
    for name, text in applied.items():
        if text:
            yield _row(name, f"applied. {text}")
    for name, text in api.echoed.items():
        yield _row(name, f"checked and repeated in the answer: {text}")
    for name, text in api.ignored.items():
        yield _row(name, f"ignored: {text}")
    for name, (reason, neutral) in api.refused.items():
        accepted = [value for i, value in enumerate(neutral) if value not in neutral[:i]]  # 1 and 1.0 are one
        values = " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in accepted)
        yield _row(name, f"refused: {reason}" + (f"; {values} is accepted" if values else ""))


def _row(name: str, text: str) -> str:
    return f"| `{name}` | {text.replace('|', '&#124;')} |\n"


def replaced(text: str) -> str:
    """A document with the tables between its marks made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{tables()}{END}{after}"


def main() -> None:
    """Print the tables, or put them into the document that is named."""
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        path.write_text(replaced(path.read_text()))
    else:
        sys.stdout.write(tables())


if __name__ == "__main__":
    main()
