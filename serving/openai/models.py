"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from pagedray.engine.config import EngineFacts


def model_card(name: str, facts: EngineFacts, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "pagedray",
        "root": facts.model_names[0],
        "max_model_len": facts.max_model_len,
    }


def model_list(facts: EngineFacts, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_card(name, facts, created) for name in facts.model_names]}
