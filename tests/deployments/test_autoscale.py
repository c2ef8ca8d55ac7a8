"""How many engines a load calls for, what Serve is told, and a load wave on a server: up, down, to none and back."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from pagedray.deployments.autoscale import _loads_now, autoscaling, engines_wanted
from pagedray.deployments.build import build
from pagedray.deployments.cli import main
from pagedray.engine.config import load_config
from pagedray.engine.errors import ConfigError
from pagedray.engine.metrics import EngineLoad
from tests.deployments.requests import Stream, complete, expected
from tests.deployments.served import REBUILD_S, Served, wait_for
from tests.deployments.test_routing import gauge

IDLE, FULL = EngineLoad(0.0, 0.0), EngineLoad(1.0, 0.2)


@pytest.mark.parametrize(
    ("loads", "calls", "wanted"),
    [
        ([], 0, 0),
        ([], 3, 1),
        ([IDLE], 0, 0),
        ([IDLE, IDLE], 0, 0),
        ([IDLE], 1, 1),
        ([FULL], 0, 2),
        ([EngineLoad(0.8, 0.0)], 0, 1),
        ([EngineLoad(0.1, 0.9)], 0, 2),  # few requests, long ones
        ([EngineLoad(9.0, 0.5)], 0, 12),  # a burst that waits is provided for at once
        ([EngineLoad(0.01, 0.0), IDLE, IDLE], 0, 1),
        ([EngineLoad(0.4, 0.0)] * 3, 0, 2),
        ([None], 0, 1),
        ([FULL, None], 0, 3),
    ],
)
def test_queue_and_kv_cache_decide(loads: list[EngineLoad | None], calls: float, wanted: int) -> None:
    assert engines_wanted(loads, 0.8, calls) == wanted


@given(st.lists(st.floats(0, 20), max_size=10), st.floats(0.1, 1.0))
def test_engines_wanted_carry_the_load_and_none_is_spare(loads: list[float], target: float) -> None:
    wanted = engines_wanted([EngineLoad(load, load / 2) for load in loads], target, 0)
    assert wanted * target >= sum(loads) - 1e-4
    assert (wanted - 1) * target < sum(loads) or wanted == 0


def context(reports: dict[str, dict[int, float]], num_running: int, queued: float = 0.0) -> AutoscalingContext:
    """What Serve gives to a policy; reports are by metric and number of the replica."""
    replicas = [ReplicaID(str(number), DeploymentID("EngineReplica", "app")) for number in range(num_running)]
    metrics = {name: {replicas[number]: value for number, value in of.items()} for name, of in reports.items()}
    return AutoscalingContext(
        deployment_id=replicas[0].deployment_id if replicas else DeploymentID("EngineReplica", "app"),
        deployment_name="EngineReplica",
        app_name="app",
        current_num_replicas=num_running,
        target_num_replicas=num_running,
        running_replicas=replicas,
        total_num_requests=queued,
        total_queued_requests=lambda: queued,
        aggregated_metrics=lambda: metrics,
        raw_metrics=None,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


def test_serve_gets_a_policy_that_travels_to_its_controller() -> None:
    server = load_config({"min_replicas": 0, "max_replicas": 4, "target_load": 0.5, "downscale_delay_s": 7}).server
    config = autoscaling(server)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 4)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (5.0, 7.0)
    assert config.look_back_period_s > config.metrics_interval_s
    policy: Any = cloudpickle.loads(cloudpickle.dumps(config.policy)).get_policy()(**config.policy.policy_kwargs)
    assert policy(context({"batch": {0: 2.0}, "kv": {0: 0.1}}, 2))[0] == 5, "the second has not reported"
    assert policy(context({"batch": {0: 0.0}, "kv": {0: 0.0}}, 1))[0] == 0
    assert policy(context({}, 0, queued=1.0))[0] == 1


def test_what_engines_reported_last_says_which_goes() -> None:
    def series(*values: float) -> list[TimeStampedValue]:
        return [TimeStampedValue(float(i), value) for i, value in enumerate(values)]

    reports = {
        "batch": {"a": series(2.0, 0.0), "b": series(0.0, 0.25), "c": []},
        "kv": {"a": series(0.1), "b": series(0.0)},
    }
    assert _loads_now(reports) == {"a": 0.1, "b": 0.25}


def test_a_range_turns_scaling_on() -> None:
    def numbers(**settings: int) -> tuple[int, int, bool]:
        server = load_config(settings).server
        return server.fewest_engines, server.most_engines, server.scales

    assert numbers() == (1, 1, False)
    assert numbers(max_replicas=4) == (1, 4, True)
    assert numbers(min_replicas=0) == (0, 1, True)
    assert numbers(min_replicas=2, max_replicas=5) == (2, 5, True)
    assert numbers(min_replicas=3) == numbers(min_replicas=3, max_replicas=3) == (3, 3, False)
    assert pickle.loads(pickle.dumps(load_config({"max_replicas": 4}))).server.scales


@pytest.mark.parametrize(
    ("settings", "both"),
    [
        ({"num_engine_replicas": 1, "max_replicas": 4}, r"num_engine_replicas \(1\).*max_replicas \(4\)"),
        ({"data_parallel_size": 2, "min_replicas": 0}, r"data_parallel_size \(2\).*min_replicas \(0\)"),
        ({"min_replicas": 3, "max_replicas": 2}, r"max_replicas \(2\).*min_replicas \(3\)"),
    ],
)
def test_numbers_that_exclude_each_other_are_refused(settings: dict[str, int], both: str) -> None:
    with pytest.raises(ConfigError, match=both):
        load_config(settings)


def test_printed_settings_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config", "--min-replicas", "0", "--max-replicas", "3"]) == 0
    server = load_config(capsys.readouterr().out).server
    assert (server.fewest_engines, server.most_engines) == (0, 3)


def test_the_application_scales_only_where_it_should() -> None:
    def engines(**settings: int) -> Any:
        app: Any = build({"device": "cpu", **settings})
        return app._bound_deployment.init_args[2]._bound_deployment._deployment_config

    fixed, scaled = engines(num_engine_replicas=3), engines(min_replicas=0, max_replicas=2)
    assert (fixed.num_replicas, fixed.autoscaling_config) == (3, None)
    assert (scaled.autoscaling_config.min_replicas, scaled.autoscaling_config.max_replicas) == (0, 2)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = {
        "port": 0,
        "min-replicas": 0,
        "max-replicas": 2,
        "upscale-delay-s": 0.5,
        "downscale-delay-s": 4,
        "max-num-seqs": 4,
        "max-num-batched-tokens": 64,
    }
    arguments = (word for name, value in flags.items() for word in (f"--{name}", str(value)))
    with Served("-m", "tests.deployments.serve_fakes", *arguments) as server:
        server.wait_until_ready()
        yield server


def num_engines(served: Served) -> int:
    return len(gauge(served, "num_requests_running"))


@pytest.mark.ray
def test_engines_follow_a_wave_of_load_and_no_request_fails(served: Served) -> None:
    wait_for(lambda: num_engines(served) <= 1, "start with one engine", REBUILD_S)
    streams = [Stream(served, 400) for _ in range(10)]
    wait_for(lambda: num_engines(served) == 2, "second engine", REBUILD_S, lambda: served.output)
    late = [Stream(served, 100) for _ in range(6)]
    wait_for(lambda: all(gauge(served, "num_requests_running").values()), "work for the second engine", 60)
    for stream in [*streams, *late]:
        stream.check()
    long_one = Stream(served, 900)  # about 18 s: it lives through the scaling down
    wait_for(lambda: num_engines(served) == 1, "one engine less", REBUILD_S, lambda: served.output)
    long_one.check()


@pytest.mark.ray
def test_without_an_engine_the_first_requests_wait_for_one(served: Served) -> None:
    wait_for(lambda: num_engines(served) == 0, "no engine", REBUILD_S, lambda: served.output)
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200
    assert httpx.get(f"{served.url}/v1/models", timeout=60).status_code == 200
    begun = time.monotonic()
    streams = [Stream(served, 20) for _ in range(5)]
    assert complete(served, 5) == expected(5)
    for stream in streams:
        stream.check()
    assert time.monotonic() - begun > 0.5, "an engine had to be started"
    assert num_engines(served) == 1
