"""The compiled kernels in this process: on torch's own threads, and right on a CPU of any kind."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagedray.kernels import compiled_attention, rms_norm, write_qkv
from pagedray.kernels.case import Case
from pagedray.kernels.cpu import library
from pagedray.kernels.cpu.compiler import FLAGS, CompileError, find_compiler
from pagedray.kernels.cpu.library import CompiledKernels, compiled_kernels, load_kernels, torch_team
from tests.kernels.test_cases import check

MODULES = (compiled_attention, rms_norm, write_qkv)
OTHER_CPUS = {
    "any": [flag for flag in FLAGS if flag != "-march=native"],
    "no tiles": [*FLAGS, "-mno-amx-tile", "-mno-amx-bf16"],  # where this CPU has more
}


@pytest.fixture(scope="module", params=OTHER_CPUS)
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CompiledKernels:
    """Without what only this machine's CPU has."""
    try:
        return load_kernels(find_compiler(), tmp_path_factory.mktemp("portable"), OTHER_CPUS[request.param])
    except CompileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("module", "case"),
    [(module, case) for module in MODULES for case in module.CASES],
    ids=lambda value: str(value) if isinstance(value, Case) else "",
)
def test_portable_kernels_equal_their_references(
    module: ModuleType, case: Case, portable: CompiledKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "compiled_kernels", lambda: portable)
    check(module, case, case.op)


def test_one_openmp_in_the_process(portable: CompiledKernels) -> None:
    assert portable.library is not None
    torch.ones(1000, 1000).sum()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    openmp = {path for path in mapped if "omp" in Path(path).name and ".so" in path and "lib" in Path(path).name[:3]}
    assert len(openmp) == 1, openmp


def test_threads_that_are_not_found_are_told(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/libc.so.6\n")
    with pytest.raises(CompileError, match="torch's OpenMP library was not found"):
        torch_team(maps)


def test_without_a_compiler_one_line_says_so_and_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> str:
        raise CompileError("no C compiler was found; install one")

    monkeypatch.setattr(library, "find_compiler", no_compiler)
    compiled_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            x, w = torch.randn(3, 8), torch.ones(8)
            for _ in range(2):
                torch.testing.assert_close(rms_norm.rms_norm(x, w), rms_norm.rms_norm_ref(x, w))
        assert [record.getMessage() for record in caplog.records] == [
            "cpu kernels are missing, torch computes in their place and slower: no C compiler was found; install one"
        ]
    finally:
        compiled_kernels.cache_clear()
