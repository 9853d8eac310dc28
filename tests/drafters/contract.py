"""The contract every drafter is held to: whatever it proposes, not one token changes.

Prompts, seeds and settings are fixed once for all drafters; equality is exact, on the reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline import (
    MTP,
    DFlash,
    DraftModel,
    Eagle,
    EarlyExit,
    FirstOf,
    Glide,
    Hydra,
    Lookahead,
    Medusa,
    MLPSpeculator,
    NGram,
    Pard,
    Suffix,
)
from paceline.testing import SETTINGS as SETTINGS
from paceline.testing import plain, prompts
from tests.drafters.pair_reader import PairReader
from tests.drafters.tiny_eagle import tiny_eagle
from tests.drafters.tiny_hydra import knowing_hydra
from tests.drafters.tiny_medusa import knowing_medusa
from tests.drafters.tiny_mlp import knowing_mlp
from tests.drafters.tiny_mtp import tiny_mtp
from tests.drafters.tiny_readers import shared
from tests.fakes import DrawnTree, Hopeless, Oracle, Recorded, Replay, tiny_model


def recorded(batch: int, setting: str) -> Recorded:
    """Plain sequences; drafts can reach over their end."""
    return {tuple(p): p + out for p, out in zip(prompts(batch), plain(batch, setting))}


DRAFTERS: dict[str, Callable[[Recorded], Any]] = {
    "ngram": lambda known: NGram(5, min_match=1, max_match=3),
    "ngram_transformers": lambda known: NGram(5, rule="transformers"),
    "ngram_reference": lambda known: NGram(5, rule="reference"),
    "suffix": lambda known: Suffix(),
    "suffix_tree": lambda known: Suffix(tree=True, max_spec_factor=4.0, min_token_prob=0.01),
    "draft_model": lambda known: DraftModel(tiny_model(layers=1, hidden=16, seed=1), 4),
    "draft_is_target": lambda known: DraftModel(tiny_model(), 4),
    "first_of": lambda known: FirstOf(Suffix(tree=True), DraftModel(tiny_model(), 3)),
    "oracle": lambda known: Oracle(known, 5),
    "hopeless": lambda known: Hopeless(known, 4),
    "hopeless_tree": lambda known: Hopeless(known, 4, trees=True),
    "replay": lambda known: Replay(known, seed=3, trees=False),
    "replay_tree": lambda known: Replay(known, seed=3, trees=True),
    "drawn_tree": lambda known: DrawnTree(known),
    "pruned_tree": lambda known: DrawnTree(known, keep=5),
    "pair_reader": lambda known: PairReader(),
    "lookahead": lambda known: Lookahead(window=3, ngram=4, guesses=2),
    "early_exit": lambda known: EarlyExit(3, layers=1),
    "first_with_lookahead": lambda known: FirstOf(NGram(5, min_match=2), Lookahead(window=3, ngram=3)),
    "medusa": lambda known: Medusa(knowing_medusa(known)),
    "medusa_tree": lambda known: Medusa(knowing_medusa(known), tree="mc_sim_7b_63"),
    "mlp_speculator": lambda known: MLPSpeculator(knowing_mlp(known)),
    "mlp_speculator_tree": lambda known: MLPSpeculator(knowing_mlp(known), tree=True),
    "hydra": lambda known: Hydra(knowing_hydra(known)),
    "hydra_prefix_tree": lambda known: Hydra(knowing_hydra(known, "prefix-mlp"), tree="mc_sim_7b_63"),
    "glide": lambda known: Glide(shared("glide"), 4),
    "glide_layers": lambda known: Glide(shared("glide_2"), 3),
    "glide_cape": lambda known: Glide(shared("glide"), 2, cape=True),
    "pard": lambda known: Pard(shared("pard"), 4),
    "dflash": lambda known: DFlash(shared("dflash")),
    "dflash_own": lambda known: DFlash(shared("dflash_own"), 3),
    "eagle": lambda known: Eagle(tiny_eagle("first"), 4),
    "eagle_static": lambda known: Eagle(tiny_eagle("first"), 25, tree="static"),
    "eagle_wide": lambda known: Eagle(tiny_eagle("third"), tree="wide"),
    "eagle_dynamic": lambda known: Eagle(tiny_eagle("third"), 7, tree="dynamic", top_k=3, depth=2),
    "eagle3": lambda known: Eagle(tiny_eagle("third"), 4),
    "eagle3_short": lambda known: Eagle(tiny_eagle("third"), 4, min_probability=0.01),
    "peagle": lambda known: Eagle(tiny_eagle("parallel"), 4),
    "mtp": lambda known: MTP(tiny_mtp("deepseek", copies=True), 3),
    "mtp_turns": lambda known: MTP(tiny_mtp("mimo", 2), 3),
    "mtp_each": lambda known: MTP(tiny_mtp("mimo", 3), min_probability=0.001),
    "first_on_device": lambda known: FirstOf(NGram(5, min_match=1, max_match=3), DraftModel(tiny_model(), 3)),
}
