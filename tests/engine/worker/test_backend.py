import pytest

from pagedray.engine.errors import ConfigError
from pagedray.engine.worker.backend import choose_backend, choose_device, choose_dtype


@pytest.mark.parametrize("forced", ["auto", "torch"])
def test_the_cpu_has_one_backend(forced: str) -> None:
    name, reason = choose_backend("cpu", "bfloat16", 64, forced)
    assert name == "torch"
    assert ("forced" in reason) == (forced == "torch")


@pytest.mark.parametrize("forced", ["triton", "flashinfer"])
def test_a_forced_backend_that_cannot_run_is_refused(forced: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend is {forced}.*device is cpu"):
        choose_backend("cpu", "bfloat16", 64, forced)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="no attention backend for device cuda"):
        choose_backend("cuda", "bfloat16", 64, "auto")
    with pytest.raises(ConfigError, match=r"device is cuda.*device=cpu"):
        choose_device("cuda")
    assert choose_device("auto") == choose_device("cpu") == "cpu"


def test_dtype() -> None:
    assert choose_dtype("auto", "bfloat16", "cpu") == "bfloat16"
    assert choose_dtype("float32", "float16", "cpu") == "float32"
    with pytest.raises(ConfigError, match=r"^dtype is float16.*bfloat16 or float32"):
        choose_dtype("float16", "bfloat16", "cpu")
    with pytest.raises(ConfigError, match="checkpoint's dtype is float16"):
        choose_dtype("auto", "float16", "cpu")
