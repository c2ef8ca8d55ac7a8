"""From settings to an application, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve import Application

from pagedray.deployments.build import build, bundles, num_cpus, num_gpus, strategy
from pagedray.deployments.devices import device_here, device_of_cluster
from pagedray.engine.config import load_config
from pagedray.engine.errors import ConfigError
from tests.deployments.served import ROOT


def test_texts_of_the_command_line_become_values() -> None:
    config = load_config({"served_model_name": "a,b", "max_num_seqs": "8", "enable_prefix_caching": "false"})
    assert config.model.served_model_name == ("a", "b")
    assert config.scheduler.max_num_seqs == 8
    assert config.cache.enable_prefix_caching is False


@pytest.mark.parametrize("args", [{"modle": "x"}, {"cache": {"block_sise": 16}}])
def test_unknown_settings_are_named(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting '(modle|block_sise)'"):
        build(args)


@pytest.mark.parametrize("args", [{"port": 8000}, {"server": {"host": "0.0.0.0"}}, {"haproxy": "true"}])
def test_settings_of_the_cluster_are_refused_with_their_place(args: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"belongs to the cluster.*: set "):
        build(args)


def test_the_shipped_file_is_valid_and_shows_defaults() -> None:
    config = yaml.safe_load((ROOT / "deployments" / "serve.yaml").read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "pagedray.deployments:build"
    assert load_config(application["args"]) == load_config()
    assert isinstance(build(application["args"]), Application)


def test_the_ranks_of_a_stage_share_a_bundle() -> None:
    assert strategy(load_config()) == strategy(load_config({"tensor_parallel_size": 4})) == "STRICT_PACK"
    config = load_config({"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "device": "cuda"})
    assert bundles(config) == [{"CPU": 0.5}, {"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 4.0}]
    assert strategy(config) == "PACK"
    assert num_gpus(config) == 8


def test_each_worker_has_a_bundle() -> None:
    assert bundles(load_config()) == [{"CPU": 0.5}, {"CPU": 1.0}]
    assert num_cpus(load_config({"num_engine_replicas": 2, "num_ingress_replicas": 4})) == 4.0


def test_a_worker_on_a_gpu_has_one_in_its_bundle() -> None:
    config = load_config(auto_device=lambda: "cuda")
    assert bundles(config) == [{"CPU": 0.5}, {"CPU": 1.0, "GPU": 1.0}]
    assert num_cpus(config) == 1.75
    assert num_gpus(config) == 1
    assert num_gpus(load_config()) == 0
    assert num_gpus(load_config({"num_engine_replicas": 3, "device": "cuda"})) == 3


def test_a_gpu_is_found_by_its_drivers_files(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert device_here(tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert device_here(tmp_path) == "cuda"


def test_without_a_cluster_auto_is_the_cpu() -> None:
    assert device_of_cluster() == "cpu"


def test_importing_deployments_leaves_rays_environment_open() -> None:
    code = "import sys, pagedray.deployments.cli; print('ray' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_app_is_the_application_of_the_defaults() -> None:
    code = "from pagedray.deployments import app; print(type(app).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path("/"))
    assert done.stdout.split() == ["Application"], done.stderr


def test_a_parser_that_there_is_not_fails_the_deployment_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tool_call_parser.*hermes"):
        build({"device": "cpu", "tool_call_parser": "hermse"})
