"""`GrammarSource`: what a client says an output must look like, before anybody has checked it."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from pagedray.engine.errors import UserError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar as its client wrote it. Equal kind and text compile to the same grammar.

    What `text` holds, by kind:
        json_object     nothing; the output is any JSON object
        json_schema     JSON of a JSON schema (draft 2020-12)
        regex           a regular expression that the whole output matches
        choice          JSON list of strings, of which the output is one
        ebnf            rules in GBNF; `root` is where it starts
        structural_tag  JSON of a structural tag as xgrammar has it, or of one of its formats alone
    """

    kind: GrammarKind
    text: str
    param: str = "grammar"  # the client's name of the field, e.g. "response_format.json_schema.schema", for errors

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            known = ", ".join(get_args(GrammarKind))
            raise UserError(f"a grammar's kind must be one of {known}, not {self.kind!r}", self.param)
