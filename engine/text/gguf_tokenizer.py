"""Tokenizers of GGUF files, built from the tables in their metadata.

Source: https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pagedray.engine.errors import ConfigError
from pagedray.engine.text.tokenizer import SPACE, Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        ConfigError: the tables are missing, or of a kind that isn't implemented.
    """
    table = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = table.get("model")
    if kind not in _BUILDERS:
        raise ConfigError(f"GGUF: tokenizer.ggml.model is {kind!r}; supported: {', '.join(_BUILDERS)}")
    for key in ("tokens", "merges" if kind == "gpt2" else "scores"):
        if key not in table:
            raise ConfigError(f"GGUF: the file lacks tokenizer.ggml.{key}")
    tokens: list[str] = table["tokens"]
    types: list[int] = table.get("token_type") or [NORMAL] * len(tokens)
    backend, adds_bos = _BUILDERS[kind](table, tokens, types)
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, y in zip(tokens, types, strict=True)
            if y in (UNKNOWN, CONTROL)
        ]
    )
    user_defined = [t for t, y in zip(tokens, types, strict=True) if y == USER_DEFINED]
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])
    ids = {name: table.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    before = [ids["bos"]] if table.get("add_bos_token", adds_bos) and ids["bos"] is not None else []
    after = [ids["eos"]] if table.get("add_eos_token", False) and ids["eos"] is not None else []
    if before or after:
        parts = [*[tokens[i] for i in before], "$A", *[tokens[i] for i in after]]
        backend.post_processor = processors.TemplateProcessing(
            single=parts, special_tokens=[(tokens[i], i) for i in {*before, *after}]
        )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens={name: tokens[i] for name, key in names.items() if (i := ids[key]) is not None},
        eos_ids=[i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None],
        chat_templates={} if template is None else {"default": template},
    )


def _byte_level(table: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Backend, bool]:
    """Byte-level BPE; `tokenizer.ggml.pre` says how text is split before merging."""
    pre = table.get("pre", "default")
    if pre not in _SPLITTERS:
        raise ConfigError(f"GGUF: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(_SPLITTERS)}")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    merges = [tuple(merge.split(" ", 1)) for merge in table["merges"]]
    is_llama3 = pre == "llama-bpe"
    backend = Backend(models.BPE(vocab, merges, ignore_merges=is_llama3))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _SPLITTERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


_SPLITTERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()]),
    "qwen2": lambda: _split(_QWEN2),
    "llama-bpe": lambda: _split(_LLAMA3),
    "gpt-2": _gpt2,
    "default": _gpt2,
}


def _sentencepiece(table: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Backend, bool]:
    """Sentencepiece BPE: no merges in the file, but a score for each token.

    Sentencepiece joins the neighbours whose union has the best score, leftmost first. As merges in order of the union's
    score (all pairs that make up the same union in a row) that is ordinary BPE.
    """
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    scores: list[float] = table["scores"]
    merges: list[tuple[str, str]] = []
    normal = [i for i, kind in enumerate(types) if kind == NORMAL and len(tokens[i]) > 1]
    normal.sort(key=scores.__getitem__, reverse=True)  # stable: equal scores stay in order of ids
    for i in normal:
        token = tokens[i]
        pairs = [
            (left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in vocab and (right := token[at:]) in vocab
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += pairs
    unknown = table.get("unknown_token_id")
    backend = Backend(
        models.BPE(
            vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    to_space = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if table.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_space
    backend.decoder = decoders.Sequence(steps)
    return backend, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
