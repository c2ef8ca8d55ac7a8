"""The configuration tree: where values come from, and what is refused."""

from typing import NoReturn

import msgspec
import pytest

from pagedray.engine.config import (
    GPU_DEFAULTS,
    OPTIMIZATION_LEVELS,
    Config,
    Device,
    WorkerConfig,
    describe_level,
    leaves,
    load_config,
)
from pagedray.engine.errors import ConfigError
from tests.fakes import FakeWorker

ON_A_CPU = Config(worker=WorkerConfig(device="cpu"))


def test_defaults_need_nothing() -> None:
    assert load_config() == ON_A_CPU


def test_the_stronger_source_wins() -> None:
    tree = "cache: {block_size: 4}\nmax_num_seqs: 3\nport: 1"
    environ = {"PAGEDRAY_MAX_NUM_SEQS": "5", "PAGEDRAY_PORT": "2", "OTHER": "x"}
    config = load_config(tree, {"port": 3, "host": None}, environ)
    assert (config.cache.block_size, config.scheduler.max_num_seqs, config.server.port) == (4, 5, 3)
    assert config.server.host == Config().server.host


@pytest.mark.parametrize(
    ("variable", "text", "leaf", "value"),
    [
        ("PAGEDRAY_SERVED_MODEL_NAME", "a,b", "model", ("a", "b")),
        ("PAGEDRAY_REVISION", "1.10", "model", "1.10"),
        ("PAGEDRAY_ENABLE_PREFIX_CACHING", "false", "cache", False),
        ("PAGEDRAY_STEP_TIMEOUT_S", "2.5", "failure", 2.5),
        ("PAGEDRAY_MAX_MODEL_LEN", "none", "model", None),
    ],
)
def test_variables_are_texts_of_their_fields_type(variable: str, text: str, leaf: str, value: object) -> None:
    field = variable.removeprefix("PAGEDRAY_").lower()
    assert getattr(getattr(load_config(environ={variable: text}), leaf), field) == value


def test_variables_that_kubernetes_makes_for_a_service_are_not_settings() -> None:
    environ = {
        "PAGEDRAY_PORT": "tcp://10.0.0.1:8000",
        "PAGEDRAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PAGEDRAY_SERVICE_HOST": "10.0.0.1",
        "PAGEDRAY_SERVICE_PORT": "8000",
        "PAGEDRAY_HEAD_SVC_SERVICE_PORT_DASHBOARD": "8265",
        "PAGEDRAY_HOST": "",
    }
    assert load_config(environ=environ) == ON_A_CPU


@pytest.mark.parametrize(
    ("tree", "overrides", "environ", "message"),
    [
        ("a: [", {}, {}, "not YAML"),
        ("[1]", {}, {}, "must be a mapping"),
        ({"cache": {"blocksize": 1}}, {}, {}, "cache: unknown setting 'blocksize'"),
        ({"blocksize": 1}, {}, {}, "unknown setting 'blocksize'"),
        ({"cache": {"port": 1}}, {}, {}, "cache: unknown setting 'port'"),
        ({}, {"block_size": 0}, {}, "cache.block_size"),
        ({}, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, {}, r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"),
        (
            *({}, {"pipeline_layers": (3, 4, 5), "pipeline_parallel_size": 2}, {}),
            r"pipeline_layers \(3, 4, 5\).*pipeline_parallel_size \(2\)",
        ),
        ({}, {"pipeline_layers": "4,0", "pipeline_parallel_size": 2}, {}, r"pipeline_layers \(4, 0\).*positive"),
        ({}, {"pipeline_layers": (4,)}, {"PAGEDRAY_PIPELINE_PARALLEL_SIZE": "3"}, r"pipeline_layers \(4\)"),
        ({}, {"enable_expert_parallel": True}, {}, "enable_expert_parallel.*tensor_parallel_size is 1"),
        (
            *({}, {"data_parallel_size": 2, "num_engine_replicas": 3}, {}),
            r"data_parallel_size \(2\) and num_engine_replicas \(3\)",
        ),
        ({}, {"pipeline_parallel_size": "two"}, {}, "worker.pipeline_parallel_size"),
        ({}, {"dtype": "float16"}, {}, "dtype float16 needs a GPU"),
        ({}, {"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype fp8 needs a GPU"),
        ({}, {"optimization_level": 4}, {}, "worker.optimization_level"),
        ({}, {"cuda_graph_sizes": (0, 4)}, {}, "cuda_graph_sizes must be positive, got 0"),
        ({}, {"step_timeout_s": float("inf")}, {}, "step_timeout_s"),
        ({}, {}, {"PAGEDRAY_PORT": "["}, "server.port"),
        ({}, {}, {"PAGEDRAY_MAX_NUM_SEQ": "3"}, "did you mean PAGEDRAY_MAX_NUM_SEQS"),
    ],
)
def test_what_is_refused_is_named(tree: object, overrides: dict[str, object], environ: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(tree, overrides, environ)  # type: ignore[arg-type]


def test_a_gpu_has_defaults_of_its_own() -> None:
    config = load_config(auto_device=lambda: "cuda")
    assert config.worker.device == "cuda"
    fields = {**config.scheduler.model_dump(), **config.worker.model_dump()}
    assert {name: fields[name] for name in GPU_DEFAULTS} == GPU_DEFAULTS
    assert load_config(overrides={"max_num_seqs": 7}, auto_device=lambda: "cuda").scheduler.max_num_seqs == 7


def test_a_device_that_is_given_is_not_looked_for() -> None:
    def look() -> NoReturn:
        raise AssertionError("looked")

    for device in ("cpu", "cuda"):
        assert load_config(overrides={"device": device}, auto_device=look).worker.device == device
    assert load_config(overrides={"device": "cuda", "dtype": "float16"}).model.dtype == "float16"


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
def test_a_level_is_a_preset_that_explicit_settings_override(level: int) -> None:
    config = load_config(environ={"PAGEDRAY_OPTIMIZATION_LEVEL": str(level)}, auto_device=lambda: "cuda")
    fields = {**config.scheduler.model_dump(), **config.worker.model_dump()}
    assert fields["optimization_level"] == level
    assert {name: fields[name] for name in OPTIMIZATION_LEVELS[level]} == OPTIMIZATION_LEVELS[level]
    explicit = load_config(overrides={"optimization_level": level, "run_ahead": 4, "cuda_graphs": True})
    assert (explicit.scheduler.run_ahead, explicit.worker.cuda_graphs) == (4, True)


@pytest.mark.parametrize("spelling", ["0", "0.0", " 0 ", "+0", 0.0])
def test_a_level_counts_however_it_is_spelt(spelling: object) -> None:
    config = load_config({"optimization_level": spelling})
    assert (config.worker.optimization_level, config.scheduler.run_ahead, config.worker.cuda_graphs) == (0, 1, False)


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"pipeline_parallel_size": 2}, 3),
        ({"pipeline_parallel_size": "4"}, 5),
        ({"pipeline_parallel_size": 4, "run_ahead": 2}, 2),
        ({"pipeline_parallel_size": 2, "optimization_level": 0}, 1),
        ({"tensor_parallel_size": 4}, 2),
        ({"pipeline_parallel_size": 2, "device": "cuda"}, 3),
        ({"pipeline_parallel_size": 3, "device": "cuda"}, 4),
        ({"tensor_parallel_size": 4, "device": "cuda"}, 3),
    ],
)
def test_a_pipeline_has_a_step_more_in_flight_than_stages(settings: dict[str, object], ahead: int) -> None:
    assert load_config(settings).scheduler.run_ahead == ahead


def test_data_parallel_size_is_another_name() -> None:
    for given in ({"data_parallel_size": 3}, {"data_parallel_size": "3", "num_engine_replicas": 3}):
        config = load_config(given)
        assert config.server.num_engine_replicas == 3
        assert load_config(config.model_dump()) == config


def test_a_level_is_told_with_what_came_of_it() -> None:
    def told(device: Device, num_graphs: int, **settings: object) -> str:
        config = load_config(overrides={"device": device, **settings})
        facts = msgspec.structs.replace(FakeWorker(config).load(), device=device, num_graphs=num_graphs)
        return describe_level(config, facts)

    assert told("cpu", 0) == "-O2: 2 steps in flight"
    assert told("cuda", 35) == "-O2: 3 steps in flight, 35 CUDA graphs"
    assert told("cpu", 0, pipeline_parallel_size=2) == "-O2: 3 steps in flight"
    few = told("cpu", 0, pipeline_parallel_size=3, run_ahead=3)
    assert few == "-O2: 3 steps in flight (run_ahead 4 would keep all 3 stages busy)"
    assert told("cuda", 0, optimization_level=0) == "-O0: 1 step in flight, no CUDA graphs"


def test_field_names_are_unique_over_the_tree() -> None:
    names = [name for leaf in leaves().values() for name in leaf.model_fields]
    assert len(names) == len(set(names))


def test_it_survives_its_own_json_with_the_fields_that_were_given() -> None:
    """Ranks in other processes get it that way, and what was given counts beside what it is."""
    config = load_config(overrides={"tensor_parallel_size": 2, "min_replicas": 1, "optimization_level": 1})
    again = Config.model_validate_json(config.model_dump_json(exclude_unset=True))
    assert again == config
    assert again.server.model_fields_set == config.server.model_fields_set
