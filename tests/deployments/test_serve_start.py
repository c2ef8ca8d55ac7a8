"""Serve's start in a thread: when applications may come, and what its failure says."""

from __future__ import annotations

import threading

import pytest
from ray import serve
from ray.exceptions import RayError

from pagedray.deployments import serve_start as module
from pagedray.deployments.proxy import Listener
from pagedray.deployments.serve_start import ServeStart
from pagedray.engine.errors import EngineUnavailable

LISTENER = Listener("127.0.0.1", 1234, "a proxy")


def test_applications_need_not_wait_for_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    proxy_is_up, looks = threading.Event(), iter([False, False, True])

    def start(**options: object) -> None:
        asked.update(options)
        proxy_is_up.wait(30)

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(module, "_has_controller", lambda: next(looks))
    starting = ServeStart(LISTENER, "HeadOnly")
    starting.wait_for_controller()
    assert not proxy_is_up.is_set() and next(looks, None) is None
    assert asked == {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": 1234}}
    proxy_is_up.set()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("The actor died\n[ALERT] cannot bind 127.0.0.1:1234\nmore", r"\[ALERT\] cannot bind 127.0.0.1:1234$"),
        ("The actor died\nfor some reason\n", "for some reason$"),
    ],
)
def test_a_failure_ends_the_wait_in_one_line(said: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: object) -> None:
        raise RayError(said)

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(module, "_has_controller", lambda: False)
    with pytest.raises(EngineUnavailable, match=f"^Serve does not start: {expected}"):
        ServeStart(LISTENER, "HeadOnly").wait_for_controller()


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: object) -> None:
        raise ValueError("unknown location")

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(module, "_has_controller", lambda: False)
    with pytest.raises(ValueError, match="unknown location"):
        ServeStart(LISTENER, "Nowhere").wait_for_controller()
