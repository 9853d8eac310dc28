"""A round's small work in Triton, under one name: `kernels/rounds.Rounds`."""

from __future__ import annotations

from paceline.kernels.triton import drafting, keeping, packing, picking, walking


class TritonRounds:
    best = staticmethod(picking.best)
    sample = staticmethod(picking.sample)
    sample_keys = staticmethod(picking.sample_keys)
    perturb = staticmethod(picking.perturb)
    walk = staticmethod(walking.walk)
    moves = staticmethod(walking.moves)
    pack = staticmethod(packing.pack)
    observe = staticmethod(packing.observe)
    budgets = staticmethod(drafting.budgets)
    cut = staticmethod(drafting.cut)
    paths = staticmethod(drafting.paths)
    look_up = staticmethod(drafting.look_up)
    count_true = staticmethod(drafting.count_true)
    put = staticmethod(keeping.put)
    take = staticmethod(keeping.take)
