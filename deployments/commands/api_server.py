"""A server of the OpenAI API as the commands reach it: its address, its key, its errors in words."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx
import msgspec

from pagedray.deployments.commands.event_stream import event_data
from pagedray.deployments.commands.exit_code import CommandError, ExitCode

DEFAULT_URL = "http://127.0.0.1:8000/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_S = 10.0
SHOWN_CHARS = 300  # of a body that isn't an error as this API writes them


def add_server_flags(parser: argparse.ArgumentParser, default_url: httpx.URL | None) -> None:
    """Args: `default_url` is None where a server is not always meant."""
    group = parser.add_argument_group("server")
    shown = f" Default: {DEFAULT_URL}." if default_url is not None else ""
    group.add_argument(
        "--url",
        type=base_url,
        default=default_url,
        help=f"base URL of an OpenAI API; /v1 is added to one without a path.{shown}",
    )
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"sent as a bearer token. Default: the variable {KEY_VARIABLE}, which other users of the machine can't "
        "read off the process list.",
    )


def base_url(text: str) -> httpx.URL:
    """argparse's type of --url."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"{text!r} must be like {DEFAULT_URL}")
    return url.copy_with(path="/v1") if url.path in ("", "/") else url


def api_key(given: str | None, environ: Mapping[str, str]) -> str | None:
    """Raises: CommandError when it can't stand in a header."""
    key = given or environ.get(KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise CommandError(f"the API key has characters that no header may have; see --api-key and {KEY_VARIABLE}")
    return key


def http_settings(url: httpx.URL, key: str | None, timeout_s: float) -> dict[str, Any]:
    """What an httpx client, of either kind, gets to talk to this server.

    Args:
        timeout_s: longest wait for the next bytes of an answer.
    """
    return {
        "base_url": url,
        "headers": {"authorization": f"Bearer {key}"} if key else {},
        "timeout": httpx.Timeout(timeout_s, connect=CONNECT_S, pool=None),
        "trust_env": not _is_this_machine(url.host),  # a proxy in the environment is for other machines
    }


class ApiServer:
    """
    Args:
        url: see `base_url`.
        key: for the server, None if it wants none.
        timeout_s: longest wait for the next bytes of an answer.
    """

    def __init__(self, url: httpx.URL, key: str | None, timeout_s: float):
        self._url, self._key, self._timeout_s = url, key, timeout_s
        self._http = httpx.Client(**http_settings(url, key, timeout_s))

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The name of the model that it lists first.

        Raises:
            CommandError: it can't be reached, refuses, or lists none.
        """
        with self._errors():
            response = self._http.get("/models")
            if response.status_code != 200:
                raise refusal(response, self._key)
        try:
            return str(msgspec.json.decode(response.content)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise CommandError(f"{plain(self._url)}/models names no model; give --model", ExitCode.BROKEN) from None

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of an answer, as they come. Leaving the context early ends the request.

        Raises:
            CommandError: also while chunks are read.
        """
        with self._errors(), self._http.stream("POST", path, content=msgspec.json.encode(body), headers=JSON) as answer:
            if answer.status_code != 200:
                answer.read()
                raise refusal(answer, self._key)
            yield _chunks(answer.iter_bytes())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Say in words what httpx says in classes."""
        where = plain(self._url)
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise unreachable(self._url, error) from None
        except httpx.TimeoutException:
            raise CommandError(
                f"{where} has sent nothing for {self._timeout_s:g} s; raise --timeout-s to wait longer", ExitCode.BROKEN
            ) from None
        except httpx.HTTPError as error:
            raise CommandError(
                f"the connection to {where} broke: {str(error) or type(error).__name__}", ExitCode.BROKEN
            ) from None


JSON = {"content-type": "application/json"}


def unreachable(url: httpx.URL, error: Exception) -> CommandError:
    text = str(error) or type(error).__name__
    return CommandError(
        f"no server answers at {plain(url)}: {text}; start one with `pagedray serve`, or give --url",
        ExitCode.UNREACHABLE,
    )


def refusal(response: httpx.Response, key: str | None) -> CommandError:
    """An answer that is none, in words. Its body must have been read."""
    status, text = response.status_code, error_text(response.content)
    hint = ""
    if status in (401, 403):
        hint = "; give another --api-key" if key else f"; give --api-key or set {KEY_VARIABLE}"
    elif status == 404:
        hint = "; check --model, and --url, which ends in /v1 for most servers"
    elif 300 <= status < 400:
        hint = f"; it points to {response.headers.get('location', 'nowhere')}: give that as --url"
    elif (wait := response.headers.get("retry-after")) is not None:
        hint = f"; it asks to wait {wait} s"
    code = ExitCode.BROKEN if status >= 500 else ExitCode.REFUSED
    return CommandError(f"{plain(response.url)} answers {status} {response.reason_phrase}: {text}{hint}", code)


def error_text(body: bytes) -> str:
    """The message of an error's body, whoever wrote it."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = body.decode("utf-8", "replace")
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), str(value))
    text = " ".join(str(value).split())
    return (text[:SHOWN_CHARS] + "…" if len(text) > SHOWN_CHARS else text) or "an empty body"


def plain(url: httpx.URL) -> str:
    """As it may be shown: without a password, without the slash that httpx adds."""
    return str(url.copy_with(userinfo=b"", query=None)).rstrip("/")


def _chunks(body: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    is_finished = False
    for data in event_data(body):
        if data.strip() == b"[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise CommandError(f"the server sent an event that is not JSON: {error}", ExitCode.BROKEN) from None
        if not isinstance(chunk, dict):
            raise CommandError(
                f"the server sent an event that is no object: {str(chunk)[:SHOWN_CHARS]}", ExitCode.BROKEN
            )
        if chunk.get("error"):
            raise CommandError(f"the server broke the answer off: {error_text(data)}", ExitCode.BROKEN)
        is_finished |= any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
        yield chunk
    if not is_finished:
        raise CommandError("the answer broke off: the stream ended before the answer did", ExitCode.BROKEN)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
