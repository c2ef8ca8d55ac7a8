from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.engine.text.detokenizer import Detokenizer, TextDelta
from tests.engine.text import samples
from tests.fakes import EOS_ID, ByteTokenizer

BYTES = ByteTokenizer()
FAMILY = "👩‍👩‍👧‍👦"
TOKENIZERS = {
    "byte level": samples.wrap(samples.byte_level()),
    "byte fallback": samples.wrap(samples.byte_fallback(True)),
    "word piece": samples.wrap(samples.word_piece()),
    "bytes": BYTES,
}
PARTS = ["the", " ", "\n\n", "dog", FAMILY, "日本", "e\u0301", "\u00a0", "aab", "a", "}", "<|im_end|>", "é"]


@functools.cache
def id_of_byte(kind: str) -> dict[bytes, int]:
    tokenizer = TOKENIZERS[kind]
    return {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}


def ids_of_bytes(kind: str, data: bytes) -> list[int]:
    """Byte tokens of any tokenizer that has them."""
    return [id_of_byte(kind)[bytes([b])] for b in data]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


def expected(tokenizer, ids, stops, include_stop, skip) -> tuple[str, str | None, int]:
    """The result by definition: decode everything, find, cut; the token is the first after which the stop is there."""
    text = tokenizer.decode(ids, skip)
    found = first_stop(text, stops)
    if found is None:
        return text, None, len(ids)
    end, stop = found
    lengths = itertools.accumulate(len(piece) for piece in map(tokenizer.text_stream(skip).feed, ids))
    num = next((n for n, length in enumerate(lengths, 1) if length >= end), len(ids))
    return text[: end if include_stop else end - len(stop)], stop, num


def run(detokenizer, feeds, finished=True) -> tuple[str, str | None, int]:
    """All deltas joined. Checks what must hold for each."""
    text, num = "", 0
    deltas = [detokenizer.feed(ids, finished and i == len(feeds) - 1) for i, ids in enumerate(feeds)]
    for delta, ids in zip(deltas, feeds, strict=True):
        text, num = text + delta.text, num + delta.num_tokens
        assert delta.num_tokens == len(ids) or delta.stop is not None
    stops = [delta.stop for delta in deltas]
    if any(stops):
        at = next(i for i, stop in enumerate(stops) if stop)
        assert stops[at:] == [stops[at]] * (len(stops) - at)
        assert all(delta.text == "" and delta.num_tokens == 0 for delta in deltas[at + 1 :])
    return text, stops[-1], num


def cut(ids, sizes):
    feeds, at = [], 0
    for size in sizes:
        feeds.append(ids[at : at + size])
        at += size
    return [*feeds, ids[at:]]


@st.composite
def cases(draw):
    """Ids (of text, of bytes cut anywhere, or random) and stop strings, mostly cut out of the text that they give."""
    kind = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[kind]
    some_ids = st.one_of(
        st.lists(st.sampled_from(PARTS), max_size=6).map(
            lambda p: tokenizer.encode("".join(p), add_special_tokens=False)
        ),
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12),
        *([] if kind == "word piece" else [st.binary(max_size=8).map(lambda b: ids_of_bytes(kind, b))]),
    )
    ids = [i for part in draw(st.lists(some_ids, max_size=4)) for i in part]
    skip = draw(st.booleans())
    text = tokenizer.decode(ids, skip)
    substring = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 8)).map(
        lambda s: text[s[0] : s[0] + s[1]]
    )
    stops = draw(st.lists(st.one_of(substring, st.sampled_from(PARTS)).filter(bool), max_size=3))
    sizes = draw(st.lists(st.integers(0, 5), max_size=20))
    return kind, ids, stops, skip, draw(st.booleans()), sizes


@settings(max_examples=600)
@given(cases())
def test_streamed_text_is_the_decoded_text_cut_at_the_first_stop(case):
    kind, ids, stops, skip, include_stop, sizes = case
    tokenizer = TOKENIZERS[kind]
    make = functools.partial(
        Detokenizer, tokenizer, stop=tuple(stops), include_stop=include_stop, skip_special_tokens=skip
    )
    want = expected(tokenizer, ids, stops, include_stop, skip)
    assert run(make(), [ids]) == want
    assert run(make(), [[i] for i in ids] or [[]]) == want
    assert run(make(), cut(ids, sizes)) == want


@settings(max_examples=300)
@given(cases())
def test_no_part_of_a_stop_string_is_ever_shown(case):
    kind, ids, stops, skip, _, _ = case
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer, stop=tuple(stops), skip_special_tokens=skip)
    want, stop, _ = expected(tokenizer, ids, stops, False, skip)
    full, shown = tokenizer.decode(ids, skip), ""
    for i in ids:
        shown += detokenizer.feed([i]).text
        assert want.startswith(shown)
    if stop is None:  # what is held back may still become a stop string, or is an incomplete character
        held = full[len(shown) :].rstrip("\ufffd")
        assert not held or any(s.startswith(held) for s in stops) or kind == "word piece"


@settings(max_examples=300)
@given(cases(), st.integers(0, 40))
def test_a_moved_request_goes_on_exactly_where_it_was(case, num_before):
    kind, ids, stops, skip, include_stop, _ = case
    options = {"stop": tuple(stops), "include_stop": include_stop, "skip_special_tokens": skip}
    before, after = ids[:num_before], ids[num_before:]
    first = Detokenizer(TOKENIZERS[kind], **options)
    shown = first.feed(before)
    second = Detokenizer(TOKENIZERS[kind], **options, output_ids=before)
    assert second.feed(after, True) == first.feed(after, True)
    if shown.stop is not None:
        assert second.feed([], True) == TextDelta("", shown.stop, 0)


@settings(max_examples=300)
@given(cases(), st.integers(0, 12))
def test_stop_strings_that_end_within_min_tokens_are_text(case, min_tokens):
    kind, ids, stops, skip, _, sizes = case
    if kind == "word piece":
        return
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer, stop=tuple(stops), skip_special_tokens=skip, min_tokens=min_tokens)
    stream = tokenizer.text_stream(skip)
    free = len("".join(map(stream.feed, ids[:min_tokens])))
    full = tokenizer.decode(ids, skip)
    if len(ids) <= min_tokens:
        free = len(full)
    ends = [(e, -len(s), s) for s in stops for e in range(free + 1, len(full) + 1) if full[:e].endswith(s)]
    text, stop, _ = run(detokenizer, cut(ids, sizes))
    assert (text, stop) == ((full[: min(ends)[0] + min(ends)[1]], min(ends)[2]) if ends else (full, None))


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
@pytest.mark.parametrize("text", ["😀", FAMILY, "日本語", "e\u0301👍🏽", "🇩🇪"])
def test_a_character_cut_by_the_length_limit_is_flushed_as_one_mark_or_more(kind, text):
    tokenizer, data = TOKENIZERS[kind], text.encode()
    for size in range(len(data) + 1):
        ids = ids_of_bytes(kind, data[:size])
        detokenizer = Detokenizer(tokenizer)
        parts = [detokenizer.feed([i]).text for i in ids]
        assert text.startswith("".join(parts))
        rest = detokenizer.feed([], True).text
        assert set(rest) <= {"\ufffd"}
        assert "".join(parts) + rest == tokenizer.decode(ids)


def feed_all(detokenizer, text: str) -> list[str]:
    return [detokenizer.feed([i]).text for i in text.encode()]


def test_the_head_of_a_stop_string_waits_for_its_next_character():
    detokenizer = Detokenizer(BYTES, stop=("###",))
    assert feed_all(detokenizer, "a#b##c") == ["a", "", "#b", "", "", "##c"]
    assert detokenizer.feed(b"##") == TextDelta("", None, 2)
    assert detokenizer.feed(b"#zz", True) == TextDelta("", "###", 1)


def test_a_head_that_came_to_nothing_is_given_out_at_the_end():
    detokenizer = Detokenizer(BYTES, stop=("STOP",))
    assert detokenizer.feed(b"go STO") == TextDelta("go ", None, 6)
    assert detokenizer.feed(b"", True) == TextDelta("STO", None, 0)


def test_a_head_that_restarts_inside_itself_is_held_from_there():
    detokenizer = Detokenizer(BYTES, stop=("aab",))
    assert feed_all(detokenizer, "aaaa") == ["", "", "a", "a"]
    assert detokenizer.feed(b"b") == TextDelta("", "aab", 1)


def test_nothing_waits_when_the_stop_string_stays_in_the_text():
    detokenizer = Detokenizer(BYTES, stop=("</end>",), include_stop=True)
    assert feed_all(detokenizer, "x</end>") == list("x</end>")
    assert detokenizer.feed(b"more", True) == TextDelta("", "</end>", 0)


def test_a_stop_inside_one_token_cuts_the_token():
    tokenizer = samples.embedded()
    ids = tokenizer.encode(" wonderful world")
    assert tokenizer.token_text(ids[0]) == " wonderful"
    assert Detokenizer(tokenizer, stop=("derf",)).feed(ids) == TextDelta(" won", "derf", 1)
    assert Detokenizer(tokenizer, stop=("derf",), include_stop=True).feed(ids) == TextDelta(" wonderf", "derf", 1)


def test_the_match_that_ends_first_wins_whatever_the_order():
    for stops in [("abcd", "bc"), ("bc", "abcd")]:
        assert Detokenizer(BYTES, stop=stops).feed(b"xabcd", True) == TextDelta("xa", "bc", 4)


def test_the_token_that_ended_generation_gives_no_text_but_counts():
    for skip in (True, False):
        detokenizer = Detokenizer(BYTES, skip_special_tokens=skip)
        assert detokenizer.feed([*b"hi", EOS_ID], True, EOS_ID) == TextDelta("hi", None, 3)
    detokenizer = Detokenizer(BYTES, skip_special_tokens=False, include_stop=True)
    assert detokenizer.feed([*b"hi", EOS_ID], True, EOS_ID) == TextDelta("hi<eos>", None, 3)
    detokenizer = Detokenizer(BYTES, skip_special_tokens=False)
    assert detokenizer.feed([*b"hi", EOS_ID], True) == TextDelta("hi<eos>", None, 3)  # ignore_eos: a token like any


def test_a_stop_id_that_is_plain_text_gives_no_text():
    dot = ord(".")
    assert Detokenizer(BYTES).feed(b"a.b.", True, dot) == TextDelta("a.b", None, 4)


def test_a_stop_string_before_the_stop_id_wins():
    assert Detokenizer(BYTES, stop=("b",)).feed([*b"abc", EOS_ID], True, EOS_ID) == TextDelta("a", "b", 2)


def test_bytes_waiting_when_the_stop_id_comes_are_flushed():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.feed(["é".encode()[0]]) == TextDelta("", None, 1)
    assert detokenizer.feed([EOS_ID], True, EOS_ID) == TextDelta("\ufffd", None, 1)


def test_an_emoji_made_of_byte_tokens_streams_with_its_last_byte():
    tokenizer = samples.embedded()
    ids = tokenizer.encode("hi 👩‍👩‍👧‍👦 ok")
    assert len(ids) > 9  # several tokens a character
    detokenizer, shown = Detokenizer(tokenizer), ""
    for i in ids:
        shown += detokenizer.feed([i]).text
        assert "\ufffd" not in shown
    assert shown == "hi 👩‍👩‍👧‍👦 ok"
