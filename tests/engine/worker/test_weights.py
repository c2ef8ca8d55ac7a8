import dataclasses
import io
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedray.engine.checkpoint import Checkpoint, open_checkpoint
from pagedray.engine.errors import ConfigError, UnsupportedModel
from pagedray.engine.layers.share import Share, all_of, none_of
from pagedray.engine.layers.slot import Slot
from pagedray.engine.models.parse import model_spec
from pagedray.engine.models.registry import build_model
from pagedray.engine.models.stages import stage_spec
from pagedray.engine.worker.parallel import ALONE
from pagedray.engine.worker.weights import fill_with_noise, load_weights
from tests.engine.layers.groups import place
from tests.gguf_models import write_gguf
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")


class Slots:
    """A model that is nothing but slots of the given shapes; all NaN until loaded."""

    def __init__(self, shapes, dtype=torch.float32):
        self.slots = {name: torch.full(tuple(shape), torch.nan, dtype=dtype) for name, shape in shapes.items()}

    def weight_slots(self):
        return {name: Slot(tensor) for name, tensor in self.slots.items()}


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: weight for file in sorted(folder.glob("*.safetensors")) for name, weight in load_file(file).items()}


def shapes_of(folder):
    return {name: weight.shape for name, weight in stored(folder).items()}


@pytest.fixture
def folder(tmp_path):
    """A copy of the tiny llama (tied, one file) to spoil."""
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    return tmp_path / "model"


def replace(folder, change) -> Checkpoint:
    weights = stored(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["llama", "llama-old-keys", "gemma3"])  # tied, three shards, many names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_gets_its_tensor_in_its_own_dtype(name, dtype):
    folder = tiny_model(name)
    model = Slots(shapes_of(folder), dtype)
    load_weights(model, open_checkpoint(str(folder)), CPU)
    for tensor, weight in stored(folder).items():
        assert model.slots[tensor].dtype == dtype
        torch.testing.assert_close(model.slots[tensor], weight.to(dtype), rtol=0, atol=0)


def test_slots_may_be_views_of_one_stacked_parameter():
    folder = tiny_model("llama")
    shapes, weights = shapes_of(folder), stored(folder)
    model = Slots(shapes)
    parts = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    stacked = torch.full((sum(shapes[part][0] for part in parts), shapes[parts[0]][1]), torch.nan)
    for part, view in zip(parts, stacked.split([shapes[part][0] for part in parts]), strict=True):
        model.slots[part] = view
    load_weights(model, open_checkpoint(str(folder)), CPU)
    assert torch.equal(stacked, torch.cat([weights[part].float() for part in parts]))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_gguf_file_fills_the_same_slots(tmp_path, name):
    write_gguf(name, tmp_path / "x.gguf")
    folder = tiny_model(name)
    model = Slots(shapes_of(folder))
    load_weights(model, open_checkpoint(str(tmp_path)), CPU)
    for tensor, weight in stored(folder).items():
        torch.testing.assert_close(model.slots[tensor], weight.float(), rtol=0, atol=1e-7)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(folder):
    shapes = shapes_of(folder)

    def spoil(weights):
        weights["model.layers.0.mlp.gate_proj.weight_scale"] = weights.pop("model.layers.1.mlp.up_proj.weight")
        weights["model.norm.weight"] = torch.zeros(65)

    with pytest.raises(UnsupportedModel) as caught:
        load_weights(Slots(shapes), replace(folder, spoil), CPU)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.mlp.gate_proj.weight_scale" in message
    assert "wrong shape: model.norm.weight is (65,), the config says (64,)" in message


def test_a_long_list_of_missing_tensors_is_cut(folder):
    shapes = shapes_of(folder) | {f"more.{i}": (1,) for i in range(30)}
    with pytest.raises(UnsupportedModel, match=r"missing: more\.0, .* and 22 more$"):
        load_weights(Slots(shapes), open_checkpoint(str(folder)), CPU)


def test_a_tied_head_and_rotary_buffers_may_be_stored_too(folder):
    shapes = shapes_of(folder)

    def add(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    model = Slots(shapes)
    load_weights(model, replace(folder, add), CPU)
    assert not any(slot.isnan().any() for slot in model.slots.values())


def test_an_untied_head_must_be_there(folder):
    shapes = shapes_of(folder) | {"lm_head.weight": (512, 64)}
    with pytest.raises(UnsupportedModel, match=r"missing: lm_head\.weight$"):
        load_weights(Slots(shapes), open_checkpoint(str(folder)), CPU)


def test_integer_weights_are_refused(folder):
    shapes = shapes_of(folder)

    def quantize(weights):
        weights["model.norm.weight"] = torch.ones(64, dtype=torch.int8)

    with pytest.raises(UnsupportedModel, match=r"quantized: model\.norm\.weight is torch\.int8"):
        load_weights(Slots(shapes), replace(folder, quantize), CPU)


def test_a_truncated_file_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read as safetensors"):
        load_weights(Slots({}), open_checkpoint(str(folder)), CPU)


def test_a_terminal_gets_a_bar_with_gib_and_seconds(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    folder = tiny_model("llama")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load_weights(Slots(shapes_of(folder)), open_checkpoint(str(folder)), CPU)
    last = terminal.getvalue().split("\r")[-1]
    assert "100%" in last and "GiB in" in last and last.rstrip().endswith("s")


def test_without_a_terminal_there_is_one_log_line(caplog, capsys):
    folder = tiny_model("llama")
    with caplog.at_level(logging.INFO, "pagedray"):
        load_weights(Slots(shapes_of(folder)), open_checkpoint(str(folder)), CPU)
    assert capsys.readouterr().err == ""
    (record,) = caplog.records
    assert f"tensors={len(json.dumps(list(shapes_of(folder))).split(','))} " in record.message
    assert "gib=" in record.message and "seconds=" in record.message


# ---- a rank's part


class Parts:
    """One slot of a matrix, and a norm that this rank doesn't want."""

    def __init__(self, name: str, *shares: Share):
        self.tensor = torch.full([share.size for share in shares], torch.nan)
        self.slots = {name: Slot(self.tensor, *shares), "other": Slot(torch.empty(0), none_of(3))}

    def weight_slots(self):
        return self.slots


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Checkpoint:
    """A matrix of 32 MiB, larger than what the system maps around a page."""
    folder = tmp_path_factory.mktemp("wide")
    weights = {"wide": torch.arange(2**23, dtype=torch.float32).view(4096, 2048), "other": torch.zeros(3)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_checkpoint(str(folder))


PARTS = [
    (all_of(4096), all_of(2048)),
    (Share(1024, 1024, 4096), all_of(2048)),
    (all_of(4096), Share(1536, 512, 2048)),
    (Share(4000, 24, 4096), Share(8, 16, 2048)),
    (none_of(4096), all_of(2048)),
]


@pytest.mark.parametrize("shares", PARTS)
def test_a_slot_gets_its_part(wide, shares):
    model = Parts("wide", *shares)
    load_weights(model, wide, CPU)
    whole = torch.arange(2**23, dtype=torch.float32).view(4096, 2048)
    assert torch.equal(model.tensor, whole[shares[0].index, shares[1].index])


@pytest.mark.parametrize(
    ("shares", "expected_mib"), [(PARTS[0], 32), (PARTS[1], 8), ((Share(8, 8, 4096), all_of(2048)), 0), (PARTS[4], 0)]
)
def test_no_other_part_of_the_file_is_touched(wide, shares, expected_mib, monkeypatch):
    """What of the mapped file is in this process's memory, asked when the last tensor has been read."""
    (path,) = wide.weight_files()
    resident = []

    class Bar:
        def __init__(self, **options):
            resident.append(options["total"] * 1024)

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            resident.append(resident_mib(path))

        def update(self, gib):
            pass

    monkeypatch.setattr("pagedray.engine.worker.weights.tqdm", Bar)
    load_weights(Parts("wide", *shares), wide, CPU)
    counted, found = resident
    assert counted == pytest.approx(expected_mib, abs=0.1)
    assert expected_mib - 0.1 < found < expected_mib + 4.1  # it maps 2 MiB at a time at most


def resident_mib(path) -> float:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (first,) = (i for i, line in enumerate(lines) if line.endswith(str(path)))
    return next(int(line.split()[1]) for line in lines[first:] if line.startswith("Rss:")) / 1024


def test_a_gguf_gives_a_part_too(tmp_path):
    write_gguf("llama", tmp_path / "x.gguf")
    whole = stored(tiny_model("llama"))["model.layers.2.self_attn.k_proj.weight"].float()
    shapes = shapes_of(tiny_model("llama"))
    model = Slots(shapes)
    tensor = torch.empty(16, 64)
    slots = model.weight_slots() | {
        "model.layers.2.self_attn.k_proj.weight": Slot(tensor, Share(8, 16, 32), all_of(64))
    }
    model.weight_slots = lambda: slots
    load_weights(model, open_checkpoint(str(tmp_path)), CPU)
    assert torch.equal(tensor, whole[8:24])


def test_layers_of_other_stages_are_expected_and_not_loaded(folder):
    shapes = {name: shape for name, shape in shapes_of(folder).items() if ".layers.1." not in name}
    with pytest.raises(UnsupportedModel, match=r"unexpected: model\.layers\.1\."):
        load_weights(Slots(shapes), open_checkpoint(str(folder)), CPU, other_layers={0})
    model = Slots(shapes)
    load_weights(model, open_checkpoint(str(folder)), CPU, other_layers={1})
    assert not any(slot.isnan().any() for slot in model.slots.values())


def test_the_shape_of_the_whole_is_checked(wide):
    with pytest.raises(UnsupportedModel, match=r"wide is \(4096, 2048\), the config says \(8192, 2048\)"):
        load_weights(Parts("wide", Share(0, 4096, 8192), all_of(2048)), wide, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_made_up_weights_are_parts_of_the_same_model(dtype):
    """Whatever the number of ranks and stages."""
    spec = model_spec(open_checkpoint(str(tiny_model("llama"))))
    whole = build_model(spec, dtype, CPU)
    fill_with_noise(whole, CPU)
    expected = {name: slot.tensor for name, slot in whole.weight_slots().items()}
    assert expected["model.layers.0.mlp.up_proj.weight"].float().std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(expected["model.layers.0.mlp.up_proj.weight"], expected["model.layers.1.mlp.up_proj.weight"])
    for rank in range(2):
        parallel = dataclasses.replace(ALONE, tp=place(rank, 2))
        model = build_model(stage_spec(spec, 1, 2), dtype, CPU, parallel)
        fill_with_noise(model, CPU)
        for name, slot in model.weight_slots().items():
            assert torch.equal(slot.tensor, expected[name][slot.index]), name
