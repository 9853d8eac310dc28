"""Cache layers as their specs say: any parts, each layer its own shape, rows moved in all of them."""

from __future__ import annotations

import pytest
import torch

from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.kernels import select
from paceline.kernels.ops import LayerSpec, Part
from paceline.models.batch import Work
from tests.kernels.networks import table_of
from tests.kernels.tiny import CPU, load, tokens

ALL = ("reference", "torch", "native")


def test_a_model_says_what_its_layers_are() -> None:
    for name, window in (("llama_64", None), ("mistral_window", 8)):
        loaded = load(name, "torch")
        heads, width = loaded.config.num_kv_heads, loaded.config.head_dim
        specs = loaded.model.layer_specs(torch.bfloat16)
        assert specs == [LayerSpec((Part(heads, width, torch.bfloat16),) * 2, window)] * 2
        assert specs[0].row_bytes == 2 * heads * width * 2


def test_a_layer_has_the_parts_its_spec_says() -> None:
    latent = LayerSpec((Part(1, 8, torch.float32), Part(1, 4, torch.bfloat16), Part(2, 3, torch.int8)))
    cache = KVCache(PagePool(3, 5), CPU)
    layers = cache.add_layers([latent, LayerSpec.kv(2, 6, torch.float16, window=4)])
    rows = 32  # three pages of five and the page of nobody, rounded up
    assert [[(tuple(part.shape), part.dtype) for part in layer] for layer in layers] == [
        [((rows, 1, 8), torch.float32), ((rows, 1, 4), torch.bfloat16), ((rows, 2, 3), torch.int8)],
        [((rows, 2, 6), torch.float16)] * 2,
    ]
    assert not any(part.any() for layer in layers for part in layer)
    assert latent.row_bytes == 8 * 4 + 4 * 2 + 6 and LayerSpec.kv(2, 6, torch.float16).row_bytes == 2 * 2 * 6 * 2


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_rows_of_every_part_are_moved(kernels: str) -> None:
    cache = KVCache(PagePool(4, 8), CPU)
    parts = (Part(1, 8, torch.float32), Part(2, 4, torch.float32), Part(1, 1, torch.int8))
    layers = cache.add_layers([LayerSpec(parts)])
    rows = torch.arange(48)  # four pages of eight and the page of nobody, rounded up
    for part in layers[0]:
        part.copy_(rows[:, None, None].expand(part.shape))
    select(kernels, CPU, torch.float32).keep(layers, torch.tensor([3, 4, 9]), torch.tensor([4, 3, 30]))
    wanted = rows.clone()
    wanted[[4, 3, 30]] = torch.tensor([3, 4, 9])
    assert all(torch.equal(part[:, -1, -1].long(), wanted) for part in layers[0])


@pytest.mark.parametrize("kernels", ALL)
def test_rows_of_layers_of_different_shapes_are_moved_together(kernels: str) -> None:
    """Two sequences change places, position by position: what each of them sees afterwards is what the other saw."""
    table = table_of("plain", kernels)
    for slot in (0, 1):
        table.begin(slot, tokens(30, 3 + slot))
        table.run([Work(slot, 0, 29)])
    wanted = [table.run([Work(slot, 29, 1)]).final for slot in (0, 1)]
    batch = table.pack([Work(0, 0, 29), Work(1, 0, 29)])
    source = batch.layout.write.view(2, 29).t()  # a position's two rows go where the other lies
    network = table.loaded.model
    network.ops.keep(table.cache.layers, source, source.flip(1))
    for slot in (0, 1):
        table.begin(slot, tokens(30, 4 - slot))
    found = [table.run([Work(slot, 29, 1)]).final for slot in (1, 0)]
    assert all(torch.equal(left, right) for left, right in zip(found, wanted))
