"""The compiled kernels, loaded into this process; ops call them where they can be had and torch elsewhere."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagedray.kernels.cpu.compiler import FLAGS, CompileError, cache_folder, compile_kernels, find_compiler

log = logging.getLogger(__name__)

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in numbers.h

_P, _N, _F, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "pagedray_use_team": [_P],
    "pagedray_rms_norm": [*[_P] * 4, *[_N] * 7, _F, _I, _I, _N],
    "pagedray_write_qkv": [*[_P] * 6, *[_N] * 8, _F, _I, _I, _N],
    "pagedray_attention": [*[_P] * 7, *[_N] * 7, _F, _F, _I, _N],
}


@dataclasses.dataclass(frozen=True)
class CompiledKernels:
    library: ctypes.CDLL | None  # None: they can't be had
    reason: str  # why not and what helps, or what compiled them
    was_compiled: bool = False  # just now


@functools.cache
def compiled_kernels() -> CompiledKernels:
    """Compiles them unless an earlier process did. Says in the log why they can't be had."""
    try:
        return load_kernels(find_compiler(), cache_folder())
    except CompileError as error:
        log.warning("cpu kernels are missing, torch computes in their place and slower: %s", error)
        return CompiledKernels(None, str(error))


def load_kernels(compiler: str, folder: Path, flags: Sequence[str] = FLAGS) -> CompiledKernels:
    """Raises: CompileError."""
    team = torch_team()
    path, was_compiled = compile_kernels(folder, compiler, flags)
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
    except (OSError, AttributeError) as error:
        raise CompileError(f"what {compiler} made can't be loaded: {error}; remove {path}") from error
    library.pagedray_use_team(team)
    return CompiledKernels(library, f"compiled by {compiler}", was_compiled)


def torch_team(maps: Path = Path("/proc/self/maps")) -> int:
    """Address of the function that starts torch's OpenMP threads. A second OpenMP would bring threads of its own."""
    try:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines()}
    except OSError as error:
        raise CompileError(f"torch's threads are only found on Linux: {error}") from error
    found = sorted(path for path in paths if re.search(r"/lib(g|i)?omp\d*[^/]*\.so[^/]*$", path))
    beside_torch = [path for path in found if path.startswith(str(Path(torch.__file__).parent))]
    for path in beside_torch or found:
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None
            return address
    raise CompileError(
        f"torch's OpenMP library was not found among {found or 'the loaded ones'}; use torch's own wheel"
    )


def library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, if they can be had and know the tensors' types; rows must be whole."""
    library = compiled_kernels().library
    if library is not None:
        for tensor in tensors:
            if tensor.dtype not in TYPES or tensor.stride(-1) != 1:
                return None
    return library
