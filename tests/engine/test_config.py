"""The configuration tree: where values come from, and what is refused."""

import pytest

from pagedray.engine.config import Config, leaves, load_config
from pagedray.engine.errors import ConfigError


def test_defaults_need_nothing() -> None:
    assert load_config() == Config()


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
    assert load_config(environ=environ) == Config()


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
        ({}, {"tensor_parallel_size": 2}, {}, "tensor_parallel_size must be 1"),
        ({}, {"device": "cuda"}, {}, "device cuda is not supported"),
        ({}, {"dtype": "float16"}, {}, "dtype float16 needs a GPU"),
        ({}, {"step_timeout_s": float("inf")}, {}, "step_timeout_s"),
        ({}, {}, {"PAGEDRAY_PORT": "["}, "server.port"),
        ({}, {}, {"PAGEDRAY_MAX_NUM_SEQ": "3"}, "did you mean PAGEDRAY_MAX_NUM_SEQS"),
    ],
)
def test_what_is_refused_is_named(tree: object, overrides: dict[str, object], environ: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(tree, overrides, environ)  # type: ignore[arg-type]


def test_field_names_are_unique_over_the_tree() -> None:
    names = [name for leaf in leaves().values() for name in leaf.model_fields]
    assert len(names) == len(set(names))
