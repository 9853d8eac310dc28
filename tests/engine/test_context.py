"""What a drafter may ask for while it proposes: several parents at once, scores, the best of a tree, budgets."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.tree import PADDING, ROOT, Proposal
from paceline.engine.context import DraftContext
from paceline.params import SamplingParams
from paceline.sampling.noise import DRAFT, SAMPLE, gumbel
from paceline.sampling.processors import process
from paceline.sampling.rules import RULES
from paceline.sampling.state import Rows, SamplerState, Words
from paceline.sampling.verify import choose

CPU = torch.device("cpu")
V = 13
TEXTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
SLOTS = [2, 0, 3]  # a batch in no order
WISHES = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "bad_words": [[3], [4, 5]]},
    {"temperature": 0.7, "seed": 7, "top_k": 6, "min_p": 0.02, "logit_bias": {2: 1.0}},
]


def make_state(wishes: list[dict[str, Any]], apart: bool = False, limit: int = 40) -> SamplerState:
    table = Slots(len(TEXTS), 40, 1, CPU, apart=apart)
    state = SamplerState(table, V, CPU)
    for slot, (text, wish) in enumerate(zip(TEXTS, wishes)):
        table.begin(slot, text, 1, limit)
        params = SamplingParams(**wish)
        state.set(slot, params, Words(wish.get("bad_words", []), []), params.seed or 0, 0)
    table.flush()
    return state


def context_of(state: SamplerState, acceptance: str = "exact", budgets: list[int] | None = None) -> DraftContext:
    return DraftContext(list(SLOTS), budgets or [99] * len(SLOTS), state, RULES[acceptance])


def random_logits(chooser: random.Random, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(chooser.randrange(2**31))
    return 2 * torch.randn(*shape, generator=generator)


Drawing = tuple[Tensor, Tensor, int]  # logits [B, P, V], parents [B, P], count


def random_drawings(chooser: random.Random, padding: bool = False) -> list[Drawing]:
    """A few draws, each under nodes of earlier ones; a node gets children once."""
    drawings: list[Drawing] = []
    free = [[ROOT] for _ in SLOTS]
    size = 0
    for level in range(chooser.randint(2, 3)):
        width = 1 if level == 0 else chooser.randint(1, min(3, *(len(nodes) for nodes in free)))
        count = chooser.randint(1, 3)
        chosen = [chooser.sample(nodes, width) for nodes in free]
        for nodes, taken in zip(free, chosen):
            nodes[:] = [node for node in nodes if node not in taken] + list(range(size, size + width * count))
        if padding and level:
            for row, taken in enumerate(chosen):
                for place in range(width):
                    if chooser.random() < 0.3:
                        taken[place] = PADDING
                        gone = range(size + place * count, size + (place + 1) * count)
                        free[row] = [node for node in free[row] if node not in gone] + [ROOT] * width
        size += width * count
        drawings.append((random_logits(chooser, len(SLOTS), width, V), torch.tensor(chosen), count))
    return drawings


def draw_all(context: DraftContext, drawings: list[Drawing], likeliest: bool = False) -> None:
    """As drafters do, many parents a draw; the answer says which nodes they became."""
    size = 0
    for logits, parents, count in drawings:
        drawn = context.draw(logits, parents, count, likeliest)
        width = parents.shape[1]
        assert drawn.tokens.shape == drawn.nodes.shape == (len(SLOTS), width, count)
        assert drawn.nodes.tolist() == [torch.arange(size, size + width * count).view(width, count).tolist()] * 3
        size += width * count


def draw_singly(context: DraftContext, drawings: list[Drawing], likeliest: bool = False) -> None:
    for logits, parents, count in drawings:
        for place in range(parents.shape[1]):
            context.draw(logits[:, place : place + 1], parents[:, place : place + 1], count, likeliest)


def tokens_to(proposal: Proposal, row: int, node: int) -> list[int]:
    """The drafted tokens from the root down to a node."""
    if node < 0:
        return []
    above = int(proposal.parents[row, node])
    return [*tokens_to(proposal, row, above), int(proposal.tokens[row, node])]


def same(first: Tensor | None, second: Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


# Draws.


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("likeliest", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_several_parents_at_once_get_what_each_gets_alone(seed: int, likeliest: bool, acceptance: str) -> None:
    drawings = random_drawings(random.Random(seed))
    state = make_state(WISHES)
    together, alone = context_of(state, acceptance), context_of(state, acceptance)
    draw_all(together, drawings, likeliest)
    draw_singly(alone, drawings, likeliest)
    first, second = together.drawn("x", chain=False), alone.drawn("x", chain=False)
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.parents, second.parents)
    assert torch.equal(first.sizes, second.sizes) and same(first.probs, second.probs)
    assert (first.probs is not None) == RULES[acceptance].needs_probs
    assert torch.equal(together.scores(), alone.scores())


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_noise_counts_as_much_as_a_drafter_says_where_it_is_the_targets_own(
    weight: float, count: int, acceptance: str
) -> None:
    """Else drafts are drawn from the distribution that is told, whatever it says."""
    state = make_state([{"temperature": 0.5, "seed": slot} for slot in range(4)])
    logits = random_logits(random.Random(1), len(SLOTS), 1, V)
    context, root = context_of(state, acceptance), torch.full((len(SLOTS), 1), ROOT)
    drawn = context.draw(logits, root, count, weight=weight).tokens[:, 0]
    shared, slots = RULES[acceptance].shares_noise, torch.tensor(SLOTS)
    places = state.table.lengths[slots]
    stream, extra = (SAMPLE, None) if shared else (DRAFT, places)
    values = gumbel(state.keys(slots), places, stream, V, extra)
    wanted = logits[:, 0] / 0.5 + (weight if shared else 1.0) * values
    assert drawn.tolist() == wanted.topk(count).indices.tolist()
    if shared and count > 1:
        assert torch.allclose(context.scores(), torch.log_softmax(wanted, 1).gather(1, drawn), atol=1e-5)


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("greedy", [False, True], ids=["mixed", "greedy"])
def test_a_drafter_that_knows_some_tokens_draws_as_if_the_others_had_no_chance(greedy: bool, acceptance: str) -> None:
    """Greedy: whether or not the logits of all tokens are ever written down."""
    ids = torch.tensor([1, 4, 5, 8, 11, 12])
    state = make_state([{"temperature": 0.0}] * len(TEXTS) if greedy else WISHES)
    few, all_of_them = context_of(state, acceptance), context_of(state, acceptance)
    parents = torch.full((len(SLOTS), 1), ROOT)
    for step, count in enumerate((2, 1, 3)):
        narrow = random_logits(random.Random(step), len(SLOTS), 1, len(ids))
        wide = torch.full((len(SLOTS), 1, V), float("-inf")).index_copy(2, ids, narrow)
        drawn, wanted = few.draw(narrow, parents, count, ids=ids), all_of_them.draw(wide, parents, count)
        assert torch.equal(drawn.tokens, wanted.tokens) and torch.equal(drawn.nodes, wanted.nodes)
        assert set(drawn.tokens.flatten().tolist()) <= set(ids.tolist())
        parents = drawn.nodes[:, :, 0]
    assert torch.equal(few.scores(), all_of_them.scores())


@pytest.mark.parametrize("acceptance", ["exact", "typical"])
@pytest.mark.parametrize("seed", range(6))
def test_the_first_child_of_every_parent_is_the_token_the_target_would_sample_there(seed: int, acceptance: str) -> None:
    """Given the target's own logits: the same processors over the same history, the same noise at the same place."""
    drawings = random_drawings(random.Random(seed))
    state = make_state(WISHES)
    context = context_of(state, acceptance)
    draw_all(context, drawings)
    proposal = context.drawn("x", chain=False)
    node = 0
    for logits, parents, count in drawings:
        for row, place in itertools.product(range(len(SLOTS)), range(parents.shape[1])):
            path = tokens_to(proposal, row, int(parents[row, place]))
            history = torch.tensor([path], dtype=torch.int64).view(1, -1)
            position = len(TEXTS[SLOTS[row]]) - 1 + len(path)
            rows = Rows(torch.tensor([SLOTS[row]]), [SLOTS[row]], torch.tensor([position]), history)
            wanted = choose(process(logits[row, place : place + 1], rows, state), rows, state)
            assert int(proposal.tokens[row, node + place * count]) == int(wanted)
        node += parents.shape[1] * count


@pytest.mark.parametrize("seed", range(4))
def test_siblings_differ_and_each_is_said_to_be_drawn_from_what_its_elder_ones_left(seed: int) -> None:
    drawings = random_drawings(random.Random(seed))
    context = context_of(make_state([{"temperature": 1.0, "seed": slot} for slot in range(4)]), "rejection")
    draw_all(context, drawings)
    proposal = context.drawn("x", chain=False)
    assert proposal.probs is not None
    node = 0
    for logits, parents, count in drawings:
        for place, row in itertools.product(range(parents.shape[1]), range(len(SLOTS))):
            left = torch.softmax(logits[row, place].double(), 0)
            for child in range(node + place * count, node + (place + 1) * count):
                token = int(proposal.tokens[row, child])
                assert left[token] > 0 and torch.allclose(proposal.probs[row, child].double(), left, atol=1e-6)
                left[token] = 0
                left = left / left.sum()
        node += parents.shape[1] * count


# Scores.


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
@pytest.mark.parametrize("seed", range(6))
def test_a_score_is_the_log_probability_of_the_whole_path(seed: int, acceptance: str) -> None:
    drawings = random_drawings(random.Random(seed), padding=True)
    context = context_of(make_state([{"temperature": 1.0, "seed": slot} for slot in range(4)]), acceptance)
    draw_all(context, drawings)
    assert_scores(context, drawings, noise=acceptance == "exact")


def noised(context: DraftContext, row: int, logits: Tensor, parent: int) -> Tensor:
    """[V] what the target would take the greatest of behind a node, were these its logits."""
    proposal = Proposal(context._tokens, context._parents, torch.tensor([context._tokens.shape[1]] * 3), chain=False)
    position = len(TEXTS[SLOTS[row]]) + len(tokens_to(proposal, row, parent))
    keys = context._state.keys(torch.tensor([SLOTS[row]]))
    return logits + gumbel(keys, torch.tensor([position]), SAMPLE, V)[0]


def assert_scores(context: DraftContext, drawings: list[Drawing], noise: bool = False) -> list[list[float]]:
    """Against a sum over each path; nodes under PADDING can never be. noise: the target's, where several were drawn."""
    found = context.scores()
    expected: list[list[float]] = [[] for _ in SLOTS]
    node = 0
    for logits, parents, count in drawings:
        for row in range(len(SLOTS)):
            for place, parent in enumerate(parents[row].tolist()):
                scored = logits[row, place]
                own = torch.log_softmax(noised(context, row, scored, parent) if noise and count > 1 else scored, 0)
                above = -math.inf if parent == PADDING else expected[row][parent] if parent >= 0 else 0.0
                for child in range(node + place * count, node + (place + 1) * count):
                    expected[row].append(above + float(own[int(context._tokens[row, child])]))
        node += parents.shape[1] * count
    assert found.shape == (len(SLOTS), node)
    for row, scores in enumerate(expected):
        for mine, theirs in zip(scores, found[row].tolist()):
            assert mine == theirs or abs(mine - theirs) <= 1e-4
    return found.tolist()


def test_without_draws_there_are_no_scores_and_no_nodes() -> None:
    context = context_of(make_state(WISHES))
    assert context.scores().shape == (3, 0)
    for keep in (None, 0, 4):
        proposal = context.drawn("x", chain=False, keep=keep)
        assert proposal.num_nodes == 0 and proposal.sizes.tolist() == [0, 0, 0]


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_is_likely_as_far_as_its_score_goes_and_drawn_ones_one_further(
    temperature: float, acceptance: str
) -> None:
    context = context_of(make_state([{"temperature": temperature, "seed": slot} for slot in range(4)]), acceptance)
    for step in range(5):
        context.draw(random_logits(random.Random(step), 3, 1, V), torch.full((3, 1), step - 1))
    more = bool(RULES[acceptance].needs_probs and temperature)
    scores = context.scores().exp().tolist()
    for least in (0.001, 0.01, 0.1, 0.3, 1.0):
        wanted = [next((n for n, score in enumerate(row) if score < least), 5) + more for row in scores]
        assert context.likely(least).tolist() == wanted
        assert context.drawn("x", most=context.likely(least)).sizes.tolist() == [min(5, n) for n in wanted]


# The best of a tree.


def closed_sets(parents: list[int], nodes: list[int], size: int) -> list[tuple[int, ...]]:
    """All sets of so many nodes that hold every member's parent."""
    return [
        chosen
        for chosen in itertools.combinations(nodes, size)
        if all(parents[node] == ROOT or parents[node] in chosen for node in chosen)
    ]


@pytest.mark.parametrize("seed", range(25))
def test_keeping_the_best_keeps_the_likeliest_tree_of_that_size(seed: int) -> None:
    """Of all trees with so many of the nodes: the one that is expected to have the most accepted."""
    chooser = random.Random(seed)
    drawings = random_drawings(chooser, padding=seed % 2 == 1)
    budgets = [chooser.choice([0, 1, 2, 4, 99]) for _ in SLOTS]
    context = context_of(make_state([{"temperature": 0.0}] * 4), budgets=budgets)
    draw_all(context, drawings)
    scores = assert_scores(context, drawings)
    whole, parents = context._tokens, context._parents.tolist()
    original = Proposal(whole, context._parents, torch.tensor([whole.shape[1]] * 3), chain=False)
    keep = chooser.choice([1, 2, 3, 5, 99])
    proposal = context.drawn("x", chain=False, keep=keep)
    smaller = context.drawn("x", chain=False, keep=max(1, keep - 1))
    assert proposal.num_nodes == min(keep, whole.shape[1]) and not proposal.chain
    for row, budget in enumerate(budgets):
        there = [node for node, score in enumerate(scores[row]) if score > -math.inf]
        size = min(keep, budget, len(there))
        assert int(proposal.sizes[row]) == size, "as many as the budget allows"
        kept = proposal.parents[row].tolist()
        assert kept[size:] == [PADDING] * (proposal.num_nodes - size)
        assert all(ROOT <= parent < node for node, parent in enumerate(kept[:size])), "parents before children"
        worth = {tuple(tokens_to(original, row, node)): math.exp(scores[row][node]) for node in there}
        paths = [tuple(tokens_to(proposal, row, node)) for node in range(size)]
        assert len(set(paths)) == size
        assert [worth[path] for path in paths] == sorted((worth[path] for path in paths), reverse=True), "best first"
        fewer = smaller.tokens[row, : smaller.sizes[row]].tolist(), smaller.parents[row, : smaller.sizes[row]].tolist()
        assert fewer == (proposal.tokens[row, : len(fewer[0])].tolist(), kept[: len(fewer[0])]), "its beginning"
        assert len(fewer[0]) == min(size, max(1, keep - 1))
        found = sum(worth[path] for path in paths)
        best = max(
            (sum(math.exp(scores[row][node]) for node in chosen) for chosen in closed_sets(parents[row], there, size)),
            default=0.0,
        )
        assert abs(found - best) <= 1e-6


def test_what_is_kept_keeps_its_own_probabilities() -> None:
    """Under rejection the likeliest were chosen: each is a point mass at its own token, wherever it moved."""
    for seed in range(8):
        drawings = random_drawings(random.Random(seed))
        context = context_of(make_state([{"temperature": 1.0, "seed": slot} for slot in range(4)]), "rejection")
        draw_all(context, drawings, likeliest=True)
        proposal = context.drawn("x", chain=False, keep=4)
        assert proposal.probs is not None
        for row, size in enumerate(proposal.sizes.tolist()):
            expected = torch.nn.functional.one_hot(proposal.tokens[row, :size], V).float()
            assert torch.equal(proposal.probs[row, :size], expected)


@pytest.mark.parametrize("acceptance", RULES)
@pytest.mark.parametrize("likeliest", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drawn_tokens_may_not_be_chosen_among_where_their_distribution_counts(
    temperature: float, likeliest: bool, acceptance: str
) -> None:
    """Picking afterwards would change what they were drawn from; the likeliest are chosen, and so is a greedy draft."""
    state = make_state([{"temperature": temperature, "seed": slot} for slot in range(4)])
    context = context_of(state, acceptance)
    draw_all(context, random_drawings(random.Random(1)), likeliest)
    if RULES[acceptance].needs_probs and temperature and not likeliest:
        with pytest.raises(ValueError, match="draw the likeliest to prune a tree"):
            context.drawn("x", chain=False, keep=2)
        assert context.drawn("x", chain=False).num_nodes > 2, "whole it may be proposed"
    else:
        assert context.drawn("x", chain=False, keep=2).sizes.tolist() == [2, 2, 2]


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_one_draw_that_was_not_the_likeliest_is_enough_to_refuse_pruning(order: tuple[bool, bool]) -> None:
    context = context_of(make_state([{"temperature": 1.0, "seed": slot} for slot in range(4)]), "rejection")
    for level, likeliest in enumerate(order):
        parents = torch.full((3, 1), level - 1)
        context.draw(random_logits(random.Random(level), 3, 1, V), parents, 2, likeliest)
    with pytest.raises(ValueError, match="prune"):
        context.drawn("x", chain=False, keep=2)


# Budgets.


def test_a_chain_is_cut_to_each_budget_and_to_what_the_drafter_says() -> None:
    context = context_of(make_state(WISHES), budgets=[3, 1, 0])
    for step in range(4):
        context.draw(random_logits(random.Random(step), 3, 1, V), torch.full((3, 1), step - 1))
    assert (context.max_nodes, context.budget_list, context.budgets.tolist()) == (3, [3, 1, 0], [3, 1, 0])
    proposal = context.drawn("x")
    assert proposal.chain and proposal.sizes.tolist() == [3, 1, 0] and proposal.num_nodes == 4
    assert proposal.parents.tolist() == [[-1, 0, 1, PADDING], [-1] + [PADDING] * 3, [PADDING] * 4]
    assert context.drawn("x", most=torch.tensor([2, 9, 9])).sizes.tolist() == [2, 1, 0]
    assert context.drawn("x", chain=False, keep=4, most=torch.tensor([2, 9, 9])).sizes.tolist() == [2, 1, 0]


def test_where_the_device_is_ahead_budgets_leave_room_for_the_targets_own_token() -> None:
    state = make_state(WISHES, apart=True, limit=6)
    context = context_of(state, budgets=[4, 4, 4])
    assert context.budget_list == [4, 4, 4], "as the host knows them"
    assert context.budgets.tolist() == [4, 2, 0]  # lengths 1, 3 and 5 of 6
    state.table.commit(torch.tensor([2]), torch.tensor([[1, 1, 1, 1, 1]]), torch.tensor([5]))
    assert context_of(state, budgets=[4, 4, 4]).budgets.tolist() == [0, 2, 0]


def test_only_gives_a_fresh_context_for_some_with_budgets_no_larger() -> None:
    state = make_state(WISHES)
    context = context_of(state, budgets=[5, 1, 3])
    context.draw(random_logits(random.Random(0), 3, 1, V), torch.full((3, 1), ROOT))
    some, everyone = context.only([2, 0], 4), context.only(None, 2)
    assert (some.slot_list, some.budget_list, some.max_nodes) == ([3, 2], [3, 4], 4)
    assert some.slots.tolist() == [3, 2] and some.lengths.tolist() == [5, 1]
    assert (everyone.slot_list, everyone.budget_list) == (SLOTS, [2, 1, 2])
    assert some.drawn("x").num_nodes == everyone.drawn("x").num_nodes == 0 and context.drawn("x").num_nodes == 1
