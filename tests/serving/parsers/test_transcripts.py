"""Every family's outputs mean the same however they are cut, and nothing of them is lost."""

from __future__ import annotations

import json
import random
import re

import pytest

from pagedray.serving.parsers.events import ToolArguments, ToolStart
from tests.serving.parsers.transcripts import HARD, TRANSCRIPTS, Transcript, meaning_of, parse

NAMED = [pytest.param(t, id=f"{t.tool}-{i}") for i, t in enumerate(TRANSCRIPTS)]


@pytest.mark.parametrize("transcript", NAMED)
def test_an_output_means_the_same_however_it_is_cut(transcript: Transcript) -> None:
    text = transcript.text
    assert parse(transcript.parser(), [text]) == transcript.meaning
    assert parse(transcript.parser(), text) == transcript.meaning
    for at in range(len(text)):
        assert parse(transcript.parser(), [text[:at], "", text[at:]]) == transcript.meaning, at
    random_ = random.Random(len(text))
    for _ in range(40):
        cuts = sorted(random_.choices(range(len(text) + 1), k=random_.randint(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(transcript.parser(), pieces) == transcript.meaning, cuts


@pytest.mark.parametrize("transcript", NAMED)
def test_an_output_may_end_anywhere(transcript: Transcript) -> None:
    whole = transcript.meaning
    for size in range(len(transcript.text)):
        text = transcript.text[:size]
        cut = parse(transcript.parser(), [text])
        assert parse(transcript.parser(), text) == cut, size
        # Calls that were begun stay; what the last one has of its arguments is the beginning of all of them.
        assert len(cut.calls) <= len(whole.calls)
        assert whole.reasoning.startswith(re.sub(r"\s*<[^>]*$", "", cut.reasoning))  # what may be a tag stays text
        for (name, given), (whole_name, all_given) in zip(cut.calls, whole.calls, strict=False):
            assert name == whole_name
            if transcript.tool not in ("pythonic", "qwen3_coder"):  # they write values, not their beginnings
                assert all_given.startswith(re.sub(r"<[^>]*$", "", given)), size
        for name, given in cut.calls[:-1]:
            assert (name, given) in whole.calls


@pytest.mark.parametrize("transcript", [p for p in NAMED if HARD in p.values[0].text])
def test_arguments_come_while_they_are_written(transcript: Transcript) -> None:
    parser = transcript.parser()
    before, behind = transcript.text[: transcript.text.index(HARD) + 9], len(HARD) - 9
    events = parser.feed(before)
    assert [type(event) for event in events[-2:]] == [ToolStart, ToolArguments]
    pieces = [parser.feed(char) for char in transcript.text[len(before) :][:behind]]
    assert sum(map(bool, pieces)) > 0.8 * behind  # brackets may begin a marker: they wait for the next character
    assert "".join(event.text for new in pieces for event in new if isinstance(event, ToolArguments)) == HARD[9:]


@pytest.mark.parametrize("transcript", [p for p in NAMED if not p.values[0].calls and not p.values[0].reasoning_parser])
def test_content_waits_only_for_what_may_be_a_call(transcript: Transcript) -> None:
    parser = transcript.parser()
    shown = meaning_of([event for char in transcript.text + " and on." for event in parser.feed(char)])
    assert shown.content == transcript.content + " and on."


def test_arguments_are_json() -> None:
    for transcript in TRANSCRIPTS:
        for _, given in transcript.calls:
            if "tru, ]" not in given and "[1}" not in given:
                assert isinstance(json.loads(given), dict)
