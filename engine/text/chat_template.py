"""A conversation to the text that the model was trained on.

Renders what transformers' `apply_chat_template` does, after bringing messages into the form that the template wants:

- Content given as parts becomes one string, text parts joined by newlines, unless the template loops over parts; then
  content given as a string becomes one text part, unless the template tests for strings.
- Arguments of tool calls, a JSON string in the API, become the object that templates expect.
- Reasoning of earlier answers, `reasoning_content`, has the other names too that templates know it by.
- The role "developer" becomes "system" in templates that don't mention it.
- Fields that are null, and empty tool calls, are left out.
- Content that is null becomes an empty string, unless the template tests for none.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, meta, nodes

from pagedray.engine.errors import ConfigError, Unsupported, UserError
from pagedray.engine.text.template_sandbox import TemplateRefusal, TemplateSandbox

_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the space shows whether the template trims
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message")


@functools.cache
def _sandbox() -> TemplateSandbox:
    return TemplateSandbox()


class ChatTemplate:
    """One Jinja template. Parsed and compiled on first use."""

    def __init__(self, source: str):
        self.source = source

    def check(self) -> None:
        """Raises: ConfigError when the template can't be compiled."""
        try:
            _ = self._compiled
        except Exception as error:  # Jinja's own errors, and Python's for what is nested too deeply
            line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
            raise ConfigError(f"the chat template has an error{line}: {error}") from error

    def uses(self, name: str) -> bool:
        """Whether the template reads a variable. Raises: jinja2's errors for a template with an error."""
        return name in meta.find_undeclared_variables(self._tree)

    def render(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The conversation as text.

        Args:
            messages: in the form of the chat API.
            variables: what the template sees besides: special tokens, tools, documents, a caller's own.
            add_generation_prompt: end with the beginning of an answer.
            continue_final_message: end where the last message's content ends.

        Raises:
            UserError: the messages are malformed, the template refuses them, or can't render them.
        """
        if not messages:
            raise UserError("messages is empty; give at least one message", "messages")
        if add_generation_prompt and continue_final_message:
            raise UserError(
                "continue_final_message and add_generation_prompt can't both be true: the first goes on with the last "
                "message, the second begins a new one",
                "continue_final_message",
            )
        for name in _RESERVED:
            if name in variables:
                raise UserError(
                    f"chat_template_kwargs can't hold {name}; it is a field of its own", "chat_template_kwargs"
                )
        try:
            self.check()
        except ConfigError as error:
            raise UserError(f"{error}; another can be given with --chat-template") from error
        prepared = [self._prepare(message, i) for i, message in enumerate(messages)]
        final_text = self._mark_end(prepared[-1]) if continue_final_message else ""
        try:
            text = _sandbox().run(
                self._compiled,
                {
                    "tools": None,
                    "documents": None,
                    **variables,
                    "messages": prepared,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except TemplateRefusal as refusal:
            raise UserError(str(refusal), "messages") from refusal
        except Exception as error:  # a template can raise anything that Python can
            raise UserError(
                f"the chat template can't render these messages: {type(error).__name__}: {error}", "messages"
            ) from error
        return _cut_at_mark(text, final_text) if continue_final_message else text

    @functools.cached_property
    def _tree(self) -> nodes.Template:
        return _sandbox().parse(self.source)

    @functools.cached_property
    def _compiled(self) -> Template:
        return _sandbox().compile_template(_sandbox().parse(self.source))

    @functools.cached_property
    def _content_names(self) -> set[str]:
        return _content_names(self._tree)

    @functools.cached_property
    def _wants_parts(self) -> bool:
        return any(_is_content(loop.iter, self._content_names) for loop in self._tree.find_all(nodes.For))

    @functools.cached_property
    def _content_tests(self) -> set[str]:
        """What the template asks about content, such as "string" and "none"."""
        tests = self._tree.find_all(nodes.Test)
        return {test.name for test in tests if _is_content(test.node, self._content_names)}

    @functools.cached_property
    def _knows_developer(self) -> bool:
        return any(const.value == "developer" for const in self._tree.find_all(nodes.Const))

    def _prepare(self, message: Any, index: int) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"{where} must be an object with a role", where)
        # clients send back answers with every field, and templates take a field that is there for one that is set
        prepared = {key: value for key, value in message.items() if value is not None or key == "content"}
        if prepared["role"] == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        if calls := prepared.pop("tool_calls", None):
            prepared["tool_calls"] = _with_parsed_arguments(calls, f"{where}.tool_calls")
        content = prepared.get("content")
        if reasoning := prepared.get("reasoning_content"):
            prepared.setdefault("reasoning", reasoning)
            if not (calls and content):  # gpt-oss' template refuses both beside calls
                prepared.setdefault("thinking", reasoning)
        if content is None:
            if "none" not in self._content_tests:
                prepared["content"] = self._from_string("")
        elif isinstance(content, str):
            prepared["content"] = self._from_string(content)
        else:
            texts = _texts(content, f"{where}.content")
            prepared["content"] = _parts(texts) if self._wants_parts else "\n".join(texts)
        return prepared

    def _from_string(self, text: str) -> str | list[dict[str, str]]:
        return _parts([text]) if self._wants_parts and "string" not in self._content_tests else text

    def _mark_end(self, message: dict[str, Any]) -> str:
        """Put a mark at the end of a message's content; gives the content without it."""
        param = "continue_final_message"
        if "content" not in self.source:
            raise UserError("continue_final_message: the chat template doesn't show content", param)
        content = message.get("content")
        if isinstance(content, list) and content:
            text: str = content[-1]["text"]
            message["content"] = [*content[:-1], {**content[-1], "text": text + _END_MARK}]
        elif isinstance(content, str):
            text = content
            message["content"] = text + _END_MARK
        else:
            raise UserError("continue_final_message: the last message has no text to continue", param)
        return text


def _cut_at_mark(text: str, final_text: str) -> str:
    mark = _END_MARK.strip()
    if final_text.strip() not in text or mark not in text:
        raise UserError(
            "continue_final_message: the chat template doesn't show the last message's content as it is",
            "continue_final_message",
        )
    at = text.rindex(mark)
    # A template that trims content took the mark's space, and would have taken the content's own without the mark.
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _texts(content: Any, where: str) -> list[str]:
    if not isinstance(content, list):
        raise UserError(f"{where} must be a string or a list of parts, got {type(content).__name__}", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "refusal"):
            raise Unsupported(
                f"{where}[{i}] has the type {kind!r}; only text parts are supported", f"{where}[{i}].type"
            )
        if not isinstance(part.get(kind), str):
            raise UserError(f"{where}[{i}].{kind} must be a string", f"{where}[{i}].{kind}")
        texts.append(part[kind])
    return texts


def _with_parsed_arguments(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list):
        raise UserError(f"{where} must be a list, got {type(calls).__name__}", where)
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise UserError(f"{where}[{i}] must be an object with a function", f"{where}[{i}]")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                param = f"{where}[{i}].function.arguments"
                raise UserError(f"{param} must be JSON: {error}", param) from error
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _content_names(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that hold a message's content."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        found = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names)
        }
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                found |= {p.name for p, arg in zip(parameters, call.args, strict=False) if _is_content(arg, names)}
                found |= {keyword.key for keyword in call.kwargs if _is_content(keyword.value, names)}
        if found <= names:
            return names
        names |= found


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is a message's content, or a choice or selection of its parts."""
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case nodes.Filter(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, names)
        case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
            return _is_content(first, names) or _is_content(second, names)
        case _:
            return False
