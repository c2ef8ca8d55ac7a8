"""The file that a batch's results are appended to, and what an earlier run has left in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys

import msgspec

from pagedray.deployments.commands.batch_line import BEGINNING, BatchRequest, Result
from pagedray.deployments.commands.exit_code import CommandError, ExitCode

STDOUT = "-"


class _Error(msgspec.Struct):
    line: int | None = None


class _Written(msgspec.Struct):
    """What is needed of a line that was written."""

    id: str
    custom_id: str | None
    error: _Error | None = None


class BatchOutput:
    """Each result is one write of a whole line, so that what ends this process tears none but the last one.

    Args:
        name: of the file; - is the standard output. A file's results are kept, and a torn last line is removed.

    Attributes:
        num_kept: results that were there.

    Raises:
        CommandError: it can't be opened, another run writes to it, or it holds something else.
    """

    def __init__(self, name: str):
        self.name = name
        self._ids: set[str] = set()
        self._lines: set[int] = set()  # those that only their number stands for
        self.num_kept = 0
        if name == STDOUT:
            sys.stdout.flush()
            self._file = os.dup(sys.stdout.fileno())
            return
        try:
            self._file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CommandError(f"-o: {error}", ExitCode.USAGE) from None
        try:
            if stat.S_ISREG(os.fstat(self._file).st_mode):
                self._take_over()
        except BaseException:
            self.close()
            raise

    def has(self, number: int, line: BatchRequest | Result) -> bool:
        """Whether the result of this line of the input was there.

        Args:
            number: of the line.
        """
        if isinstance(line, BatchRequest):
            return line.custom_id in self._ids
        return number in self._lines

    def write(self, result: Result) -> None:
        """Raises: CommandError."""
        data = memoryview(result.encode() + b"\n")
        try:
            while data:  # one write takes all of it, unless the disk is full or a pipe's reader is slow
                data = data[os.write(self._file, data) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandError(f"can't write results to {self.name}: {error}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # pipes and terminals have nothing to sync
            os.fsync(self._file)
        os.close(self._file)

    def _take_over(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another run writes to {self.name}") from None
        decoder = msgspec.json.Decoder(_Written)
        end = number = 0
        with open(self.name, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        self._keep(decoder.decode(line))
                except msgspec.DecodeError:
                    if line.endswith(b"\n") or not _is_torn(line):
                        text = f"line {number} of {self.name} is no result of a batch; give another -o"
                        raise CommandError(text, ExitCode.USAGE) from None
                    os.ftruncate(self._file, end)  # torn by the end of the run that wrote it
                    return
                end += len(line)
            if number and not line.endswith(b"\n"):
                os.write(self._file, b"\n")

    def _keep(self, result: _Written) -> None:
        self.num_kept += 1
        if result.error is not None and result.error.line is not None:
            self._lines.add(result.error.line)
        elif result.custom_id is not None:
            self._ids.add(result.custom_id)


def _is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a result, or the zeros that a crash of the machine leaves."""
    return BEGINNING.startswith(line[: len(BEGINNING)]) or not line.strip(b"\0")
