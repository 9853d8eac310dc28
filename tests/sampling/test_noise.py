"""Keyed noise against a statement of the hash in unbounded integers, and against the distribution it should have.

Keys are fixed and counted up, never picked: a statistical test here asks whether the hash is good on the keys an engine
uses (neighbouring positions, samples, seeds and tokens). Each has alpha 1e-6; some fifty of them run.
"""

from __future__ import annotations

import math
import random

import pytest
import scipy.stats
import torch
from torch import Tensor

from paceline.params import SamplingParams
from paceline.sampling import noise
from paceline.sampling.noise import ACCEPT, DRAFT, RESIDUAL, SAMPLE, Keys
from tests.sampling.checks import Case, make_state, same_bits
from tests.sampling.noises import (
    ALPHA,
    WALKS,
    WORD,
    check_independent,
    keys_of,
    stated_bits,
    stated_uniform,
    unit_of,
    walk_bits,
)

# seed, sample, position, stream, extra, token -> bits
GOLDEN = [
    (0, 0, 0, 0, None, 0, 0x303A4665),
    (1, 0, 0, 0, None, 0, 0x29F18D39),
    (0, 1, 0, 0, None, 0, 0xD04434C8),
    (0, 0, 1, 0, None, 0, 0xC24AA235),
    (0, 0, 0, 1, None, 0, 0x90B68687),
    (0, 0, 0, 0, 0, 0, 0x8DEA736B),
    (0, 0, 0, 0, None, 1, 0xBA098DC1),
    (9223372036854775808, 0, 5, 2, 8193, 0, 0xE67F2A13),
    (18446744073709551615, 3, 100, 3, 101, 49151, 0x712201FB),
    (-1, 3, 100, 3, 101, 49151, 0x712201FB),
    (-9223372036854775808, 0, 7, 0, None, 96, 0xFFC11341),
    (123456789012345, 63, 4095, 1, 4000, 128255, 0x5AAA6063),
]


def bits_of(key: tuple[int, int, int, int, int | None, int]) -> int:
    seed, sample, position, stream, extra, token = key
    more = None if extra is None else torch.tensor([extra])
    found = noise.bits(keys_of([seed], [sample]), torch.tensor([position]), stream, torch.tensor([token]), more)
    return int(found[0, 0])


def random_key(draws: random.Random) -> tuple[int, int, int, int, int | None, int]:
    seed = draws.choice([draws.getrandbits(64), draws.getrandbits(31), -draws.getrandbits(63), 2**64 - 1, 0])
    extra = draws.choice([None, draws.getrandbits(20), draws.getrandbits(33)])
    return seed, draws.randrange(200), draws.randrange(10**6), draws.randrange(4), extra, draws.randrange(200_000)


# The bits


@pytest.mark.parametrize("row", GOLDEN, ids=str)
def test_bits_are_those_of_the_golden_table(row: tuple[int, int, int, int, int | None, int, int]) -> None:
    *key, expected = row
    assert bits_of(tuple(key)) == expected == stated_bits(*key)


def test_bits_equal_the_hash_stated_in_unbounded_integers() -> None:
    draws = random.Random(0)
    for _ in range(2000):
        key = random_key(draws)
        assert bits_of(key) == stated_bits(*key), key


def test_many_rows_and_tokens_at_once_are_the_same_bits() -> None:
    draws = random.Random(1)
    listed = [random_key(draws) for _ in range(64)]
    tokens = torch.arange(97)
    extra = torch.tensor([key[4] or 0 for key in listed])
    keys = keys_of([key[0] for key in listed], [key[1] for key in listed])
    found = noise.bits(keys, torch.tensor([key[2] for key in listed]), RESIDUAL, tokens, extra)
    for row, key in enumerate(listed):
        expected = [stated_bits(*key[:3], RESIDUAL, key[4] or 0, token) for token in range(97)]
        assert found[row].tolist() == expected


def test_uniforms_are_the_stated_ones_and_inside_the_open_interval() -> None:
    positions = torch.arange(5000)
    keys = keys_of([7] * 5000, [3] * 5000)
    found = noise.uniform(keys, positions, ACCEPT, positions * 4096 + 1).tolist()
    assert found == [stated_uniform(7, 3, position, ACCEPT, position * 4096 + 1) for position in range(5000)]
    ends = noise._unit(torch.tensor([0, WORD - 1]))
    assert float(ends[0]) > 0 and float(ends[1]) < 1


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, 2**63 - 1, -1, -(2**63), 0])
def test_a_slot_keeps_all_64_bits_of_any_allowed_seed(seed: int) -> None:
    state = make_state([Case([1], params=SamplingParams(seed=seed), seed=seed, sample=5)], 11)
    found = noise.bits(state.keys(torch.tensor([0])), torch.tensor([9]), SAMPLE, torch.arange(11))
    assert found[0].tolist() == [stated_bits(seed, 5, 9, SAMPLE, None, token) for token in range(11)]


def test_every_part_of_the_key_changes_the_noise() -> None:
    base: tuple[int, int, int, int, int | None] = (12345, 1, 20, SAMPLE, 7)
    others = [(12346, *base[1:]), (12345 + 2**32, *base[1:]), (12345 + 2**63, *base[1:])]
    others += [(12345, 2, *base[2:]), (12345, 1, 21, *base[3:]), (*base[:4], 8), (*base[:4], None)]
    others += [(*base[:3], stream, 7) for stream in (DRAFT, ACCEPT, RESIDUAL)]
    rows = [_gumbel_row(key, 1000) for key in [base, *others]]
    for one in range(len(rows)):
        for other in range(one):
            assert int((rows[one] == rows[other]).sum()) <= 2, (one, other)  # chance: 1000 / 2**32


def _gumbel_row(key: tuple[int, int, int, int, int | None], vocab_size: int) -> Tensor:
    seed, sample, position, stream, extra = key
    more = None if extra is None else torch.tensor([extra])
    return noise.gumbel(keys_of([seed], [sample]), torch.tensor([position]), stream, vocab_size, more)[0]


# The logarithm and the Gumbel values


def test_log_is_within_1e_13_of_the_true_one() -> None:
    draws = random.Random(2)
    values = [math.ldexp(1 + draws.random(), draws.randrange(-40, 6)) for _ in range(20_000)]
    values += [1.0, 2.0, 0.5, 1 - 2**-33, 2**-33, math.nextafter(1, 0), math.nextafter(1, 2), math.nextafter(2, 0)]
    values += [1 + k / 4096 for k in range(4096)] + [math.nextafter(1 + k / 4096, 0) for k in range(4096)]
    found = noise._log(torch.tensor(values, dtype=torch.float64)).tolist()
    worst = max(abs(ours - math.log(value)) for ours, value in zip(found, values))
    assert worst < 1e-13


def test_gumbel_values_are_those_of_the_stated_uniforms_to_four_float32_steps() -> None:
    """Steps are asked for absolutely, at the size of the largest values: near 0 a step is finer than 1e-13."""
    ends = torch.tensor([[0, 1, 2, WORD - 1, WORD - 2, WORD - 3]])
    tokens = torch.arange(20_000)
    integers = torch.cat([ends, noise.bits(keys_of([3], [0]), torch.tensor([4]), DRAFT, tokens)], dim=1)
    units = noise._unit(integers)
    found = (-noise._log(-noise._log(units))).float()[0].tolist()
    for ours, unit in zip(found, units[0].tolist()):
        true = -math.log(-math.log1p(unit - 1)) if unit > 0.5 else -math.log(-math.log(unit))
        assert abs(ours - true) <= 4 * max(abs(true), 1) * 2.0**-23
    assert found[3] > 22 and found[0] < -3 and all(map(math.isfinite, found))


def test_gumbel_is_the_composition_of_bits_unit_and_log() -> None:
    keys, positions = keys_of([3, 9], [0, 1]), torch.tensor([4, 5])
    integers = noise.bits(keys, positions, SAMPLE, torch.arange(300), positions)
    expected = (-noise._log(-noise._log(noise._unit(integers)))).float()
    assert same_bits(noise.gumbel(keys, positions, SAMPLE, 300, positions), expected)


# The same row, whatever is around it


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_rows_noise_does_not_depend_on_rows_vocabulary_or_threads(threads: int) -> None:
    before = torch.get_num_threads()
    positions, extra = torch.arange(64) * 17 + 3, torch.arange(64) * 4096
    keys = keys_of([row * 2**57 + row for row in range(64)], [row % 5 for row in range(64)])
    try:
        torch.set_num_threads(threads)
        batch = noise.gumbel(keys, positions, SAMPLE, 4999, extra)
        wide = noise.gumbel(_pick(keys, [11]), positions[11:12], SAMPLE, 49_152, extra[11:12])
        torch.set_num_threads(1)
        for row in (0, 11, 40, 63):
            alone = noise.gumbel(_pick(keys, [row]), positions[[row]], SAMPLE, 4999, extra[[row]])
            short = noise.gumbel(_pick(keys, [row]), positions[[row]], SAMPLE, 97, extra[[row]])
            assert same_bits(batch[row], alone[0])
            assert same_bits(batch[row, :97], short[0])
        assert same_bits(wide[0, :4999], batch[11])
    finally:
        torch.set_num_threads(before)


def _pick(keys: Keys, rows: list[int]) -> Keys:
    return Keys(keys.seeds[rows], keys.samples[rows])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_makes_the_same_bits_as_a_cpu() -> None:
    keys, positions = keys_of(list(range(-8, 8)), [1] * 16), torch.arange(16)
    here = noise.gumbel(keys, positions, SAMPLE, 49_152, positions)
    away = Keys(keys.seeds.cuda(), keys.samples.cuda())
    assert same_bits(here, noise.gumbel(away, positions.cuda(), SAMPLE, 49_152, positions.cuda()).cpu())


# The distribution


@pytest.mark.parametrize("part", WALKS)
def test_noise_along_each_part_of_the_key_is_gumbel_distributed(part: str) -> None:
    """Kolmogorov-Smirnov, n = 32000, alpha 1e-6: a distribution function off by 0.022 somewhere would show."""
    values = -noise._log(-noise._log(noise._unit(walk_bits(part))))
    assert scipy.stats.kstest(values.numpy(), "gumbel_r", method="asymp").pvalue > ALPHA


def test_every_bit_is_set_half_of_the_time_and_flips_half_of_the_time() -> None:
    for part in WALKS:
        integers = walk_bits(part)
        for series in (integers, integers[1:] ^ integers[:-1]):
            ones = ((series[:, None] >> torch.arange(32)) & 1).double().mean(0)
            scores = (ones - 0.5).abs() * 2 * math.sqrt(len(series))
            assert float(2 * scipy.stats.norm.sf(float(scores.max()))) * 32 > ALPHA, part


@pytest.mark.parametrize("lag", [1, 2, 64])
@pytest.mark.parametrize("part", WALKS)
def test_neighbours_along_each_part_of_the_key_are_independent(part: str, lag: int) -> None:
    values = unit_of(walk_bits(part))
    check_independent(values[lag:], values[:-lag])


@pytest.mark.parametrize("other", ["position", "sample", "seed", "extra"])
def test_rows_that_differ_in_one_part_are_independent_token_by_token(other: str) -> None:
    start = {"position": 30, "sample": 0, "seed": 1, "extra": 31}[other]
    check_independent(unit_of(walk_bits("token")), unit_of(walk_bits("token", **{other: start + 1})))


@pytest.mark.parametrize("streams", [(a, b) for a in range(4) for b in range(a)])
def test_streams_are_independent(streams: tuple[int, int]) -> None:
    one, other = (unit_of(walk_bits("position", stream=stream)) for stream in streams)
    check_independent(one, other)


def test_moving_the_position_and_the_token_against_each_other_is_not_a_way_back() -> None:
    """A hash that adds its parts would give (position + 1, token) the noise of (position, token + 1)."""
    check_independent(unit_of(walk_bits("token", position=31)), unit_of(walk_bits("token", shift=1)))
    check_independent(unit_of(walk_bits("position", sample=1)), unit_of(walk_bits("position", shift=1)))
