"""deployments/kuberay: what the operator accepts, and what each of its manifests promises."""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.scripts.scripts import drain_node

from tests.deployments.cluster_files import (
    MANIFESTS,
    RAY_SERVICES,
    ROOT,
    container,
    env,
    groups,
    objects,
    pod,
    pre_stop,
    ray_service,
    serve_config,
)

# The operator's CustomResourceDefinitions, from ray-operator/config/crd/bases of the KubeRay repository.
DEFINITIONS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "kuberay"))
GRACE_S = 40  # how long before its deadline Serve stops a replica without a successor: graceful_shutdown_timeout_s

each_service = pytest.mark.parametrize("path", RAY_SERVICES, ids=lambda path: path.stem)


def closed(schema: Any) -> Any:
    """The same schema, refusing unknown fields: the operator would drop them in silence."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def fields(required: str, optional: str = "", **inner: Any) -> dict[str, Any]:
    """A schema that knows these fields and no others; `inner` has the schemas of some of them."""
    names = [*required.split(), *optional.split()]
    properties = {name: inner.get(name, {}) for name in names}
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


# The part of the operator's schema that our manifests use, so that they are checked where the whole is not at hand.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}
PROBE = fields("timeoutSeconds periodSeconds failureThreshold", "exec httpGet")
CONTAINER = fields(
    "name image ports env resources volumeMounts startupProbe readinessProbe livenessProbe",
    "lifecycle",
    env=several(fields("name value", value={"type": "string"})),
    ports=several(fields("name containerPort", containerPort={"type": "integer"})),
    resources=fields("requests limits", requests=TEXTS, limits=TEXTS),
    volumeMounts=several(fields("name mountPath")),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
)
POD = fields(
    "containers volumes securityContext",
    "restartPolicy terminationGracePeriodSeconds tolerations",
    containers=several(CONTAINER),
    volumes=several(fields("name", "emptyDir persistentVolumeClaim")),
)
TEMPLATE = fields("spec", spec=POD)
OURS = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=fields("name"),
    spec=fields(
        "serveConfigV2 rayClusterConfig upgradeStrategy excludeHeadPodFromServeSvc rayClusterDeletionDelaySeconds",
        serveConfigV2={"type": "string"},
        excludeHeadPodFromServeSvc={"type": "boolean"},
        rayClusterDeletionDelaySeconds=COUNT,
        upgradeStrategy=fields(
            "type",
            "clusterUpgradeOptions",
            type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]},
            clusterUpgradeOptions=fields(
                "gatewayClassName stepSizePercent intervalSeconds maxSurgePercent",
                stepSizePercent=COUNT,
                intervalSeconds=COUNT,
                maxSurgePercent=COUNT,
            ),
        ),
        rayClusterConfig=fields(
            "rayVersion authOptions headGroupSpec workerGroupSpecs",
            "enableInTreeAutoscaling autoscalerOptions gcsFaultToleranceOptions",
            rayVersion={"type": "string"},
            authOptions=fields("mode", mode={"enum": ["token", "disabled"]}),
            autoscalerOptions=fields("version", "idleTimeoutSeconds resources", version={"enum": ["v1", "v2"]}),
            gcsFaultToleranceOptions=fields("redisAddress", "redisPassword"),
            headGroupSpec=fields("template rayStartParams", template=TEMPLATE, rayStartParams=TEXTS),
            workerGroupSpecs=several(
                fields(
                    "groupName replicas minReplicas maxReplicas rayStartParams template",
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=TEXTS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)


@pytest.fixture(scope="module", params=["operator", "ours"])
def validate(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    if request.param == "ours":
        return jsonschema.Draft7Validator(OURS).validate
    path = DEFINITIONS / "ray.io_rayservices.yaml"
    if not path.exists():
        pytest.skip(f"{path} is not there: put KubeRay's definitions somewhere and name the folder in KUBERAY_CRDS")
    versions = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1")
    return jsonschema.Draft7Validator(closed(schema)).validate


@each_service
def test_the_operator_accepts_it(validate: Callable[[dict[str, Any]], None], path: Path) -> None:
    validate(ray_service(path))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(serveConfig="typo"),
        lambda spec: spec.pop("rayClusterConfig"),
        lambda spec: spec["rayClusterConfig"]["authOptions"].update(mode="password"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="1"),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(probe={}),
        lambda spec: spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"].append({}),
        lambda spec: spec["upgradeStrategy"].update(clusterUpgradeOptions={"gatewayClassName": "istio"}),
    ],
)
def test_a_planted_fault_is_refused(
    validate: Callable[[dict[str, Any]], None], spoil: Callable[[dict[str, Any]], object]
) -> None:
    spoilt = copy.deepcopy(ray_service(RAY_SERVICES[0]))
    spoil(spoilt["spec"])
    with pytest.raises(jsonschema.ValidationError):
        validate(spoilt)


def test_every_manifest_is_a_ray_service_or_known() -> None:
    kinds = {path.name: [item["kind"] for item in objects(path)] for path in MANIFESTS if path not in RAY_SERVICES}
    assert kinds == {"redis.yaml": ["Service", "StatefulSet"]}
    assert {path.stem for path in RAY_SERVICES} == {
        f"rayservice-{name}" for name in ("cpu", "gpu", "autoscaling", "gcs-ft", "incremental-upgrade")
    }


@each_service
def test_replicas_can_be_reached_from_outside_their_pod(path: Path) -> None:
    service = ray_service(path)
    http = serve_config(service)["http_options"]
    assert http["host"] == "0.0.0.0"
    head, *workers = groups(service)
    for worker in workers:
        assert {"name": "serve", "containerPort": http["port"]} in container(worker)["ports"]
        assert container(worker)["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
    # It has no replica, so traffic must not come to it.
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    assert head["rayStartParams"]["num-cpus"] == "0"


@each_service
def test_a_node_is_found_dead_within_seconds(path: Path) -> None:
    seen = env(groups(ray_service(path))[0])
    period, timeout = (int(seen[f"RAY_health_check_{name}_ms"]) for name in ("period", "timeout"))
    assert int(seen["RAY_health_check_failure_threshold"]) * (period + timeout) <= 3000


@each_service
def test_pods_are_bounded_and_not_root(path: Path) -> None:
    for group in groups(ray_service(path)):
        resources = container(group)["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        security = pod(group)["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 1000  # the user of the Dockerfile may write to volumes
        volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container(group)["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        claims = {item["metadata"]["name"] for item in objects(path) if item["kind"] == "PersistentVolumeClaim"}
        claimed = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
        assert claimed <= claims


@each_service
def test_pods_with_gpus_have_the_image_for_them_and_may_be_scheduled(path: Path) -> None:
    for group in groups(ray_service(path)):
        has_gpu = "nvidia.com/gpu" in container(group)["resources"]["limits"]
        assert container(group)["image"].endswith("-gpu" if has_gpu else "-cpu")
        tolerated = {item["key"] for item in pod(group).get("tolerations", [])}
        assert tolerated == ({"nvidia.com/gpu"} if has_gpu else set())


@each_service
def test_a_stopping_pod_gives_its_streams_time(path: Path) -> None:
    """The hook's own time is part of the grace period, behind which the pod is killed."""
    service = ray_service(path)
    for worker in groups(service)[1:]:
        found = re.fullmatch(r"(ray drain-node .*?); (for .*; done); ray stop", pre_stop(worker))
        assert found, pre_stop(worker)
        drain, loop = found.groups()
        words = shlex.split(drain)
        parsed = drain_node.make_context("drain-node", words[2:]).params  # refuses an option that Ray doesn't have
        deadline_s = parsed["deadline_remaining_seconds"]
        assert GRACE_S < deadline_s < pod(worker)["terminationGracePeriodSeconds"]
        assert f"seq {deadline_s}" in loop
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= 60


@each_service
def test_pods_of_autoscaler_v2_never_restart(path: Path) -> None:
    service = ray_service(path)
    cluster = service["spec"]["rayClusterConfig"]
    scales = cluster.get("enableInTreeAutoscaling", False)
    assert scales == ("autoscalerOptions" in cluster)
    for group in groups(service):
        assert pod(group).get("restartPolicy") == ("Never" if scales else None)
    if scales:
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert any(group["minReplicas"] < group["maxReplicas"] for group in cluster["workerGroupSpecs"])


def test_scaling_to_no_engine_leaves_an_ingress() -> None:
    service = ray_service(ROOT / "deployments/kuberay/rayservice-autoscaling.yaml")
    by_name = {group["groupName"]: group for group in groups(service)[1:]}
    assert by_name["engines"]["minReplicas"] == 0
    assert by_name["ingress"]["minReplicas"] >= 1
    (ingress,) = serve_config(service)["applications"][0]["deployments"]
    assert ingress["name"] == "Ingress"
    assert ingress["ray_actor_options"]["label_selector"] == {"ray.io/node-group": "ingress"}


def test_the_state_of_the_head_is_in_the_redis_of_its_own_file() -> None:
    service = ray_service(ROOT / "deployments/kuberay/rayservice-gcs-ft.yaml")
    options = service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    network, stateful = objects(ROOT / "deployments/kuberay/redis.yaml")
    assert options["redisAddress"] == f"{network['metadata']['name']}:{network['spec']['ports'][0]['port']}"
    template = stateful["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert labels == network["spec"]["selector"] == stateful["spec"]["selector"]["matchLabels"]
    (redis,) = template["spec"]["containers"]
    assert redis["ports"][0]["containerPort"] == network["spec"]["ports"][0]["port"]
    (password,) = redis["env"]
    assert password["valueFrom"] == options["redisPassword"]["valueFrom"]
    assert f"$({password['name']})" in redis["args"]
    assert "--appendonly" in redis["command"]
    # One pod may die and its engine has a place to go.
    application = serve_config(service)["applications"][0]
    assert groups(service)[1]["minReplicas"] > application["args"]["data_parallel_size"] > 1
    assert application["args"]["num_ingress_replicas"] > 1


def test_an_upgrade_takes_less_than_a_second_cluster() -> None:
    service = ray_service(ROOT / "deployments/kuberay/rayservice-incremental-upgrade.yaml")
    options = service["spec"]["upgradeStrategy"]["clusterUpgradeOptions"]
    assert service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True  # the operator demands it
    engines = serve_config(service)["applications"][0]["args"]["data_parallel_size"]
    assert 0 < options["maxSurgePercent"] < 100
    assert engines * options["maxSurgePercent"] >= 100, "a step smaller than one engine would start none"
    assert options["stepSizePercent"] <= options["maxSurgePercent"]
