"""JSON schema (draft 2020-12) to grammar rules: every output validates, and what can't be promised is refused by name.

The unit of work is a conjunction: schemas that must all hold for one value. `$ref` and `allOf` add to it, `anyOf`
makes several of one, and a conjunction without any of those becomes one rule per type. Equal conjunctions share a
rule, which is how recursive schemas end.

Outputs are a part of what a schema allows: properties come in the order of the schema; objects with `properties` have
others only where additionalProperties (or patternProperties) asks for them, as OpenAI's strict schemas say anyway;
a schema with keywords of some types and no `type` means those types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

import jsonschema
import referencing
import referencing.jsonschema

from pagedray.engine.errors import UserError
from pagedray.engine.grammar import automaton, json_text, number_text, regex
from pagedray.engine.grammar.automaton import Automaton
from pagedray.engine.grammar.conjunction import (
    Part,
    Parts,
    bounds_of,
    required_of,
    says_something,
    types_of,
)
from pagedray.engine.grammar.formats import FORMATS
from pagedray.engine.grammar.json_text import COLON, COMMA, QUOTE
from pagedray.engine.grammar.members import Members
from pagedray.engine.grammar.rules import EMPTY, NOTHING, Node, Ref, Repeat, Rules, Text, choice, sequence
from pagedray.engine.grammar.schema_syntax import check_syntax, kind_of

MAX_REFERENCES = 64  # one behind the other
MAX_PROPERTIES = 1000  # of one object
MAX_PATTERNS = 4  # in patternProperties of one object
MAX_COUNTED = 10_000  # minProperties and maxProperties make a state for each property and number of them
MAX_ENUM = 5000
MAX_DIVISOR = 1000
MAX_MULTIPLE = 10**6  # of multipleOf, where there is no other bound
MAX_LENGTH = 1_000_000

REFUSED = {
    "not": "write the values that are allowed instead",
    "if": "write anyOf with one schema for each case instead",
    "then": "write anyOf with one schema for each case instead",
    "else": "write anyOf with one schema for each case instead",
    "dependentRequired": "write anyOf with one schema for each case instead",
    "dependentSchemas": "write anyOf with one schema for each case instead",
    "dependencies": "write anyOf with one schema for each case instead",
    "contains": "describe all items with items instead",
    "minContains": "describe all items with items instead",
    "maxContains": "describe all items with items instead",
    "unevaluatedItems": "write items instead",
    "additionalItems": "write prefixItems and items instead",
    "$dynamicRef": "write $ref instead",
    "$recursiveRef": "write $ref instead",
}
ROOT_URI = "urn:schema"

T = TypeVar("T")
PARTS = "pagedray:parts"


def parse_json(text: str) -> Any:
    """A JSON text of a client's. Raises: UserError with line and column."""

    def refuse(name: str) -> NoReturn:
        raise UserError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UserError(f"it isn't JSON: {error}") from error
    except ValueError as error:  # integers of thousands of digits
        raise UserError(f"it holds a number that can't be read: {error}") from error


def json_object_node(rules: Rules) -> Node:
    """Any JSON object."""
    return SchemaRules({"type": "object"}, rules).root()


def schema_node(schema: Any, rules: Rules) -> Node:
    """Rules for a schema; the node stands for its values.

    Raises:
        UserError: the schema is invalid, or a keyword can't be kept; the message names it and its path.
    """
    check_syntax(schema)
    return SchemaRules(schema, rules).root()


class SchemaRules:
    """Turns one schema document into rules."""

    def __init__(self, document: dict[str, Any] | bool, rules: Rules):
        self._rules = rules
        self._document = document
        self._parts: dict[int, Part] = {}  # by id of the schema, which the document keeps
        self._derived: dict[tuple[int, str], Part] = {}
        self._names: dict[frozenset[int], str] = {}
        self._equal: dict[Node, Ref] = {}
        self._branches: dict[str, list[str]] = {}  # rules that are a choice of other rules
        self._split_at: dict[str, Part] = {}
        self._references: set[int] = set()  # ids of schemas that do no more than refer to another one
        self._todo: list[tuple[str, Parts]] = []
        self._validators: dict[int, jsonschema.Draft202012Validator] = {}
        self._automata: dict[tuple[str, str], Automaton] = {}

    def root(self) -> Node:
        self._check_document()
        node = self._value([(self._document, "$")])
        while self._todo:
            name, parts = self._todo.pop()
            self._rules.by_name[name] = self._body(parts, name)
        self._check_circles()
        return node

    def _check_circles(self) -> None:
        """Refuse alternatives that lead back to themselves before any value: no validator comes to an end with them."""
        left = dict(self._branches)
        while left:
            done = [name for name, branches in left.items() if not any(branch in left for branch in branches)]
            if not done:
                part = self._split_at[next(iter(left))]
                _refuse("anyOf" if "anyOf" in part.schema else "oneOf", part.path, "leads back to itself through $ref")
            for name in done:
                del left[name]

    def _check_document(self) -> None:
        if isinstance(self._document, bool):
            return
        draft = self._document.get("$schema")
        if draft is not None and not (
            isinstance(draft, str) and any(name in draft for name in ("draft-07", "draft/20"))
        ):
            raise UserError(f"$schema {str(draft)[:100]!r} isn't supported; write for draft 2020-12")

    # Conjunctions

    def _value(self, schemas: Sequence[tuple[Any, str]]) -> Node:
        """The rule of a conjunction of schemas."""
        parts: dict[int, Part] = {}
        return self._rule(tuple(parts.values())) if self._merge(parts, schemas) else NOTHING

    def _rule(self, parts: Parts) -> Ref:
        key = frozenset(id(part.schema) for part in parts)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._rules.new_name()
            self._todo.append((name, parts))
        return Ref(name)

    def _flatten(self, schema: Any, path: str, parts: dict[int, Part], inside: tuple[int, ...]) -> bool:
        """Add a schema to a conjunction, following $ref and allOf. False: nothing satisfies it."""
        if isinstance(schema, bool):
            return schema
        if id(schema) in inside:
            _refuse("$ref", path, "refers to itself and nothing else")
        if len(inside) > MAX_REFERENCES:
            _refuse("$ref", path, f"is a chain of more than {MAX_REFERENCES} references")
        self._check_keywords(schema, path)
        if "unevaluatedProperties" in schema and (parts or not self._references.issuperset(inside)):
            _refuse(
                "unevaluatedProperties", path, "isn't supported beside or inside of other schemas, which it can't see"
            )
        inside = (*inside, id(schema))
        if "$ref" in schema:
            if not says_something({name: value for name, value in schema.items() if name != "$ref"}):
                self._references.add(id(schema))
            target, where = self._resolve(schema["$ref"], path)
            if not self._flatten(target, where, parts, inside):
                return False
        for i, member in enumerate(schema.get("allOf", ())):
            if not self._flatten(member, f"{path}.allOf[{i}]", parts, inside):
                return False
        part = self._part(schema, path)
        if "$ref" in schema or "allOf" in schema:
            part = self._without(part, "$ref", "allOf")
        if says_something(part.schema):
            parts[id(part.schema)] = part
        return True

    def _merge(self, found: dict[int, Part], schemas: Sequence[tuple[Any, str]]) -> bool:
        """Add schemas that come from different places to a conjunction."""
        for schema, path in schemas:
            if not self._flatten(schema, path, found, ()):
                return False
        for part in found.values():
            if len(schemas) > 1 and "unevaluatedProperties" in part.schema:
                _refuse("unevaluatedProperties", part.path, "isn't supported beside other schemas, which it can't see")
        return True

    def _part(self, schema: dict[str, Any], path: str) -> Part:
        return self._parts.setdefault(id(schema), Part(schema, path))

    def _without(self, part: Part, *keywords: str) -> Part:
        key = (id(part.schema), ",".join(keywords))
        if key not in self._derived:
            rest = {name: value for name, value in part.schema.items() if name not in keywords}
            self._derived[key] = self._part(rest, part.path)
        return self._derived[key]

    def _resolve(self, reference: str, path: str) -> tuple[Any, str]:
        if reference == "#":
            return self._document, "$"
        if not reference.startswith("#/"):
            found = self._anchor(self._document, reference[1:]) if reference.startswith("#") else None
            if found is None:
                _refuse(
                    "$ref", path, f"{reference[:100]!r} isn't in this schema; only references that begin with # are"
                )
            return found, reference
        target: Any = self._document
        for step in reference[2:].split("/"):
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isascii() and step.isdigit() and int(step) < len(target):
                target = target[int(step)]
            else:
                _refuse("$ref", path, f"{reference[:100]!r} points to nothing")
        if not isinstance(target, dict | bool):
            _refuse("$ref", path, f"{reference[:100]!r} points to {kind_of(target)}, no schema")
        return target, "$" + reference[1:].replace("/", ".")

    def _anchor(self, node: Any, name: str) -> dict[str, Any] | None:
        todo = [node]
        while todo:
            node = todo.pop()
            if isinstance(node, dict):
                if node.get("$anchor") == name:
                    return node
                todo += node.values()
            elif isinstance(node, list):
                todo += node
        return None

    def _check_keywords(self, schema: dict[str, Any], path: str) -> None:
        for keyword, instead in REFUSED.items():
            if keyword in schema:
                _refuse(keyword, path, f"isn't supported; {instead}")
        if "$id" in schema and path != "$":
            _refuse("$id", path, "isn't supported inside a schema; write $anchor or a path instead")
        if isinstance(schema.get("unevaluatedProperties"), dict) and schema["unevaluatedProperties"]:
            _refuse("unevaluatedProperties", path, "isn't supported as a schema; write additionalProperties instead")

    # One conjunction

    def _body(self, parts: Parts, name: str) -> Node:
        for part in parts:
            if "enum" in part.schema or "const" in part.schema:
                return self._enumeration(part, parts)
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                if keyword in part.schema:
                    return self._alternatives(part, keyword, parts, name)
        nodes: list[Node] = []
        types = types_of(parts)
        if "object" in types:
            nodes.append(self._object(parts))
        if "array" in types:
            nodes.append(self._array(parts))
        if "string" in types:
            nodes.append(self._string(parts))
        if "fraction" in types or "integer" in types:
            nodes.append(self._number(parts, "fraction" in types))
        if "boolean" in types:
            nodes += [Text("true"), Text("false")]
        if "null" in types:
            nodes.append(Text("null"))
        return choice(*nodes)

    def _enumeration(self, part: Part, parts: Parts) -> Node:
        values = part.schema["enum"] if "enum" in part.schema else [part.schema["const"]]
        if len(values) > MAX_ENUM:
            _refuse("enum", part.path, f"has {len(values)} values, the limit is {MAX_ENUM}")
        kept = [value for value in values if all(self._is_valid(value, other) for other in parts)]
        try:
            return choice(*map(json_text.constant, kept))
        except UserError as error:
            _refuse("enum" if "enum" in part.schema else "const", part.path, error.message)

    def _is_valid(self, value: Any, part: Part) -> bool:
        validator = self._validators.get(id(part.schema))
        if validator is None:
            document = dict(self._document) if isinstance(self._document, dict) else {}
            document.pop("$id", None)
            document.pop("$schema", None)
            document[PARTS] = [part.schema]
            resource = referencing.jsonschema.DRAFT202012.create_resource(document)
            registry: Any = referencing.Registry().with_resource(ROOT_URI, resource)
            validator = jsonschema.Draft202012Validator({"$ref": f"{ROOT_URI}#/{PARTS}/0"}, registry=registry)
            self._validators[id(part.schema)] = validator
        try:
            return bool(validator.is_valid(value)) and self._matches_format(value, part)
        except re.error as error:
            _refuse("pattern", part.path, f"is broken: {error}")
        except RecursionError:
            _refuse("$ref", part.path, "leads back to itself")

    def _matches_format(self, value: Any, part: Part) -> bool:
        name = part.schema.get("format")
        if not isinstance(value, str) or name not in FORMATS:
            return True
        return self._automaton("format", FORMATS[name], part.path).matches(value)

    def _alternatives(self, part: Part, keyword: str, parts: Parts, name: str) -> Node:
        rest = [self._without(other, keyword) if other is part else other for other in parts]
        rest = [other for other in rest if says_something(other.schema)]
        branches: list[Parts] = []
        for i, schema in enumerate(part.schema[keyword]):
            found = {id(other.schema): other for other in rest}
            if self._flatten(schema, f"{part.path}.{keyword}[{i}]", found, ()):
                branches.append(tuple(found.values()))
        if keyword == "oneOf":
            for i, one in enumerate(branches):
                for j, other in enumerate(branches[:i]):
                    if not self._are_disjoint(other, one, 0):
                        _refuse("oneOf", part.path, f"isn't supported where a value may match two of its schemas, and "
                                f"{j} and {i} may have one in common; write anyOf instead")  # fmt: skip
        refs = [self._rule(branch) for branch in branches]
        self._branches[name], self._split_at[name] = [ref.name for ref in refs], part
        return choice(*refs)

    def _are_disjoint(self, a: Parts, b: Parts, depth: int) -> bool:
        """Whether no value satisfies both, as far as that is easily seen."""
        if not set(types_of(a)) & set(types_of(b)):
            return True
        for one, other in ((a, b), (b, a)):
            for part in one:
                values = part.schema.get("enum", [part.schema["const"]] if "const" in part.schema else None)
                if values is not None:
                    both = (*one, *other)
                    if not any(all(self._is_valid(value, p) for p in both) for value in values):
                        return True
        common = set(types_of(a)) & set(types_of(b))
        if common != {"object"} or depth > 3:
            return False
        for name in required_of(a) | required_of(b):
            if name in required_of(a) and name in required_of(b):
                flat_a, flat_b = self._property(a, name), self._property(b, name)
                if flat_a is None or flat_b is None or self._are_disjoint(flat_a, flat_b, depth + 1):
                    return True
            for one, other in ((a, b), (b, a)):
                if name in required_of(one) and self._property(other, name) is None:
                    return True
        return False

    def _shared(self, node: Node) -> Node:
        """One rule for all equal nodes: what xgrammar computes for a rule serves wherever that is used."""
        if node not in self._equal:
            self._equal[node] = self._rules.add(node)
        return self._equal[node]

    # Strings

    def _string(self, parts: Parts) -> Node:
        low, high = bounds_of(parts, "minLength", "maxLength")
        path = parts[0].path if parts else "$"
        if max(low, high or 0) > MAX_LENGTH:
            _refuse("minLength" if low > MAX_LENGTH else "maxLength", path, f"may be at most {MAX_LENGTH}")
        patterns = [("pattern", part.schema["pattern"], part.path) for part in parts if "pattern" in part.schema]
        for part in parts:
            name = part.schema.get("format")
            if name in FORMATS:
                patterns.append(("format", FORMATS[name], part.path))
        if not patterns:
            return self._shared(json_text.string(low, high))
        if len(patterns) == 1 and low == 0 and high is None:
            return sequence(QUOTE, json_text.quoted(_pattern_node(*patterns[0])), QUOTE)
        automata = [self._automaton(*pattern) for pattern in patterns]
        if low > 0 or high is not None:
            automata.append(_named(patterns[0][0], path, lambda: automaton.lengths(low, high)))
        found = _named(patterns[0][0], path, lambda: automaton.intersect(automata))
        if found.is_empty:
            return NOTHING
        return sequence(QUOTE, found.to_node(self._rules, json_text.quoted_chars), QUOTE)

    def _automaton(self, keyword: str, pattern: str, path: str) -> Automaton:
        if (keyword, pattern) not in self._automata:
            node = _pattern_node(keyword, pattern, path)
            self._automata[keyword, pattern] = _named(keyword, path, lambda: automaton.from_node(node))
        return self._automata[keyword, pattern]

    # Numbers

    def _number(self, parts: Parts, has_fractions: bool) -> Node:
        bounds = number_text.Bounds()
        divisors: list[tuple[int, str]] = []
        for part in parts:
            schema = part.schema
            for keyword in ("minimum", "exclusiveMinimum"):
                if keyword in schema:
                    bounds.at_least(_decimal(schema[keyword], keyword, part.path), keyword != "minimum")
            for keyword in ("maximum", "exclusiveMaximum"):
                if keyword in schema:
                    bounds.at_most(_decimal(schema[keyword], keyword, part.path), keyword != "maximum")
            if "multipleOf" in schema:
                divisors.append((_divisor(schema["multipleOf"], part.path), part.path))
        if not divisors:
            return self._shared(number_text.number(bounds) if has_fractions else number_text.integer(bounds))
        path = divisors[0][1]
        automata = [automaton.remainders(divisor) for divisor, _ in divisors]
        bounds.limit(MAX_MULTIPLE)  # states are divisor times digits
        automata.append(_named("multipleOf", path, lambda: automaton.from_node(number_text.integer(bounds))))
        found = _named("multipleOf", path, lambda: automaton.intersect(automata))
        return NOTHING if found.is_empty else found.to_node(self._rules, lambda node: node)

    # Arrays

    def _array(self, parts: Parts) -> Node:
        low, high = bounds_of(parts, "minItems", "maxItems")
        unique = [part for part in parts if part.schema.get("uniqueItems")]
        if unique and (high is None or high > 1):
            return self._unique_items(unique[0], parts, low, high)
        num_first = max((len(part.schema.get("prefixItems", ())) for part in parts), default=0)
        if high is not None:
            num_first = min(num_first, high)
        first = [self._item(parts, i) for i in range(num_first)]
        is_open = any("items" in part.schema for part in parts) or not num_first or low > num_first
        rest = self._item(parts, num_first) if is_open else NOTHING
        if rest == NOTHING:
            high = num_first if high is None else min(high, num_first)
        if high is not None and high < low:
            return NOTHING
        more_low, more_high = max(0, low - num_first), None if high is None else max(0, high - num_first)
        if more_high == 0 or rest == NOTHING:
            tail: Node = EMPTY
        elif num_first:
            tail = Repeat(sequence(COMMA, rest), more_low, more_high)
        else:
            again = Repeat(sequence(COMMA, rest), max(0, more_low - 1), None if more_high is None else more_high - 1)
            tail = choice(sequence(rest, again), *([EMPTY] if low == 0 else []))
        for i in reversed(range(num_first)):
            tail = sequence(*([COMMA] if i else []), first[i], tail)
            if i >= low:
                tail = self._rules.add(choice(tail, EMPTY))
        return sequence(Text("["), tail, Text("]"))

    def _item(self, parts: Parts, index: int) -> Node:
        schemas = []
        for part in parts:
            first = part.schema.get("prefixItems", ())
            if index < len(first):
                schemas.append((first[index], f"{part.path}.prefixItems[{index}]"))
            elif "items" in part.schema:
                schemas.append((part.schema["items"], f"{part.path}.items"))
        return self._value(schemas)

    def _unique_items(self, unique: Part, parts: Parts, low: int, high: int | None) -> Node:
        """Items in the order of their enum, each once or not at all: the one way to keep them apart."""
        values: list[Any] | None = None
        for part in parts:
            items: dict[int, Part] = {}
            if isinstance(part.schema.get("items"), dict) and self._flatten(part.schema["items"], part.path, items, ()):
                for item in items.values():
                    values = item.schema.get("enum", values)
        if values is None or any("prefixItems" in part.schema for part in parts):
            _refuse("uniqueItems", unique.path, "isn't supported, unless items has an enum or maxItems is 1")
        allowed = [part for part in parts if "items" in part.schema]
        kept: list[Any] = []
        for value in values:
            is_new = all(json_text.constant(value) != json_text.constant(other) and value != other for other in kept)
            if is_new and all(self._is_valid([value], self._without(p, "minItems", "uniqueItems")) for p in allowed):
                kept.append(value)
        high = len(kept) if high is None else min(high, len(kept))
        if low > high:
            return NOTHING
        if len(kept) * (high + 1) > MAX_COUNTED:
            _refuse("uniqueItems", unique.path, f"with {len(kept)} values is too much to count")
        members = [(json_text.constant(value), False) for value in kept]
        return sequence(Text("["), Members(self._rules, members, None, low, high).node(), Text("]"))

    # Objects

    def _object(self, parts: Parts) -> Node:
        low, high = bounds_of(parts, "minProperties", "maxProperties")
        required = required_of(parts)
        declared = list(dict.fromkeys(name for part in parts for name in part.schema.get("properties", ())))
        names = [
            *declared,
            *(name for part in parts for name in part.schema.get("required", ()) if name not in declared),
        ]
        names = list(dict.fromkeys(names))
        path = parts[0].path if parts else "$"
        if len(names) > MAX_PROPERTIES:
            _refuse("properties", path, f"has {len(names)} names, the limit is {MAX_PROPERTIES}")
        members: list[tuple[Node, bool]] = []
        for name in names:
            found = self._property(parts, name)
            if found is None:
                if name in required:
                    return NOTHING
                continue
            try:
                key = json_text.constant(name)
            except UserError as error:
                _refuse("properties", path, error.message)
            members.append((sequence(key, COLON, self._rule(found)), name in required))
        num_required = sum(is_required for _, is_required in members)
        if high is not None and high < max(low, num_required):
            return NOTHING
        others = NOTHING if high == len(members) == num_required else self._others(parts, names, low > len(members))
        if others != NOTHING and low - len(members) >= 2:
            part = next(part for part in parts if part.schema.get("minProperties") == low)
            _refuse("minProperties", part.path, f"{low} isn't supported with {len(members)} named properties: "
                    "nothing keeps two free names apart; name more of them in properties")  # fmt: skip
        counts = low > num_required or high is not None
        if counts and len(members) * ((high or low) + 1) > MAX_COUNTED:
            _refuse("maxProperties" if high else "minProperties", path, "is too much to count")
        body = Members(self._rules, members, None if others == NOTHING else others, low, high).node()
        return sequence(Text("{"), body, Text("}"))

    def _property(self, parts: Parts, name: str) -> Parts | None:
        """What holds for the value of a property; None: it can't be there."""
        values: list[tuple[Any, str]] = []
        is_declared = any(name in part.schema.get("properties", ()) or self._matching(part, name) for part in parts)
        for part in parts:
            schema = part.schema
            own = (
                [(schema["properties"][name], f"{part.path}.properties.{name}")]
                if name in schema.get("properties", ())
                else []
            )
            own += [
                (schema["patternProperties"][p], f"{part.path}.patternProperties.{p}")
                for p in self._matching(part, name)
            ]
            if not own and "additionalProperties" in schema:
                own = [(schema["additionalProperties"], f"{part.path}.additionalProperties")]
            if not is_declared and schema.get("unevaluatedProperties") is False:
                return None
            if "propertyNames" in schema:
                rules: dict[int, Part] = {}
                where = f"{part.path}.propertyNames"
                if not self._flatten(schema["propertyNames"], where, rules, ()):
                    return None
                if not all(self._is_valid(name, rule) for rule in rules.values()):
                    return None
            values += own
        found: dict[int, Part] = {}
        return tuple(found.values()) if self._merge(found, values) else None

    def _matching(self, part: Part, name: str) -> list[str]:
        patterns = part.schema.get("patternProperties", {})
        return [p for p in patterns if self._automaton("patternProperties", p, part.path).matches(name)]

    def _others(self, parts: Parts, names: list[str], is_needed: bool) -> Node:
        """Members with other names than these; NOTHING: there may be none."""
        schemas = [part.schema for part in parts]
        patterns = [(part, pattern) for part in parts for pattern in part.schema.get("patternProperties", ())]
        are_asked = any(schema.get("additionalProperties", False) is not False for schema in schemas)
        is_free = not any("properties" in schema for schema in schemas)
        if not (are_asked or is_free or is_needed or patterns):
            return NOTHING
        if len(patterns) > MAX_PATTERNS:
            part = patterns[-1][0]
            _refuse("patternProperties", part.path, f"has {len(patterns)} patterns, the limit is {MAX_PATTERNS}")
        keys = self._free_names(parts, names)
        nodes = []
        for number in range(2 ** len(patterns)):
            chosen = [bool(number >> i & 1) for i in range(len(patterns))]
            if number == 0 and not (are_asked or is_free or is_needed):
                continue
            value = self._other_value(
                parts, [pair for pair, is_chosen in zip(patterns, chosen, strict=True) if is_chosen]
            )
            if value is None:
                continue
            key = self._key_node(keys, patterns, chosen)
            if key != NOTHING:
                nodes.append(sequence(QUOTE, key, QUOTE, COLON, self._rule(value)))
        return self._rules.add(choice(*nodes)) if nodes else NOTHING

    def _other_value(self, parts: Parts, matched: list[tuple[Part, str]]) -> Parts | None:
        """What holds for the value of a free name that matches exactly these patterns."""
        values: list[tuple[Any, str]] = []
        for part in parts:
            own = [pattern for owner, pattern in matched if owner is part]
            values += [(part.schema["patternProperties"][p], f"{part.path}.patternProperties.{p}") for p in own]
            if not own and "additionalProperties" in part.schema:
                values += [(part.schema["additionalProperties"], f"{part.path}.additionalProperties")]
            if not matched and part.schema.get("unevaluatedProperties") is False:
                return None
        found: dict[int, Part] = {}
        return tuple(found.values()) if self._merge(found, values) else None

    def _free_names(self, parts: Parts, names: list[str]) -> Automaton | None:
        """Names that aren't taken and that propertyNames allows; None: all."""
        found: list[Automaton] = []
        for part in parts:
            if "propertyNames" in part.schema:
                where = f"{part.path}.propertyNames"
                flat: dict[int, Part] = {}
                if not self._flatten(part.schema["propertyNames"], where, flat, ()):
                    return automaton.words([])
                found += [self._name_automaton(rule, where) for rule in flat.values()]
        if not found and not names:
            return None
        if not found:
            found.append(automaton.lengths(0, None))
        all_found = _named("propertyNames", parts[0].path, lambda: automaton.intersect(found))
        return _named("properties", parts[0].path, lambda: all_found.without(automaton.words(names)))

    def _name_automaton(self, part: Part, path: str) -> Automaton:
        schema = part.schema
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return automaton.words(v for v in values if isinstance(v, str) and self._is_valid(v, part))
        extra = set(schema) - {"type", "pattern", "format", "minLength", "maxLength", "title", "description"}
        if extra or "string" not in types_of((part,)):
            _refuse(
                "propertyNames", path, f"may have type string, enum, pattern, format and lengths, got {sorted(schema)}"
            )
        low, high = bounds_of((part,), "minLength", "maxLength")
        automata = [_named("propertyNames", path, lambda: automaton.lengths(low, high))]
        if "pattern" in schema:
            automata.append(self._automaton("pattern", schema["pattern"], path))
        if schema.get("format") in FORMATS:
            automata.append(self._automaton("format", FORMATS[schema["format"]], path))
        return _named("propertyNames", path, lambda: automaton.intersect(automata))

    def _key_node(self, keys: Automaton | None, patterns: list[tuple[Part, str]], chosen: list[bool]) -> Node:
        if keys is None and not patterns:
            return Repeat(json_text.CHARACTER, 0, None)
        path = patterns[0][0].path if patterns else "$"
        base = automaton.lengths(0, None) if keys is None else keys
        automata = [base, *(self._automaton("patternProperties", p, part.path) for part, p in patterns)]
        found = _named("patternProperties", path, lambda: automaton.classify(automata, [True, *chosen]))
        return NOTHING if found.is_empty else found.to_node(self._rules, json_text.quoted_chars)


def _pattern_node(keyword: str, pattern: str, path: str) -> Node:
    read = regex.whole if keyword == "format" else regex.search
    return _named(keyword, path, lambda: read(pattern))


def _named(keyword: str, path: str, work: Callable[[], T]) -> T:
    """Do something that may be refused, and say of which keyword."""
    try:
        return work()
    except UserError as error:
        _refuse(keyword, path, error.message)


def _refuse(keyword: str, path: str, why: str) -> NoReturn:
    raise UserError(f"{keyword} at {path}: {why}")


def _decimal(value: float, keyword: str, path: str) -> Decimal:
    number = Decimal(repr(value))
    if not number.is_finite() or number.adjusted() > 300 or number.adjusted() < -300:
        _refuse(keyword, path, f"{value} is too large or too small")
    return number


def _divisor(value: float, path: str) -> int:
    number = _decimal(value, "multipleOf", path)
    if number != number.to_integral_value():
        _refuse("multipleOf", path, f"{value} isn't supported; whole numbers up to {MAX_DIVISOR} are")
    if not 1 <= number <= MAX_DIVISOR:
        _refuse("multipleOf", path, f"{value} is too large, the limit is {MAX_DIVISOR}")
    return int(number)
