"""A server in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import ray

from tests.deployments.processes import gcs_address, processes_of

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0  # a machine may be busy with anything
END_S = 60.0
REBUILD_S = 120.0

T = TypeVar("T")


class Served:
    """`python ARGS`, a command that prints what `pagedray serve` prints. Its Ray lives in a folder of its own."""

    def __init__(self, *args: str, env: dict[str, str] | None = None):
        self._folder = tempfile.TemporaryDirectory(prefix="pd-", dir="/tmp")  # short: Ray puts sockets there
        self.ray_tmpdir = Path(self._folder.name)
        self._log = self.ray_tmpdir / "output"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PAGEDRAY_"))},
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(self.ray_tmpdir),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self._args = args

    def __enter__(self) -> Served:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._args],
                cwd=ROOT,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a test can send a signal to all, as a terminal does
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if ray.is_initialized():
                ray.shutdown()
            self.stop()
        finally:
            for process in self.left_over():
                process.kill()
            self._folder.cleanup()

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        match = re.search(r"ready in .*?: (https?://\S+)", self.output)
        assert match is not None, self.output
        return match[1]

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: "  curl " in self.output, "the ready line", START_S)

    def wait_for(self, condition: Callable[[], T], what: str, timeout_s: float = START_S) -> T:
        """What `condition` gives once that is true."""
        return wait_for(condition, what, timeout_s, lambda: self.output, self._check_running)

    def stop(self) -> int:
        """Ask it to end, and wait for that; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self, timeout_s: float = END_S) -> int:
        """Wait for the end; the exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not ended after {timeout_s:g} s:\n{self.output}") from None

    def left_over(self) -> list[Any]:
        """Processes of this server's Ray that live."""
        return processes_of(self.ray_tmpdir)

    def join_ray(self) -> None:
        """Make this process a driver of the server's Ray."""
        if not ray.is_initialized():
            ray.init(address=gcs_address(self.ray_tmpdir), log_to_driver=False, logging_level="ERROR")

    def _check_running(self) -> None:
        assert self.process.poll() is None, f"ended with status {self.process.returncode}:\n{self.output}"


def wait_for(
    condition: Callable[[], T],
    what: str,
    timeout_s: float,
    details: Callable[[], str] = str,
    check: Callable[[], None] = lambda: None,
) -> T:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        check()
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s:\n{details()}"
        time.sleep(0.05)
    return value
