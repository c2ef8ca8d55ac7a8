"""The server's HTTP application over one engine in this process: no Ray, no socket, and otherwise the same."""

from __future__ import annotations

import asyncio
from types import TracebackType

import httpx

from pagedray.engine.config import Config, EngineFacts
from pagedray.engine.engine import Engine
from pagedray.engine.errors import EngineDead, PagedrayError
from pagedray.engine.executor import LocalExecutor, StepWorker
from pagedray.engine.messages import Request, UpdateBatch
from pagedray.engine.metrics import EngineStats
from pagedray.engine.text.tokenizer import Tokenizer
from pagedray.serving.app import create_app
from pagedray.serving.client import EngineClient
from pagedray.serving.grammars import Grammars

BASE_URL = "http://this-process/v1"


class LocalLink:
    """`serving.client.EngineLink` over an engine on this event loop.

    Args:
        worker: loaded; it is closed when the engine ends.
        facts: what loading it gave.

    Attributes:
        running: ends with the engine: with its failure, or when cancelled.
    """

    def __init__(self, config: Config, worker: StepWorker, facts: EngineFacts):
        self.facts = facts
        self._engine = Engine(config, facts, LocalExecutor(worker))
        self._poll_s = config.failure.client_timeout_s / 2
        self.running = asyncio.create_task(self._run())

    async def submit(self, requests: tuple[Request, ...]) -> None:
        self._engine.submit(requests)

    async def poll(self, client_id: str, ack: int) -> UpdateBatch:
        return await self._engine.poll(client_id, ack, self._poll_s)

    async def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        self._engine.abort(request_ids)

    async def health(self) -> None:
        self._engine.health()

    async def stats(self) -> EngineStats:
        return await self._engine.stats_with_experts()

    async def _run(self) -> None:
        try:
            await self._engine.run()
        except PagedrayError:
            raise
        except Exception as error:
            raise EngineDead(f"{type(error).__name__}: {error}") from error


class LocalServer:
    """Entered on an event loop.

    Args:
        config: of its server settings only those of requests count; nobody needs an API key.
        worker, facts: see `LocalLink`.

    Attributes:
        http: talks to the application.
        running: see `LocalLink`.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, worker: StepWorker, facts: EngineFacts):
        server = config.server.model_copy(update={"api_key": (), "api_key_file": None})
        self._config = config.model_copy(update={"server": server})
        self._tokenizer, self._worker, self._facts = tokenizer, worker, facts

    async def __aenter__(self) -> LocalServer:
        link = LocalLink(self._config, self._worker, self._facts)
        self.running = link.running
        self._client = EngineClient(self._config.failure)
        self._client.add_link(link)
        self._grammars = Grammars(self._tokenizer, self._config.api.grammar_timeout_s)
        app = create_app(self._client, self._tokenizer, self._config, grammars=self._grammars)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.http.aclose()
        await self._client.close()
        await self._grammars.close()
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
