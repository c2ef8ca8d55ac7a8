from pagedray.engine.worker.token_index import TokenIndex

TOKENS = [
    b"",
    b"<",
    b"<think>",
    b"<th",
    b"think",
    b"<think>\n",
    b"ink>",
    b"<",
    b"a</t>",
    b"a</t>b",
    b"</t>\xff",
    b"\xff",
]


def test_tokens_by_how_they_begin():
    index = TokenIndex(TOKENS)
    assert index.starting_with(b"<th") == [3, 2, 5]
    assert index.starting_with(b"\xff") == [11]
    assert index.starting_with(b"b") == []
    assert index.that_are(b"<") == [1, 7] and index.that_are(b"") == []


def test_tokens_along_a_text_are_its_beginnings_and_what_begins_with_it():
    index = TokenIndex(TOKENS)
    assert index.along(b"<think>") == [1, 7, 3, 2, 5]
    assert index.along(b"ink>") == [6]
    assert index.along(b"x") == []


def test_tokens_with_a_text_and_something_behind_it():
    assert sorted(TokenIndex(TOKENS).containing_before_more(b"</t>")) == [9, 10]
