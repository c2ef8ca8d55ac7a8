"""Serve's start, in a thread of its own: its proxies need as long as the first processes of an application."""

from __future__ import annotations

import threading
import time

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from pagedray.deployments.proxy import Listener
from pagedray.engine.errors import EngineUnavailable

LOOK_S = 0.02


class ServeStart:
    """Begins when it is made.

    Args:
        listener: where HTTP is served.
        proxy_location: on which nodes, in Serve's words.
    """

    def __init__(self, listener: Listener, proxy_location: str):
        self._listener, self._proxy_location = listener, proxy_location
        self._error: Exception | None = None
        # A daemon, since it must not keep a process that is told to end.
        self._thread = threading.Thread(target=self._run, name="serve-start", daemon=True)
        self._thread.start()

    def wait_for_controller(self) -> None:
        """Wait until applications can be handed over.

        Raises:
            EngineUnavailable: Serve does not start.
        """
        while self._thread.is_alive() and not _has_controller():
            time.sleep(LOOK_S)
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong so far.

        Raises:
            EngineUnavailable: Serve does not start.
        """
        if isinstance(self._error, RayError):
            lines = str(self._error).strip().splitlines()
            alerts = [line for line in lines if "ALERT" in line]  # HAProxy's own words
            raise EngineUnavailable(f"Serve does not start: {(alerts or lines[-1:])[0]}") from None
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            serve.start(proxy_location=self._proxy_location, http_options=self._listener.http_options)
        except Exception as error:  # it is the main thread's to raise
            self._error = error


def _has_controller() -> bool:
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    except ValueError:
        return False
    return True
