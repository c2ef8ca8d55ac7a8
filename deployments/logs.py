"""One log per engine and per ingress: what pagedray's loggers say goes into the Serve replica's own log file."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

MAX_LINES = 1000


class LogLine(msgspec.Struct, frozen=True):
    level: int
    text: str


class LineBuffer(logging.Handler):
    """Keeps the last lines until they are taken: the scheduler actor's way to the log of its replica."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(LogLine(record.levelno, self.format(record)))

    def take(self) -> tuple[LogLine, ...]:
        lines = tuple(self._lines)
        self._lines.clear()
        return lines


def log_to_stderr() -> None:
    """Make pagedray's loggers of this process write to stderr, which Ray keeps in a file for each process."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s -- %(message)s"))
    logging.getLogger("pagedray").addHandler(handler)
    logging.getLogger("pagedray").setLevel(logging.INFO)


def log_to_serve() -> None:
    """Make pagedray's loggers of this process write where Serve's own logger writes."""
    pagedray = logging.getLogger("pagedray")
    pagedray.parent = logging.getLogger("ray.serve")
    pagedray.setLevel(logging.INFO)
