"""What each keyword comes to: JSON texts that a grammar takes, and texts that it doesn't."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.vocabulary import Vocabulary
from tests.engine.grammar.random_schemas import RandomSchemas
from tests.engine.grammar.sampling import Sampler, accepts, byte_vocabulary, smollm2

FORMAT_CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def spaced(text: str) -> str:
    """JSON text as the grammars want it."""
    return re.sub(r'("(?:[^"\\]|\\.)*")|([:,])', lambda found: found[1] or f"{found[2]} ", text)


@functools.cache
def byte_sampler() -> Sampler:
    return Sampler(byte_vocabulary())


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}
CASES: list[tuple[Any, list[str], list[str]]] = [
    # All texts here are given a space behind each colon and comma before they are tried.
    (
        POINT,
        ['{"x":1}', '{"x":1,"y":2}'],
        ['{ "x":1}', '{"x":  1}', '{"x":\n1}', '{"x":1} ', '{"y":2}'],
    ),
    (POINT, [], ['{"y":2,"x":1}', '{"x":1,"z":2}', '{"x":1,"x":2}', "{}", "[]", '{"x":"1"}', '{"x":1', '{"x":1,}']),
    ({"type": "object"}, ["{}", '{"a":[1,{"b":null}]}'], ["[]", '"a"', "1", "null", "", "{"]),
    (True, ["{}", "[]", '"a"', "1.5e-7", "null", "true"], ["", "tru", "01", "+1", "1.", ".5", "'a'", "NaN"]),
    ({}, ['{"a":1}', "false"], ["undefined"]),
    # Strings.
    ({"type": "string"}, ['""', '"é😀"', '"\\"\\\\\\n\\/"'], ['"', '"a\n"', '"\\x"', "a", '"\\ud800"', '"\t"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abc"', '"é😀"'], ['"a"', '"abcd"', '""']),
    ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
    ({"type": "string", "minLength": 1}, ['"a"', '"a\\n"'], ['""']),
    ({"type": "string", "pattern": "b+"}, ['"b"', '"abbc"'], ['""', '"ac"']),
    ({"type": "string", "pattern": "^b+$"}, ['"b"', '"bb"'], ['"abb"', '"bc"']),
    ({"type": "string", "pattern": '^"\\\\$'}, ['"\\"\\\\"'], ['""\\"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"', '"a"'], ['"xa"', '"bx"']),
    ({"type": "string", "pattern": "^[a-c]*$", "maxLength": 2}, ['""', '"ab"'], ['"abc"', '"d"']),
    ({"type": "string", "pattern": "a", "minLength": 3}, ['"bab"', '"aaaa"'], ['"a"', '"bbb"']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-02-30"', '"2024-13-01"', '"24-01-01"']),
    (
        {"type": "string", "format": "date-time"},
        ['"2024-01-31T23:59:59Z"', '"2024-01-31T00:00:00.5+01:00"'],
        ['"2024-01-31"'],
    ),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"', '"1.2.3"', '"01.2.3.4"']),
    ({"type": "string", "format": "ipv6"}, ['"::1"', '"fe80::1:2"', '"::"'], ['"1::2::3"', '":1"']),
    ({"type": "string", "format": "email"}, ['"a.b@example.com"'], ['"a@"', '"@b.c"', '"a b@c.de"']),
    ({"type": "string", "format": "made-up"}, ['"anything"'], ["1"]),
    # Numbers.
    ({"type": "integer"}, ["0", "-7", "123456789012345678"], ["1.0", "1e2", "-0", "007", '"1"']),
    ({"type": "number"}, ["0", "-0.5", "1e10", "3.25E-2"], ["1.", "--1", "1e999"]),
    ({"type": "integer", "minimum": -3, "maximum": 12}, ["-3", "0", "9", "12"], ["-4", "13", "00", "120"]),
    ({"type": "integer", "minimum": 95}, ["95", "99", "100", "12345"], ["94", "9", "-95"]),
    ({"type": "integer", "maximum": -95}, ["-95", "-100"], ["-94", "95", "0"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
    ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3"]),
    ({"type": "integer", "multipleOf": 15, "minimum": 20}, ["30", "45", "300"], ["15", "31", "0", "-30"]),
    ({"type": "number", "multipleOf": 2}, ["4", "-2", "0"], ["3", "2.5"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.5", "1", "1.0", "0.0"], ["1.01", "-0.1", "2", "-0.5"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "5", "99.5"], ["0", "0.0", "-1"]),
    ({"type": "number", "exclusiveMaximum": 3.14}, ["3.13", "3.1399", "3", "-100.5"], ["3.14", "3.140", "3.15", "4"]),
    (
        {"type": "number", "minimum": -1.25, "maximum": -0.5},
        ["-1.25", "-1", "-0.5", "-0.75"],
        ["-1.26", "-0.4", "0", "1"],
    ),
    # Constants.
    ({"const": {"a": [1, None, "x"]}}, ['{"a":[1,null,"x"]}'], ['{"a":[1,null]}', "{}"]),
    ({"enum": ["a", 1, None, True, 'q"']}, ['"a"', "1", "null", "true", '"q\\""'], ['"b"', "false", "2"]),
    ({"enum": [1, "a", 2.5], "type": ["string", "number"], "minimum": 2}, ['"a"', "2.5"], ["1"]),
    ({"enum": ["2024-01-01", "x"], "format": "date"}, ['"2024-01-01"'], ['"x"']),
    # Types.
    ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "true"]),
    ({"type": "boolean"}, ["true", "false"], ["null", "True"]),
    ({"minimum": 3}, ["3", "4.5"], ['"a"', "{}"]),
    # Arrays.
    ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1]", "[1,2,3]"], ["[1,]", "[,1]", '["a"]', "[ 1]"]),
    (
        {"type": "array", "items": {"const": 0}, "minItems": 2, "maxItems": 3},
        ["[0,0]", "[0,0,0]"],
        ["[0]", "[]", "[0,0,0,0]"],
    ),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]}, ["[]", "[1]", "[1,2]"], ["[2]", "[1,2,3]"]),
    (
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2},
        ["[1,2]", "[1,2,2]"],
        ["[1]", "[2]"],
    ),
    ({"type": "array", "prefixItems": [{"const": 1}], "minItems": 2}, ["[1,5]", '[1,"a"]'], ["[1]"]),
    ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        ["[]", '["a"]', '["a","b"]'],
        ['["a","a"]'],
    ),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[]", "[5]"], ["[5,5]"]),
    # Objects.
    ({"properties": {"a": {"const": 1}}}, ["{}", '{"a":1}'], ['{"a":2}', '{"b":1}', "1"]),
    ({"type": "object", "required": ["k"]}, ['{"k":1}', '{"k":{},"z":2}'], ["{}", '{"z":2}']),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "null"}},
        ["{}", '{"a":1,"b":null}', '{"ab":null}', '{"":null}'],
        ['{"a":null}', '{"b":1}', '{"b":null,"a":1}', '{"\\u0061":null}'],
    ),
    (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        ["{}", '{"n_a":1,"n_":2}'],
        ['{"n_a":"x"}', '{"m":1}'],
    ),
    (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}, "s$": {"type": "string"}}},
        ['{"n":1}', '{"s":"x"}', "{}", '{"q":null}'],
        ['{"ns":1}', '{"ns":"x"}', '{"n":"x"}'],
    ),
    (
        {"properties": {"n1": {"minimum": 5}}, "patternProperties": {"^n": {"type": "integer"}}},
        ['{"n1":5}'],
        ['{"n1":5.5}', '{"n1":4}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^[ab]+$", "maxLength": 2}},
        ['{"ab":1}'],
        ['{"abb":1}', '{"c":1}'],
    ),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, ['{"a":1,"b":2}'], ['{"c":1}']),
    (
        {"properties": {k: {"const": 1} for k in "abc"}, "maxProperties": 2},
        ["{}", '{"a":1,"c":1}'],
        ['{"a":1,"b":1,"c":1}'],
    ),
    ({"properties": {k: {"const": 1} for k in "abc"}, "minProperties": 2}, ['{"a":1,"c":1}'], ["{}", '{"a":1}']),
    ({"type": "object", "minProperties": 1}, ['{"a":1}', '{"a":1,"b":2}'], ["{}"]),
    # Combinations.
    ({"anyOf": [{"type": "null"}, POINT]}, ["null", '{"x":1}'], ["1", "{}"]),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    (
        {"allOf": [POINT, {"properties": {"z": {"const": 3}}, "required": ["z"]}]},
        ['{"x":1,"z":3}'],
        ['{"x":1}', '{"z":3}'],
    ),
    ({"allOf": [{"minimum": 3}, {"type": "integer"}, {"maximum": 5}]}, ["3", "5"], ["2", "6", "3.5"]),
    ({"allOf": [{**POINT, "additionalProperties": False}, {"properties": {"z": {}}}]}, ['{"x":1}'], ['{"x":1,"z":1}']),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["1.5", "null"]),
    (
        {"oneOf": [{"properties": {"t": {"const": t}}, "required": ["t"]} for t in "ab"]},
        ['{"t":"a"}', '{"t":"b"}'],
        ['{"t":"c"}'],
    ),
    (TREE, ['{"v":1}', '{"v":1,"kids":[{"v":2,"kids":[]},{"v":3}]}'], ['{"kids":[]}', '{"v":1,"kids":[1]}']),
    ({"properties": {"next": {"$ref": "#"}}}, ["{}", '{"next":{"next":{}}}'], ['{"next":1}']),
    ({"$ref": "#tree", "$defs": {"t": {"$anchor": "tree", "const": 1}}}, ["1"], ["2"]),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, ["1"], ["2"]),
    ({"properties": {"a": {"const": 1}}, "unevaluatedProperties": False}, ["{}", '{"a":1}'], ['{"b":1}']),
    # An alternative that nothing satisfies is left out, however deep it stands.
    (
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/$defs/no"}, "minItems": 1}],
            "$defs": {"no": {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}, "required": ["a"]}},
        },
        ['"a"'],
        ["[", "[{"],
    ),
    ({"properties": {"a": {"minimum": 2, "maximum": 1}}}, ["{}"], ['{"a":1}', '{"a']),
    # Annotations change nothing.
    (
        {
            "type": "null",
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [],
            "$comment": "c",
            "deprecated": True,
            "readOnly": True,
            "x-own": {"not": 1},
            "nullable": False,
            "discriminator": {},
        },
        ["null"],
        ["1"],
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_takes_what_it_should(schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = byte_sampler().compile("json_schema", json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    for text in good:
        assert accepts(grammar, spaced(text)), text
        validator.validate(json.loads(text))
    for text in bad:
        assert not accepts(grammar, spaced(text)), text


def test_spaces_are_where_python_puts_them() -> None:
    grammar = byte_sampler().compile("json_schema", json.dumps(POINT))
    assert accepts(grammar, '{"x": 1, "y": 2}')
    others = (
        '{"x":1}',
        '{"x":  1}',
        '{"x": 1,"y": 2}',
        '{ "x": 1}',
        '{"x": 1 }',
        '{"x":\n1}',
        ' {"x": 1}',
        '{"x": 1}\n',
    )
    assert not any(accepts(grammar, text) for text in others)


def test_json_object_takes_objects_only() -> None:
    grammar = byte_sampler().compile("json_object", "")
    assert accepts(grammar, '{"a": {"b": [1, "x", null]}}')
    assert not any(accepts(grammar, text) for text in ("[]", "1", '"a"', "null", "", " {}"))


def _check_random_schemas(sampler: Sampler, seed: int, num: int, num_outputs: int) -> None:
    schemas, choose = RandomSchemas(seed), random.Random(seed)
    num_refused = num_unfinished = 0
    for _ in range(num):
        schema = schemas.next()
        text = json.dumps(schema)
        try:
            grammar = sampler.compile("json_schema", text)
        except UserError as error:
            allowed = (
                "no output can satisfy it",
                "refers to itself",
                "leads back to itself",
                "minProperties",
                "compiles to",
            )
            assert any(reason in error.message for reason in allowed), (error.message, text)
            num_refused += 1
            continue
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
        for _ in range(num_outputs):
            output = sampler.sample(grammar, choose)
            if output is None:
                num_unfinished += 1
                continue
            errors = [error.message for error in validator.iter_errors(json.loads(output))]
            assert not errors, (text, output, errors)
    assert num_refused < 0.35 * num
    assert num_unfinished < 0.05 * num * num_outputs


def test_outputs_of_random_schemas_validate() -> None:
    _check_random_schemas(byte_sampler(), seed=1, num=1000, num_outputs=2)


def test_outputs_of_random_schemas_validate_with_a_real_vocabulary() -> None:
    _check_random_schemas(Sampler(smollm2()), seed=2, num=40, num_outputs=4)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [byte_vocabulary, smollm2])
def test_outputs_of_a_thousand_random_schemas_validate(vocabulary: Callable[[], Vocabulary]) -> None:
    _check_random_schemas(Sampler(vocabulary()), seed=3, num=1000, num_outputs=4)
