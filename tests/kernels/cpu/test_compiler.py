"""Compiling: once for each machine, complete or not at all, and in words where it can't be done."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedray.kernels.cpu.compiler import (
    FLAGS,
    CompileError,
    cache_folder,
    compile_kernels,
    find_compiler,
    library_name,
    sources,
)

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def compiler() -> str:
    try:
        return find_compiler()
    except CompileError as error:
        pytest.skip(str(error))


def write(folder: Path, text: str) -> list[Path]:
    folder.mkdir()
    path = folder / "answer.c"
    path.write_text(text)
    return [path]


def test_the_first_compiler_of_the_list_is_taken() -> None:
    assert find_compiler({"gcc": "/bin/gcc", "clang": "/bin/clang"}.get) == "/bin/gcc"


def test_no_compiler_is_told_with_what_helps() -> None:
    with pytest.raises(CompileError, match=r"no C compiler was found \(cc, gcc, clang\); install gcc or clang"):
        find_compiler(lambda name: None)


def test_compiled_once_and_by_one_of_many(compiler: str, tmp_path: Path) -> None:
    files, folder = write(tmp_path / "source", SOURCE), tmp_path / "cache"
    folder.mkdir()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: compile_kernels(folder, compiler, files=files), range(4)))
    (path,) = {path for path, _ in results}
    assert any(was_compiled for _, was_compiled in results)
    assert compile_kernels(folder, compiler, files=files) == (path, False)
    assert list(folder.iterdir()) == [path]


def test_a_complaint_is_passed_on_and_nothing_is_left(compiler: str, tmp_path: Path) -> None:
    files, folder = write(tmp_path / "source", "int answer(void) { return no_such_name; }\n"), tmp_path / "cache"
    folder.mkdir()
    with pytest.raises(CompileError, match=r"failed: .*error.*no_such_name.*; update it or install gcc or clang"):
        compile_kernels(folder, compiler, files=files)
    assert list(folder.iterdir()) == []


def test_a_compiler_that_does_not_start_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("not a program")
    with pytest.raises(CompileError, match=r"cc could not run or fill .*install gcc or clang"):
        compile_kernels(tmp_path, str(broken), files=write(tmp_path / "source", SOURCE))


def test_the_name_depends_on_all_that_the_result_does(compiler: str, tmp_path: Path) -> None:
    files = write(tmp_path / "one", SOURCE)
    name = library_name(files, compiler, FLAGS, "a CPU")
    assert name == library_name(files, compiler, FLAGS, "a CPU")
    assert name != library_name(files, compiler, FLAGS, "another CPU")
    assert name != library_name(files, compiler, FLAGS[1:], "a CPU")
    assert name != library_name(write(tmp_path / "two", SOURCE + "\n"), compiler, FLAGS, "a CPU")


def test_headers_are_sources_too() -> None:
    assert {path.suffix for path in sources()} == {".c", ".h"}


def test_kernels_are_kept_in_the_home_folder(tmp_path: Path) -> None:
    assert cache_folder(lambda: tmp_path) == tmp_path / ".cache" / "pagedray"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    check_folder_elsewhere(tmp_path)
    tmp_path.chmod(0o700)


def test_a_home_that_is_no_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("")
    check_folder_elsewhere(home)


def check_folder_elsewhere(home: Path) -> None:
    folder = cache_folder(lambda: home)
    assert home not in folder.parents
    assert list(folder.iterdir()) == []
    folder.rmdir()


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "cut"])
def test_a_damaged_library_is_compiled_anew(compiler: str, tmp_path: Path, damage: bytes | None) -> None:
    files, folder = write(tmp_path / "source", SOURCE), tmp_path / "cache"
    folder.mkdir()
    path, _ = compile_kernels(folder, compiler, files=files)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert compile_kernels(folder, compiler, files=files) == (path, True)
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_a_full_folder_is_told(compiler: str, tmp_path: Path) -> None:
    missing = tmp_path / "cache" / "that is not there"
    with pytest.raises(CompileError, match="could not run or fill"):
        compile_kernels(missing, compiler, files=write(tmp_path / "source", SOURCE))
