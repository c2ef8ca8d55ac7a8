"""How chat completions are written: whole messages, or deltas that join to the same."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import PagedrayError
from pagedray.engine.messages import TokenLogprobs
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.answer import ChoiceSoFar, Delta
from pagedray.serving.openai import sse
from pagedray.serving.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from pagedray.serving.openai.respond import Head, Usage
from pagedray.serving.openai.schema import ChatRequest
from pagedray.serving.parsers.events import (
    ContentText,
    Event,
    OutputParser,
    ReasoningText,
    ToolArguments,
    ToolStart,
)

encode = msgspec.json.encode


class ChatShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says about how its answer looks."""

    head: Head
    prompt_ids: list[int]
    wire: ChatRequest
    may_call: bool  # tools are offered
    is_legacy: bool  # a call is a `function_call`
    can_reason: bool  # the model marks its reasoning
    echoed: str = ""  # what content begins with


class _Call(msgspec.Struct):
    id: str
    name: str
    arguments: list[str]


class _Choice:
    """One choice while its deltas come."""

    def __init__(self, parser: OutputParser):
        self._parser = parser
        self.so_far = ChoiceSoFar()
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[_Call] = []
        self.has_role = False

    def read(self, delta: Delta) -> list[Event]:
        """What a delta means; it is gathered too."""
        events = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events = [*events, *self._parser.finish()]
        for event in events:
            match event:
                case ContentText(text):
                    self.content.append(text)
                case ReasoningText(text):
                    self.reasoning.append(text)
                case ToolStart(_, id, name):
                    self.calls.append(_Call(id, name, []))
                case ToolArguments(index, text):
                    self.calls[index].arguments.append(text)
        return events


class ChatForm:
    """Writes chat completions. Chunks begin with the role, then bring reasoning, content and calls, then the finish
    reason on its own. Reasoning has two names, `reasoning_content` and `reasoning`, with the same text.

    Args:
        parsers: one for each choice.
    """

    def __init__(self, shape: ChatShape, parsers: list[OutputParser], tokenizer: Tokenizer):
        self._shape = shape
        self._wire = shape.wire
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer, bool(shape.wire.return_tokens_as_token_ids))
        self._choices = [_Choice(parser) for parser in parsers]
        self._frame = sse.ChunkFrame(msgspec.to_builtins(shape.head), shape.wire.wants_usage)
        self._is_plain = not shape.may_call and not shape.can_reason  # the answer is content and nothing else

    def begin(self, num_prompt_tokens: int) -> bytes:
        return b""

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        return b"".join(self._frame.chunk(*item, usage) for delta in deltas for item in self._items(delta))

    def end(self, usage: Usage) -> bytes:
        return (self._frame.chunk(b"", usage=usage) if self._wire.wants_usage else b"") + sse.DONE

    def failed(self, error: PagedrayError | None) -> bytes:
        return sse.failure(error)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.index]
            choice.read(delta)
            choice.so_far.add(delta)

    def body(self, usage: Usage) -> dict[str, Any]:
        body: dict[str, Any] = {
            **msgspec.to_builtins(self._shape.head),
            "choices": [self._whole(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage,
        }
        if self._wire.prompt_logprobs is not None:
            entries = self._choices[0].so_far.prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer, self._wire.prompt_logprobs)
        if self._wire.return_token_ids:
            body["prompt_token_ids"] = self._shape.prompt_ids
        return body

    def _items(self, delta: Delta) -> list[tuple[bytes, bytes]]:
        """Encoded choices that tell of a delta, each with further fields of its chunk."""
        choice, index = self._choices[delta.index], b"%d" % delta.index
        wants_ids = bool(self._wire.return_token_ids)
        out: list[tuple[bytes, bytes]] = []
        if not choice.has_role:
            is_first = not any(other.has_role for other in self._choices)
            fields = b',"prompt_token_ids":%b' % encode(self._shape.prompt_ids) if wants_ids and is_first else b""
            choice.has_role = True
            # a message that turns out to be calls only has no content
            content = b"null" if self._shape.may_call else b'""'
            out.append((_choice(index, b'{"role":"assistant","content":%b}' % content), fields))
            if self._shape.echoed:
                out.append((_choice(index, b'{"content":%b}' % encode(self._shape.echoed)), b""))
        pieces = [piece for event in choice.read(delta) if (piece := self._piece(event))]
        if delta.finish_reason is not None and self._shape.may_call and not (choice.content or choice.calls):
            pieces.append(b'{"content":""}')
        if not pieces and (delta.logprobs or (wants_ids and delta.token_ids)):
            pieces.append(b'{"content":""}' if self._is_plain else b"{}")
        for i, piece in enumerate(pieces):
            logprobs, more = b"null", b""
            if i == 0 and delta.logprobs:
                logprobs = self._logprobs(delta.logprobs)
            if wants_ids:
                more = b',"token_ids":%b' % encode(delta.token_ids if i == 0 else ())
            out.append((_choice(index, piece, logprobs, more=more), b""))
        if delta.finish_reason is not None:
            reason = encode(self._finish_reason(choice, delta.finish_reason))
            more = b',"stop_reason":%b' % encode(delta.stop_reason)
            out.append((_choice(index, b"{}", reason=reason, more=more), b""))
        return out

    def _piece(self, event: Event) -> bytes:
        """The delta that tells of an event; empty for one that the client doesn't want."""
        match event:
            case ContentText(text):
                return b'{"content":%b}' % encode(text)
            case ReasoningText(text):
                if self._wire.include_reasoning is False:
                    return b""
                piece = encode(text)
                return b'{"reasoning_content":%b,"reasoning":%b}' % (piece, piece)
            case ToolStart(_, _, name) if self._shape.is_legacy:
                return b'{"function_call":{"name":%b,"arguments":""}}' % encode(name)
            case ToolArguments(_, text) if self._shape.is_legacy:
                return b'{"function_call":{"arguments":%b}}' % encode(text)
            case ToolStart(index, id, name):
                return (
                    b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}'
                    % (index, encode(id), encode(name))
                )
            case ToolArguments(index, text):
                return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, encode(text))

    def _finish_reason(self, choice: _Choice, reason: str | None) -> str | None:
        if reason != "stop" or not choice.calls:
            return reason
        return "function_call" if self._shape.is_legacy else "tool_calls"

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        so_far = choice.so_far
        out: dict[str, Any] = {
            "index": index,
            "message": self._message(choice),
            "logprobs": chat_logprobs(so_far.logprobs, self._tokenizer, self._names) if self._wire.logprobs else None,
            "finish_reason": self._finish_reason(choice, so_far.finish_reason),
            "stop_reason": so_far.stop_reason,
        }
        if self._wire.return_token_ids:
            out["token_ids"] = so_far.token_ids
        return out

    def _message(self, choice: _Choice) -> dict[str, Any]:
        content = self._shape.echoed + "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not content else content,
            "refusal": None,
        }
        if self._shape.can_reason and self._wire.include_reasoning is not False:
            message["reasoning_content"] = message["reasoning"] = "".join(choice.reasoning) or None
        functions = [{"name": call.name, "arguments": "".join(call.arguments)} for call in choice.calls]
        if functions and self._shape.is_legacy:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(choice.calls, functions, strict=True)
            ]
        return message

    def _logprobs(self, entries: tuple[TokenLogprobs, ...]) -> bytes:
        return encode(chat_logprobs(entries, self._tokenizer, self._names))


def _choice(
    index: bytes, delta: bytes, logprobs: bytes = b"null", *, reason: bytes = b"null", more: bytes = b""
) -> bytes:
    return b'{"index":%b,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, reason, more)
