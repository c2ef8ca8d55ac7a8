"""Schemas of clients are checked, however long they are, without keeping others waiting."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from pagedray.engine.errors import UserError
from pagedray.serving.schema_check import MAX_OBJECTS, check_schemas


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "strin"}, "x.type"),
        ({"properties": {"a": {"minLength": -1}}}, "x.properties.a.minLength"),
        ({"required": ["a", "a"]}, "x.required"),
        ({"required": ["a", 1, 1]}, "x.required"),
        ({"type": ["string", "string"]}, "x.type"),
    ],
)
async def test_what_is_no_schema_is_named(schema: dict[str, Any], param: str) -> None:
    with pytest.raises(UserError, match="is no valid JSON schema") as caught:
        await check_schemas({"good": {"type": "object"}, "x": schema})
    assert caught.value.param is not None and caught.value.param.startswith(param)


async def test_either_draft_is_taken() -> None:
    await check_schemas({"modern": {"prefixItems": [{"type": "string"}]}, "older": {"items": [{"type": "string"}]}})


@pytest.mark.parametrize("name", ["type", "required"])
async def test_a_long_list_of_anything_takes_no_squared_time(name: str) -> None:
    begun_s = time.monotonic()
    with pytest.raises(UserError):
        await check_schemas({"x": {name: [*range(3000), *map(str, range(3000))]}})
    assert time.monotonic() - begun_s < 5


async def test_others_go_on_while_a_long_schema_is_checked() -> None:
    schema = {"properties": {f"name{i}": {"type": "string"} for i in range(2000)}}
    checking = asyncio.create_task(check_schemas({"x": schema}))
    num_turns = 0
    while not checking.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    await checking
    assert num_turns > 5


async def test_what_would_take_long_is_refused_by_its_size() -> None:
    half = {"properties": {f"name{i}": {"enum": [{"type": "string"}]} for i in range(MAX_OBJECTS // 4)}}
    await check_schemas({"a": half})
    with pytest.raises(UserError, match="more than 5000 objects") as caught:
        await check_schemas({"a": half, "b": half})
    assert caught.value.param == "b"
