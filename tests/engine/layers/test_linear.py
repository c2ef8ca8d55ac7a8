import pytest
import torch

from pagedray.engine.layers.linear import GatedLinear, Linear, QKVLinear, can_pack, should_pack
from pagedray.engine.worker.parallel import ALONE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_packing_changes_nothing_but_the_layout(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = Linear(24, 300, 100, bias=bias).to(dtype)
    for i, slot in enumerate(layer.slots("a", "b").values()):
        slot.tensor.copy_(torch.randn(slot.shape, generator=generator) + i)
    assert layer.weight is not None
    is_packed = can_pack(layer.weight)
    x = torch.randn(5, 24, generator=generator).to(dtype)
    with torch.inference_mode():
        expected = layer(x)
        layer.finish_loading()
        torch.testing.assert_close(layer(x), expected)
    assert (layer.packed is not None, layer.weight is None) == (is_packed, is_packed)  # no second copy in memory
    assert is_packed or dtype != torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_gate_equals_separate_passes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = GatedLinear(16, 160, "silu", ALONE.tp).to(dtype)
    for slot in layer.slots("gate", "up").values():
        slot.tensor.copy_(torch.randn(slot.shape, generator=generator))
    assert layer.weight is not None
    is_packed = can_pack(layer.weight)
    x = torch.randn(5, 16, generator=generator).to(dtype)
    with torch.inference_mode():
        expected = layer(x)
        layer.finish_loading()
        assert len(layer.matrices()) == (2 if is_packed else 1)
        torch.testing.assert_close(layer(x), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_narrow_float32_layers_stay_as_they_are() -> None:
    assert not should_pack(torch.empty(48, 24))


def test_a_type_without_a_kernel_stays_as_it_is() -> None:
    layer = Linear(24, 10).half()
    layer.finish_loading()
    assert layer.packed is None
    assert layer(torch.zeros(2, 24).half()).shape == (2, 10)


def test_the_three_inputs_of_attention() -> None:
    layer = QKVLinear(8, num_heads=4, num_kv_heads=2, head_dim=3, tp=ALONE.tp, bias=True)
    slots = layer.slots("q", "k", "v")
    assert {name: slot.shape for name, slot in slots.items()} == {
        "q.weight": (12, 8),
        "k.weight": (6, 8),
        "v.weight": (6, 8),
        "q.bias": (12,),
        "k.bias": (6,),
        "v.bias": (6,),
    }
    for i, part in enumerate("qkv"):
        slots[f"{part}.weight"].tensor.zero_()
        slots[f"{part}.bias"].tensor.fill_(i)
    assert layer(torch.zeros(5, 8))[4, :, 0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
