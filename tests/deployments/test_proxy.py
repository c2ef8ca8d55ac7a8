"""Where HTTP is served, and by what."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pagedray.deployments import proxy
from pagedray.deployments.proxy import ANY, claim_port, haproxy_environment, listener
from pagedray.engine.config import ServerConfig
from pagedray.engine.errors import ConfigError


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for host in ("127.0.0.1", ANY):
            with pytest.raises(
                ConfigError, match=f"port {port} on {host} is already in use; choose another with --port"
            ):
                claim_port(host, port)
    assert claim_port("127.0.0.1", port) == port


def test_port_0_is_any_free_one() -> None:
    assert claim_port("127.0.0.1", 0) > 0


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"port 80 on 203\.0\.113\.1 can't be used"):
        claim_port("203.0.113.1", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", ANY])
def test_haproxy_listens_where_it_is_told(tmp_path: Path, host: str) -> None:
    listen, trouble = listener(ServerConfig(port=0, host=host), tmp_path)
    assert (listen.host, listen.kind, trouble) == (host, "HAProxy", None)
    assert listen.reachable_host == "127.0.0.1"
    assert listen.environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_without_a_binary_pythons_proxy_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **kwargs: object) -> object:
        raise PermissionError("exec format error")

    monkeypatch.setattr(proxy.subprocess, "run", run)
    listen, trouble = listener(ServerConfig(port=0, host="127.0.0.1"), tmp_path)
    assert trouble == "exec format error"
    assert listen.host == "127.0.0.1"
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in listen.environment


def test_two_servers_of_one_machine_share_nothing(tmp_path: Path) -> None:
    first, second = haproxy_environment(tmp_path / "a"), haproxy_environment(tmp_path / "b")
    shared = {name for name in first if first[name] == second[name]}
    shared.discard("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH")  # a path of modules
    assert not [name for name in shared if name.endswith(("_PORT", "_LOC", "_PATH", "_BASE", "_FILE"))]
