"""Names of fields in errors that other layers raise about a prompt, as clients of the Messages API know them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from pagedray.engine.errors import UserError

_CONTINUE = "continue_final_message"  # how a prefill is asked for between the layers
_TOOL = re.compile(r"tools\[(\d+)\](\.function)?")
_SCHEMA = re.compile(r"(tools\.\d+)\.(parameters|arguments)")


@contextmanager
def client_names() -> Iterator[None]:
    """Put the client's own names into errors."""
    try:
        yield
    except UserError as error:
        if error.param == _CONTINUE:
            why = str(error).removeprefix(f"{_CONTINUE}: ")
            raise UserError(
                f"messages: the last one, the assistant's, can't be continued: {why}", "messages"
            ) from error
        if error.param is not None:
            error.param = client_name(error.param)
        error.message = client_name(error.message)
        raise


def client_name(text: str) -> str:
    """For example tools.0.input_schema for tools[0].function.parameters, alone or within a text."""
    return _SCHEMA.sub(r"\1.input_schema", _TOOL.sub(r"tools.\1", text))
