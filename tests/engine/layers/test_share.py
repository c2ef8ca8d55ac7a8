import pytest

from pagedray.engine.errors import ConfigError
from pagedray.engine.layers.share import (
    Share,
    even_share,
    head_shares,
    local_heads,
    vocab_rows,
    vocab_share,
)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "expected"),
    [
        (32, 8, 1, (32, 8)),
        (32, 8, 2, (16, 4)),
        (32, 8, 8, (4, 1)),
        (32, 8, 16, (2, 1)),  # each key-value head twice
        (32, 8, 32, (1, 1)),
        (9, 3, 3, (3, 1)),
        (12, 1, 4, (3, 1)),
        (40, 40, 8, (5, 5)),
    ],
)
def test_heads_of_one_rank(num_heads, num_kv_heads, num_ranks, expected):
    assert local_heads(num_heads, num_kv_heads, num_ranks) == expected


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "possible"),
    [
        (32, 8, 3, "1, 2, 4, 8, 16, 32"),
        (9, 3, 2, "1, 3, 9"),
        (12, 4, 6, "1, 2, 4, 12"),  # divides the query heads, but rank 1 would need parts of two key-value heads
        (8, 2, 16, "1, 2, 4, 8"),
    ],
)
def test_heads_that_cannot_be_split_are_refused_with_the_numbers(num_heads, num_kv_heads, num_ranks, possible):
    with pytest.raises(ConfigError) as raised:
        local_heads(num_heads, num_kv_heads, num_ranks)
    message = str(raised.value)
    assert f"{num_heads} query heads and {num_kv_heads} key-value heads" in message
    assert f"tensor_parallel_size {num_ranks}" in message
    assert message.endswith(f"possible sizes: {possible}")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (12, 4), (8, 8), (24, 1)])
def test_a_rank_has_the_key_value_heads_of_its_query_heads(num_heads, num_kv_heads):
    """A query head's key-value head is its own number divided by the size of its group, on a rank and over all."""
    sizes = [
        n for n in range(1, num_heads + 1) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]
    assert len(sizes) > 2
    for num_ranks in sizes:
        seen = []
        for rank in range(num_ranks):
            q, kv = head_shares(num_heads, num_kv_heads, rank, num_ranks)
            assert (q.whole, kv.whole) == (num_heads, num_kv_heads)
            for head in range(q.size):
                whole = (q.first + head) // (num_heads // num_kv_heads)
                assert kv.first + head // (q.size // kv.size) == whole
                seen.append(q.first + head)
        assert seen == list(range(num_heads))


def test_an_even_share_and_its_refusal():
    assert even_share(48, 2, 3, "intermediate size") == Share(32, 16, 48)
    with pytest.raises(ConfigError, match=r"intermediate size of 12 .* tensor_parallel_size 5; .*: 1, 2, 3, 4, 6, 12"):
        even_share(12, 0, 5, "intermediate size")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("vocab_size", [1, 8, 33, 512, 49152, 151936])
def test_every_id_has_its_row_on_one_rank(vocab_size, num_ranks):
    rows = vocab_rows(vocab_size, num_ranks)
    shares = [vocab_share(vocab_size, rank, num_ranks) for rank in range(num_ranks)]
    assert [i for share in shares for i in range(share.first, share.first + share.size)] == list(range(vocab_size))
    for rank, share in enumerate(shares):
        assert share.whole == vocab_size and share.size <= rows
        assert share.size == 0 or share.first == rank * rows  # where kernels/gather_logits.py expects it
    assert rows * num_ranks < vocab_size + 8 * num_ranks
    assert rows == vocab_size if num_ranks == 1 else rows % 8 == 0


def test_heads_become_rows():
    assert Share(1, 2, 4).times(16) == Share(16, 32, 64)
