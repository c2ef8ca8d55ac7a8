"""Grammars that must be refused: broken, contradictory, unsupported, too big, too slow. More than 200, all different.

Each comes with a part of the message that its client must get: the keyword or the place that is wrong. An empty part
means that any refusal is right, such as that of the limit of time.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec


class Hostile(msgspec.Struct, frozen=True):
    kind: str
    text: str
    names: str


def _schema(schema: Any, names: str) -> Hostile:
    return Hostile("json_schema", json.dumps(schema), names)


def _property(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}, "required": ["p"]}


def _nested(depth: int) -> Hostile:
    return Hostile("json_schema", '{"items": ' * depth + "{}" + "}" * depth, "nested")


def _not_json() -> list[Hostile]:
    texts = [
        "",
        "{",
        "nul",
        '{"type": "object",}',
        "{'type': 'object'}",
        '{"a" 1}',
        '{"maximum": NaN}',
        "[1, 2",
        '"',
        '{"minimum": Infinity}',
        "\ufeff{}",
        '{"a": "\n"}',
        "{} {}",
        "1" * 10_000,
        "[" * 100_000,
    ]
    return [Hostile("json_schema", text, "") for text in texts]


def _not_schemas() -> list[Hostile]:
    values = [1, "object", None, [], [{"type": "string"}], 0.5]
    found = [_schema(value, "a schema is an object or a boolean") for value in values]
    wrong: dict[str, list[Any]] = {
        "type": ["strng", 1, [], ["string", "string"], [1], {}],
        "properties": [[], "a", {"a": 1}, {"a": "string"}],
        "required": ["a", [1], ["a", "a"], {}],
        "items": [1, "x", [{"type": "string"}]],
        "prefixItems": [[], {}, [1]],
        "additionalProperties": [1, "no", []],
        "patternProperties": [[], {"a": 1}],
        "propertyNames": [1, []],
        "minLength": [-1, "1", 1.5],
        "maxLength": [-1, None, 0.1],
        "minItems": [-1, "1"],
        "maxItems": [-2, []],
        "minProperties": [-1, "0"],
        "maxProperties": [-1, {}],
        "minimum": ["0", None, []],
        "maximum": ["0", {}],
        "exclusiveMinimum": [True, "1"],
        "exclusiveMaximum": [False, []],
        "multipleOf": [0, -1, "2"],
        "pattern": [1, [], None],
        "enum": [1, "a", {}],
        "anyOf": [[], {}, [1]],
        "allOf": [[], {}, ["a"]],
        "oneOf": [[], {}, [None]],
        "$ref": [1, []],
        "$defs": [[], {"a": 1}],
        "uniqueItems": ["yes", 1],
        "format": [1, []],
    }
    return found + [_schema({keyword: value}, keyword) for keyword, values in wrong.items() for value in values]


def _refused_keywords() -> list[Hostile]:
    any_schema = {"type": "integer"}
    values = {
        "not": any_schema,
        "if": any_schema,
        "then": any_schema,
        "else": any_schema,
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"a": any_schema},
        "dependencies": {"a": ["b"]},
        "contains": any_schema,
        "minContains": 1,
        "maxContains": 1,
        "unevaluatedItems": False,
        "unevaluatedProperties": any_schema,
        "additionalItems": False,
        "$dynamicRef": "#a",
        "$recursiveRef": "#",
    }
    found = [_schema({keyword: value}, f"{keyword} at $") for keyword, value in values.items()]
    found += [_schema(_property({keyword: value}), f"{keyword} at $.properties.p") for keyword, value in values.items()]
    at = "at $.properties.p"
    return [
        *found,
        _schema(_property({"type": "array", "uniqueItems": True}), f"uniqueItems {at}"),
        _schema(_property({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}), f"uniqueItems {at}"),
        _schema(_property({"type": "number", "multipleOf": 0.01}), f"multipleOf {at}"),
        _schema(_property({"type": "integer", "multipleOf": 1_000_003}), f"multipleOf {at}"),
        _schema(_property({"type": "number", "minimum": 1e305}), f"minimum {at}"),
        _schema(_property({"type": "object", "minProperties": 5}), f"minProperties {at}"),
        _schema(_property({"type": "string", "maxLength": 10**9}), f"maxLength {at}"),
        _schema(_property({"type": "string", "pattern": "a", "maxLength": 10**5}), f"pattern {at}"),
        _schema(_property({"oneOf": [{"type": "integer"}, {"type": "number"}]}), f"oneOf {at}"),
        _schema(_property({"oneOf": [_property({}), {"type": "object"}]}), f"oneOf {at}"),
        _schema({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema"),
        _schema({"$schema": "https://example.com/own", "type": "object"}, "$schema"),
        _schema(_property({"$id": "https://example.com/x", "type": "object"}), f"$id {at}"),
        _schema(_property({"type": "object", "propertyNames": {"anyOf": [{"pattern": "a"}]}}), "propertyNames"),
        _schema({"type": "object", "patternProperties": {f"^{c}": True for c in "abcdef"}}, "patternProperties at $"),
        _schema({"allOf": [{"unevaluatedProperties": False}, {"properties": {"a": {}}}]}, "unevaluatedProperties"),
    ]


def _references() -> list[Hostile]:
    bad = [
        "#/$defs/none",
        "#/none/0",
        "#nowhere",
        "other.json",
        "https://example.com/s.json",
        "#/$defs/a/0",
        "/$defs/a",
        "#/properties/p/type",
        "file:///etc/passwd",
        "a",
        "#/$defs/%zz",
    ]
    found = [_schema({**_property({"$ref": ref, "type": "string"}), "$defs": {"a": {}}}, "$ref at $") for ref in bad]
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(300)}
    return [
        *found,
        _schema({"$ref": "#"}, "$ref"),
        _schema({"allOf": [{"$ref": "#"}]}, "refers to itself"),
        _schema({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, "anyOf at $: leads back to itself"),
        _schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref"),
        _schema({"$ref": "#/$defs/d0", "$defs": {**chain, "d300": {"type": "string"}}}, "$ref"),
        _schema(_property({"$ref": "#"}), "no output can satisfy it"),
        _schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no output can satisfy it"),
        _schema(
            {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, "no output can satisfy it"
        ),
    ]


def _contradictions() -> list[Hostile]:
    schemas: list[Any] = [
        False,
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "minProperties": 2, "maxProperties": 1},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "required": ["a", "b"], "maxProperties": 1},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"enum": []},
        {"enum": [1, 2], "type": "string"},
        {"const": 5, "maximum": 4},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"enum": [1, 2]}, {"enum": [3]}]},
        {"anyOf": [False, {"type": "string", "minLength": 2, "maxLength": 1}]},
        {"type": "string", "pattern": "^a$", "format": "date"},
        {"type": "string", "pattern": "^abc$", "maxLength": 2},
        {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}, "minItems": 3},
    ]
    return [_schema(schema, "") for schema in schemas]


def _too_big() -> list[Hostile]:
    wide = {f"property{i}": {"type": "string"} for i in range(3000)}
    doubling = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2}
        for i in range(100)
    }
    splitting = {
        "type": "object",
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(40)],
    }
    return [
        _nested(500),
        _nested(5000),
        _schema({"type": "object", "properties": wide}, "properties at $"),
        _schema({"enum": list(range(20_000))}, "enum at $"),
        _schema({"$ref": "#/$defs/d0", "$defs": {**doubling, "d100": {"$ref": "#/$defs/d0"}}}, ""),
        _schema(splitting, ""),
        _schema({"type": "object", "properties": dict(list(wide.items())[:900]), "maxProperties": 500}, "Properties"),
        _schema({"type": "string", "pattern": "(a|b)*a(a|b){25}", "maxLength": 200}, "pattern at $"),
        _schema({"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$", "format": "date"}, "pattern at $"),
        Hostile("json_schema", json.dumps({"title": "x" * 2**20}), "characters"),
        Hostile("regex", "a" * 2**20, "characters"),
        Hostile("choice", json.dumps([f"c{i}" for i in range(6000)]), "6000 choices"),
        Hostile("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested"),
        Hostile(
            "ebnf",
            "\n".join(f'r{i} ::= r{i + 1} | "a"' for i in range(20_000)) + '\nr20000 ::= "b"\nroot ::= r0',
            "rules",
        ),
        Hostile("regex", "(" * 500 + "a" + ")" * 500, "nested"),
        Hostile("regex", "(((a{1,99}b?){1,99}c?){1,99}d?){1,99}" * 50, ""),
    ]


def _regexes() -> list[Hostile]:
    named = {
        "(": "without )",
        ")": "unmatched )",
        "[a": "[ without ]",
        "[]": "empty class",
        "a**": "two quantifiers",
        "*a": "* repeats nothing",
        "+": "+ repeats nothing",
        "a{2,1}": "from 2 to 1",
        "a{": "{ that begins",
        "a{1": "{ that begins",
        "}": "without its partner",
        "]": "without its partner",
        "\\": "ends too early",
        "[b-a]": "backwards",
        "[\\d-z]": "range",
        "\\xg0": "hexadecimal",
        "\\u12": "hexadecimal",
        "\\ud800": "no character",
        "\\q": "unknown escape",
        "(?=a)b": "look-ahead",
        "(?!a)b": "negative look-ahead",
        "a(?<=a)": "look-behind",
        "(?<!a)b": "negative look-behind",
        "(?>a)": "atomic group",
        "(a)\\1": "back reference",
        "(?P<x>a)(?P=x)": "back reference",
        "\\ba": "word boundary",
        "a\\B": "word boundary",
        "\\p{L}": "property class",
        "(?i)a": "flags",
        "a*+": "possessive",
        "a^b": "^ in the middle",
        "a$b": "$ in the middle",
        "(^a)*": "anchor",
        "\\Aa": "anchor \\A",
        "a\\Z": "anchor \\Z",
        "(?#c)a": "comment",
        "(?(1)a|b)": "conditional",
        "\\k<x>": "back reference",
        "[[:alpha:]]": "[: in a class",
        "a{99999}": "99999 repetitions",
        "\\ca": "control",
        "(?<1>a)": "name",
        "\\01": "octal",
    }
    found = [Hostile("regex", pattern, names) for pattern, names in named.items()]
    return found + [_schema(_property({"type": "string", "pattern": p}), "pattern at $.properties.p") for p in named]


def _ebnf() -> list[Hostile]:
    named = {
        "": "no rule root",
        "root": "expected ::=",
        "root ::=": "expected something",
        'root ::= "a': "line 1, column 10",
        "root ::= [a": "line 1, column 10",
        "root ::= []": "empty class",
        'root ::= ("a"': "( without )",
        'root ::= "a")': "unexpected )",
        "root ::= foo": "rule foo isn't defined",
        'a ::= "b"': "no rule root",
        'root ::= "a"\nroot ::= "b"': "line 2, column 1: rule root is there twice",
        'root ::= "a" |': "expected something",
        'root ::= | "a"': "expected something",
        'root ::= "\\q"': "unknown escape",
        'root ::= "\\x1"': "hexadecimal",
        "root ::= [z-a]": "backwards",
        'root ::= "a"{3,1}': "from 3 to 1",
        'root ::= "a"{x}': "expected {n}",
        'root ::= "a"{1': "expected {n}",
        'root ::= "a"{999999}': "repetitions",
        "root ::= *": "unexpected *",
        'root ::= "a" (= "b")': "look-ahead",
        "root ::= Token(5)": "Token(...)",
        'root ::= TagDispatch(("a", root))': "TagDispatch(...)",
        'root ::= "a" root': "no output can satisfy it",
        "root ::= root": "no output can satisfy it",
        "root ::= a\na ::= b\nb ::= a": "no output can satisfy it",
        'root = "a"': "expected ::=",
        "1 ::= 2": "name of a rule",
        'root ::= "a"; b': "unexpected ;",
        'start: "a"': "expected ::=",
        "root ::= 'a'": "unexpected '",
    }
    return [Hostile("ebnf", text, names) for text, names in named.items()]


def _choices() -> list[Hostile]:
    named = {
        "": "",
        "[]": "at least one",
        '"a"': "list of strings",
        "[1]": "list of strings",
        '["a", null]': "list of strings",
        '["a", ""]': "choice 1 is empty",
        '["a", "b", "a"]': "there twice",
        '["\\ud800"]': "surrogate",
        "{}": "list",
    }
    return [Hostile("choice", text, names) for text, names in named.items()]


def _tags() -> list[Hostile]:
    tag = {"begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
    named: list[tuple[Any, str]] = [
        ([], "object"),
        ({}, "$.type"),
        ({"type": "nothing"}, "$.type"),
        ({"type": "structural_tag", "format": {"type": "nothing"}}, "$.format.type"),
        ({"type": "structural_tag", "format": None}, "$.format"),
        ({"type": "tag", "begin": "<a>", "end": "</a>"}, "$.content is missing"),
        ({"type": "tag", **tag, "extra": 1}, "$.extra"),
        ({"type": "tag", **tag, "begin": 5}, "$.begin"),
        ({"type": "const_string", "value": 5}, "$.value"),
        ({"type": "sequence", "elements": []}, "$.elements"),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "("}]}, "$.elements[0].pattern"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "not at $"),
        ({"type": "json_schema", "json_schema": {"type": "strng"}}, "type at $: must be one of"),
        ({"type": "json_schema", "json_schema": 5}, "$.json_schema"),
        ({"type": "json_schema", "json_schema": {}, "style": "latin"}, "$.style"),
        ({"type": "grammar", "grammar": "root ::= x"}, "rule x isn't defined"),
        ({"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}, "$.syntax"),
        ({"type": "regex", "pattern": "(?=a)"}, "look-ahead"),
        ({"type": "token", "token": 10**7}, "$.token"),
        ({"type": "token", "token": "<no such token>"}, "$.token"),
        ({"type": "any_text", "max_tokens": -1}, "$.max_tokens"),
        ({"type": "repeat", "min": 3, "max": 2, "content": tag | {"type": "tag"}}, "min 3"),
        ({"type": "repeat", "min": 10**6, "max": -1, "content": tag | {"type": "tag"}}, "repeats"),
        ({"type": "triggered_tags", "triggers": ["<b>"], "tags": [tag]}, ""),
        ({"type": "triggered_tags", "triggers": [""], "tags": [tag]}, "$.triggers"),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": []}, "$.tags"),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": [{"type": "regex", "pattern": "a"}]}, "$.tags"),
        ({"structures": 5, "triggers": []}, "$.structures"),
        ({"structures": [{"begin": "<a>", "schema": {"if": {}}, "end": ""}], "triggers": ["<a"]}, "if at $"),
    ]
    found = [Hostile("structural_tag", json.dumps(value), names) for value, names in named]
    deep: Any = {"type": "any_text"}
    for _ in range(60):
        deep = {"type": "optional", "content": deep}
    return [*found, Hostile("structural_tag", json.dumps(deep), "nested"), Hostile("structural_tag", "{", "JSON")]


def slow() -> list[Hostile]:
    """Well formed, and too much for the matcher or the compiler."""
    text = 'c ::= [^"\\\\\\x00-\\x1f] | "\\\\" ["nrt]'
    return [Hostile("ebnf", f'root ::= "{i}" ("x" | c c?){{0,5000}}\n{text}', "") for i in range(4)]


HOSTILE = [
    *_not_json(),
    *_not_schemas(),
    *_refused_keywords(),
    *_references(),
    *_contradictions(),
    *_too_big(),
    *_regexes(),
    *_ebnf(),
    *_choices(),
    *_tags(),
    *slow(),
]
