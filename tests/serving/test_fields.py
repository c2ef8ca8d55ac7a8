"""The README's tables of fields are those that the code makes, and have every field once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pagedray.serving import fields

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_has_the_tables() -> None:
    text = README.read_text()
    assert text.count(fields.BEGIN) == text.count(fields.END) == 1
    assert fields.replaced(text) == text, "make them anew: python -m pagedray.serving.fields README.md"


@pytest.mark.parametrize("api", fields.APIS, ids=lambda api: api.route)
def test_every_field_is_in_its_table_once(api: fields.Api) -> None:
    table = fields.tables().split(f"`{api.route}`")[1].split("\n\n")[1]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    known = {field.alias or name for name, field in api.request.model_fields.items()}
    assert sorted(named) == sorted(known | set(api.ignored) | set(api.refused))


def test_it_can_be_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["fields"])
    fields.main()
    assert capsys.readouterr().out == fields.tables()
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{fields.BEGIN}old\n{fields.END}after\n")
    monkeypatch.setattr(sys, "argv", ["fields", str(document)])
    fields.main()
    assert document.read_text() == f"before\n{fields.BEGIN}{fields.tables()}{fields.END}after\n"
