"""The ingress: a Serve replica that runs `serving.app` over links to the application's engines."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from pagedray.deployments.directory import Directory
from pagedray.deployments.engine_finder import EngineFinder
from pagedray.deployments.logs import log_to_serve
from pagedray.deployments.placement import PlacementWatch
from pagedray.deployments.response_store import SharedStore
from pagedray.deployments.worker_actor import load_attribute
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import Config
from pagedray.engine.text.tokenizer import load_tokenizer
from pagedray.serving.app import create_app
from pagedray.serving.client import EngineClient
from pagedray.serving.demand import Demand
from pagedray.serving.grammars import Grammars
from pagedray.serving.router import Router


class Ingress:
    """
    Args:
        config: the whole tree.
        tokenizer: `module:name` of what makes one without arguments; None: the checkpoint's.
        engines: makes the engine deployment part of the application. No request goes through this handle, only calls
            for an engine where there may be none.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, tokenizer: str | None, engines: DeploymentHandle[Any]
    ):
        log_to_serve()
        self._config = config
        directory = Directory(serve.get_replica_context().app_name, config.model)
        server, turn = config.server, secrets.randbelow(2**16)  # ingresses don't all begin with the same engine
        self._finder, self._engines = EngineFinder(directory, server.fewest_engines), engines
        wake = self._wake if server.fewest_engines == 0 else None
        self._client = EngineClient(
            config.failure,
            self._finder.on_link_dead,
            router=Router(server.routing_policy, server.routing_imbalance_factor, turn),
            demand=Demand(wake, config.scheduler.max_queued_requests),
        )
        self._finding = asyncio.create_task(self._finder.run(self._client))
        if tokenizer is not None:
            self._tokenizer = load_attribute(tokenizer)()
        else:
            leaf = config.model
            checkpoint = await asyncio.to_thread(open_checkpoint, leaf.model, leaf.revision, leaf.needs_weights)
            self._tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint, leaf.chat_template)
        self._grammars = Grammars(self._tokenizer, config.api.grammar_timeout_s)
        # A later turn may come to another ingress than the one that answered the first.
        self._responses = SharedStore(directory.namespace, config.api) if server.num_ingress_replicas > 1 else None
        waiting = asyncio.create_task(PlacementWatch(config).log_troubles())
        try:
            await self._client.await_engine(config.failure.start_timeout_s)  # ready means: it can answer
        finally:
            waiting.cancel()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Serve echoes X-Request-Id, or makes one.
        return create_app(
            self._client,
            self._tokenizer,
            self._config,
            adds_request_id=False,
            grammars=self._grammars,
            responses=self._responses,
        )

    async def _wake(self) -> None:
        """Call an engine replica. Where there is none the call waits, and Serve starts one for it."""
        await self._engines.wake.remote()
        self._finder.hurry()

    async def check_health(self) -> None:
        """Raise when this ingress has stopped looking for engines. Whether there are any is for /health to say."""
        if self._finding.done():
            self._finding.result()

    async def __del__(self) -> None:
        """Serve's call once running requests have ended."""
        self._finding.cancel()
        await self._client.close()
        await self._grammars.close()
