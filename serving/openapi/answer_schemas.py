"""Schemas of answers. Tests hold real answers against them."""

from __future__ import annotations

from pagedray.serving.openapi.shapes import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    LOGPROB,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array,
    const,
    mapping,
    maybe,
    one_of,
    record,
    ref,
    said,
)

_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_FINISH = const("stop", "length", "tool_calls")
_STOP_REASON = said(one_of(STRING, INTEGER, NULL), "The stop string or stop id that ended it.")
_IDS = array(INTEGER)
_PROMPT_LOGPROBS = array(maybe(mapping(record({"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}))))

_OPENAI: dict[str, Schema] = {
    "Error": record(
        {
            "error": record(
                {
                    "message": said(STRING, "What was found, what is allowed and what changes it."),
                    "type": said(STRING, "invalid_request_error, rate_limit_error, timeout_error or server_error."),
                    "param": said(maybe(STRING), "The offending field's path."),
                    "code": said(maybe(STRING), "For programs, e.g. model_not_found, context_length_exceeded."),
                }
            )
        }
    ),
    "Usage": record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
            "completion_tokens_details": record({}, {"reasoning_tokens": COUNT}),
        }
    ),
    "TokenLogprob": record({"token": STRING, "logprob": LOGPROB, "bytes": array(INTEGER)}),
    "ChatLogprobs": record(
        {
            "content": array(
                record(
                    {
                        "token": STRING,
                        "logprob": LOGPROB,
                        "bytes": array(INTEGER),
                        "top_logprobs": array(ref("TokenLogprob")),
                    }
                )
            ),
            "refusal": NULL,
        }
    ),
    "ToolCall": record(
        {
            "id": STRING,
            "type": const("function"),
            "function": record({"name": STRING, "arguments": said(STRING, "JSON.")}),
        }
    ),
    "ToolCallDelta": record(
        {"index": COUNT, "function": record({}, {"name": STRING, "arguments": STRING})},
        {"id": STRING, "type": const("function")},
        "id, type and name come with a call's first delta; the arguments of all join to JSON.",
    ),
    "ChatCompletion": record(
        {
            **_HEAD,
            "object": const("chat.completion"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "message": record(
                            {"role": const("assistant"), "content": maybe(STRING), "refusal": NULL},
                            {
                                "reasoning_content": maybe(STRING),
                                "reasoning": maybe(STRING),
                                "tool_calls": maybe(array(ref("ToolCall"))),
                                "annotations": array(ANY),
                                "function_call": NULL,
                                "audio": NULL,
                            },
                        ),
                        "logprobs": maybe(ref("ChatLogprobs")),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP_REASON,
                    },
                    {"token_ids": _IDS},
                )
            ),
            "usage": ref("Usage"),
        },
        {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _IDS, "service_tier": STRING},
    ),
    "ChatCompletionChunk": record(
        {
            **_HEAD,
            "object": const("chat.completion.chunk"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "delta": record(
                            {},
                            {
                                "role": const("assistant"),
                                "content": maybe(STRING),
                                "refusal": NULL,
                                "reasoning_content": maybe(STRING),
                                "reasoning": maybe(STRING),
                                "tool_calls": array(ref("ToolCallDelta")),
                            },
                        ),
                        "logprobs": maybe(ref("ChatLogprobs")),
                        "finish_reason": maybe(_FINISH),
                    },
                    {"stop_reason": _STOP_REASON, "token_ids": _IDS},
                )
            ),
        },
        {"usage": maybe(ref("Usage")), "prompt_token_ids": _IDS, "service_tier": STRING},
        "Data of an event. The last event's data is [DONE]; after an error comes an Error, then [DONE].",
    ),
    "CompletionLogprobs": record(
        {
            "text_offset": array(COUNT),
            "token_logprobs": array(maybe(LOGPROB)),
            "tokens": array(STRING),
            "top_logprobs": array(maybe(mapping(LOGPROB))),
        }
    ),
    "Completion": record(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": maybe(ref("CompletionLogprobs")),
                        "finish_reason": const("stop", "length"),
                        "stop_reason": _STOP_REASON,
                    },
                    {"prompt_logprobs": _PROMPT_LOGPROBS, "token_ids": _IDS, "prompt_token_ids": _IDS},
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "CompletionChunk": record(
        {
            **_HEAD,
            "object": const("text_completion"),
            "choices": array(
                record(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": maybe(ref("CompletionLogprobs")),
                        "finish_reason": maybe(const("stop", "length")),
                    },
                    {"stop_reason": _STOP_REASON, "token_ids": _IDS, "prompt_token_ids": _IDS},
                )
            ),
        },
        {"usage": maybe(ref("Usage"))},
        "Data of an event. The last event's data is [DONE]; after an error comes an Error, then [DONE].",
    ),
    "Model": record(
        {
            "id": STRING,
            "object": const("model"),
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "max_model_len": INTEGER,
        }
    ),
    "ModelList": record({"object": const("list"), "data": array(ref("Model"))}),
    "Tokens": record({"count": COUNT, "max_model_len": INTEGER, "tokens": _IDS}, {"token_strs": array(STRING)}),
    "Text": record({"prompt": STRING}),
    "Load": record({"server_load": COUNT}),
    "Healthy": record({"status": const("healthy")}),
    "Version": record({"version": STRING}),
}

# Items have several forms and grow with the API: what every client relies on is said, the rest is left open.
_ITEM: Schema = {"type": "object", "required": ["type"], "properties": {"type": STRING, "id": STRING}}

_RESPONSES: dict[str, Schema] = {
    "Response": {
        "type": "object",
        "required": ["id", "object", "created_at", "status", "model", "output"],
        "properties": {
            "id": STRING,
            "object": const("response"),
            "created_at": NUMBER,
            "status": const("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
            "model": STRING,
            "output": array(_ITEM),
            "error": maybe({"type": "object", "required": ["code", "message"]}),
            "incomplete_details": maybe({"type": "object", "required": ["reason"]}),
            "usage": maybe(
                {
                    "type": "object",
                    "required": ["input_tokens", "output_tokens", "total_tokens"],
                    "properties": {"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT},
                }
            ),
        },
    },
    "ResponseEvent": {
        "type": "object",
        "required": ["type", "sequence_number"],
        "properties": {"type": STRING, "sequence_number": COUNT},
        "description": "Data of an event; the event is named after its type.",
    },
    "ResponseDeleted": record({"id": STRING, "object": STRING, "deleted": const(True)}),
    "ResponseItems": {
        "type": "object",
        "required": ["object", "data", "has_more"],
        "properties": {
            "object": const("list"),
            "data": array(_ITEM),
            "first_id": maybe(STRING),
            "last_id": maybe(STRING),
            "has_more": BOOLEAN,
        },
    },
    "ResponseInputTokens": record({"object": STRING, "input_tokens": COUNT}),
}

_MESSAGE_USAGE = {
    "input_tokens": COUNT,
    "cache_creation_input_tokens": COUNT,
    "cache_read_input_tokens": COUNT,
    "output_tokens": COUNT,
    "output_tokens_details": record({"thinking_tokens": COUNT}),
}

_ANTHROPIC: dict[str, Schema] = {
    "AnthropicError": record(
        {
            "type": const("error"),
            "error": record({"type": STRING, "message": STRING}),
        },
        {"request_id": STRING},
    ),
    "MessageBlock": one_of(
        record({"type": const("text"), "text": STRING}, {"citations": NULL}),
        record({"type": const("thinking"), "thinking": STRING, "signature": STRING}),
        record(
            {"type": const("tool_use"), "id": STRING, "name": STRING, "input": mapping(ANY)},
            {"caller": mapping(ANY)},
        ),
    ),
    "Message": record(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array(ref("MessageBlock")),
            "stop_reason": const(
                "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
            ),
            "stop_sequence": maybe(STRING),
            "usage": record(_MESSAGE_USAGE, {"service_tier": STRING}),
        },
        {"diagnostics": maybe(mapping(ANY))},
    ),
    "MessageEvent": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": const(
                "message_start",
                "ping",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
                "error",
            )
        },
        "description": "Data of an event; the event is named after its type.",
    },
    "MessageTokens": record({"input_tokens": COUNT}),
}

ANSWERS: dict[str, Schema] = {**_OPENAI, **_RESPONSES, **_ANTHROPIC}
