"""Routes of the two APIs that aren't here, and what to do instead: more than "not found" for those who call one."""

from __future__ import annotations

from pagedray.engine.errors import UserError
from pagedray.serving.refusals import UnknownPath, UnsupportedPath

_POOLING = "the model served here generates text; this needs a model with pooling, on a server for such models"
_SOUND = "this server takes and makes text only; speech needs another server"
_NOTHING_STORED = "no files are stored here"
_BATCHES = "no batches are kept here; `pagedray run-batch` sends the requests of a batch file to a server"

# These need another kind of model on the same kind of server.
POOLING = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/classify",
    "/v2/rerank",
    "/v2/embed",
)

# First part of the path → why, and what to do.
ABSENT = {
    "/v1/messages/batches": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/audio": _SOUND,
    "/v1/realtime": _SOUND,
    "/v1/images": "this server makes text only; images need another server",
    "/v1/videos": "this server makes text only; videos need another server",
    "/v1/moderations": "no moderation model is served here; ask a chat model with a prompt for it",
    "/v1/files": _NOTHING_STORED,
    "/v1/uploads": _NOTHING_STORED,
    "/v1/vector_stores": "nothing is stored or searched here; put what the model should know into the prompt",
    "/v1/containers": "no code is run here; declare a function tool and run it in the client",
    "/v1/fine_tuning": "models are not trained here; train elsewhere and serve the checkpoint with --model",
    "/v1/evals": "no evaluations are kept here; send their requests to /v1/chat/completions",
    "/v1/assistants": "the Assistants API is not served; use /v1/responses",
    "/v1/threads": "the Assistants API is not served; use /v1/responses",
    "/v1/conversations": "conversations are not stored; use previous_response_id of /v1/responses",
    "/v1/organization": "there are no organizations here; API keys are a setting of the server (api_key_file)",
    "/v1/engines": "engines were replaced by models: see /v1/models",
    "/v1/edits": "edits are no longer part of the API; use /v1/chat/completions",
    "/v1/complete": "the old completions of Anthropic are not served; use /v1/messages",
    "/v1/chat/completions": "chat completions are not stored; the answer of the POST is all there is",
}


def absent_path(method: str, path: str) -> UserError:
    """The refusal of a path that no route has."""
    if path.rstrip("/") in POOLING:
        return UnsupportedPath(method, path, _POOLING)
    for first, why in ABSENT.items():
        if path == first or (path.startswith(first + "/") and path != first + "/"):
            return UnknownPath(method, path, why)
    if len(path) > 1 and path.endswith("/"):
        return UnknownPath(method, path, "no such route; paths here have no slash at their end")
    return UnknownPath(method, path)
