from __future__ import annotations

import io

import pytest

from pagedray.deployments.commands.exit_code import CommandError
from pagedray.deployments.commands.terminal import Terminal


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(out: io.StringIO, **environ: str) -> Terminal:
    return Terminal(io.StringIO("one\ntwo \\\nthree\n"), out, io.StringIO(), {"TERM": "xterm", **environ})


def test_an_answer_cannot_steer_the_terminal() -> None:
    shown, piped = Tty(), io.StringIO()
    for out in (shown, piped):
        terminal(out).answer("a\x1b]0;title\x07\tb\r\n\x9b2J")
    assert shown.getvalue() == "a]0;title\tb\n2J"
    assert piped.getvalue() == "a\x1b]0;title\x07\tb\r\n\x9b2J"  # whoever reads this gets what was said


@pytest.mark.parametrize(
    ("out", "environ", "text"),
    [
        (Tty(), {}, "\x1b[2mhm\x1b[0m"),
        (Tty(), {"NO_COLOR": "1"}, "hm"),
        (Tty(), {"TERM": "dumb"}, "hm"),
        (io.StringIO(), {}, ""),
    ],
)
def test_reasoning_is_dimmed_where_somebody_watches(out: io.StringIO, environ: dict[str, str], text: str) -> None:
    terminal(out, **environ).reason("hm")
    assert out.getvalue() == text


def test_a_backslash_joins_lines() -> None:
    lines = terminal(io.StringIO())
    assert [lines.ask(), lines.ask(), lines.ask()] == ["one", "two \nthree", None]


def test_input_of_another_encoding_is_an_error() -> None:
    text = io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8")
    with pytest.raises(CommandError, match="utf-8"):
        Terminal(text, io.StringIO(), io.StringIO(), {}).ask()
