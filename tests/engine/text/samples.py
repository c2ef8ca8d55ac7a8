"""Small tokenizers of the kinds that models have, trained in milliseconds on a few lines of text."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pagedray.engine.checkpoint import open_checkpoint
from pagedray.engine.config import EMBEDDED_MODEL
from pagedray.engine.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "def add(a, b):\n    return a + b  # 1234567890\n\n\n",
    "Ünïcödé naïve café; 日本語のテキスト, 汉字; emoji 😀 👩‍👩‍👧‍👦 🇩🇪; the end.\tStop here!",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "\n\n",
    "it's 2024, isn't it? I'LL SEE",
    "e\u0301 \u1112\u1161\u11ab \u00c5 \u212b",
    "<s>typed</s> <|im_end|>x",
    "日本 🏴\U000e0067\U000e0062\U000e007f end",
    "a\u00a0b\u200bc\u3000d",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

BYTE_LEVEL_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


@functools.cache
def embedded() -> Tokenizer:
    """The real tokenizer of the embedded model: byte-level, 49152 tokens."""
    return load_tokenizer(open_checkpoint(EMBEDDED_MODEL))


def byte_level(pre_tokenizer: Any = None, normalizer: Any = None, vocab_size: int = 400) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in BYTE_LEVEL_SPECIAL])
    return backend


def qwen_like() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return byte_level(split, normalizers.NFC())


def llama3_like() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend = byte_level(split)
    bos = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return backend


def byte_fallback(adds_prefix: bool, adds_bos: bool = True) -> tokenizers.Tokenizer:
    """Sentencepiece BPE as Llama 2 (with a space put before the text) and Gemma (without) have it."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [*CORPUS[:2], "naïve café 日本語", " the end"],
        trainers.BpeTrainer(vocab_size=220, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(steps)
    special = ("<unk>", "<s>", "</s>", "<pad>", "<mask>")
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """The same as transformers 5 writes it: a space is put before the text unless it has one."""
    backend = byte_fallback(True)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """A decoder without a byte table: pieces joined by spaces, then punctuation pulled to the left."""
    chars = [chr(c) for c in range(33, 127)]
    tokens = ["[UNK]", "[SEP]", *chars, *("##" + c for c in chars), "the", "dog", "##gy", "##s", "fox"]
    backend = tokenizers.Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("[UNK]", "[SEP]")])
    return backend


def wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, special_tokens={})


def save(
    folder: Path,
    backend: tokenizers.Tokenizer,
    tokenizer_config: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **files: Any,
) -> Path:
    """Write a checkpoint directory with a tokenizer; files: name with _ for the dot → JSON value or text."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | (tokenizer_config or {}))
    )
    (folder / "model.safetensors").touch()
    for name, value in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder
