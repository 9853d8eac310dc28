"""MTP modules: layers that were trained with their target to say the tokens behind its next one.

The first module reads pairs of a token and the target's state in front of it, each later one the state that the module
before it gave. All of them read every committed pair in `observe`, in one pass each, however many tokens were
accepted. Drafts come from the modules in turn, over again where there are fewer modules than drafts:

    module 1    place p reads (x_p, f_{p-1}), f being the target's state        →  g1_p, which predicts x_{p+1}
    module 2    place p reads (x_p, g1_{p-1})                                   →  g2_p, which predicts x_{p+1}
    draft 1     what module 1 gave at the newest token
    draft j     its module at the j-1 places of the drafts so far, beside what the module of draft j-1 gave in front
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters import speculators, table
from paceline.drafters.base import Context, Needs, Taps, Target
from paceline.drafters.cached import StateReader
from paceline.drafters.checkpoint import Checkpoint, check_options
from paceline.drafters.mtp_form import find_form
from paceline.drafters.mtp_network import OWN, layer_specs, load_modules
from paceline.drafters.tree import ROOT, Proposal
from paceline.errors import OptionError
from paceline.kernels.chain import Chain, Drafts, Link, Picks
from paceline.kernels.ops import cache_rows
from paceline.models.batch import Batch
from paceline.models.json_file import is_folder
from paceline.params import check_number


@dataclass(frozen=True)
class MTP:
    """MTP modules of DeepSeek-V3, GLM-4.5 and MiMo: those that the target's own folder holds, or a folder apart.

    model: the folder of modules apart from their target; None: the target's own.
    num_draft_tokens: the most tokens to propose; None: what its files say, else as many as there are modules.
    min_probability: a draft ends where the modules themselves give all of it a smaller chance; 0: at its end.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats.
    """

    model: str | None = None
    num_draft_tokens: int | None = None
    min_probability: float = 0.0
    quantization: str = "int8"

    def __post_init__(self) -> None:
        check_options(self.num_draft_tokens, self.quantization)
        check_number("min_probability", self.min_probability, 0.0, 1.0)

    def create(self) -> MTPDrafter:
        return MTPDrafter(self)


class MTPDrafter(StateReader):
    name = "mtp"

    def __init__(self, config: MTP) -> None:
        self.config = config
        self.max_nodes = config.num_draft_tokens or 1  # until `plan` has seen the checkpoint

    def plan(self, target: Target) -> Needs:
        checkpoint = self._open(target)
        form, prefixes = find_form(checkpoint.source.names(), checkpoint.label)
        self.modules = load_modules(form, prefixes, checkpoint, target, self.config.quantization)
        said = speculators.draft_length(checkpoint.config, speculators.CHAINS, checkpoint.label)
        self.max_nodes = self.config.num_draft_tokens or said or len(self.modules)
        state = form.state_of(target)
        self.taps = Taps(hidden=(state,))
        return Needs(layer_specs(self.modules, target), target.model.tap_width(state))

    def _open(self, target: Target) -> Checkpoint:
        if self.config.model is not None:
            return Checkpoint(self.config.model)
        if not is_folder(Path(target.origin)):
            kind = table.find(self.name)
            assert kind is not None
            raise OptionError(
                f"drafter {self.name!r} without a model reads the target's own folder, but the target is "
                f"{target.origin or 'none'}; write {kind.written('model=…')}"
            )
        return Checkpoint(target.origin)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, layer_specs(self.modules, target), target.max_model_len)
        self._given = [part for (part,) in self._caches[len(self.modules) :]]  # each [rows, 1, H]
        self._caches = self._caches[: len(self.modules)]
        shape = (len(self.modules), target.max_num_seqs + 1, self.modules[0].hidden)
        # What each module gave at the newest token. [M, S+1, H]
        self._finals = torch.zeros(shape, dtype=self.modules[0].dtype, device=target.device)

    def read_pairs(self, batch: Batch, states: Tensor, table: Slots) -> None:
        layout = batch.layout
        finals = list[Tensor]()
        if len(self.modules) > 1:
            before = cache_rows(layout, layout.slots, (layout.positions - 1).clamp(min=0))
        for number, module in enumerate(self.modules):
            given = module.run(self._seen_by(batch, number), states, self._caches).final
            finals.append(given)
            if number + 1 < len(self.modules):
                kept = self._given[number]
                kept.index_copy_(0, layout.write, given[:, None])
                states = kept[before, 0]
        self.keep(batch, table, finals, self._finals.unbind())

    def _seen_by(self, batch: Batch, number: int) -> Batch:
        """The same rows for a later module: each begins a place behind the one before it."""
        if not number:
            return batch
        layout = batch.layout
        first = torch.minimum(self.first.index_select(0, layout.slots) + number, layout.positions)
        return replace(batch, layout=replace(layout, first=first))

    def propose(self, context: Context) -> Proposal:
        most, finals = self.recall(context, self._finals.unbind())  # of each module [B, H]
        at_once = self._draw_at_once(context, finals[0], most)
        if at_once is not None:
            return context.drawn(self.name, most=at_once)
        self._draw_steps(context, finals, most)
        least = self.config.min_probability
        return context.drawn(self.name, most=torch.minimum(most, context.likely(least)) if least else most)

    def _draw_at_once(self, context: Context, finals: Tensor, most: Tensor) -> Tensor | None:
        """One module's chain by kernels that draw it in one call: [B] how many each has."""
        module = self.modules[0]
        if len(self.modules) > 1 or not module.ops.chains:
            return None

        def run(picking: Picks | None) -> Drafts:
            links = [Link(module if step else None, module.head) for step in range(context.max_nodes)]
            given, own, least = {"states": finals}, ("states", OWN), self.config.min_probability
            chain = Chain(links, self.feeding(context, most), None, finals, given, own, None, picking, least)
            return module.ops.chain(chain, self._caches)

        return context.draw_chain(run)

    def _draw_steps(self, context: Context, finals: list[Tensor], most: Tensor) -> None:
        """One draft after the other. given [B, n, H]: what the last step's module gave in front of each draft."""
        count, turns = len(context.slots), len(self.modules)
        given, logits = finals[0][:, None], self.modules[0].logits(finals[0])
        parents = torch.full_like(context.slots, ROOT)[:, None]
        drafts: list[Tensor] = []
        for step in range(1, context.max_nodes + 1):
            drawn = context.draw(logits[:, None], parents)
            if step == context.max_nodes:
                break
            drafts, parents = [*drafts, drawn.tokens[:, 0, 0]], drawn.nodes[:, :, 0]
            module = self.modules[step % turns]
            if turns == 1:  # what it gave for earlier drafts stays what it is
                batch, width = self.step_batch(context, drafts[-1], step, most), 1
            else:
                batch, width = self.level_batch(context, torch.stack(drafts, dim=1), None, 0, most), step
            rows = torch.arange(1, count + 1, device=most.device) * width - 1  # each sequence's last
            out = module.run(self._seen_by(batch, step % turns), given.flatten(0, 1), self._caches, rows)
            assert out.logits is not None
            logits, found = out.logits, out.final.view(count, width, -1)
            given = found if turns == 1 else torch.cat([finals[step % turns][:, None], found], dim=1)
