"""deployments/serve*.yaml and the Serve configs inside the RayServices: valid for Serve, and applications of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from pagedray.deployments.build import INGRESS_CPUS, build, bundles
from pagedray.engine.config import Config, load_config
from tests.deployments.cluster_files import (
    RAY_SERVICES,
    ROOT,
    SERVE_CONFIGS,
    container,
    groups,
    load,
    ray_service,
    serve_config,
)

EXAMPLES = {path.name: path for path in SERVE_CONFIGS}
CONFIGS = {**{path.name: load(path) for path in SERVE_CONFIGS}} | {
    path.name: serve_config(ray_service(path)) for path in RAY_SERVICES
}

each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def settings(config: dict[str, Any]) -> Config:
    (application,) = config["applications"]
    return load_config(application["args"])


def example(name: str) -> Config:
    return settings(load(EXAMPLES[name]))


@each_config
def test_serve_accepts_it(config: dict[str, Any]) -> None:
    ServeDeploySchema.model_validate(config)


@each_config
def test_it_builds_the_application(config: dict[str, Any]) -> None:
    (application,) = config["applications"]
    assert application["import_path"] == "pagedray.deployments:build"
    assert isinstance(build(application["args"]), Application)


@each_config
def test_deployments_it_changes_exist(config: dict[str, Any]) -> None:
    from pagedray.deployments import build as named_in_import_path

    (application,) = config["applications"]
    bound = named_in_import_path(application["args"])
    names = {bound._bound_deployment.name} | {
        argument._bound_deployment.name
        for argument in bound._bound_deployment.init_args
        if isinstance(argument, Application)
    }
    assert names == {"Ingress", "EngineReplica"}
    assert {item["name"] for item in application.get("deployments", [])} <= names


@each_config
def test_all_are_reached_the_same_way(config: dict[str, Any]) -> None:
    shared = {key: value for key, value in config.items() if key != "applications"}
    assert shared == {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "logging_config": {"enable_access_log": False},
    }
    assert config["applications"][0]["route_prefix"] == "/"


@each_config
def test_an_engine_for_gpus_says_so(config: dict[str, Any]) -> None:
    """A cluster that scales has no GPU node yet when the application is built, so auto would choose the CPU."""
    args = config["applications"][0]["args"]
    is_for_gpus = "/" in str(args["model"])  # a model of the hub; the embedded one is for CPUs
    assert args.get("device") == ("cuda" if is_for_gpus else None)


@pytest.mark.parametrize(
    ("manifest", "beside"),
    [
        ("rayservice-cpu.yaml", "serve.yaml"),
        ("rayservice-gpu.yaml", "serve-gpu.yaml"),
        ("rayservice-autoscaling.yaml", "serve-gpu-autoscaling.yaml"),
    ],
)
def test_a_ray_service_has_the_application_of_the_file_it_names(manifest: str, beside: str) -> None:
    path = ROOT / "deployments" / "kuberay" / manifest
    assert f"deployments/{beside}" in path.read_text()
    assert settings(CONFIGS[manifest]) == example(beside)


def test_examples_show_what_their_names_say() -> None:
    single = example("serve-gpu.yaml").worker
    assert (single.tensor_parallel_size, single.pipeline_parallel_size) == (1, 1)
    assert example("serve-gpu-tp.yaml").worker.tensor_parallel_size > 1
    assert example("serve-gpu-pp.yaml").worker.pipeline_parallel_size > 1
    assert example("serve-gpu-ep.yaml").worker.enable_expert_parallel
    assert load(EXAMPLES["serve-gpu-dp.yaml"])["applications"][0]["args"]["data_parallel_size"] > 1
    scaling = example("serve-gpu-autoscaling.yaml").server
    assert scaling.fewest_engines < scaling.most_engines


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "gpu" in name])
def test_every_rank_of_an_engine_has_a_gpu(name: str) -> None:
    config = example(name)
    world_size = config.worker.tensor_parallel_size * config.worker.pipeline_parallel_size
    assert sum(bundle.get("GPU", 0) for bundle in bundles(config)) == world_size


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_how_to_deploy_it(name: str) -> None:
    assert f"serve deploy deployments/{name}" in EXAMPLES[name].read_text()


def test_the_first_gpu_example_names_the_others() -> None:
    named = set(re.findall(r"serve-gpu-\w+\.yaml", EXAMPLES["serve-gpu.yaml"].read_text()))
    assert named == {name for name in EXAMPLES if name.startswith("serve-gpu-")}


@pytest.mark.parametrize("path", RAY_SERVICES, ids=lambda path: path.name)
def test_the_application_fits_into_its_pods(path: Path) -> None:
    """Each engine into one pod of some group, and the most engines with their ingresses into the most pods."""
    service = ray_service(path)
    config = settings(serve_config(service))
    engine = {name: sum(bundle.get(name, 0) for bundle in bundles(config)) for name in ("CPU", "GPU")}
    num_pods, num_cpus = 0, 0.0
    for group in groups(service)[1:]:
        limits = container(group)["resources"]["limits"]
        num_cpus += group["maxReplicas"] * float(limits["cpu"])
        if engine["CPU"] <= float(limits["cpu"]) and engine["GPU"] <= float(limits.get("nvidia.com/gpu", 0)):
            num_pods += group["maxReplicas"]
    assert num_pods >= config.server.most_engines
    ingresses = config.server.num_ingress_replicas * INGRESS_CPUS
    assert num_cpus >= config.server.most_engines * engine["CPU"] + ingresses
