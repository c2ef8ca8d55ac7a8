"""HTTPS and API keys through Serve, with fakes for the model; and where the keys must not show."""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from pagedray.deployments.launch import Launch
from pagedray.deployments.phases import Phases
from pagedray.deployments.proxy import Listener, check_certificate, listener
from pagedray.engine.config import ServerConfig, load_config
from pagedray.engine.errors import ConfigError
from tests.deployments.requests import PROMPT, expected
from tests.deployments.served import START_S, Served

KEY = "sk-of-the-file-0123456789"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


def make_certificate(folder: Path, *extra: str) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=here"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names, *files, *(extra or ("-nodes",))], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def served(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    cert, key = certificate
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# the tests\n{KEY}\n")
    flags = ("--port", "0", "--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--api-key-file", str(file))
    with Served("-m", "tests.deployments.serve_fakes", *flags) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.ray
def test_https_with_the_official_client(served: Served, certificate: tuple[Path, Path]) -> None:
    assert served.url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    with (
        httpx.Client(verify=trusted, timeout=START_S) as http,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, http_client=http) as client,
    ):
        stream = client.completions.create(model="fake", prompt=PROMPT, max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected(8)
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        assert http.get(f"{served.url}/health").status_code == 200
        odd = http.get(f"{served.url}/v1/models", headers=[(b"authorization", b"Bearer schl\xfcssel")])
        assert odd.status_code == 401
    with pytest.raises(httpx.ConnectError, match="certificate"), httpx.Client() as strict:
        strict.get(f"{served.url}/health")
    with pytest.raises(httpx.HTTPError), httpx.Client() as plain:
        plain.get(served.url.replace("https", "http") + "/health")


@pytest.mark.ray
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_curl_has_no_key_and_works_as_it_is(served: Served, certificate: tuple[Path, Path]) -> None:
    (line,) = re.findall(r"^  curl .*$", served.output, re.MULTILINE)
    assert KEY not in line
    line = line.replace("curl ", f"curl -s --cacert {certificate[0]} ", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=START_S)
    assert json.loads(done.stdout)["choices"], done.stdout


@pytest.mark.ray
def test_the_key_shows_in_no_process_and_no_log(served: Served) -> None:
    assert KEY not in served.output
    assert not [process.command for process in served.left_over() if KEY in process.command]
    logs = [path for path in served.ray_tmpdir.rglob("*") if path.is_file() and path.suffix in (".log", ".err", ".out")]
    assert len(logs) > 5
    assert not [path for path in logs if KEY.encode() in path.read_bytes()]


def test_a_certificate_that_cannot_be_used_is_found_before_anything_starts(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = map(str, certificate)
    check_certificate(cert, key)
    other = str(make_certificate(tmp_path)[1])
    locked = tmp_path / "locked"
    locked.mkdir()
    encrypted = make_certificate(locked, "-passout", "pass:hush")
    cases = [
        (cert, other, "values mismatch|VALUES_MISMATCH"),
        (key, cert, "can't be used"),
        (cert, "/nowhere.pem", "No such file"),
        (*map(str, encrypted), "encrypted"),
    ]
    for one, two, reason in cases:
        with pytest.raises(ConfigError, match=reason) as caught:
            check_certificate(one, two)
        assert "ssl_certfile" in str(caught.value)


def test_https_is_served_by_pythons_proxy(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = map(str, certificate)
    listen, trouble = listener(ServerConfig(port=0, ssl_certfile=cert, ssl_keyfile=key), tmp_path)
    assert trouble is not None and "ssl_certfile" in trouble
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in listen.environment
    assert listen.http_options == {
        "host": "127.0.0.1",
        "port": listen.port,
        "ssl_keyfile": key,
        "ssl_certfile": cert,
    }
    assert listen.url == f"https://127.0.0.1:{listen.port}"
    assert listener(ServerConfig(port=0, haproxy=False, ssl_certfile=cert, ssl_keyfile=key), tmp_path)[1] is None


def test_https_on_a_cluster_of_others_is_refused_with_what_to_do(certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    config = load_config(overrides={"ssl_certfile": cert, "ssl_keyfile": key})
    with pytest.raises(ConfigError, match=r"http_options\.ssl_certfile"), open(os.devnull, "w") as out:
        Launch(config, Listener("127.0.0.1", 1, "the cluster's proxy"), "1.2.3.4:6379", Phases(out, 0.0))


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile"])
def test_half_a_pair_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} \\(x.pem\\) needs ssl_"):
        load_config(overrides={name: "x.pem"})
