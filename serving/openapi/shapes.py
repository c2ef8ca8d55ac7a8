"""Short names for pieces of JSON Schema (draft 2020-12, as OpenAPI 3.1 takes it)."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

ANY: Schema = {}
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
COUNT: Schema = {"type": "integer", "minimum": 0}
LOGPROB: Schema = {"type": "number", "maximum": 0, "description": "-9999 stands for minus infinity."}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def const(value: Any, *others: Any) -> Schema:
    return {"enum": [value, *others]}


def said(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None, description: str = "") -> Schema:
    """An object that has exactly these fields."""
    out: Schema = {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }
    return said(out, description) if description else out
