"""A starting engine as the command sees it: how far its worker has loaded, and what it knows once it runs."""

from __future__ import annotations

from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from pagedray.deployments.directory import Directory
from pagedray.deployments.phases import Phases
from pagedray.deployments.worker_actor import LoadProgress
from pagedray.engine.config import EngineFacts
from pagedray.engine.messages import decode

BEFORE_LOADING = "engine replica, worker process"


class EngineWatch:
    """Follows the engine that is ready first.

    Args:
        directory: where its actors are named.
        phases: where its progress is shown.
    """

    def __init__(self, directory: Directory, phases: Phases):
        self._directory, self._phases = directory, phases
        self._calls: dict[tuple[str, str], ObjectRef[Any]] = {}  # open ones, by role and engine
        self._worker: str | None = None  # the engine whose worker is followed
        self._num_shown = 0

    @property
    def has_begun(self) -> bool:
        """Whether a worker loads."""
        return self._worker is not None

    def look(self) -> EngineFacts | None:
        """Show what is new; the facts once an engine runs."""
        for engine_id, worker in self._directory.find("worker").items():
            progress = self._answer("worker", engine_id, worker.progress)
            if progress is not None and self._worker in (None, engine_id):
                self._show(engine_id, decode(LoadProgress, progress))
        if self._worker is None:
            self._phases.draw(BEFORE_LOADING)
        for engine_id, scheduler in self._directory.find("scheduler").items():
            facts = self._answer("scheduler", engine_id, scheduler.facts)
            if facts is not None:
                return self._finish(decode(EngineFacts, facts))
        return None

    def _answer(self, role: str, engine_id: str, method: Any) -> bytes | None:
        """The method's answer if it is there by now; an actor that died gives none."""
        call = self._calls.get((role, engine_id)) or method.remote()
        self._calls[role, engine_id] = call
        if not ray.wait([call], timeout=0)[0]:
            return None
        del self._calls[role, engine_id]
        try:
            answer: bytes = ray.get(call)
            return answer
        except RayError:
            return None

    def _show(self, engine_id: str, progress: LoadProgress) -> None:
        if self._worker is None:
            self._worker = engine_id
            self._phases.end(BEFORE_LOADING, ago_s=progress.elapsed_s)
        for phase in progress.phases[self._num_shown :]:
            self._phases.end(phase.name, phase.bar, seconds=phase.seconds)
        self._num_shown = len(progress.phases)
        self._phases.draw(progress.bar or "loading")

    def _finish(self, facts: EngineFacts) -> EngineFacts:
        """Show what ended between two looks."""
        loading = facts.start_phases[1:]
        if self._worker is None:
            self._phases.end(BEFORE_LOADING, ago_s=sum(seconds for _, seconds in loading))
        for name, seconds in loading[self._num_shown :]:
            self._phases.end(name, seconds=seconds)
        return facts
