"""How a command ends, for scripts that run it."""

from __future__ import annotations

import enum

from pagedray.engine.errors import PagedrayError


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1  # settings, files, the model
    USAGE = 2  # argparse's own
    UNREACHABLE = 3  # no server answers
    REFUSED = 4  # it answered that the request or the key is wrong (4xx)
    BROKEN = 5  # it failed (5xx), or its answer broke off
    INTERRUPTED = 130  # Ctrl-C, as shells count it


class CommandError(PagedrayError):
    """Ends a command with one line and a code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.FAILED):
        super().__init__(message, code)
        self.message, self.code = message, code

    def __str__(self) -> str:
        return self.message
