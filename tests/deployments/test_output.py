"""Phases and log lines on the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from pagedray.deployments import phases as module
from pagedray.deployments.launch import blocks_per_sequence, describe_ranks
from pagedray.deployments.log_tail import LogTail
from pagedray.deployments.phases import Phases
from pagedray.engine.config import load_config
from tests.deployments.test_gang import Steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_phases_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    phases = Phases(out, 98.0)
    phases.end("one")
    now[0] = 110.0
    phases.end("two", ago_s=4.0)
    phases.end("three", "a detail", seconds=1.5)
    phases.end("four")
    phases.end("none", seconds=7.0)  # a clock elsewhere ran ahead: never past now
    lengths = [float(text) for text in re.findall(r"(\d+\.\d) s", out.getvalue())]
    assert lengths == [2.0, 6.0, 1.5, 2.5, 0.0]
    assert sum(lengths) == phases.total_s == 12.0
    assert "three" in out.getvalue().splitlines()[2] and out.getvalue().splitlines()[2].endswith("s  a detail")


def test_a_terminal_shows_the_running_phase_and_a_file_does_not() -> None:
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        phases = Phases(out, 0.0)
        phases.draw("loading  40%")
        phases.say("done")
    assert "loading  40%" in terminal.getvalue() and terminal.getvalue().endswith("\r\x1b[Kdone\n")
    assert file.getvalue() == "done\n"


def log_line(level: str, text: str) -> str:
    return f"{level} 2026-12-01 05:46:30,673 default_EngineReplica nann47nl -- {text}\n"


def test_the_log_shows_what_engines_say_and_warnings(tmp_path: Path) -> None:
    old = tmp_path / "replica_default_EngineReplica_old.log"
    old.write_text(log_line("ERROR", "before"))
    (tmp_path / "replica_other_EngineReplica_x.log").write_text(log_line("ERROR", "of another application"))
    tail = LogTail(tmp_path, "default")
    assert tail.lines() == []
    with old.open("a") as file:
        file.write(log_line("INFO", "throughput generation=1.0 tok/s engine_id=ab"))
        file.write(log_line("INFO", "Serve's own chatter"))
        file.write("of which this is part\n")
        file.write(log_line("WARNING", "odd") + "Traceback\n" + log_line("ERROR", "half a line")[:-6])
    assert tail.lines() == ["05:46:30 throughput generation=1.0 tok/s engine_id=ab", "05:46:30 WARNING odd"]
    (tmp_path / "replica_default_Ingress_new.log").write_text(log_line("ERROR", "new file"))
    with old.open("a") as file:
        file.write(" line\n")
    assert tail.lines() == ["05:46:30 ERROR half a line", "05:46:30 ERROR new file"]


def test_a_window_holds_what_it_sees() -> None:
    from msgspec.structs import replace

    facts = replace(Steps(None, 0).load(lambda *args: None), max_model_len=100, block_size=16)
    assert blocks_per_sequence(facts) == 7
    assert blocks_per_sequence(replace(facts, block_groups=(None, 32))) == 9


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"num_engine_replicas": 2}, "2 of 1 rank (tensor parallel 1 x pipeline stages 1)"),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "1 of 4 ranks (tensor parallel 2 x pipeline stages 2)",
        ),
        ({"min_replicas": 0}, "0 to 1, by load, of 1 rank (tensor parallel 1 x pipeline stages 1)"),
    ],
)
def test_engines_and_ranks_are_told_where_there_are_several(settings: dict[str, int], words: str) -> None:
    assert describe_ranks(load_config(overrides=settings)) == words
