"""What an answer must look like: `response_format` of OpenAI's API, and what vLLM has besides, as a `GrammarSource`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pagedray.engine.errors import Unsupported, UserError
from pagedray.engine.grammar.source import GrammarSource
from pagedray.serving.limits import json_type
from pagedray.serving.openai.shape import as_object, as_string, optional

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
# Of structured_outputs: what says nothing here. There is one compiler, and its JSON has no whitespace that could vary.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (None, True, False),
    "disable_fallback": (None, True, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
}
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")  # of structured_outputs
OLD_NAMES = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def read_grammar(
    response_format: Any, structured_outputs: dict[str, Any] | None, old: dict[str, Any]
) -> GrammarSource | None:
    """The one thing that was asked for; None: nothing.

    Args:
        old: names of `OLD_NAMES` and what was given for them.

    Raises:
        UserError: it is malformed, or there are several.
        Unsupported: a format that isn't implemented.
    """
    found: list[GrammarSource] = []
    if response_format is not None and (source := _response_format(response_format)) is not None:
        found.append(source)
    if structured_outputs is not None:
        found.append(_structured_outputs(structured_outputs))
    found += [_source(OLD_NAMES[name], value, name) for name, value in old.items() if value is not None]
    if len(found) > 1:
        raise UserError(f"{found[0].param} and {found[1].param} are both given; choose one", found[1].param)
    return found[0] if found else None


def _response_format(value: Any) -> GrammarSource | None:
    path = "response_format"
    kind = as_object(value, path).get("type")
    if kind in ("text", "json_object"):
        as_object(value, path, ("type",))
        return GrammarSource("json_object", "", path) if kind == "json_object" else None
    if kind == "json_schema":
        as_object(value, path, ("type", "json_schema"))
        return _json_schema(value.get("json_schema"), f"{path}.json_schema")
    if kind == "structural_tag":
        return _source("structural_tag", value, path)
    if isinstance(kind, str):
        raise Unsupported(f"{path}.type {kind[:64]!r} is not implemented, only {', '.join(FORMATS)}", f"{path}.type")
    raise UserError(f"{path}.type must be one of {', '.join(FORMATS)}", f"{path}.type")


def _json_schema(value: Any, path: str) -> GrammarSource:
    name = as_object(value, path, SCHEMA_FIELDS).get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{path}.name must be 1 to 64 letters, digits, underscores and dashes", f"{path}.name")
    optional(value, "description", str, path)
    optional(value, "strict", bool, path)
    return _source("json", value.get("schema"), f"{path}.schema")


def _structured_outputs(value: dict[str, Any]) -> GrammarSource:
    path = "structured_outputs"
    as_object(value, path, (*KINDS, *OPTIONS))
    for name, accepted in OPTIONS.items():
        if not any(value.get(name) is option for option in accepted):
            raise Unsupported(f"{path}.{name} with this value is not implemented", f"{path}.{name}")
    given = [kind for kind in KINDS if value.get(kind) is not None and value.get(kind) is not False]
    if len(given) != 1:
        found = f", not {' and '.join(given)}" if given else ""
        raise UserError(f"{path} must have one of {', '.join(KINDS)}{found}", path)
    return _source(given[0], value[given[0]], f"{path}.{given[0]}")


def _source(kind: str, value: Any, path: str) -> GrammarSource:
    """Args: `kind` is one of `KINDS`."""
    match kind:
        case "json":
            return GrammarSource("json_schema", _schema_text(value, path), path)
        case "json_object":
            if value is not True:
                raise UserError(f"{path} must be true", path)
            return GrammarSource("json_object", "", path)
        case "regex":
            return GrammarSource("regex", _text(value, path), path)
        case "grammar":
            return GrammarSource("ebnf", _text(value, path), path)
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
                raise UserError(f"{path} must be an array of strings, with one at least", path)
            return GrammarSource("choice", _json(value), path)
        case _:
            return GrammarSource("structural_tag", _structural_tag(value, path), path)


def _schema_text(value: Any, path: str) -> str:
    """A schema, which may come as the text of one."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UserError(f"{path} is a string that isn't JSON: {error}", path) from None
    if not isinstance(value, dict | bool):
        raise UserError(f"{path} must be a JSON schema, not {json_type(value)}", path)
    return _json(value)


def _text(value: Any, path: str) -> str:
    if not as_string(value, path):
        raise UserError(f"{path} must not be empty", path)
    return str(value)


def _structural_tag(value: Any, path: str) -> str:
    """A structural tag, which may come as its text, or in its earlier form: structures and triggers."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UserError(f"{path} is a string that isn't JSON: {error}", path) from None
    if "format" in as_object(value, path):
        return _json({"type": "structural_tag", "format": value["format"]})
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise UserError(f"{path} must have a format, or structures and triggers", path)
    tags = []
    for i, structure in enumerate(structures):
        if not isinstance(structure, dict) or not {"begin", "end"} <= set(structure):
            raise UserError(f"{path}.structures[{i}] must have begin, schema and end", f"{path}.structures[{i}]")
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    made = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return _json({"type": "structural_tag", "format": made})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
