"""Who may use the API: clients that send one of the server's keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from pagedray.engine.config import MAX_API_KEY, ServerConfig
from pagedray.engine.errors import ConfigError
from pagedray.serving.limits import Headers, own_path
from pagedray.serving.refusals import Unauthorized

log = logging.getLogger(__name__)

# What needs no key: probes and monitoring ask these, and they tell nothing of what clients send. All else needs one, so
# that a route that is added later does.
OPEN_PATHS = frozenset({"/health", "/ping", "/load", "/version", "/metrics", "/openapi.json", "/docs"})

LOOK_AGAIN_S = 1.0  # between looks at a key file
MAX_CREDENTIALS = 4  # that are looked at of one request

Stamp = tuple[int, int, int]


class KeyRing:
    """The server's API keys: those of the settings, and those of the key file as it is now.

    Only digests are kept. When a changed file can't be read or has no key, its former keys stay.

    Raises:
        ConfigError: the file can't be read, or has a line that is no key.
    """

    def __init__(self, server: ServerConfig):
        self._fixed = tuple(digest(key.get_secret_value().encode()) for key in server.api_key)
        self._path = None if server.api_key_file is None else Path(server.api_key_file)
        self._stamp: Stamp | None = None
        self._looked_s = time.monotonic()
        self._digests = self._fixed
        if self._path is not None:
            self._stamp = stamp(self._path)
            self._digests += tuple(map(digest, read_keys(self._path)))

    @property
    def is_needed(self) -> bool:
        """Whether there are keys at all."""
        return bool(self._digests)

    def has(self, key: bytes) -> bool:
        """Whether `key` is one of them. Takes the same time for each one and for none."""
        self._look()
        if len(key) > 4 * MAX_API_KEY:  # bytes of as many characters
            return False
        given, found = digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(given, known)
        return found

    def _look(self) -> None:
        """Read the file again if it has changed."""
        now = time.monotonic()
        if self._path is None or now - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now
        found = stamp(self._path)
        if found == self._stamp:
            return
        self._stamp = found
        try:
            self._digests = self._fixed + tuple(map(digest, read_keys(self._path)))
        except ConfigError as error:
            log.warning("the keys that were read before stay: %s", error)
            return
        log.info("api keys read again file=%s num=%d", self._path, len(self._digests))


class KeyCheck:
    """ASGI middleware: only those who send a key of the ring pass.

    Args:
        refuse: the answer to an error.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, refuse: Callable[[Scope, Unauthorized], ASGIApp]):
        self._app, self._ring, self._refuse = app, ring, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and own_path(scope) not in OPEN_PATHS:
            given = credentials(scope["headers"])
            known = [self._ring.has(key) for key in given]  # all of them, whichever counts
            if not any(known):
                error = Unauthorized("the API key is not one of this server's" if given else "an API key is needed")
                await self._refuse(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def credentials(headers: Headers) -> list[bytes]:
    """The keys that a client sent, in either of the two ways."""
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(key.strip())
    return [key for key in found if key][:MAX_CREDENTIALS]


def first_key(server: ServerConfig) -> str | None:
    """A key for the server's own requests to itself; None where none is needed. Raises ConfigError."""
    for key in server.api_key:
        return key.get_secret_value()
    return None if server.api_key_file is None else read_keys(Path(server.api_key_file))[0].decode()


def read_keys(path: Path) -> list[bytes]:
    """The keys of a file: one a line, without blanks around it; empty lines and those that begin with # don't count.

    Raises:
        ConfigError: it can't be read, has no key, or has a line that is none. The message doesn't quote it.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"api_key_file {path} can't be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) > MAX_API_KEY or not key.isprintable():
            raise ConfigError(
                f"api_key_file {path}, line {number}: no key; one has 1 to {MAX_API_KEY} printable characters"
            )
        keys.append(key.encode())
    if not keys:
        raise ConfigError(f"api_key_file {path} has no key; write one a line, or leave the setting out")
    return keys


def stamp(path: Path) -> Stamp | None:
    """What tells that a file has changed; None if it isn't there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def digest(key: bytes) -> bytes:
    """Of one length for every key, so that comparing tells nothing of theirs."""
    return hashlib.sha256(key).digest()
