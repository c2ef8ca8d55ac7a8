"""A client's grammar to what xgrammar compiles. Pure Python on hostile input: runs in the compiler's workers."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.ebnf import ebnf_node
from pagedray.engine.grammar.json_schema import json_object_node, parse_json, schema_node
from pagedray.engine.grammar.regex import whole
from pagedray.engine.grammar.rules import Node, Rules, Text, choice
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.grammar.structural_tag import structural_tag_json
from pagedray.engine.grammar.vocabulary import Vocabulary

MAX_CHOICES = 5000


class Ebnf(msgspec.Struct, frozen=True):
    text: str


class Tag(msgspec.Struct, frozen=True):
    json: str


def translate(source: GrammarSource, vocabulary: Vocabulary) -> Ebnf | Tag:
    """What xgrammar is to compile.

    Raises:
        UserError: the source is broken or not supported; says what and where.
    """
    if source.kind == "structural_tag":
        return Tag(structural_tag_json(source.text, vocabulary))
    rules = Rules()
    return Ebnf(rules.to_ebnf(_node(source, rules)))


def _node(source: GrammarSource, rules: Rules) -> Node:
    if source.kind == "json_object":
        return json_object_node(rules)
    if source.kind == "json_schema":
        return schema_node(parse_json(source.text), rules)
    if source.kind == "regex":
        return whole(source.text)
    if source.kind == "choice":
        return _choice(parse_json(source.text))
    return ebnf_node(source.text, rules)


def _choice(given: Any) -> Node:
    if not isinstance(given, list) or not given or not all(isinstance(item, str) for item in given):
        raise UserError("choices are a list of strings, and at least one")
    if len(given) > MAX_CHOICES:
        raise UserError(f"{len(given)} choices, the limit is {MAX_CHOICES}")
    for i, text in enumerate(given):
        if not text:
            raise UserError(f"choice {i} is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"choice {i} holds half a surrogate pair") from error
    if len(set(given)) < len(given):
        twice = next(text for i, text in enumerate(given) if text in given[:i])
        raise UserError(f"choice {twice[:100]!r} is there twice")
    return choice(*map(Text, given))
