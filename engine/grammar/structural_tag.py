"""xgrammar's structural tags, checked and made exact: schemas, patterns and grammars in them become rules of ours.

A special token has no text that a grammar could match. Where a tag names one, as in {"begin": "<|python_tag|>"}, that
place becomes the token itself.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pagedray.engine.errors import UserError
from pagedray.engine.grammar.ebnf import ebnf_node
from pagedray.engine.grammar.json_schema import parse_json, schema_node
from pagedray.engine.grammar.regex import whole
from pagedray.engine.grammar.rules import Node, Rules
from pagedray.engine.grammar.vocabulary import Vocabulary

MAX_DEPTH = 32
MAX_REPEATS = 10_000

# Fields of each format: name → kinds of value; those that begin with ? may be left out.
TAG_FIELDS = {"begin": "text or token", "content": "format", "end": "texts or token"}
FORMATS: dict[str, dict[str, str]] = {
    "const_string": {"value": "text"},
    "json_schema": {"json_schema": "schema", "?style": "text"},
    "grammar": {"grammar": "text", "?syntax": "text"},
    "regex": {"pattern": "text"},
    "any_text": {"?excludes": "texts", "?max_tokens": "count", "?max_chars": "count"},
    "token": {"token": "token id"},
    "exclude_token": {"?exclude_tokens": "token ids"},
    "any_tokens": {"?exclude_tokens": "token ids", "?max_tokens": "count"},
    "sequence": {"elements": "formats"},
    "or": {"elements": "formats"},
    "tag": TAG_FIELDS,
    "triggered_tags": {"triggers": "texts", "tags": "tags", "?at_least_one": "flag", "?stop_after_first": "flag",
                       "?excludes": "texts"},
    "token_triggered_tags": {"trigger_tokens": "token ids", "tags": "tags", "?exclude_tokens": "token ids",
                             "?at_least_one": "flag", "?stop_after_first": "flag"},
    "tags_with_separator": {"tags": "tags", "separator": "text", "?at_least_one": "flag", "?stop_after_first": "flag"},
    "optional": {"content": "format"},
    "plus": {"content": "format"},
    "star": {"content": "format"},
    "repeat": {"min": "count", "max": "bound", "content": "format"},
}  # fmt: skip
# How arguments are written by models that don't write JSON: xgrammar knows how, so their schemas are checked only.
STYLES = ("json", "qwen_xml", "minimax_xml", "minimax_m3_xml", "deepseek_xml", "glm_xml", "cohere_xml", "kimi_k3_xml",
          "deepseek_v4_1_xml", "gemma")  # fmt: skip


def structural_tag_json(text: str, vocabulary: Vocabulary) -> str:
    """The tag as xgrammar is to compile it.

    Args:
        text: JSON of a structural tag, of one of its formats alone, or of the older form with `structures` and
            `triggers`.

    Raises:
        UserError: it is broken or uses what isn't supported; the message has the path.
    """
    given = parse_json(text)
    if not isinstance(given, dict):
        raise UserError("a structural tag is an object")
    if "structures" in given:
        given = _from_structures(given)
    path = "$"
    if "format" in given and given.get("type") in (None, "structural_tag"):
        given, path = given["format"], "$.format"
    return json.dumps({"type": "structural_tag", "format": _Reader(vocabulary).format(given, path, 0)})


def _from_structures(given: dict[str, Any]) -> dict[str, Any]:
    """The older form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    structures = given["structures"]
    if not isinstance(structures, list) or not all(isinstance(item, dict) for item in structures):
        _refuse("$.structures", "is a list of objects with begin, schema and end")
    tags = [
        {
            "type": "tag",
            "begin": item.get("begin"),
            "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
            "end": item.get("end"),
        }
        for item in structures
    ]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}


def _refuse(path: str, why: str) -> NoReturn:
    raise UserError(f"{path} {why}")


class _Reader:
    def __init__(self, vocabulary: Vocabulary):
        self._size = len(vocabulary.tokens)
        self._special_ids = [i for i in vocabulary.special_ids if vocabulary.tokens[i]]
        texts = ((vocabulary.tokens[i].decode(errors="replace"), i) for i in self._special_ids)
        self._special = dict(sorted(texts, key=lambda pair: -len(pair[0])))

    def format(self, given: Any, path: str, depth: int) -> dict[str, Any]:
        """A format, checked and rewritten."""
        if depth > MAX_DEPTH:
            _refuse(path, f"is nested more than {MAX_DEPTH} deep")
        if not isinstance(given, dict):
            _refuse(path, "is an object with a type")
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in FORMATS:
            _refuse(f"{path}.type", f"{str(kind)[:100]!r} isn't supported; {', '.join(FORMATS)} are")
        fields = FORMATS[kind]
        known = {name.removeprefix("?") for name in fields} | {"type"}
        for name in given:
            if name not in known:
                _refuse(f"{path}.{name}", f"isn't supported; {kind} has {', '.join(sorted(known))}")
        found: dict[str, Any] = {"type": kind}
        for field, value_kind in fields.items():
            name = field.removeprefix("?")
            if name in given and not (field.startswith("?") and given[name] is None):
                found[name] = self._value(given[name], value_kind, f"{path}.{name}", depth)
            elif not field.startswith("?"):
                _refuse(f"{path}.{name}", f"is missing; {kind} needs it")
        rewrite = getattr(self, f"_{kind}", None)
        return rewrite(found, path) if rewrite is not None else found

    def _value(self, value: Any, kind: str, path: str, depth: int) -> Any:
        if kind == "format":
            return self.format(value, path, depth + 1)
        if kind in ("formats", "tags"):
            if not isinstance(value, list) or not value:
                _refuse(path, "is a list of formats, and not empty")
            if kind == "tags" and not all(
                isinstance(item, dict) and item.get("type") in (None, "tag") for item in value
            ):
                _refuse(path, "is a list of tags")
            items = [{**item, "type": "tag"} for item in value] if kind == "tags" else value
            return [self.format(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]
        if kind in ("text or token", "texts or token") and isinstance(value, dict):
            return self.format({**value, "type": "token"}, path, depth + 1)
        if kind == "texts or token" and isinstance(value, str):
            return value
        if kind.startswith("texts"):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                _refuse(path, "is a list of strings")
            if kind == "texts" and not all(value):
                _refuse(path, "has an empty string")
            return value
        if kind == "token id":
            return self._token_id(value, path)
        if kind == "token ids":
            if not isinstance(value, list):
                _refuse(path, "is a list of token ids or names of tokens")
            return [self._token_id(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if kind in ("count", "bound"):
            if isinstance(value, bool) or not isinstance(value, int) or not -(kind == "bound") <= value < 2**31:
                _refuse(path, "is a number from 0" + (", or -1 for no bound" if kind == "bound" else ""))
            return value
        wanted, name = {"flag": (bool, "true or false"), "schema": (dict | bool, "a JSON schema")}.get(
            kind, (str, "a string")
        )
        if not isinstance(value, wanted):
            _refuse(path, f"is {name}")
        return value

    def _token_id(self, value: Any, path: str) -> int:
        if isinstance(value, str) and value in self._special:
            return self._special[value]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < self._size:
            _refuse(path, f"{str(value)[:100]!r} is neither a special token of this model nor an id below {self._size}")
        return value

    def _json_schema(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        style = found.get("style", "json")
        if style not in STYLES:
            _refuse(f"{path}.style", f"{style[:100]!r} isn't known; {', '.join(STYLES)} are")
        rules = Rules()
        try:
            text = rules.to_ebnf(schema_node(found["json_schema"], rules))
        except UserError as error:
            _refuse(f"{path}.json_schema:", error.message)
        return {"type": "grammar", "grammar": text} if style == "json" else found

    def _grammar(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        if found.get("syntax", "ebnf") != "ebnf":
            _refuse(f"{path}.syntax", "isn't supported; write ebnf")
        return _grammar_of(lambda rules: ebnf_node(found["grammar"], rules), f"{path}.grammar:")

    def _regex(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        return _grammar_of(lambda rules: whole(found["pattern"]), f"{path}.pattern:")

    def _repeat(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        low, high = found["min"], found["max"]
        if max(low, high) > MAX_REPEATS:
            _refuse(path, f"repeats {max(low, high)} times, the limit is {MAX_REPEATS}")
        if 0 <= high < low:
            _refuse(path, f"has min {low} above max {high}")
        return found

    def _const_string(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        parts = self._split(found["value"])
        return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}

    def _split(self, text: str) -> list[dict[str, Any]]:
        """A text as constant strings and special tokens; at least one."""
        parts: list[dict[str, Any]] = []
        start = at = 0
        while at < len(text):
            name = next((name for name in self._special if text.startswith(name, at)), None)
            if name is None:
                at += 1
                continue
            if start < at:
                parts.append({"type": "const_string", "value": text[start:at]})
            parts.append({"type": "token", "token": self._special[name]})
            start = at = at + len(name)
        if start < at or not parts:
            parts.append({"type": "const_string", "value": text[start:at]})
        return parts

    def _tag(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        before: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        begin, end = found["begin"], found["end"]
        if isinstance(begin, str):
            first, *before = self._split(begin)
            begin = first if first["type"] == "token" else first["value"]
        if isinstance(end, str):
            *after, last = self._split(end)
            end = last if last["type"] == "token" else last["value"]
        elif isinstance(end, list) and any(len(self._split(text)) > 1 or text in self._special for text in end):
            _refuse(f"{path}.end", "has special tokens among several strings; give one string")
        content = found["content"]
        if before or after:
            content = {"type": "sequence", "elements": [*before, content, *after]}
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def _triggered_tags(self, found: dict[str, Any], path: str) -> dict[str, Any]:
        special = [trigger in self._special for trigger in found["triggers"]]
        are_tokens = [isinstance(tag["begin"], dict) for tag in found["tags"]]
        if not any(special) and not any(are_tokens):
            return found
        if not all(special) or not all(are_tokens):
            _refuse(f"{path}.triggers", "and the begins of its tags are either all special tokens or none")
        if found.get("excludes"):
            _refuse(f"{path}.excludes", "isn't supported where triggers are special tokens")
        triggers = [self._special[trigger] for trigger in found["triggers"]]
        rest: dict[str, Any] = {name: found[name] for name in ("at_least_one", "stop_after_first") if name in found}
        excluded = [i for i in self._special_ids if i not in triggers]
        return {"type": "token_triggered_tags", "trigger_tokens": triggers, "tags": found["tags"],
                "exclude_tokens": excluded, **rest}  # fmt: skip


def _grammar_of(read: Any, path: str) -> dict[str, Any]:
    rules = Rules()
    try:
        node: Node = read(rules)
        return {"type": "grammar", "grammar": rules.to_ebnf(node)}
    except UserError as error:
        _refuse(path, error.message)
