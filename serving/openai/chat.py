"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import msgspec

from pagedray.engine.errors import UserError
from pagedray.engine.messages import TokenLogprobs
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.answer import ChoiceSoFar, Delta
from pagedray.serving.openai import sse
from pagedray.serving.openai.logprobs import chat_logprobs, prompt_logprobs
from pagedray.serving.openai.respond import Context, Head, Job, Usage
from pagedray.serving.openai.schema import ChatRequest, parse

encode = msgspec.json.encode


async def prepare(context: Context, body: dict[str, Any]) -> Job:
    """Check a body, render the template, tokenize. Raises UserError."""
    wire = parse(ChatRequest, body)
    facts = context.facts_for(wire.model)
    params = wire.params(logprobs=(wire.top_logprobs or 0) if wire.logprobs else None)
    if wire.max_completion_tokens is not None:  # the newer name of max_tokens; it wins
        if wire.max_completion_tokens < 1:
            raise UserError(
                f"max_completion_tokens must be at least 1, got {wire.max_completion_tokens}", "max_completion_tokens"
            )
        params = msgspec.structs.replace(params, max_tokens=wire.max_completion_tokens)
    prompt_ids = await context.encoder.encode_chat(wire, facts)
    head = Head.new("chatcmpl", "chat.completion.chunk" if wire.stream else "chat.completion", wire.model, facts)
    names = {"prompt": "messages"}
    if wire.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return Job([prompt_ids], params, ChatForm(wire, prompt_ids, context.tokenizer, head), wire, facts, names)


class ChatForm:
    """Writes chat completions: chunks begin with the role, then bring content, then the finish reason on its own."""

    def __init__(self, wire: ChatRequest, prompt_ids: list[int], tokenizer: Tokenizer, head: Head):
        self._wire = wire
        self._prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._head = head
        self._choices = [ChoiceSoFar() for _ in range(wire.n or 1)]
        self._has_role = [False] * len(self._choices)
        with_usage = wire.stream_options is not None and bool(wire.stream_options.include_usage)
        self._frame = sse.ChunkFrame(msgspec.to_builtins(head), with_usage)

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        wants_ids = bool(self._wire.return_token_ids)
        out: list[bytes] = []
        for delta in deltas:
            index = b"%d" % delta.index
            if not self._has_role[delta.index]:
                fields = (
                    b',"prompt_token_ids":%b' % encode(self._prompt_ids)
                    if wants_ids and not any(self._has_role)
                    else b""
                )
                self._has_role[delta.index] = True
                choice = b'{"index":%b,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                out.append(self._frame.chunk(choice % index, usage, fields))
            if delta.text or delta.logprobs or (wants_ids and delta.token_ids):
                choice = b'{"index":%b,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}' % (
                    index,
                    encode(delta.text),
                    self._logprobs(delta.logprobs),
                    b',"token_ids":%b' % encode(delta.token_ids) if wants_ids else b"",
                )
                out.append(self._frame.chunk(choice, usage))
            if delta.finish_reason is not None:
                choice = b'{"index":%b,"delta":{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}' % (
                    index,
                    delta.finish_reason.encode(),
                    encode(delta.stop_reason),
                )
                out.append(self._frame.chunk(choice, usage))
        return b"".join(out)

    def last_chunk(self, usage: Usage) -> bytes:
        return self._frame.chunk(b"", usage)

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._choices[delta.index].add(delta)

    def body(self, usage: Usage) -> dict[str, Any]:
        body: dict[str, Any] = {
            **msgspec.to_builtins(self._head),
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": usage,
        }
        if self._wire.prompt_logprobs is not None:
            entries = self._choices[0].prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(entries, self._tokenizer, self._wire.prompt_logprobs)
        if self._wire.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids
        return body

    def _choice(self, index: int, choice: ChoiceSoFar) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, self._tokenizer) if self._wire.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._wire.return_token_ids:
            out["token_ids"] = choice.token_ids
        return out

    def _logprobs(self, entries: tuple[TokenLogprobs, ...]) -> bytes:
        return encode(chat_logprobs(entries, self._tokenizer)) if entries else b"null"
