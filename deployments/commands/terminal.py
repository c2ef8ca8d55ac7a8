"""Where a person, or a pipe, types prompts and reads answers."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from pagedray.deployments.commands.exit_code import CommandError

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: an answer mustn't steer a terminal
PROMPT, MORE = "> ", "… "
KEPT_LINES = 1000


class Terminal:
    """
    Args:
        environ: NO_COLOR and TERM count, and XDG_STATE_HOME for the history of what was typed.
    """

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO, environ: Mapping[str, str]):
        if isinstance(stdout, io.TextIOWrapper):
            stdout.reconfigure(errors="replace")  # what a terminal of few characters can't show is no error
        self._in, self._out, self._err = stdin, stdout, stderr
        self.is_typed = stdin.isatty()  # else lines come from a pipe or a file
        self.is_watched = stdout.isatty()
        self._dims = self.is_watched and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"
        self._is_line_begun = False
        state = environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._history = Path(state).expanduser() / "pagedray" / "chat_history"

    @contextlib.contextmanager
    def history(self) -> Iterator[None]:
        """Lines typed in here can be called back with the arrow keys, also the next time."""
        if not (self.is_typed and self.is_watched):
            yield
            return
        try:
            import readline
        except ImportError:  # Python can be built without it; lines are typed without comfort then
            yield
            return
        readline.set_history_length(KEPT_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._history)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # no place for it: the next chat begins without
                self._history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))  # prompts are private
                readline.write_history_file(self._history)

    def ask(self) -> str | None:
        """The next prompt; None at the end of the input. A backslash at a line's end joins the next line to it."""
        lines: list[str] = []
        while True:
            line = self._read(MORE if lines else PROMPT)
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def everything(self) -> str:
        """All of the input as one prompt."""
        return self._text(self._in.read)

    def answer(self, text: str) -> None:
        """A piece of the answer, shown at once."""
        self._write(text)

    def reason(self, text: str) -> None:
        """A piece of what the model thinks before it answers: dimmed, and only where somebody watches."""
        if self.is_watched:
            self._write(text, self._dims)

    def gap(self) -> None:
        """An empty line between reasoning and answer."""
        if self.is_watched:
            self._write("\n\n")

    def end_line(self) -> None:
        """Go to a new line, unless the cursor is at the beginning of one."""
        if self._is_line_begun:
            self._write("\n")

    def note(self, text: str) -> None:
        """A line about the program, beside the answers."""
        if self.is_watched:
            self.end_line()
        self._err.write(f"{DIM}{text}{PLAIN}\n" if self._dims and self._err.isatty() else f"{text}\n")
        self._err.flush()

    def _read(self, prompt: str) -> str | None:
        if self.is_typed and self.is_watched:
            self.end_line()
            self._is_line_begun = True  # Ctrl-C and Ctrl-D leave the cursor behind the prompt
            try:
                line = input(prompt)
            except EOFError:
                return None
            self._is_line_begun = False
            return line
        if self.is_typed:  # answers go elsewhere, and prompts must not go with them
            self._err.write(prompt)
            self._err.flush()
        line = self._text(self._in.readline)
        return line.removesuffix("\n") if line else None

    def _text(self, read: Callable[[], str]) -> str:
        try:
            return read()
        except UnicodeDecodeError as error:
            raise CommandError(f"the input is not {self._in.encoding}: {error}") from None

    def _write(self, text: str, dim: bool = False) -> None:
        if self.is_watched:
            text = CONTROL.sub("", text)
        if not text:
            return
        self._out.write(f"{DIM}{text}{PLAIN}" if dim else text)
        self._out.flush()
        self._is_line_begun = not text.endswith("\n")
