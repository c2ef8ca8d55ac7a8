"""Responses that run on while nobody waits: each is a task of this ingress, and whoever wants it reads the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack

from pagedray.engine.errors import EngineUnavailable, PagedrayError
from pagedray.serving.answer import Answer
from pagedray.serving.openai.respond import Call, Context, Job, open_answer, usage_of
from pagedray.serving.openai.responses.form import ResponseForm
from pagedray.serving.openai.responses.store import OWNER_POLL_S, Record, ResponseStore

log = logging.getLogger(__name__)


class Background:
    """The running responses of one ingress.

    Args:
        store: where their state and events go.
    """

    def __init__(self, store: ResponseStore):
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, context: Context, job: Job, form: ResponseForm, call: Call) -> Record:
        """Have an engine accept a job, and read its answer from now on. Gives what is in the store then.

        Raises:
            UserError, Overloaded, EngineUnavailable: it was not accepted.
        """
        async with AsyncExitStack() as stack:
            answering = open_answer(context, job, call.session, deadline=call.deadline, arrival_s=call.arrival_s)
            answer = await stack.enter_async_context(answering)
            form.start("queued")
            record = form.record()
            await self._store.put(record)
            task = asyncio.get_running_loop().create_task(self._run(job, form, answer, stack.pop_all()))
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return record

    async def _run(self, job: Job, form: ResponseForm, answer: Answer, stack: AsyncExitStack) -> None:
        async with stack:
            reading = asyncio.ensure_future(self._read(job, form, answer))
            watching = asyncio.ensure_future(self._until_unwanted(form.id))
            try:
                await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    form.cancel(usage_of(job, answer))
            finally:
                reading.cancel()
                watching.cancel()
                await asyncio.gather(reading, watching, return_exceptions=True)
        await self._keep(form)

    async def _read(self, job: Job, form: ResponseForm, answer: Answer) -> None:
        """Read the answer to its end, whatever that is."""
        try:
            form.start("in_progress")
            await self._store.update(form.record())
            await self._tell(form, form.begin_events() if form.streams else [])
            while deltas := await answer.next():
                if form.streams:
                    await self._tell(form, form.delta_events(deltas))
                else:
                    form.add(deltas)
            form.finish(usage_of(job, answer))
            await self._tell(form, [form.end_event()] if form.streams else [])
        except Exception as error:
            if not isinstance(error, PagedrayError):
                log.exception("a background response failed response=%s", form.id)
            told = error if isinstance(error, PagedrayError) else None
            with contextlib.suppress(EngineUnavailable):
                await self._tell(form, form.failed_events(told) if form.streams else [])
            form.fail(told)

    async def _tell(self, form: ResponseForm, events: list[bytes]) -> None:
        if events:
            await self._store.append(form.id, tuple(events))

    async def _keep(self, form: ResponseForm) -> None:
        try:
            await self._store.update(form.record())
        except EngineUnavailable as error:
            log.warning("a background response is lost response=%s reason=%s", form.id, error)

    async def _until_unwanted(self, response_id: str) -> None:
        with contextlib.suppress(EngineUnavailable):  # no store, nobody to read it
            while await self._store.is_wanted(response_id, OWNER_POLL_S):
                pass
