"""Errors that only HTTP knows: what is wrong with a request before anybody looks into its body.

    UserError
    ├── Unauthorized            no API key, or none that counts here: 401
    ├── UnknownPath             no such route: 404
    ├── UnsupportedPath         a known API's route that needs another kind of model: 400
    ├── WrongMethod             the route has other methods: 405 with Allow
    ├── BodyTooLarge            413
    ├── PathTooLong             path and query: 414
    ├── UnsupportedMedia        a body that isn't plain JSON: 415
    └── HeadersTooLarge         431

serving/app.py chooses the codes, and the envelope by the path's protocol.
"""

from __future__ import annotations

from pagedray.engine.errors import Unsupported, UserError


class Unauthorized(UserError):
    def __init__(self, found: str):
        super().__init__(f"{found}; send one as Authorization: Bearer KEY or as x-api-key: KEY")
        self.args = (found,)


class UnknownPath(UserError):
    def __init__(self, method: str, path: str, why: str = "no such route"):
        super().__init__(f"{method[:32]} {path[:256]}: {why}")
        self.args = (method, path, why)


class UnsupportedPath(Unsupported):
    def __init__(self, method: str, path: str, why: str):
        super().__init__(f"{method[:32]} {path[:256]}: {why}")
        self.args = (method, path, why)


class WrongMethod(UserError):
    def __init__(self, method: str, path: str, allowed: tuple[str, ...]):
        super().__init__(f"{method[:32]} {path[:256]}: this route takes {', '.join(allowed)}")
        self.args = (method, path, allowed)
        self.allowed = allowed


class BodyTooLarge(UserError):
    def __init__(self, limit: int):
        super().__init__(f"the request body has more than {limit} bytes; shorten it or raise max_body_bytes")
        self.args = (limit,)


class PathTooLong(UserError):
    def __init__(self, size: int, limit: int):
        super().__init__(f"path and query have {size} bytes, the limit is {limit}; parameters belong in the body")
        self.args = (size, limit)


class UnsupportedMedia(UserError):
    """A Content-Type or Content-Encoding that isn't taken. `accepted` is (header of the answer, value)."""

    def __init__(self, found: str, accepted: tuple[str, str]):
        super().__init__(found)
        self.args = (found, accepted)
        self.accepted = accepted


class HeadersTooLarge(UserError):
    def __init__(self, found: str):
        super().__init__(found)
        self.args = (found,)
