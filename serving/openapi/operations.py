"""What every route takes and answers: the table that the document is made from."""

from __future__ import annotations

from typing import NamedTuple, get_args

import msgspec
from pydantic import BaseModel

from pagedray.serving.anthropic import schema as anthropic
from pagedray.serving.openai import schema as openai
from pagedray.serving.openai.responses import schema as responses
from pagedray.serving.openapi.request_schemas import Ignored, Refused
from pagedray.serving.openapi.shapes import STRING, Schema, array, const


class Body(NamedTuple):
    """A request body: the class that checks it, and fields that it doesn't have."""

    kind: type[BaseModel]
    ignored: Ignored
    refused: Refused


class Parameter(NamedTuple):
    name: str
    place: str  # path, query or header
    schema: Schema
    description: str


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    tag: str
    summary: str
    details: str = ""
    body: Body | None = None
    parameters: tuple[Parameter, ...] = ()
    answer: str | None = None  # component of the 200's JSON; None: text
    event: str | None = None  # component of the data of a stream's events, where stream is true
    errors: tuple[int, ...] = ()  # besides those of every route
    error: str = "Error"


OPENAI, RESPONSES, ANTHROPIC, TOKENS, SERVER = "OpenAI", "Responses", "Anthropic", "Tokenizer", "Server"

TIMEOUT = Parameter(
    "X-Request-Timeout-S",
    "header",
    {"type": "string", "pattern": r"^([1-9][0-9]{0,4}(\.[0-9]+)?|0\.[0-9]*[1-9])$"},
    "Seconds that the whole answer may take; past them it ends with a typed error (408, or an error in the stream).",
)
REQUEST_ID = Parameter(
    "X-Request-Id",
    "header",
    {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._~:/+=@-]*$"},
    "Comes back in the answer's header of that name. It need not be unique.",
)
SESSION = Parameter(
    "X-Session-Id",
    "header",
    {"type": "string", "maxLength": 128, "pattern": "^[A-Za-z0-9._-]*$"},
    "Requests of one session go to one engine, as far as load allows.",
)
GENERATION = (TIMEOUT, REQUEST_ID, SESSION)
_ID = Parameter("id", "path", {"type": "string", "minLength": 1}, "Of the response.")
_INCLUDE = Parameter(
    "include",
    "query",
    array(const(*get_args(responses.Include))),
    "Accepted: all of it is there already.",
)

_ASKS = (400, 408, 413, 415)
_GENERATES = (*_ASKS, 404, 429, 503)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        tag=OPENAI,
        summary="Answer a conversation.",
        body=Body(openai.ChatRequest, openai.IGNORED, openai.REFUSED),
        parameters=GENERATION,
        answer="ChatCompletion",
        event="ChatCompletionChunk",
        errors=_GENERATES,
    ),
    ("POST", "/v1/completions"): Operation(
        tag=OPENAI,
        summary="Continue one or several prompts.",
        body=Body(openai.CompletionRequest, openai.IGNORED, openai.REFUSED),
        parameters=GENERATION,
        answer="Completion",
        event="CompletionChunk",
        errors=_GENERATES,
    ),
    ("GET", "/v1/models"): Operation(
        tag=OPENAI, summary="Names of the model that is served.", answer="ModelList", errors=(503,)
    ),
    ("GET", "/v1/models/{id}"): Operation(
        tag=OPENAI,
        summary="One name of the model.",
        parameters=(Parameter("id", "path", {"type": "string", "minLength": 1}, "May have slashes."),),
        answer="Model",
        errors=(404, 503),
    ),
    ("POST", "/v1/responses"): Operation(
        tag=RESPONSES,
        summary="Answer an input, with the memory of an earlier response if one is named.",
        body=Body(responses.ResponseRequest, responses.IGNORED, responses.REFUSED),
        parameters=GENERATION,
        answer="Response",
        event="ResponseEvent",
        errors=_GENERATES,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        tag=RESPONSES,
        summary="Count the tokens of an input.",
        body=Body(responses.CountRequest, responses.IGNORED, responses.REFUSED),
        answer="ResponseInputTokens",
        errors=(*_ASKS, 404, 503),
    ),
    ("POST", "/v1/responses/compact"): Operation(
        tag=RESPONSES, summary="Refused: compaction is not implemented.", errors=(400,)
    ),
    ("GET", "/v1/responses/{id}"): Operation(
        tag=RESPONSES,
        summary="Read a stored response.",
        parameters=(
            _ID,
            Parameter(
                "stream", "query", const("true", "false"), "Events of a background response, also while it runs."
            ),
            Parameter(
                "starting_after", "query", {"type": "integer", "minimum": 0}, "With stream: the last event known."
            ),
            _INCLUDE,
        ),
        answer="Response",
        event="ResponseEvent",
        errors=(400, 404, 503),
    ),
    ("DELETE", "/v1/responses/{id}"): Operation(
        tag=RESPONSES,
        summary="Forget a stored response.",
        parameters=(_ID,),
        answer="ResponseDeleted",
        errors=(404, 503),
    ),
    ("POST", "/v1/responses/{id}/cancel"): Operation(
        tag=RESPONSES,
        summary="End a background response.",
        parameters=(_ID,),
        answer="Response",
        errors=(400, 404, 503),
    ),
    ("GET", "/v1/responses/{id}/input_items"): Operation(
        tag=RESPONSES,
        summary="What a stored response was made from.",
        parameters=(
            _ID,
            Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}, "Items of a page."),
            Parameter("order", "query", const("asc", "desc"), "desc, the last first, unless given."),
            Parameter("after", "query", STRING, "Id of the last item known."),
            _INCLUDE,
        ),
        answer="ResponseItems",
        errors=(400, 404, 503),
    ),
    ("POST", "/v1/messages"): Operation(
        tag=ANTHROPIC,
        summary="Answer a conversation.",
        body=Body(anthropic.MessagesRequest, anthropic.IGNORED, anthropic.REFUSED),
        parameters=GENERATION,
        answer="Message",
        event="MessageEvent",
        errors=(*_ASKS, 404, 503, 529),
        error="AnthropicError",
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag=ANTHROPIC,
        summary="Count the tokens of a conversation.",
        body=Body(anthropic.CountTokensRequest, anthropic.IGNORED, anthropic.REFUSED),
        answer="MessageTokens",
        errors=(*_ASKS, 404, 503),
        error="AnthropicError",
    ),
    ("POST", "/tokenize"): Operation(
        tag=TOKENS,
        summary="Token ids of a prompt, or of messages as the chat template writes them.",
        body=Body(openai.TokenizeRequest, openai.IGNORED, openai.REFUSED),
        answer="Tokens",
        errors=(*_ASKS, 404, 503),
    ),
    ("POST", "/detokenize"): Operation(
        tag=TOKENS,
        summary="Text of token ids.",
        body=Body(openai.DetokenizeRequest, openai.IGNORED, openai.REFUSED),
        answer="Text",
        errors=(*_ASKS, 404, 503),
    ),
    ("GET", "/health"): Operation(
        tag=SERVER, summary="Whether an engine can take requests.", answer="Healthy", errors=(503,)
    ),
    ("GET", "/ping"): Operation(
        tag=SERVER, summary="The same as /health, as SageMaker asks it.", answer="Healthy", errors=(503,)
    ),
    ("POST", "/ping"): Operation(tag=SERVER, summary="The same as its GET.", answer="Healthy", errors=(503,)),
    ("GET", "/load"): Operation(tag=SERVER, summary="How many sequences run or wait.", answer="Load"),
    ("GET", "/version"): Operation(tag=SERVER, summary="The server's version.", answer="Version"),
    ("GET", "/metrics"): Operation(tag=SERVER, summary="Counts and latencies, in the text format of Prometheus."),
}

# Of every route, by what surrounds it.
EVERYWHERE = (414, 431, 500)

ERRORS: dict[int, str] = {
    400: "A field is missing, wrong, unknown or not implemented; the message names it.",
    401: "No API key, or none of this server's.",
    404: "No such model, or nothing of that id.",
    408: "The time that X-Request-Timeout-S gave is over.",
    413: "The body has more than max_body_bytes.",
    414: "Path and query are too long.",
    415: "The body isn't application/json, or is compressed.",
    429: "The queue is full; try again after Retry-After seconds.",
    431: "The headers are too many or too large.",
    500: "The engine failed, or this server has a bug.",
    503: "No engine is up; try again after Retry-After seconds.",
    529: "The queue is full; try again after Retry-After seconds.",
}
