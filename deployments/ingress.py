"""The ingress: a Serve replica that runs `serving.app` over links to the application's engines."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from pagedray.deployments.directory import Directory
from pagedray.deployments.engine_finder import EngineFinder
from pagedray.deployments.logs import log_to_serve
from pagedray.deployments.worker_actor import load_attribute
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import Config
from pagedray.engine.errors import EngineUnavailable
from pagedray.engine.text.tokenizer import load_tokenizer
from pagedray.serving.app import create_app
from pagedray.serving.client import EngineClient


class Ingress:
    """
    Args:
        config: the whole tree.
        tokenizer: `module:name` of what makes one without arguments; None: the checkpoint's.
        engines: makes the engine deployment part of the application. No request goes through this handle.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, tokenizer: str | None, engines: DeploymentHandle[Any]
    ):
        log_to_serve()
        self._config = config
        directory = Directory(serve.get_replica_context().app_name, config.model)
        finder = EngineFinder(directory, config.server.num_engine_replicas)
        self._client = EngineClient(config.failure, finder.on_link_dead)
        self._finding = asyncio.create_task(finder.run(self._client))
        if tokenizer is not None:
            self._tokenizer = load_attribute(tokenizer)()
        else:
            leaf = config.model
            checkpoint = await asyncio.to_thread(open_checkpoint, leaf.model, leaf.revision, leaf.needs_weights)
            self._tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint, leaf.chat_template)
        limit_s = config.failure.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await finder.connected.wait()  # ready means: it can answer
        except TimeoutError:
            raise EngineUnavailable(f"no engine has started within start_timeout_s ({limit_s:g} s)") from None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Serve echoes X-Request-Id, or makes one.
        return create_app(self._client, self._tokenizer, self._config, adds_request_id=False)

    async def check_health(self) -> None:
        """Raise when this ingress has stopped looking for engines. Whether there are any is for /health to say."""
        if self._finding.done():
            self._finding.result()

    async def __del__(self) -> None:
        """Serve's call once running requests have ended."""
        self._finding.cancel()
        await self._client.close()
