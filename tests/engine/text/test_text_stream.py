from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.engine.text.text_stream import ONE_PER_BYTE, REPLACEMENT, Utf8Stream, WindowStream
from tests.engine.text import samples

EMOJI = "👩‍👩‍👧‍👦🏴\U000e0067\U000e0062\U000e007f日e\u0301é\u00a0x"


def pieces(stream, ids) -> list[str]:
    return [*map(stream.feed, ids), stream.flush()]


def stream_bytes(data: bytes, errors: str = "replace") -> list[str]:
    return pieces(Utf8Stream(lambda i: bytes([i]), errors=errors), data)


@given(st.binary(max_size=40))
def test_bytes_one_at_a_time_give_what_they_give_at_once(data):
    assert "".join(stream_bytes(data)) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("cut", range(len(EMOJI.encode()) + 1))
def test_a_text_cut_at_any_byte_shows_whole_characters_and_one_mark_for_the_rest(cut):
    data = EMOJI.encode()[:cut]
    *shown, tail = stream_bytes(data)
    assert EMOJI.startswith("".join(shown))
    assert tail == ("" if "".join(shown).encode() == data else REPLACEMENT)


def test_a_character_appears_with_its_last_byte():
    assert stream_bytes("a😀b".encode()) == ["a", "", "", "", "😀", "b", ""]


def test_bytes_that_can_not_be_completed_are_replaced_as_soon_as_that_is_known():
    assert stream_bytes(b"\xf0\x9f\x98a\xffb") == ["", "", "", REPLACEMENT + "a", REPLACEMENT, "b", ""]
    assert stream_bytes(b"\xf0\x9f\x98a\xff", ONE_PER_BYTE) == ["", "", "", 3 * REPLACEMENT + "a", REPLACEMENT, ""]
    assert stream_bytes(b"\xe2\x82", ONE_PER_BYTE) == ["", "", 2 * REPLACEMENT]


BACKENDS = {
    "byte level": samples.byte_level(),
    "byte fallback with prefix": samples.byte_fallback(True),
    "byte fallback": samples.byte_fallback(False),
    "word piece": samples.word_piece(),
}


def one_mark_per_byte(ids, backend) -> str:
    """Decode byte fallback by hand: unlike the library, keep the characters of a run that are complete."""
    data = b""
    for i in ids:
        token = backend.id_to_token(i)
        data += bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace("▁", " ").encode()
    out = ""
    while data:
        for size in (1, 2, 3, 4):
            try:
                out += data[:size].decode()
            except UnicodeDecodeError:
                continue
            break
        else:
            size, out = 1, out + REPLACEMENT
        data = data[size:]
    return out


@settings(max_examples=200)
@given(data=st.data(), kind=st.sampled_from(sorted(BACKENDS)), skip=st.booleans())
def test_any_ids_stream_to_what_the_library_decodes(data, kind, skip):
    backend = BACKENDS[kind]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=30))
    tokenizer = samples.wrap(backend)
    parts = pieces(tokenizer.text_stream(skip), ids)
    assert "".join(parts) == tokenizer.decode(ids, skip)
    if "fallback" not in kind:
        assert "".join(parts) == backend.decode(ids, skip_special_tokens=skip)
    else:
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        plain = [i for i in ids if not (skip and i in special)]
        text = one_mark_per_byte(plain, backend)
        assert "".join(parts) == (text.removeprefix(" ") if "prefix" in kind else text)
        if REPLACEMENT not in backend.decode(ids, skip_special_tokens=skip):
            assert "".join(parts) == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(text=st.text(max_size=30), kind=st.sampled_from(sorted(BACKENDS)[:3]))
def test_any_text_streams_back_in_prefixes_of_itself(text, kind):
    tokenizer = samples.wrap(BACKENDS[kind])
    stream, shown = tokenizer.text_stream(True), ""
    for i in tokenizer.encode(text, add_special_tokens=False):
        shown += stream.feed(i)
        assert text.startswith(shown)
    assert shown + stream.flush() == text


def test_the_space_that_sentencepiece_puts_first_is_dropped_once():
    words = [b" the", b" ", b"  ", b""]
    assert pieces(Utf8Stream(words.__getitem__, strips_space=True), [3, 0, 0]) == ["", "the", " the", ""]
    assert pieces(Utf8Stream(words.__getitem__, strips_space=True), [1, 1, 0]) == ["", " ", " the", ""]
    assert pieces(Utf8Stream(words.__getitem__, strips_space=True), [2, 0]) == [" ", " the", ""]


def test_a_decoder_that_never_completes_a_character_is_not_waited_for():
    stream = WindowStream(lambda ids: REPLACEMENT * len(ids))
    assert pieces(stream, range(9)) == ["", "", "", 4 * REPLACEMENT, "", "", "", 4 * REPLACEMENT, "", REPLACEMENT]


def test_special_tokens_inside_a_character_do_not_break_it():
    tokenizer = samples.wrap(BACKENDS["byte level"])
    ids = [next(i for i in range(256) if tokenizer.token_bytes(i) == bytes([b])) for b in "é".encode()]
    end = BACKENDS["byte level"].token_to_id("<|im_end|>")
    assert pieces(tokenizer.text_stream(True), [ids[0], end, ids[1]]) == ["", "", "é", ""]
    assert pieces(tokenizer.text_stream(False), [ids[0], end]) == ["", REPLACEMENT + "<|im_end|>", ""]


def test_word_pieces_show_once_they_are_tokens():
    tokenizer = samples.wrap(BACKENDS["word piece"])
    ids = tokenizer.encode("the doggys fox", add_special_tokens=False)
    assert pieces(tokenizer.text_stream(True), ids) == ["the", " dog", "gy", "s", " fox", ""]
