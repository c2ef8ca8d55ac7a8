"""transformers' AutoTokenizer is the oracle for directories."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, processors

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.errors import ConfigError, UserError
from pagedray.engine.text.tokenizer import load_tokenizer
from tests.engine.text import samples
from tests.engine.text.samples import TEXTS

CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}


def load(folder, chat_template=None):
    return load_tokenizer(open_checkpoint(str(folder)), chat_template)


def auto(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def with_bos_and_eos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


KINDS = {
    "gpt2-like": (samples.byte_level, CHATML, {}),
    "qwen-like": (samples.qwen_like, {"tokenizer_class": "Qwen2Tokenizer", **CHATML}, {"model_type": "qwen2"}),
    "llama3-like": (samples.llama3_like, CHATML, {}),
    "llama2-like": (
        samples.metaspace,
        {"tokenizer_class": "LlamaTokenizer", **SPM},
        {"model_type": "llama"},
    ),
    "spm bpe": (lambda: samples.byte_fallback(True), SPM, {}),
    "gemma-like": (
        lambda: samples.byte_fallback(False),
        {"tokenizer_class": "GemmaTokenizer", **SPM},
        {"model_type": "gemma3_text"},
    ),
    "no bos, whatever the flags say": (
        lambda: samples.byte_fallback(True, adds_bos=False),
        {"add_bos_token": True, "add_eos_token": True, **SPM},
        {},
    ),
    "bos, whatever the flags say": (lambda: samples.byte_fallback(True), {"add_bos_token": False, **SPM}, {}),
    "bos and eos": (lambda: with_bos_and_eos(samples.byte_fallback(False)), SPM, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_and_decodes_as_transformers_does(kind, tmp_path):
    build, tokenizer_config, config = KINDS[kind]
    folder = samples.save(tmp_path, build(), tokenizer_config, config)
    ours, theirs = load(folder), auto(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), (text, add)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    for i in range(ours.vocab_size):
        if "\ufffd" not in theirs.decode([i]):  # a part of a character
            assert ours.token_bytes(i).decode() == theirs.decode([5, i])[len(theirs.decode([5])) :] or i < 3


def flags(token_id, content, **changes):
    base = {"content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {str(token_id): base | {"special": True} | changes}


PLAIN = AddedToken("fox", special=False, normalized=False)
SPECIAL_TOKENS = {
    "named, in the vocabulary": ([], {"eos_token": "fox"}, {}),
    "named, added as plain": ([PLAIN], {"eos_token": "fox"}, {}),
    "named, new": ([], {"eos_token": "<new>", "pad_token": "<newer>"}, {}),
    "named with flags": ([], {"eos_token": {"__type": "AddedToken", "content": "<new>", "lstrip": True}}, {}),
    "additional": ([], {"additional_special_tokens": ["fox", "<new>"]}, {}),
    "additional, added as plain": ([PLAIN], {"additional_special_tokens": ["fox"]}, {}),
    "extra, a list": ([], {"extra_special_tokens": ["<new>"]}, {}),
    "extra, named": ([], {"extra_special_tokens": {"image_token": "<img>"}, "audio_token": "<audio>"}, {}),
    "null": ([], {"eos_token": None, "bos_token": "<|im_start|>"}, {}),
    "from the map": ([], {}, {"eos_token": {"content": "<new>", "rstrip": True}, "additional_special_tokens": ["fox"]}),
    "map and config": ([], {"eos_token": "<a>"}, {"eos_token": "<b>", "bos_token": "<c>"}),
    "decoder table, no map": ([], {"added_tokens_decoder": {}, "bos_token": "<c>"}, {"eos_token": "<b>"}),
    "decoder table changes a token": ([PLAIN], {"added_tokens_decoder": flags(300, "fox", rstrip=True)}, {}),
    "decoder table adds": ([], {"added_tokens_decoder": flags(403, "<new>", special=False, lstrip=True)}, {}),
}


@pytest.mark.parametrize("case", SPECIAL_TOKENS)
def test_special_tokens_are_those_of_transformers(case, tmp_path):
    added, tokenizer_config, special_map = SPECIAL_TOKENS[case]
    backend = samples.byte_level()
    backend.add_tokens(added)
    files = {"special_tokens_map_json": special_map} if special_map else {}
    folder = samples.save(tmp_path, backend, tokenizer_config, **files)
    ours, theirs = load(folder), auto(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    text = "the quick fox <new> <newer> x <img> <audio> <a> <b> <c> fox <|im_start|> end"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.vocab_size == len(theirs)
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_eos_ids_are_those_of_the_generation_config_and_the_tokenizer(tmp_path):
    backend = samples.byte_level()
    end, pad = backend.token_to_id("<|im_end|>"), backend.token_to_id("<|pad|>")
    config = {"model_type": "llama", "eos_token_id": 7}
    folder = samples.save(tmp_path / "a", backend, CHATML, config, generation_config_json={"eos_token_id": [pad, end]})
    assert load(folder).eos_ids == (pad, end)
    folder = samples.save(tmp_path / "b", backend, CHATML, config)
    assert load(folder).eos_ids == (7, end)
    folder = samples.save(tmp_path / "c", backend, {})
    assert load(folder).eos_ids == ()


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    backend = samples.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = load(samples.save(tmp_path, backend))
    for text in ("a", "a b c d e f"):
        assert tokenizer.encode(text) == samples.byte_level().encode(text).ids


def test_chat_templates_come_from_files_first(tmp_path):
    def template(name, **files):
        return load(samples.save(tmp_path / name, samples.byte_level(), CHATML | files.pop("config", {}), **files))

    assert template("none").chat_template is None
    assert template("config", config={"chat_template": "C"}).chat_template == "C"
    assert template("file", config={"chat_template": "C"}, chat_template_jinja="F").chat_template == "F"
    assert template("processor", chat_template_json={"chat_template": "P"}).chat_template == "P"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = template("named", config={"chat_template": named})
    assert tokenizer.chat_template == "D"
    messages = [{"role": "user", "content": ""}]
    assert tokenizer.apply_chat_template(messages, kwargs={"tools": [{}]}) == "T"
    folder = tmp_path / "file" / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("A")
    assert load(tmp_path / "file").apply_chat_template(messages, kwargs={"tools": [{}]}) == "A"
    assert auto(tmp_path / "file").get_chat_template(tools=[{}]) == "A"


def test_a_given_chat_template_replaces_the_models(tmp_path):
    folder = samples.save(tmp_path / "m", samples.byte_level(), {"chat_template": "C"})
    file = tmp_path / "other.jinja"
    file.write_text("F")
    assert load(folder, str(file)).chat_template == "F"
    assert load(folder, "{{ messages[0].role }}").chat_template == "{{ messages[0].role }}"
    with pytest.raises(ConfigError, match=r"absent\.jinja"):
        load(folder, str(tmp_path / "absent.jinja"))
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match="chat template"):
        load(folder, str(file))


def test_a_directory_without_tokenizer_json_is_converted_or_refused(tmp_path):
    theirs = auto(samples.save(tmp_path / "a", samples.byte_level(), CHATML))
    folder = samples.save(tmp_path / "b", samples.byte_level(), {"tokenizer_class": "GPT2Tokenizer", **CHATML})
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(samples.byte_level().get_vocab()))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)))
    ours = load(folder)
    for text in CORPUS_WITH_ENDS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.special_tokens["eos_token"] == "<|im_end|>"
    (folder / "vocab.json").unlink()
    (folder / "merges.txt").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer"):
        load(folder)


CORPUS_WITH_ENDS = [*samples.CORPUS, "<|im_start|>user\nhi<|im_end|>"]


def test_a_broken_file_is_named(tmp_path):
    folder = samples.save(tmp_path, samples.byte_level())
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json can't be read"):
        load(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja can't be read"):
        load(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be read"):
        load(folder)


def test_half_a_surrogate_pair_is_a_users_error():
    with pytest.raises(UserError, match="surrogate pair at character 2"):
        samples.embedded().encode("hi\ud83d")


def test_tokens_are_shown_as_text_or_as_bytes():
    tokenizer = samples.embedded()
    ids = tokenizer.encode("hi 👩‍👧")
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "hi 👩‍👧"
    texts = [tokenizer.token_text(i) for i in ids]
    assert texts[0] == "hi"
    partial = [text for text in texts if text.startswith("bytes:")]
    assert partial and all(text.replace("bytes:", "", 1).replace("\\x", "").isalnum() for text in partial)
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.decode([ids[0], tokenizer.vocab_size + 5, -1, 2**40]) == "hi"


def test_sentencepiece_tokens_are_bytes_too():
    tokenizer = samples.wrap(samples.byte_fallback(True))
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_text(3 + 0xE2) == "bytes:\\xe2"
    assert tokenizer.token_text(3 + 0x0A) == "\n"
    ids = tokenizer.encode(" the é😀", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "  the é😀"


def test_added_tokens_that_are_not_in_the_byte_alphabet_are_themselves():
    backend = samples.byte_level()
    backend.add_special_tokens([AddedToken("<｜end▁of▁turn｜>", normalized=False), AddedToken("a b", normalized=False)])
    tokenizer = samples.wrap(backend)
    ids = tokenizer.encode("<｜end▁of▁turn｜>a b")
    assert [tokenizer.token_text(i) for i in ids] == ["<｜end▁of▁turn｜>", "a b"]
    assert tokenizer.decode(ids, False) == backend.decode(ids, skip_special_tokens=False) == "<｜end▁of▁turn｜>a b"


def test_neither_torch_nor_transformers_is_imported():
    """An ingress has no torch, and starts in as long as its imports take."""
    code = """
import sys
from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.text import chat_template, detokenizer, gguf_tokenizer, hf_tokenizer, tokenizer
t = tokenizer.load_tokenizer(open_checkpoint("smollm2-135m-instruct"))
text = t.apply_chat_template([{"role": "user", "content": "hi"}])
assert detokenizer.Detokenizer(t, skip_special_tokens=False).feed(t.encode(text), True).text == text
heavy = {"torch", "transformers", "numpy", "gguf", "ray", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
