"""Processes that belong to one test's Ray: its folder is in their environment, which all of them inherit."""

from __future__ import annotations

import os
import signal
from pathlib import Path


class Process:
    def __init__(self, pid: int, command: str):
        self.pid, self.command = pid, command

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def __repr__(self) -> str:
        return f"{self.pid} {self.command}"


def processes_of(ray_tmpdir: Path) -> list[Process]:
    """Living processes whose RAY_TMPDIR this is, but not this one."""
    mark = f"RAY_TMPDIR={ray_tmpdir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):  # a zombie's is empty
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(int(entry.name), command))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def gcs_address(ray_tmpdir: Path) -> str:
    """Address of the Ray that lives in this folder."""
    (port,) = (ray_tmpdir / "ray" / "session_latest").glob("gcs_server_port_*")
    return f"127.0.0.1:{port.read_text().strip()}"
