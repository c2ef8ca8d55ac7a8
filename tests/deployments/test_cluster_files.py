"""All files that describe a cluster, read together: images, ports, paths and variables agree between them."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

from pagedray.deployments.proxy import COMMON, haproxy_environment
from tests.deployments.cluster_files import (
    RAY_SERVICES,
    ROOT,
    SERVE_CONFIGS,
    container,
    dockerfile,
    env,
    groups,
    load,
    pod,
    ray_service,
    serve_config,
)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = f"ghcr.io/OWNER/pagedray:{VERSION}"


@pytest.fixture(scope="module")
def launcher() -> dict[str, Any]:
    return load(ROOT / "cluster.yaml")


def options(launcher: dict[str, Any], name: str) -> list[str]:
    """Values of an option of `docker run`."""
    found = [re.match(rf"--{name}[= ](.*)", option) for option in launcher["docker"]["run_options"]]
    return [match[1] for match in found if match]


def launcher_env(launcher: dict[str, Any]) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in options(launcher, "env"))


def start_options(command: str) -> dict[str, Any]:
    """Options of a `ray start`, as Ray reads them."""
    words = command.split("ray start ", 1)[1].split()
    return dict(start.make_context("start", words).params)


def test_the_launcher_accepts_it(launcher: dict[str, Any]) -> None:
    prepared = prepare_config(copy.deepcopy(launcher))
    validate_config(prepared)
    # Ray's own defaults would install another Ray and another start command.
    assert prepared["setup_commands"] == prepared["head_setup_commands"] == prepared["worker_setup_commands"] == []
    assert prepared["available_node_types"]["head"]["max_workers"] == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config: config.update(head_node={}, workers={}),
        lambda config: config.update(max_workers=0),
        lambda config: config.update(head_node_type="other"),
        lambda config: config["available_node_types"]["gpu"].update(min_replicas=1),
        lambda config: config["available_node_types"]["gpu"].pop("resources"),
        lambda config: config["docker"].update(shm="1g"),
    ],
)
def test_the_launcher_refuses_a_planted_fault(launcher: dict[str, Any], spoil: Any) -> None:
    spoilt = copy.deepcopy(launcher)
    spoil(spoilt)
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        validate_config(prepare_config(spoilt))


def test_the_launcher_has_a_head_and_groups_that_scale(launcher: dict[str, Any]) -> None:
    types = launcher["available_node_types"]
    assert list(types) == ["head", "cpu", "gpu"]
    assert types["head"]["resources"] == {"CPU": 0}  # as num-cpus in the RayServices
    assert types["cpu"]["min_workers"] == 1
    assert types["gpu"]["min_workers"] == 0
    assert types["gpu"]["resources"]["GPU"] >= 1
    assert launcher["max_workers"] == types["cpu"]["max_workers"] + types["gpu"]["max_workers"]
    # An engine of every GPU of a node, with its replica and an ingress.
    assert types["gpu"]["resources"]["CPU"] >= types["gpu"]["resources"]["GPU"] + 1


def test_nodes_of_the_launcher_find_each_other(launcher: dict[str, Any]) -> None:
    head_stop, head_start = launcher["head_start_ray_commands"]
    worker_stop, worker_start = launcher["worker_start_ray_commands"]
    assert head_stop == worker_stop == "ray stop"
    head, worker = start_options(head_start), start_options(worker_start)
    assert head["head"] is True
    assert worker["address"] == f"$RAY_HEAD_IP:{head['port']}"
    assert head["autoscaling_config"] == "~/ray_bootstrap_config.yaml"  # where the launcher puts it
    assert head["dashboard_host"] == "127.0.0.1"
    for name in ("metrics_export_port", "object_store_memory"):
        assert head[name] == worker[name]


@pytest.mark.parametrize("path", RAY_SERVICES, ids=lambda path: path.stem)
def test_nodes_have_the_same_ports_on_kubernetes(launcher: dict[str, Any], path: Path) -> None:
    head = start_options(launcher["head_start_ray_commands"][1])
    expected = {
        "gcs": int(head["port"]),
        "dashboard": head["dashboard_port"],
        "client": 10001,  # Ray's default
        "metrics": head["metrics_export_port"],
    }
    service = ray_service(path)
    first, *workers = groups(service)
    assert {port["name"]: port["containerPort"] for port in container(first)["ports"]} == expected
    serves = serve_config(service)["http_options"]["port"]
    for worker in workers:
        ports = {port["name"]: port["containerPort"] for port in container(worker)["ports"]}
        assert ports == {"serve": serves, "metrics": expected["metrics"]}
        assert int(worker["rayStartParams"]["object-store-memory"]) == head["object_store_memory"]
    probes = container(first)["startupProbe"]["exec"]["command"][-1]
    assert f":{expected['dashboard']}/api/gcs_healthz" in probes
    assert str(serves) in dockerfile().of("cpu", "EXPOSE")


def test_all_name_the_images_that_the_dockerfile_builds(launcher: dict[str, Any]) -> None:
    built = {f"{IMAGE}-{kind}" for kind in ("cpu", "gpu")}
    text = (ROOT / "Dockerfile").read_text()
    for kind in ("cpu", "gpu"):
        assert f"docker build --target {kind} --tag {IMAGE}-{kind} ." in text
        assert kind in dockerfile().stages
    used = {launcher["docker"]["image"], launcher["available_node_types"]["gpu"]["docker"]["worker_image"]}
    for path in RAY_SERVICES:
        used |= {container(group)["image"] for group in groups(ray_service(path))}
    assert used == built
    for path in [ROOT / "cluster.yaml", ROOT / "README.md", *RAY_SERVICES]:
        assert set(re.findall(r"ghcr\.io/OWNER/[\w.:-]+\w", path.read_text())) <= built


def test_every_node_runs_the_ray_that_we_test(launcher: dict[str, Any]) -> None:
    ours = importlib.metadata.version("ray")
    assert f"ray[default]=={ours}" in (ROOT / "cluster.yaml").read_text()
    for path in RAY_SERVICES:
        assert ray_service(path)["spec"]["rayClusterConfig"]["rayVersion"] == ours


def test_every_ray_process_has_the_same_environment(launcher: dict[str, Any]) -> None:
    seen = launcher_env(launcher)
    # `pagedray serve` decides on the same switches; paths and ports are its own, and so is the short drain of its end.
    ours = haproxy_environment(Path("/x"))
    shared = {name: ours[name] for name in (*COMMON, "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_TUNE_BUFSIZE")}
    shared["RAY_SERVE_HAPROXY_BINARY_PATH"] = "/usr/local/bin/pagedray-haproxy"  # where pip of the image puts it
    del shared["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]
    assert {name: value for name, value in seen.items() if name.startswith("RAY_SERVE_")} == shared
    assert seen.pop("RAY_AUTH_MODE") == "token"
    for path in RAY_SERVICES:
        service = ray_service(path)
        assert service["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"
        for group in groups(service):
            assert env(group) == seen
    for path in SERVE_CONFIGS:
        for name, value in re.findall(r"(RAY_\w+)=(\$\([^)]+\)|\S+)", path.read_text()):
            assert value in (seen[name], f"$(command -v {Path(seen[name]).name})")


def test_what_the_environment_names_exists() -> None:
    module, _, name = COMMON["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].rpartition(".")
    assert inspect.isfunction(getattr(importlib.import_module(module), name))
    scripts = importlib.metadata.entry_points(group="console_scripts", name="pagedray-haproxy")
    assert [script.value for script in scripts] == ["pagedray.deployments.haproxy:main"]


def test_models_and_kernels_are_kept_where_the_image_puts_them(launcher: dict[str, Any]) -> None:
    (volume,) = options(launcher, "volume")
    machine, cache = volume.split(":")
    assert any(machine in command and "1000" in command for command in launcher["initialization_commands"])
    for kind in ("cpu", "gpu"):
        assert dockerfile().env(kind)["HF_HOME"].startswith(f"{cache}/")
    for path in RAY_SERVICES:
        for group in groups(ray_service(path))[1:]:
            assert cache in [mount["mountPath"] for mount in container(group)["volumeMounts"]]
    (token,) = launcher["file_mounts"]
    assert token == "/home/ray/.ray/auth_token"
    assert any("/home/ray/.ray" in command for command in dockerfile().of("cpu", "RUN"))


def test_shared_memory_has_room_for_rays_objects(launcher: dict[str, Any]) -> None:
    size = {"Gi": 2**30, "g": 2**30}
    head = start_options(launcher["head_start_ray_commands"][1])
    (shm,) = options(launcher, "shm-size")
    assert int(shm[:-1]) * size[shm[-1:]] > 2 * head["object_store_memory"]
    for path in RAY_SERVICES:
        for group in groups(ray_service(path)):
            (volume,) = (item for item in pod(group)["volumes"] if item["name"] == "shared-mem")
            limit = volume["emptyDir"]["sizeLimit"]
            assert int(limit[:-2]) * size[limit[-2:]] > 2 * int(group["rayStartParams"]["object-store-memory"])


def test_files_that_texts_name_exist() -> None:
    texts = [ROOT / "README.md", ROOT / "cluster.yaml", ROOT / "Dockerfile", *SERVE_CONFIGS, *RAY_SERVICES]
    for text in texts:
        for name in re.findall(r"deployments/[\w./-]+\.yaml", text.read_text()):
            assert (ROOT / name).exists(), f"{text.name} names {name}"
