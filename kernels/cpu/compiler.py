"""Compiles the C files of this folder for the CPU that they will run on, once on each machine.

The result is kept under a name made from all that it depends on, so it is never out of date; it is moved there when it
is complete, so several processes may start at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
SOURCES = Path(__file__).parent
# Signed numbers that overflow wrap around, as in the integer steps of an exponential.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fwrapv", "-fPIC", "-shared")
_TIMEOUT_S = 120.0


class CompileError(Exception):
    """There is no compiler, or it failed; the text says which, and what helps."""


def find_compiler(which: Callable[[str], str | None] = shutil.which) -> str:
    """Path of the machine's C compiler. Raises: CompileError if there is none."""
    found = next(filter(None, map(which, COMPILERS)), None)
    if found is None:
        raise CompileError(f"no C compiler was found ({', '.join(COMPILERS)}); install gcc or clang")
    return found


def cpu_name() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if re.match(r"(model name|flags|Features|isa|CPU part)\s*:", line)}
    return "\n".join([platform.machine(), *sorted(told)])


def sources() -> list[Path]:
    return sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


def library_name(files: Sequence[Path], compiler: str, flags: Sequence[str], cpu: str) -> str:
    """The same for the same sources, flags, compiler and CPU."""
    binary = Path(compiler).resolve()
    stat = binary.stat()
    parts = [*flags, str(binary), str(stat.st_size), str(stat.st_mtime_ns), cpu]
    parts += [part for path in files for part in (path.name, path.read_text())]
    return f"kernels-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}.so"


def cache_folder(home: Callable[[], Path] = Path.home) -> Path:
    """Where compiled kernels are kept; a folder for this process alone where the user has none to write to."""
    with contextlib.suppress(OSError, RuntimeError):  # a home that can't be written, or none
        folder = home() / ".cache" / "pagedray"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    try:
        return Path(tempfile.mkdtemp(prefix="pagedray-"))
    except OSError as error:
        raise CompileError(f"there is no folder for compiled kernels: {error}") from error


def compile_kernels(
    folder: Path, compiler: str, flags: Sequence[str] = FLAGS, files: Sequence[Path] | None = None
) -> tuple[Path, bool]:
    """The compiled library, and whether it had to be compiled.

    Args:
        folder: where such libraries are kept.
        files: C files and headers; those of this folder by default.

    Raises:
        CompileError: with the compiler's first complaint.
    """
    files = sources() if files is None else files
    target = folder / library_name(files, compiler, flags, cpu_name())
    if _is_whole(target):
        return target, False
    c_files = [str(path) for path in files if path.suffix == ".c"]
    try:
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as own:
            unfinished = Path(own, target.name)
            done = subprocess.run(
                [compiler, *flags, "-o", str(unfinished), *c_files, "-lm"],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
            if done.returncode:
                raise CompileError(f"{compiler} failed: {_complaint(done.stderr)}; update it or install gcc or clang")
            with unfinished.open("r+b") as file:  # a loader doesn't mind what follows the library
                file.write(hashlib.sha256(file.read()).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{compiler} could not run or fill {folder}: {error}; install gcc or clang") from error
    return target, True


def _is_whole(library: Path) -> bool:
    """Whether it is there and ends with the digest of what precedes: to load a damaged one would end the process."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    end = len(data) - hashlib.sha256().digest_size
    return end > 0 and hashlib.sha256(data[:end]).digest() == data[end:]


def _complaint(text: str) -> str:
    lines = text.splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line), lines[-1])[:300]
