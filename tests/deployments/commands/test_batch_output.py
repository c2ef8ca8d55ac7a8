from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from pagedray.deployments.commands.batch_line import BatchRequest, Failure, Response, Result
from pagedray.deployments.commands.batch_output import BatchOutput
from pagedray.deployments.commands.exit_code import CommandError

OK = Result("a", Response(200, "r", {"text": "two\nlines \u2028"}))
BAD = Result(None, error=Failure("invalid_json_line", "no", 7))


def request(custom_id: str) -> BatchRequest:
    return BatchRequest(custom_id, "/v1/completions", b"{}")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    output = BatchOutput(str(path))
    output.write(OK)
    output.write(BAD)
    output.close()
    return path


def test_a_result_is_a_line_of_the_batch_format(path: Path) -> None:
    first, second = map(json.loads, path.read_bytes().splitlines())
    assert first == {
        "id": OK.id,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "two\nlines \u2028"}},
        "error": None,
    }
    assert second["response"] is None
    assert second["error"] == {"code": "invalid_json_line", "message": "no", "line": 7}


@pytest.mark.parametrize("tail", [b"", b'{"id":"batch_req_1","custom_id":"torn","resp', b"{", b"\0\0\0", b"\n"])
def test_what_is_there_is_kept_and_a_torn_line_removed(path: Path, tail: bytes) -> None:
    before = path.read_bytes()
    path.write_bytes(before + tail)
    output = BatchOutput(str(path))
    assert output.has(1, request("a")) and output.has(7, BAD)
    assert not output.has(1, request("torn")) and not output.has(8, BAD)
    output.write(Result("b"))
    output.close()
    kept, _, last = path.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    assert kept.strip() + b"\n" == before
    assert json.loads(last)["custom_id"] == "b"


def test_a_last_line_that_lacks_its_end_alone_is_kept(path: Path) -> None:
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    output = BatchOutput(str(path))
    output.write(Result("b"))
    output.close()
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 3


@pytest.mark.parametrize("text", ["precious\n", "precious", '{"id": "x"', '{"custom_id": "a"}\n', "[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(CommandError, match=r"line 1 of .*notes is no result"):
        BatchOutput(str(path))
    assert path.read_text() == text


def test_two_runs_do_not_share_a_file(path: Path) -> None:
    output = BatchOutput(str(path))
    with pytest.raises(CommandError, match="another run"):
        BatchOutput(str(path))
    output.close()
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the failed one let go too


def test_a_full_disk_is_an_error_with_words() -> None:
    output = BatchOutput("/dev/full")
    with pytest.raises(CommandError, match=r"can't write results to /dev/full.*space"):
        output.write(OK)
    output.close()


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for name in (str(tmp_path), str(tmp_path / "no" / "where")):
        with pytest.raises(CommandError, match="-o: "):
            BatchOutput(name)
