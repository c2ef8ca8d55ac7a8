"""What an answer must look like: the fields that ask for it, and what becomes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from pagedray.engine.grammar.source import GrammarSource
from pagedray.serving.grammars import Grammars
from tests.fakes import BROKEN
from tests.serving.rig import Rig, ScriptedGrammars, texts
from tests.serving.scripted import says
from tests.serving.test_bad_requests import check

USER = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "fake", "messages": USER},
    "/v1/completions": {"model": "fake", "prompt": "hi", "max_tokens": 99},
}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'
TAG = {"type": "json_schema", "json_schema": SCHEMA}
LEGACY_TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


def structural(form: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": form}, separators=(",", ":"))


ASKED: list[tuple[dict[str, Any], GrammarSource]] = [
    ({"response_format": {"type": "json_object"}}, GrammarSource("json_object", "", "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        GrammarSource("json_schema", TEXT, "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        GrammarSource("structural_tag", structural(TAG), "response_format"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarSource("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"json": TEXT}}, GrammarSource("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSource("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSource("choice", '["a","b"]', "structured_outputs.choice")),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        GrammarSource("ebnf", 'root ::= "a"', "structured_outputs.grammar"),
    ),
    ({"structured_outputs": {"json_object": True}}, GrammarSource("json_object", "", "structured_outputs.json_object")),
    (
        {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": TAG}, "json": None}},
        GrammarSource("structural_tag", structural(TAG), "structured_outputs.structural_tag"),
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(LEGACY_TAG)}},
        GrammarSource(
            "structural_tag",
            structural(
                {
                    "type": "triggered_tags",
                    "triggers": ["<f"],
                    "tags": [{"type": "tag", "begin": "<f>", "content": TAG, "end": "</f>"}],
                }
            ),
            "structured_outputs.structural_tag",
        ),
    ),
    ({"guided_json": SCHEMA}, GrammarSource("json_schema", TEXT, "guided_json")),
    ({"guided_regex": "a+"}, GrammarSource("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a", "b"]}, GrammarSource("choice", '["a","b"]', "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, GrammarSource("ebnf", 'root ::= "a"', "guided_grammar")),
]


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize(("fields", "source"), ASKED)
async def test_every_way_to_ask(path: str, fields: dict[str, Any], source: GrammarSource) -> None:
    grammars = ScriptedGrammars('{"b": 1}')
    async with Rig(says("free"), grammars=grammars) as rig:
        got = (await rig.post(path, {**BASE[path], **fields})).json()["choices"][0]
        assert (got["text"] if "text" in got else got["message"]["content"]) == '{"b": 1}'
        assert got["finish_reason"] == "stop"
        body = {name: value for name, value in BASE[path].items() if name != "model"}
        assert texts(await rig.stream(path, **body, **fields)) == {0: '{"b": 1}'}
        assert grammars.sources == [source] * 2


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {"response_format": None}, {}])
async def test_no_grammar(path: str, fields: dict[str, Any]) -> None:
    grammars = ScriptedGrammars("x")
    async with Rig(says("free"), grammars=grammars) as rig:
        assert (await rig.post(path, {**BASE[path], **fields})).status_code == 200
        assert grammars.sources == []
        assert rig.links[0].worker.constraints == [None]


async def test_every_choice_has_the_grammar() -> None:
    async with Rig(says("free"), grammars=ScriptedGrammars("{}")) as rig:
        got = await rig.chat(messages=USER, n=3, response_format={"type": "json_object"}, logprobs=True)
        assert [choice["message"]["content"] for choice in got["choices"]] == ["{}"] * 3
        assert [len(choice["logprobs"]["content"]) for choice in got["choices"]] == [3] * 3


def named(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **fields}}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": 5}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (named(name="a b"), "response_format.json_schema.name"),
    (named(name="a" * 65), "response_format.json_schema.name"),
    (named(name=5), "response_format.json_schema.name"),
    (named(schema=None), "response_format.json_schema.schema"),
    (named(schema=[]), "response_format.json_schema.schema"),
    (named(strict="yes"), "response_format.json_schema.strict"),
    (named(description=5), "response_format.json_schema.description"),
    (named(colour="red"), "response_format.json_schema.colour"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"colour": "red"}}, "structured_outputs.colour"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"structural_tag": []}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"structural_tag": {"triggers": [], "structures": [{}]}}},
        "structured_outputs.structural_tag.structures[0]",
    ),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ["a"]}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_what_is_malformed_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    async with Rig(says("x"), grammars=ScriptedGrammars("{}")) as rig:
        check(await rig.post(path, {**BASE[path], **fields}), 400, param)
        await rig.idle()


async def test_a_grammar_that_fails_in_the_worker_fails_its_request_alone() -> None:
    class Broken(ScriptedGrammars):
        async def compile(self, *args: Any) -> Any:
            return BROKEN

    async with Rig(says("fine"), grammars=Broken("")) as rig:
        body = {**BASE["/v1/chat/completions"], "response_format": {"type": "json_object"}}
        check(await rig.post("/v1/chat/completions", body), 500, code="engine_error")
        assert (await rig.chat(messages=USER))["choices"][0]["message"]["content"] == "fine"


class Step(BaseModel):
    text: str
    number: int


async def test_the_official_clients_parse() -> None:
    grammars = ScriptedGrammars('{"text": "é", "number": 3}')
    async with Rig(says("x"), grammars=grammars) as rig, rig.openai() as client:
        got = await client.chat.completions.parse(model="fake", messages=USER, response_format=Step)  # type: ignore[arg-type]
        assert got.choices[0].message.parsed == Step(text="é", number=3)
        async with client.chat.completions.stream(
            model="fake",
            messages=USER,  # type: ignore[arg-type]
            response_format=Step,
        ) as stream:
            kinds = {event.type async for event in stream}
        assert "content.done" in kinds
        final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Step(text="é", number=3)
        source = grammars.sources[0]
        assert source.kind == "json_schema" and source.param == "response_format.json_schema.schema"
        assert json.loads(source.text)["additionalProperties"] is False


async def test_real_compilation_names_what_is_wrong() -> None:
    async with Rig(says("x")) as rig:
        for fields, param, said in [
            (named(schema={"type": "objekt"}), "response_format.json_schema.schema", "objekt"),
            ({"guided_regex": "("}, "guided_regex", ""),
            ({"guided_grammar": "root ::= ("}, "guided_grammar", ""),
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": "f"}},
                        {
                            "type": "function",
                            "function": {"name": "g", "parameters": {"properties": {"x": {"$ref": "#/$defs/none"}}}},
                        },
                    ],
                    "tool_choice": "required",
                },
                "tools[1].function.parameters",
                "",
            ),
        ]:
            body = {**BASE["/v1/chat/completions"], **fields}
            error = check(await rig.post("/v1/chat/completions", body), 400, param)
            assert said in error["message"]
        assert (await rig.chat(messages=USER))["choices"][0]["message"]["content"] == "x"


async def test_a_vocabulary_that_could_not_be_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        grammars, facts = Grammars(rig.tokenizer, 30.0), rig.links[0].facts  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr("pagedray.serving.grammars.make_vocabulary", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await grammars.compile(GrammarSource("regex", "a"), facts)
        assert (await grammars.compile(GrammarSource("regex", "a"), facts)).data
        await grammars.close()
