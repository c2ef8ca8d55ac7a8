"""The whole path from HTTP to SSE in one process: app, client and engines with fake workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import uvicorn
from starlette.applications import Starlette

from pagedray.engine.config import Config, EngineFacts, load_config
from pagedray.engine.engine import Engine
from pagedray.engine.errors import EngineDead
from pagedray.engine.executor import LocalExecutor
from pagedray.engine.grammar.source import GrammarSource
from pagedray.engine.messages import CompiledGrammar, Request, UpdateBatch
from pagedray.engine.metrics import EngineStats
from pagedray.engine.text.chat_template import ChatTemplate
from pagedray.serving.app import create_app
from pagedray.serving.client import Deadlines, EngineClient, EngineLink
from pagedray.serving.grammars import Grammars
from pagedray.serving.router import Router
from tests.fakes import VOCAB_SIZE, ByteTokenizer, FakeWorker, fake_grammar


class LocalLink:
    """An engine in this process. `kill()` is what a dead scheduler actor looks like: every call raises EngineDead."""

    def __init__(self, config: Config, worker_class: type[FakeWorker]):
        self.worker = worker_class(config)
        self.facts: EngineFacts = self.worker.load()
        self.engine = Engine(config, self.facts, LocalExecutor(self.worker))
        self.submitted: list[Request] = []
        self.is_frozen = False  # a frozen process: calls neither return nor fail
        self._death = asyncio.Event()
        self._running = asyncio.ensure_future(self.engine.run())
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def submit(self, requests: tuple[Request, ...]) -> None:
        await self._alive()
        self.submitted += requests
        self.engine.submit(requests)

    async def poll(self, client_id: str, ack: int) -> UpdateBatch:
        await self._alive()
        polling = asyncio.ensure_future(self.engine.poll(client_id, ack, 1.0))
        death = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait((polling, death), return_when=asyncio.FIRST_COMPLETED)
            await self._alive()
            return await polling
        finally:
            polling.cancel()
            death.cancel()

    async def abort(self, client_id: str, request_ids: tuple[str, ...]) -> None:
        await self._alive()
        self.engine.abort(request_ids)

    async def health(self) -> None:
        await self._alive()
        self.engine.health()

    async def stats(self) -> EngineStats:
        await self._alive()
        return await self.engine.stats_with_experts()

    def kill(self) -> None:
        self._death.set()
        self._running.cancel()

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _alive(self) -> None:
        if self._death.is_set():
            raise EngineDead("killed")
        if self.is_frozen:
            await asyncio.Event().wait()

    @property
    def num_used_blocks(self) -> int:
        return self.engine.stats().scheduler.num_used_blocks


TEMPLATE = """{%- for message in messages -%}
{{ message.role }}:{{ message.content }}
{% endfor -%}
{%- if note %}{{ note | tojson }}{% endif -%}
{%- if add_generation_prompt %}assistant:{% endif -%}"""


class TemplatedTokenizer(ByteTokenizer):
    """Bytes, with a real chat template."""

    special_ids = frozenset(range(256, VOCAB_SIZE))

    def __init__(self, template: str = TEMPLATE):
        self.chat_template = template
        self._template = ChatTemplate(template)

    def template_uses(self, name: str) -> bool:
        return self._template.uses(name)

    def apply_chat_template(self, messages: Any, *, kwargs: Any = None, **how: bool) -> str:
        return self._template.render(messages, kwargs or {}, **how)


class ScriptedGrammars(Grammars):
    """Makes of every grammar one that a fake worker answers with `output`. `sources` has what it was asked for."""

    def __init__(self, output: str):
        self.output = output
        self.sources: list[GrammarSource] = []

    async def compile(self, source: GrammarSource, facts: EngineFacts) -> CompiledGrammar:
        self.sources.append(source)
        return fake_grammar(self.output.encode())

    async def close(self) -> None:
        pass


class Rig:
    """Engines, client and app. `http` talks to the app without a socket; `served()` puts it on a loopback port."""

    def __init__(
        self,
        worker_class: type[FakeWorker] = FakeWorker,
        num_engines: int = 1,
        on_link_dead: Callable[[EngineLink], None] | None = None,
        deadlines: Deadlines | None = None,
        router: Router | None = None,
        template: str = TEMPLATE,
        grammars: Grammars | None = None,
        **settings: Any,
    ):
        self.worker_class = worker_class
        self.num_engines = num_engines
        self.config = load_config(overrides={"num_kv_blocks": 256, "block_size": 4, **settings})
        self.client = EngineClient(self.config.failure, on_link_dead, deadlines or Deadlines(), router)
        self.links: list[LocalLink] = []
        self.tokenizer: Any = TemplatedTokenizer(template)
        self.app: Starlette = create_app(self.client, self.tokenizer, self.config, grammars=grammars)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", timeout=60)

    def start_engine(self) -> LocalLink:
        link = LocalLink(self.config, self.worker_class)
        self.links.append(link)
        self.client.add_link(link)
        return link

    async def __aenter__(self) -> Rig:
        for _ in range(self.num_engines):
            self.start_engine()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.http.aclose()
        await self.client.close()
        await self.app.state.grammars.close()
        for link in self.links:
            await link.close()

    @property
    def engine(self) -> Engine:
        return self.links[0].engine

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return await self.http.post(path, **kwargs)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"model": "fake", **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/chat/completions", {"model": "fake", **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Chunks of a stream, checked by `read_sse`."""
        response = await self.post(path, {"model": "fake", "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_sse(response.text)

    async def idle(self, timeout_s: float = 10.0) -> None:
        """Return once no engine holds anything, else fail."""
        async with asyncio.timeout(timeout_s):
            while any(self._is_busy(link) for link in self.links) or self.client.num_live:
                await asyncio.sleep(0.005)

    def _is_busy(self, link: LocalLink) -> bool:
        stats = link.engine.stats().scheduler
        return not link._death.is_set() and bool(stats.num_used_blocks or stats.num_running or stats.num_waiting)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve the app on a loopback port; gives its URL."""
        settings = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(settings)
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await serving

    @asynccontextmanager
    async def openai(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """The official client against a served app."""
        async with (
            self.served() as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client


def read_sse(text: str) -> list[dict[str, Any]]:
    """Chunks of a complete stream that ended well: framing, equal heads, one finish reason per choice, [DONE] last."""
    assert text.endswith("data: [DONE]\n\n")
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for key in ("id", "object", "created", "model", "system_fingerprint"):
        assert len({chunk[key] for chunk in chunks}) == 1
    finished: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in finished, "something came after the finish reason"
            assert "finish_reason" in choice and "logprobs" in choice
            if choice["finish_reason"] is not None:
                finished.add(choice["index"])
    assert finished == {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    return chunks


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Choice index → its joined text, of chat or text completion chunks."""
    out: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            out[choice["index"]] = out.get(choice["index"], "") + piece
    return out


def text_of(token_ids: list[int]) -> str:
    return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")
