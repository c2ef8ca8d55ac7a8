"""API keys and CORS: who gets in, what a stranger learns, and where keys must never show."""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml

from pagedray.deployments.cli import main
from pagedray.engine.config import Config, load_config
from pagedray.engine.errors import ConfigError
from pagedray.serving import access
from pagedray.serving.access import OPEN_PATHS, KeyRing, first_key, read_keys
from pagedray.serving.app import create_app
from tests.serving.rig import Rig

KEY, OTHER = "sk-first-secret", "clé-β-second"
TEXT = {"model": "fake", "prompt": "x", "max_tokens": 1}

GOOD: list[list[tuple[str, bytes]]] = [
    [("authorization", f"Bearer {KEY}".encode())],
    [("Authorization", f"bearer   {KEY}  ".encode())],
    [("x-api-key", KEY.encode())],
    [("authorization", f"Bearer {OTHER}".encode())],
    [("authorization", b"Bearer wrong"), ("x-api-key", KEY.encode())],
    [("authorization", b"Basic eDp5"), ("x-api-key", OTHER.encode())],
]
BAD: dict[str, list[tuple[str, bytes]]] = {
    "none": [],
    "empty": [("authorization", b"")],
    "scheme alone": [("authorization", b"Bearer")],
    "scheme and blanks": [("authorization", b"Bearer    ")],
    "empty key": [("x-api-key", b"")],
    "wrong": [("authorization", b"Bearer wrong")],
    "wrong scheme": [("authorization", f"Basic {KEY}".encode())],
    "no scheme": [("authorization", KEY.encode())],
    "beginning": [("authorization", f"Bearer {KEY[:-1]}".encode())],
    "longer": [("authorization", f"Bearer {KEY}x".encode())],
    "other case": [("authorization", f"Bearer {KEY.upper()}".encode())],
    "two in one": [("authorization", f"Bearer {KEY} {KEY}".encode())],
    "both, joined": [("x-api-key", f"{KEY},{OTHER}".encode())],
    "very long": [("authorization", b"Bearer " + b"a" * 20_000)],
    "not ascii": [("authorization", "Bearer schlüssel".encode())],
    "latin-1": [("authorization", b"Bearer schl\xfcssel")],
    "in the query": [("cookie", f"key={KEY}".encode())],
    "too many": [("x-api-key", b"wrong")] * 50 + [("x-api-key", KEY.encode())],
}


def keyed() -> Rig:
    return Rig(api_key=[KEY, OTHER])


@pytest.mark.parametrize("headers", GOOD)
async def test_a_key_opens_every_route(headers: list[tuple[str, bytes]]) -> None:
    async with keyed() as rig:
        assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await rig.post("/v1/completions", TEXT, headers=headers)).status_code == 200
        assert (await rig.post("/tokenize", {"prompt": "x"}, headers=headers)).status_code == 200
        assert (await rig.http.get("/nothing", headers=headers)).status_code == 404


@pytest.mark.parametrize("headers", BAD.values(), ids=BAD)
async def test_without_one_every_route_of_the_api_is_closed(headers: list[tuple[str, bytes]]) -> None:
    async with keyed() as rig:
        calls = [
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/nothing"),
            ("DELETE", "/v1/models"),
            ("GET", "/health/"),
            ("GET", "//v1/models"),
            ("GET", "/docs/../v1/models"),
            ("OPTIONS", "/v1/models"),
            ("GET", f"/v1/models?api_key={KEY}"),
        ]
        for method, path in calls:
            response = await rig.http.request(method, path, headers=headers)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error" and error["code"] == "invalid_api_key"
            assert error["param"] is None
            for secret in (KEY, OTHER, "wrong", "schl"):
                assert secret not in response.text
        assert rig.links[0].submitted == []


async def test_probes_and_documents_need_no_key() -> None:
    async with keyed() as rig:
        for path in OPEN_PATHS:
            assert (await rig.http.get(path)).status_code == 200, path


async def test_messages_are_refused_in_anthropics_form() -> None:
    async with keyed() as rig:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await rig.post(path, {})
            assert response.status_code == 401
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
            assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


async def test_the_official_clients_send_keys_and_tell_refusals() -> None:
    async with keyed() as rig, rig.served() as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["fake"]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
            assert caught.value.code == "invalid_api_key" and caught.value.request_id
        async with anthropic.AsyncAnthropic(base_url=url, api_key="wrong", max_retries=0) as other:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await other.messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": "x"}])
            assert refused.value.request_id


async def test_without_keys_none_is_needed() -> None:
    async with Rig() as rig:
        for headers in ({}, {"authorization": "Bearer anything"}, {"authorization": "nonsense"}):
            assert (await rig.http.get("/v1/models", headers=headers)).status_code == 200


# Where keys come from


@pytest.mark.parametrize(
    ("tree", "overrides", "environ", "keys"),
    [
        (None, {"api_key": "a,b"}, {}, ["a", "b"]),
        (None, {}, {"PAGEDRAY_API_KEY": "a, b"}, ["a", "b"]),
        (None, {}, {"PAGEDRAY_API_KEY": "http://x"}, ["http://x"]),
        ("api_key: [a, b]", {}, {}, ["a", "b"]),
        ("server: {api_key: a}", {}, {}, ["a"]),
        ("api_key: [a]", {"api_key": "c"}, {"PAGEDRAY_API_KEY": "b"}, ["c"]),
    ],
)
def test_keys_come_from_flags_variables_and_files(tree: Any, overrides: Any, environ: Any, keys: list[str]) -> None:
    server = load_config(tree, overrides, environ).server
    assert [key.get_secret_value() for key in server.api_key] == keys
    ring = KeyRing(server)
    assert all(ring.has(key.encode()) for key in keys) and not ring.has(b"d") and not ring.has(b"")


@pytest.mark.parametrize(
    ("tree", "environ"),
    [
        ("api_key: ['']", {}),
        ("api_key: ['a b ']", {}),
        ('api_key: ["hush\\nhush"]', {}),
        ("api_key: [12345]", {}),
        ("api_key: null", {}),
        (f"api_key: [{'hush' * 1000}]", {}),
        ("{}", {"PAGEDRAY_API_KEY": ""}),
        ("{}", {"PAGEDRAY_API_KEY": " "}),
        ("{}", {"PAGEDRAY_API_KEY": "a,,b"}),
        ("{}", {"PAGEDRAY_API_KEY": "none"}),
    ],
)
def test_keys_that_cannot_be_used_never_mean_an_open_server(tree: str, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tree, environ=environ)
    assert "hush" not in str(caught.value) and "12345" not in str(caught.value)
    assert "api_key" in str(caught.value).lower()


def test_keys_show_nowhere(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = load_config(overrides={"api_key": f"{KEY},{OTHER}"})
    file = tmp_path / "c.yaml"
    assert main(["serve", "--print-config", "--api-key", KEY]) == 0
    file.write_text(printed := capsys.readouterr().out)
    assert load_config(file.read_text()).server.api_key == ()
    texts = [repr(config), str(config.server), config.model_dump_json(), repr(KeyRing(config.server).__dict__), printed]
    for text in texts:
        assert (
            KEY not in text
            and OTHER not in text
            and "***" not in text.replace("'**********'", "").replace("**********", "")
        )
    assert "***" not in printed


def test_actors_get_the_keys_and_engines_do_not() -> None:
    config = load_config(overrides={"api_key": KEY})
    there: Config = pickle.loads(pickle.dumps(config))
    assert there == config and first_key(there.server) == KEY
    bare = config.without_keys()
    assert KEY.encode() not in pickle.dumps(bare)
    assert bare == load_config()


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who: Ann\n{KEY}\n\n  # who: Bob\n  {OTHER}  \n", encoding="utf-8")
    assert read_keys(file) == [KEY.encode(), OTHER.encode()]
    server = load_config(overrides={"api_key_file": str(file), "api_key": "third"}).server
    ring = KeyRing(server)
    assert [ring.has(key.encode()) for key in (KEY, OTHER, "third", "# who: Ann", "")] == [True] * 3 + [False] * 2
    assert first_key(server) == "third"
    assert first_key(load_config(overrides={"api_key_file": str(file)}).server) == KEY
    assert first_key(load_config().server) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has no key"),
        (b"# only\n\n", "has no key"),
        (b"hush\x00hush\n", "line 1"),
        (b"good\n" + b"hush" * 1000, "line 2"),
        (b"\xffhush", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_none_stops_the_start(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        KeyRing(load_config(overrides={"api_key_file": str(file)}).server)
    assert "hush" not in str(caught.value) and str(file) in str(caught.value)


async def test_a_changed_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "LOOK_AGAIN_S", 0.0)
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("old-key")
    async with Rig(api_key_file=str(file)) as rig:

        async def status(key: str) -> int:
            return (await rig.http.get("/v1/models", headers={"x-api-key": key})).status_code

        assert (await status("old-key"), await status("new-key")) == (200, 401)
        replacement = tmp_path / "next"
        replacement.write_text("new-key")
        os.replace(replacement, file)
        assert (await status("old-key"), await status("new-key")) == (401, 200)
        file.write_text("")  # somebody's editor
        assert (await status("new-key"), await status("")) == (200, 401)
        file.unlink()
        assert (await status("new-key"), await status("other")) == (200, 401)
        file.write_text("third-key")
        assert (await status("new-key"), await status("third-key")) == (401, 200)
    assert "has no key" in caplog.text and "can't be read" in caplog.text and "read again" in caplog.text
    assert not any(key in caplog.text for key in ("old-key", "new-key", "third-key"))


# CORS

ORIGIN = "https://app.example"


def asks(origin: str = ORIGIN, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


async def test_pages_of_a_named_origin_may_call_and_others_may_not() -> None:
    async with Rig(cors_allow_origins=[ORIGIN], api_key=[KEY]) as rig:
        response = await rig.http.options("/v1/chat/completions", headers=asks())
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in response.headers["access-control-allow-methods"]
        assert "x-stainless-lang" in response.headers["access-control-allow-headers"]
        assert (await rig.http.options("/v1/models", headers=asks("https://evil.example"))).status_code == 400
        assert (await rig.http.options("/v1/models", headers=asks(method="PUT"))).status_code == 400
        headers = {"origin": ORIGIN, "authorization": f"Bearer {KEY}"}
        for call, code in ((headers, 200), ({"origin": ORIGIN}, 401)):
            response = await rig.http.get("/v1/models", headers=call)
            assert response.status_code == code
            assert response.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        response = await rig.http.get("/v1/models", headers={**headers, "origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_cors_is_off_by_default() -> None:
    async with Rig() as rig:
        response = await rig.http.options("/v1/chat/completions", headers=asks())
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        response = await rig.http.get("/v1/models", headers={"origin": ORIGIN})
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cors_allow_origins": "https://a.example/"}, "no web origin"),
        ({"cors_allow_origins": "a.example"}, "no web origin"),
        ({"cors_allow_origins": "*", "cors_allow_credentials": True}, "cors_allow_credentials"),
    ],
)
def test_settings_that_would_not_do_what_they_say(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=settings)
    environ = {"PAGEDRAY_CORS_ALLOW_ORIGINS": "https://a.example,http://localhost:3000"}
    assert load_config(environ=environ).server.cors_allow_origins == ("https://a.example", "http://localhost:3000")


async def test_keys_are_asked_for_below_a_route_prefix_too() -> None:
    async with keyed() as rig:
        app = create_app(rig.client, rig.tokenizer, rig.config)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.get("/llm/version")).status_code == 200
            assert (await http.get("/llm/v1/models")).status_code == 401
            assert (await http.get("/llm/v1/models", headers={"x-api-key": KEY})).status_code == 200
            response = await http.post("/llm/v1/messages", json={})
            assert response.json()["type"] == "error"


def test_the_printed_settings_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--cors-allow-origins", ORIGIN]) == 0
    assert "api_key" not in yaml.safe_load(capsys.readouterr().out)["server"]
