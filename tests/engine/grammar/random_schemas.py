"""Random JSON schemas of the supported subset: every keyword, in combinations that nobody would think of."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "id", "tags", "größe", 'say "hi"', "back\\slash", "a/b", "~x", "", "x y", "nested", "count")
PATTERNS = (
    "^[a-z]{2,5}$",
    "^a|b$",
    "[0-9]+",
    "^(foo|ba[rz])-\\d{3}$",
    "^\\S*$",
    "x",
    '^[^"]{0,4}$',
    "^\\w+@\\w+\\.com$",
)
KEY_PATTERNS = ("^x-", "[0-9]$", "^[a-z]+$", "_")
FORMATS = (
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "json-pointer",
    "int32",
)


class RandomSchemas:
    """A stream of schemas. Some allow nothing or ask for what is refused; most can be sampled."""

    def __init__(self, seed: int):
        self._choose = random.Random(seed)
        self._definitions: list[str] = []

    def next(self) -> dict[str, Any]:
        self._definitions = [f"d{i}" for i in range(self._choose.choice((0, 0, 1, 2)))]
        schema = self._schema(0, is_root=True)
        if self._definitions:
            schema["$defs"] = {name: self._schema(1) for name in self._definitions}
        return schema

    def _maybe(self, chance: float) -> bool:
        return self._choose.random() < chance

    def _schema(self, depth: int, is_root: bool = False) -> dict[str, Any]:
        choose = self._choose
        leaves = [self._string, self._integer, self._number, self._boolean, self._null, self._enum, self._const]
        inner = [self._object, self._object, self._array, self._any_of, self._one_of, self._all_of, self._types]
        if self._definitions and not is_root and self._maybe(0.15):
            return self._reference()
        if is_root:
            schema = choose.choice([self._object, self._object, self._object, *inner])(depth)
        elif depth >= 3:
            schema = choose.choice(leaves)(depth)
        else:
            schema = choose.choice([*leaves, *inner])(depth)
        if self._maybe(0.2):
            schema = {"title": "T", "description": "what it is", **schema, "examples": [1], "x-note": {"not": 1}}
        return schema

    def _reference(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/{self._choose.choice(self._definitions)}"}
        return {**schema, "description": "beside a reference"} if self._maybe(0.2) else schema

    def _string(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if self._maybe(0.3):
            schema["minLength"] = self._choose.choice((0, 1, 2, 5))
        if self._maybe(0.3):
            schema["maxLength"] = self._choose.choice((5, 8, 20, 100))
        if self._maybe(0.25):
            schema["pattern"] = self._choose.choice(PATTERNS)
        elif self._maybe(0.25):
            schema["format"] = self._choose.choice(FORMATS)
            if self._maybe(0.8):
                schema.pop("minLength", None)
                schema.pop("maxLength", None)
        return schema

    def _bounds(self, values: tuple[float, ...]) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        low, high = sorted(self._choose.sample(values, 2))
        if self._maybe(0.5):
            schema[self._choose.choice(("minimum", "exclusiveMinimum"))] = low
        if self._maybe(0.5):
            schema[self._choose.choice(("maximum", "exclusiveMaximum"))] = high
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        schema = {"type": "integer", **self._bounds((-1000, -37, -1, 0, 3, 9, 10, 128, 99999, 2**53, 2.5, -7.5))}
        if self._maybe(0.2):
            schema["multipleOf"] = self._choose.choice((1, 2, 3, 5, 7, 10, 60, 1000))
        return schema

    def _number(self, depth: int) -> dict[str, Any]:
        return {
            "type": "number",
            **self._bounds((-1e6, -3.25, -0.001, 0, 0.1, 0.5, 1, 3.14159, 100, 1e9, 1.5e15, 12345.678)),
        }

    def _boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _null(self, depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def _enum(self, depth: int) -> dict[str, Any]:
        values = ["a", "b", "été", 'q"uote', 1, 2.5, None, True, [1, "x"], {"k": [None]}, "", "new\nline"]
        schema: dict[str, Any] = {"enum": self._choose.sample(values, self._choose.randint(1, 5))}
        if self._maybe(0.2):
            schema["enum"].append("string")
            schema["type"] = "string"
        return schema

    def _const(self, depth: int) -> dict[str, Any]:
        return {"const": self._choose.choice(("c", 7, None, False, {"a": 1}, [], -0.5))}

    def _types(self, depth: int) -> dict[str, Any]:
        names = ["string", "integer", "number", "boolean", "null", "array", "object"]
        schema: dict[str, Any] = {"type": self._choose.sample(names, self._choose.randint(1, 3))}
        if self._maybe(0.5):
            schema.update(maxLength=7, minimum=0, maxItems=2)
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        choose = self._choose
        names = choose.sample(WORDS, choose.choice((0, 1, 2, 2, 3, 4, 6)))
        schema: dict[str, Any] = {"type": "object"}
        if names or self._maybe(0.5):
            schema["properties"] = {name: self._schema(depth + 1) for name in names}
        if names and self._maybe(0.7):
            schema["required"] = choose.sample(names, choose.randint(0, len(names)))
        if self._maybe(0.5):
            schema["additionalProperties"] = choose.choice((False, False, True, {"type": "integer"}))
        if self._maybe(0.15):
            patterns = choose.sample(KEY_PATTERNS, choose.randint(1, 2))
            schema["patternProperties"] = {pattern: self._schema(3) for pattern in patterns}
        if self._maybe(0.1):
            schema["propertyNames"] = choose.choice(
                ({"maxLength": 6}, {"pattern": "^[a-z0-9_-]*$"}, {"enum": ["id", "k"]})
            )
        if self._maybe(0.15):
            schema["maxProperties"] = choose.randint(1, 4)
        if self._maybe(0.15):
            schema["minProperties"] = choose.randint(0, 2)
        if self._maybe(0.1) and names:
            schema["anyOf"] = [{"required": [name]} for name in names[:2]]
        if not self._maybe(0.85):
            schema.pop("type")
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if self._maybe(0.8):
            schema["items"] = self._schema(depth + 1)
        if self._maybe(0.25):
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(self._choose.randint(1, 3))]
            if self._maybe(0.5):
                schema["items"] = False
        if self._maybe(0.4):
            schema["minItems"] = self._choose.randint(0, 3)
        if self._maybe(0.4):
            schema["maxItems"] = self._choose.choice((0, 1, 2, 3, 5, 30))
        if self._maybe(0.1):
            schema.update(items={"enum": ["r", "g", "b", 4]}, uniqueItems=True)
            schema.pop("prefixItems", None)
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"anyOf": [self._schema(depth + 1) for _ in range(self._choose.randint(1, 3))]}
        if self._maybe(0.2):
            schema["type"] = self._choose.choice(("object", "string", "array"))
        return schema

    def _one_of(self, depth: int) -> dict[str, Any]:
        branches = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "v": self._schema(depth + 1)},
                "required": ["kind"],
            }
            for kind in ("circle", "square")
        ]
        return {"oneOf": [*branches, {"type": self._choose.choice(("string", "null", "number"))}]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        branches = [self._object(depth + 1) if self._maybe(0.7) else self._schema(depth + 1) for _ in range(2)]
        return {"allOf": branches, **(self._object(2) if self._maybe(0.3) else {})}
