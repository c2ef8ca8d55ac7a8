"""One token per row: temperature, top-k, min-p, top-p, then the inverse of the cumulative distribution.

    p = softmax(z / temperature)
    top_k   keep the k most likely (0: all), ties by lower id
    min_p   keep p >= min_p * max p
    top_p   keep the smallest set of the most likely with sum >= top_p * (sum of what is left), ties by lower id
    token = first id in id order with cumsum(p) > u * sum(p)

Order    as vLLM applies them. Its min_p comes before top_k, which is the same: both cut the same sorted list and
         neither depends on the other, since the ratio to the best probability survives any cut below the best.
Shapes   z [R, V]; u [R] float64 in [0, 1); temperature (> 0), top_k, top_p, min_p [R]; returns [R] int64.
Dtypes   z float32 (greedy: any float); p float32 over the vocabulary, float64 over candidates; sums float64.
Inputs   each row's maximum is finite, and nothing is NaN; -inf is a forbidden token. The caller sees to that.
Rows     don't influence each other: each sum has a shape that the row's own parameters decide, so a token is the
         same alone and in any batch, bit for bit.
Method   Greedy and sampling without filters never sort. top_k sorts its candidates. top_p first tries the 128 most
         likely tokens, which hold the nucleus of a peaked distribution; for a flat one it cuts by a histogram of
         logits, and sorts only the bucket where the sum crosses top_p.
Source   Holtzman et al. 2019, arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p).
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from pagedray.kernels.case import Case
from pagedray.kernels.top_candidates import BLOCK, top_candidates, top_candidates_ref

NUM_CANDIDATES = 128
_BUCKET_SHIFT = 18  # of a float32's bits: 32 buckets between a power of two and the next
_NUM_BUCKETS = 1 << (31 - _BUCKET_SHIFT)


def sample_ref(z: Tensor, u: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The definition, row by row in float64."""
    tokens = []
    for row in range(z.shape[0]):
        values, ids = top_candidates_ref(z[row : row + 1], z.shape[1])
        p = torch.softmax(values[0].double() / temperature[row].double(), dim=-1)
        if top_k[row] > 0:
            p[top_k[row] :] = 0
        p[p < min_p[row].double() * p[0]] = 0
        if top_p[row] < 1:
            p[p.cumsum(0) - p >= top_p[row].double() * p.sum()] = 0
        in_id_order = torch.zeros_like(p).scatter(0, ids[0], p)
        cumulative = in_id_order.cumsum(0)
        position = int((cumulative <= u[row] * cumulative[-1]).sum())
        tokens.append(min(position, int(in_id_order.nonzero()[-1])))
    return torch.tensor(tokens, dtype=torch.int64, device=z.device)


def greedy_ref(z: Tensor) -> Tensor:
    return top_candidates_ref(z, 1)[1].squeeze(1)


def sample_all_ref(z: Tensor, u: Tensor, temperature: Tensor) -> Tensor:
    off = torch.zeros_like(temperature)
    return sample_ref(z, u, temperature, off.to(torch.int64), off + 1, off)


def sample_top_k_ref(
    z: Tensor, u: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> Tensor:
    return sample_ref(z, u, temperature, top_k, top_p, min_p)


def sample_min_p_ref(z: Tensor, u: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    off = torch.zeros_like(temperature)
    return sample_ref(z, u, temperature, off.to(torch.int64), off + 1, min_p)


def sample_top_p_ref(z: Tensor, u: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    return sample_ref(z, u, temperature, torch.zeros_like(temperature, dtype=torch.int64), top_p, min_p)


def greedy(z: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id among equals. NaN is more likely than anything."""
    at = _block_ids(_block_reduce(z, "max").argmax(-1), z.shape[1])
    return at.gather(1, z.gather(1, at).argmax(-1, keepdim=True)).squeeze(1)


def sample_all(z: Tensor, u: Tensor, temperature: Tensor) -> Tensor:
    """Sample without a filter."""
    return _inverse_cdf(_probabilities(z, temperature), u)


def sample_top_k(
    z: Tensor, u: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> Tensor:
    """Sample rows that all have 0 < top_k <= width; `width` should follow from top_k alone (see Rows above)."""
    values, ids = top_candidates(z, width)
    outside = torch.arange(values.shape[1], device=z.device) >= top_k.unsqueeze(1)
    scaled = values.double() / temperature.double().unsqueeze(1)
    p = torch.softmax(scaled.masked_fill_(outside, -inf), dim=-1)
    p = _cut_min_p(p, min_p.double())
    return _choose(_nucleus(p, top_p.double() * p.cumsum(1)[:, -1]), ids, u)


def sample_min_p(z: Tensor, u: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Sample rows without top_k and top_p."""
    return _inverse_cdf(_cut_min_p(_probabilities(z, temperature), min_p), u)


def sample_top_p(z: Tensor, u: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sample rows that all have top_p < 1, and no top_k."""
    p = _probabilities(z, temperature)
    if min_p.any():
        p = _cut_min_p(p, min_p)
    limit = top_p.double() * _block_reduce(p, "sum").cumsum(1)[:, -1]
    tokens = torch.empty_like(u, dtype=torch.int64)

    _, ids = top_candidates(z, NUM_CANDIDATES)
    likely = p.gather(1, ids).double()
    is_covered = likely.cumsum(1)[:, -1] >= limit
    covered = is_covered.nonzero().squeeze(1)
    if covered.numel():
        kept = _nucleus(likely[covered], limit[covered])
        tokens[covered] = _choose(kept, ids[covered], u[covered])
    for row in (~is_covered).nonzero().squeeze(1).tolist():
        kept = _cut_nucleus(z[row], p[row], limit[row]).unsqueeze(0)
        tokens[row : row + 1] = _inverse_cdf(kept, u[row : row + 1])
    return tokens


def _probabilities(z: Tensor, temperature: Tensor) -> Tensor:
    scaled = z / temperature.unsqueeze(1)
    return torch.softmax(scaled, dim=-1, out=scaled)


def _cut_min_p(p: Tensor, min_p: Tensor) -> Tensor:
    least = min_p.unsqueeze(1) * p.amax(-1, keepdim=True)
    return p * torch.ge(p, least, out=torch.empty_like(p))  # several times faster than a mask of booleans


def _nucleus(p: Tensor, limit: Tensor) -> Tensor:
    """Zero what comes after the sum reached `limit`; p is sorted, most likely first."""
    before = torch.nn.functional.pad(p.cumsum(1)[:, :-1], (1, 0))
    return torch.where(before < limit.unsqueeze(1), p, 0.0)


def _cut_nucleus(z: Tensor, p: Tensor, limit: Tensor) -> Tensor:
    """The same for one row [V] in id order, without sorting it.

    Buckets are ranges of the distance to the best logit, so all of one bucket is more likely than all of the next;
    only the bucket in which the sum reaches the limit needs an order.
    """
    distance = (z.amax() - z).abs_()  # 0.0 - -0.0 would set the sign bit
    buckets = distance.view(torch.int32) >> _BUCKET_SHIFT
    reached = torch.bincount(buckets, weights=p.double(), minlength=_NUM_BUCKETS).cumsum(0)
    crossing = int((reached < limit).sum())
    inside = (buckets == crossing).nonzero().squeeze(1)
    values, order = z[inside].sort(descending=True, stable=True)
    inside = inside[order]
    before = p[inside].double().cumsum(0) - p[inside] + (reached[crossing - 1] if crossing else 0.0)
    num_inside = max(1, int((before < limit).sum()))
    is_higher = torch.gt(z, values[num_inside - 1], out=torch.empty_like(z))
    kept = p * is_higher
    kept[inside[:num_inside]] = p[inside[:num_inside]]
    return kept


def _choose(p: Tensor, ids: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution, in id order, over candidates in any order."""
    ids, order = ids.sort(dim=-1)
    return ids.gather(1, _first_beyond(p.gather(1, order).cumsum(1), u).unsqueeze(1)).squeeze(1)


def _inverse_cdf(p: Tensor, u: Tensor) -> Tensor:
    """The same over the whole vocabulary: find the block first, then the token in it."""
    reached = _block_reduce(p, "sum").cumsum(1)
    block = _first_beyond(reached, u)
    before = torch.nn.functional.pad(reached, (1, 0)).gather(1, block.unsqueeze(1))
    at = _block_ids(block, p.shape[1])
    inside = p.gather(1, at).cumsum(1, dtype=torch.float64)  # repeats of the last id come last and are that id
    token = _count_up_to(inside, (u * reached[:, -1]).unsqueeze(1) - before)
    return at.gather(1, token.unsqueeze(1)).squeeze(1)


def _first_beyond(cumulative: Tensor, u: Tensor) -> Tensor:
    return _count_up_to(cumulative, (u * cumulative[:, -1]).unsqueeze(1))


def _count_up_to(cumulative: Tensor, target: Tensor) -> Tensor:
    """First position whose sum exceeds the target; rounding may put the target at the end, then the last that adds."""
    last = (cumulative < cumulative[:, -1:]).sum(1)
    return torch.minimum((cumulative <= target).sum(1), last)


def _block_reduce(x: Tensor, how: str) -> Tensor:
    """Maximum, or float64 sum, of each block of 64 tokens, the last one maybe shorter: [R, V] → [R, ceil(V / 64)]."""
    num_blocks, num_rest = divmod(x.shape[1], BLOCK)
    full = x[:, : num_blocks * BLOCK].unflatten(1, (num_blocks, BLOCK))
    rest = x[:, num_blocks * BLOCK :]
    if how == "max":
        return torch.cat((full.amax(-1), rest.amax(-1, keepdim=True)), 1) if num_rest else full.amax(-1)
    sums = full.sum(-1, dtype=torch.float64)
    return torch.cat((sums, rest.sum(-1, keepdim=True, dtype=torch.float64)), 1) if num_rest else sums


def _block_ids(blocks: Tensor, vocab: int) -> Tensor:
    """Ids of one block per row, [R] → [R, 64]; past the vocabulary its last id repeats."""
    ids = blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=blocks.device)
    return ids.clamp_(max=vocab - 1)


def make_inputs(case: Case) -> tuple[Tensor | int, ...]:
    generator = torch.Generator().manual_seed(7)
    num_rows = case["R"]
    z = case.randn(num_rows, case["V"]).float() * case.get("scale", 3)
    temperature, top_p, min_p = 0.5 + torch.rand((3, num_rows), generator=generator) / 2
    top_k = torch.randint(1, case.get("width", 1) + 1, (num_rows,), generator=generator)
    u = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    inputs: dict[str, tuple[Tensor | int, ...]] = {
        "greedy": (z,),
        "sample_all": (z, u, temperature),
        "sample_min_p": (z, u, temperature, min_p / 20),
        "sample_top_p": (z, u, temperature, top_p, min_p / 200),
        "sample_top_k": (z, u, temperature, top_k, top_p, min_p / 20, case.get("width")),
    }
    return inputs[case.op]


CASES = [
    Case("greedy", R=1, V=7),
    Case("greedy", R=64, V=49152),
    Case("greedy", R=9, V=50257, dtype=torch.bfloat16),
    Case("sample_all", R=1, V=7),
    Case("sample_all", R=64, V=49152),
    Case("sample_all", R=9, V=50257, dtype=torch.bfloat16),
    Case("sample_min_p", R=1, V=7),
    Case("sample_min_p", R=64, V=49152),
    Case("sample_top_p", R=1, V=7),
    Case("sample_top_p", R=64, V=49152, scale=6),
    Case("sample_top_p", R=9, V=50257, scale=1, dtype=torch.bfloat16),
    Case("sample_top_k", R=1, V=7, width=64),
    Case("sample_top_k", R=64, V=49152, width=64),
    Case("sample_top_k", R=9, V=50257, width=512, dtype=torch.bfloat16),
]
