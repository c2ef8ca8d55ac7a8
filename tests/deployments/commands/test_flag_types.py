from __future__ import annotations

import argparse

import pytest

from pagedray.deployments.commands.flag_types import count, seconds


def test_numbers() -> None:
    assert count("12") == 12
    assert (seconds("0"), seconds("1.5")) == (0.0, 1.5)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        count(text)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "x", ""])
def test_no_seconds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="seconds"):
        seconds(text)
