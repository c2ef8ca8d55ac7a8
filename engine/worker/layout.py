"""Which ranks of a gang form which groups. Pure numbers.

world = pp_size stages of tp_size ranks each: rank = stage * tp_size + tp_rank
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    tp_size: int
    pp_size: int

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def result_rank(self) -> int:
        """Whose results are the gang's: the first rank of the last stage."""
        return self.tp_size * (self.pp_size - 1)

    def stage(self, rank: int) -> int:
        return rank // self.tp_size

    def tp_ranks(self, rank: int) -> list[int]:
        """The ranks of this rank's stage."""
        first = self.stage(rank) * self.tp_size
        return list(range(first, first + self.tp_size))

    def pp_ranks(self, rank: int) -> list[int]:
        """The rank of each stage that has this rank's share of the layers."""
        return list(range(rank % self.tp_size, self.size, self.tp_size))
