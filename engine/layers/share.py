"""What part of a dimension one rank of a tensor-parallel group has. Pure numbers."""

from __future__ import annotations

import dataclasses

from pagedray.engine.errors import ConfigError

_VOCAB_MULTIPLE = 8  # rows of a vocabulary's share: sums of 16-bit logits begin at whole 16 bytes


@dataclasses.dataclass(frozen=True)
class Share:
    """Elements first … first + size - 1 of `whole`."""

    first: int
    size: int
    whole: int

    def times(self, num: int) -> Share:
        """The same part where each element is `num`: from heads to rows of a weight."""
        return Share(self.first * num, self.size * num, self.whole * num)

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    @property
    def index(self) -> slice:
        return slice(self.first, self.first + self.size)


def all_of(whole: int) -> Share:
    return Share(0, whole, whole)


def none_of(whole: int) -> Share:
    return Share(0, 0, whole)


def even_share(whole: int, rank: int, num_ranks: int, what: str) -> Share:
    """Raises: ConfigError when it doesn't divide; `what` names it there."""
    if whole % num_ranks:
        fitting = [n for n in range(1, min(whole, 64) + 1) if whole % n == 0]
        raise ConfigError(
            f"the {what} of {whole} doesn't divide by tensor_parallel_size {num_ranks}; "
            f"sizes that divide it: {', '.join(map(str, fitting))}"
        )
    size = whole // num_ranks
    return Share(rank * size, size, whole)


def local_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[int, int]:
    """Query heads and key-value heads of one rank; key-value heads are repeated where there are more ranks than heads.

    Raises:
        ConfigError: they can't be split so that each rank has the key-value heads of its query heads and no others.
    """
    if not _heads_fit(num_heads, num_kv_heads, num_ranks):
        fitting = [n for n in range(1, num_heads + 1) if _heads_fit(num_heads, num_kv_heads, n)]
        raise ConfigError(
            f"{num_heads} query heads and {num_kv_heads} key-value heads can't be split by tensor_parallel_size "
            f"{num_ranks}: it must divide the query heads, and divide the key-value heads or be a multiple of them; "
            f"possible sizes: {', '.join(map(str, fitting))}"
        )
    return num_heads // num_ranks, max(num_kv_heads // num_ranks, 1)


def _heads_fit(num_heads: int, num_kv_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)


def head_shares(num_heads: int, num_kv_heads: int, rank: int, num_ranks: int) -> tuple[Share, Share]:
    """Which query heads and which key-value heads this rank has. Raises: ConfigError as `local_heads`."""
    heads, kv_heads = local_heads(num_heads, num_kv_heads, num_ranks)
    first_kv = rank * num_kv_heads // num_ranks
    return Share(rank * heads, heads, num_heads), Share(first_kv, kv_heads, num_kv_heads)


def vocab_rows(vocab_size: int, num_ranks: int) -> int:
    """Rows of each rank's table, padding included: all ranks have equally many, for their logits are gathered."""
    if num_ranks == 1:
        return vocab_size
    return -(-vocab_size // (num_ranks * _VOCAB_MULTIPLE)) * _VOCAB_MULTIPLE


def vocab_share(vocab_size: int, rank: int, num_ranks: int) -> Share:
    """The ids whose rows this rank has; the last ranks may have fewer than the others, or none."""
    rows = vocab_rows(vocab_size, num_ranks)
    first = min(rank * rows, vocab_size)
    return Share(first, min(rows, vocab_size - first), vocab_size)
