"""Where the actors of an application are found: by name, in a Ray namespace of their own.

The namespace tells models apart: during a redeploy with another model an ingress must find only engines whose tokens
mean what its tokenizer says.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import ray
from ray.util import list_named_actors

from pagedray.deployments.calls import Actor
from pagedray.engine.config import ModelConfig

Role = Literal["scheduler", "worker"]


class Directory:
    """
    Args:
        app: name of the Serve application.
        model: the model that its engines run.
    """

    def __init__(self, app: str, model: ModelConfig):
        digest = hashlib.blake2b(model.model_dump_json().encode(), digest_size=4).hexdigest()
        self.namespace = f"pagedray-{app}-{digest}"

    def name(self, role: Role, engine_id: str, rank: int = 0) -> str:
        return f"{role}-{engine_id}-{rank}"

    def find(self, role: Role, rank: int = 0) -> dict[str, Actor]:
        """Engine id → its living actor of that role and rank. It blocks while Ray's head is down."""
        found = {}
        for entry in list_named_actors(all_namespaces=True):
            kind, _, rest = entry["name"].partition("-")
            engine_id, _, number = rest.rpartition("-")
            if entry["namespace"] == self.namespace and kind == role and number == str(rank):
                try:
                    found[engine_id] = ray.get_actor(entry["name"], self.namespace)
                except ValueError:
                    continue  # it died between the two questions
        return found
