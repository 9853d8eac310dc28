"""Which captured round a planned one fits into, and which are captured at the start."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.engine.ladder import FEW, MIXED, MIXED_NODES, NODES, ROWS, up
from paceline.engine.round import Plan
from paceline.models.frame import Size


def find_size(plan: Plan, max_nodes: int, least_nodes: int = 0) -> Size | None:
    """The size of the captured round that serves this one; None: there is none so large.

    least_nodes: what is drafted has room for so many, though no sequence may have them all, as at the end of answers.
    """
    shape = plan.shape
    exact = Size.exact(shape, plan.num_sampling)
    exact = exact._replace(nodes=exact.nodes and max(exact.nodes, least_nodes))
    decoding = exact.chunks == 0 and all(count == 1 for count, _ in shape)
    nodes = up(exact.nodes, NODES if decoding else MIXED_NODES) or exact.nodes
    nodes = min(nodes, max(max_nodes, exact.nodes))
    if decoding:
        sampling = up(exact.sampling, FEW)
        return None if sampling is None else Size(sampling * (1 + nodes), sampling, 0, nodes)
    rows, sampling = up(exact.rows, ROWS), up(exact.sampling, MIXED)
    if rows is None or sampling is None or exact.chunks > 1:
        return None
    return Size(rows, sampling, 1, nodes)


def usual_sizes(max_num_seqs: int, max_rows: int, max_nodes: int, arms: Iterable[int] = ()) -> list[Size]:
    """Of the rounds that come first, the largest before the others: what they need of memory serves all.

    arms: numbers of nodes that a budget may choose; of those between none and all, rounds that are not too large.
    """
    few = FEW[: FEW.index(up(max_num_seqs, FEW) or FEW[-1]) + 1]
    between = [Size(count * (1 + nodes), count, 0, nodes) for nodes in arms if 0 < nodes < max_nodes for count in few]
    found = [size for size in between if size.rows <= max_rows]
    for nodes in {0, max_nodes}:
        found += [Size(count * (1 + nodes), count, 0, nodes) for count in few]
        rows = ROWS[: ROWS.index(up(max_rows, ROWS) or ROWS[-1]) + 1]
        most = up(max_num_seqs, MIXED) or MIXED[-1]
        found += [Size(count, beside, 1, nodes) for count in rows for beside in MIXED if beside <= min(most, count)]
    return sorted(found, reverse=True)
