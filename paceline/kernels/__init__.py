"""One name per operation. `select` answers with the set of implementations a model runs on.

    reference   rows one at a time in a fixed order: slow, row-invariant, what everything else is tested against
    torch       PyTorch's own kernels: fast, not row-invariant on a CPU (a row's last bits depend on its neighbours)

Kernels see tensors and a `Layout`. They know nothing of sequences, drafting or sampling.
"""

from __future__ import annotations

from paceline.errors import OptionError
from paceline.kernels.ops import Ops

KERNELS = ("auto", "torch", "reference")


def select(name: str) -> Ops:
    """The operations called `name`."""
    if name == "reference":
        from paceline.kernels.reference import ReferenceOps

        return ReferenceOps()
    if name in ("auto", "torch"):
        from paceline.kernels.eager import EagerOps

        return EagerOps()
    raise OptionError(f"kernels={name!r} is not known; allowed: {', '.join(KERNELS)}")


__all__ = ["KERNELS", "Ops", "select"]
