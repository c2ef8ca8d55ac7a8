"""GET /v1/models and /v1/models/{id} as Anthropic's clients read them; they share the paths with OpenAI's.

A client of Anthropic's is known by its `anthropic-version` header.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pagedray.engine.config import EngineFacts
from pagedray.serving.anthropic.messages import context_window


def model_info(name: str, facts: EngineFacts, created: int) -> dict[str, Any]:
    """Args: `created` in seconds since the epoch."""
    window = context_window(facts)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": window,
        "max_tokens": window,
    }


def model_page(facts: EngineFacts, created: int) -> dict[str, Any]:
    """All models, on one page whatever size the client asks for: they are names of one model."""
    names = facts.model_names
    data = [model_info(name, facts, created) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
