"""The sampling pipeline: raw logits in, the logits a token is picked from out, every row with its own node's history.

Order: the user's functions → allowed tokens, bias, bad words, min_tokens → repetition, frequency, presence →
temperature → min-p → top-k → top-p. A stage runs when some slot in the batch asks for it, and leaves the rows of all
others bit for bit as they were. A stage is a function (logits, rows, state) -> logits over all rows; it keeps no state
of its own, since everything it needs is in the slot tables and the row's path, so there is nothing that a rejected
draft could leave stale.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from paceline.errors import first_line
from paceline.params import SamplingParams
from paceline.sampling.state import ANYTHING, Kind, Rows, SamplerState, Words

NEVER = float("-inf")
LIKELY = 512  # tokens that are sorted before all are
FEW = 64  # or a power of two above it: so many are looked at for a top_k, that others need no round of their own

Stage = Callable[[Tensor, Rows, SamplerState], Tensor]


def process(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    """[R, V] float32 → [R, V]; the input is left as it is."""
    for number in _joined({state.kinds[slot] for slot in rows.slot_list}):
        logits = STAGES[number][1](logits, rows, state)
    return logits


def kind_of(params: SamplingParams) -> Kind:
    """What `process` does for a request, found once."""
    stages = tuple([number for number, (needs, _) in enumerate(STAGES) if needs(params)])
    tempered = all(STAGES[number][1] is _temperature for number in stages)
    most = 0 if params.greedy or params.top_k <= 0 else max(FEW, 1 << (params.top_k - 1).bit_length())
    return Kind(params.greedy, stages, most, tempered)


def common_kind(kinds: AbstractSet[Kind], state: SamplerState) -> Kind | None:
    """What `process` does for requests of these kinds, as a key: the same for others alike. None: it needs the host."""
    stages = _joined(kinds)
    if any(STAGES[number][1] in _ASKING_THE_HOST for number in stages):
        return None
    tempered = all(kind.tempered for kind in kinds)
    greedy, top_k = all(kind.greedy for kind in kinds), max([kind.top_k for kind in kinds], default=0)
    bans = state.ban_shapes if any(STAGES[number][1] in _BANNING for number in stages) else ()
    return Kind(greedy, stages, top_k, tempered, bans)


def _joined(kinds: AbstractSet[Kind]) -> tuple[int, ...]:
    """The stages that any of them needs, in their order."""
    return tuple(sorted({number for kind in kinds for number in kind.stages}))


def _functions(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    """The users' own, one row at a time. History is read where the tables are, so this waits for the device, and is
    right with any number of rounds ahead of the host."""
    table = state.table
    asked = [slot for slot in rows.slot_list if state.words[slot].functions]
    texts = {slot: table.tokens.tensor[slot, : table.longest([slot])].tolist() for slot in asked}
    result = logits.clone()
    places = zip(rows.slots.tolist(), rows.positions.tolist(), rows.drafted.tolist())
    for row, (slot, position, drafted) in enumerate(places):
        if slot in texts:
            path = [token for token in drafted if token >= 0]
            text = texts[slot][: position + 1 - len(path)] + path
            result[row] = _call(state.words[slot], text, table.prompt_length(slot), logits[row])
    return result


def _call(words: Words, text: list[int], prompt_length: int, logits: Tensor) -> Tensor:
    """A row [V] as the functions leave it; nothing can be sampled where one fails. That ends the request if the row is
    reached, and means nothing on a draft that is refused: so a drafter changes no error either."""
    output, found = text[prompt_length:], logits.clone()
    for number, (function, takes_prompt) in enumerate(words.functions):
        try:
            found = function(*[text[:prompt_length]] * takes_prompt, list(output), found)
            if not isinstance(found, Tensor) or found.shape != logits.shape or not found.is_floating_point():
                kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise TypeError(f"it must return {len(logits)} logits as a float tensor, not {kind}")
            found = found.to(logits)
        except Exception as error:
            where = f"logits_processors[{number}] failed after {len(output)} tokens of output"
            words.note_fault(output, f"{where}: {type(error).__name__}: {first_line(error)}")
            return torch.full_like(logits, NEVER)
    return found


def _bias(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    assert state.bias is not None
    biased = state.column("biased", rows.slots) != 0
    return torch.where(biased[:, None], logits + state.bias[rows.slots], logits)


def _tail(rows: Rows, state: SamplerState, count: int) -> Tensor:
    """[R, count] the last tokens before the one to be sampled, drafted ones included; -1 before the beginning."""
    back = torch.arange(count - 1, -1, -1, device=rows.slots.device)
    depth = (rows.drafted >= 0).sum(1)
    place = rows.positions[:, None] - back  # position in the row's own history
    committed = rows.positions - depth  # the last committed position
    table = state.table.tokens.tensor
    inside = place.clamp(0, table.shape[1] - 1)  # padding may lie beyond the end of the table
    tokens = table[rows.slots[:, None], inside]
    if rows.drafted.shape[1]:
        drafted = (place - committed[:, None] - 1).clamp(0, rows.drafted.shape[1] - 1)
        tokens = torch.where(place > committed[:, None], rows.drafted.gather(1, drafted), tokens)
    return torch.where(place >= 0, tokens, -1)


def _bad_words(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    return _ban(logits, rows, state, state.bad.tensor, state.column("worded", rows.slots) != 0)


def _min_tokens(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    produced = rows.positions + 1 - state.table.prompt_lengths[rows.slots]
    return _ban(logits, rows, state, state.stops.tensor, produced < state.column("min_tokens", rows.slots))


def _ban(logits: Tensor, rows: Rows, state: SamplerState, bans: Tensor, held: Tensor) -> Tensor:
    """In rows that are held [R], a ban's last token goes wherever the row's history ends with its other tokens."""
    own = bans[rows.slots]  # [R, W, 1+L]
    last, head = own[:, :, 0], own[:, :, 1:]
    tail = _tail(rows, state, head.shape[2])[:, None]
    fits = ((tail == head) | (head == ANYTHING)).all(2) & held[:, None]  # [R, W]
    most = torch.where(fits, NEVER, -NEVER).to(logits.dtype)
    return logits.scatter_reduce(1, last, most, "amin")  # bans may share their last token


def _counts(rows: Rows, state: SamplerState, vocab_size: int) -> tuple[Tensor, Tensor]:
    """How often each token stands in a row's prompt and in its output so far, both [R, V] float32."""
    longest = state.table.longest(rows.slot_list)
    tokens = state.table.tokens.tensor[:, :longest][rows.slots]  # [R, L]
    place = torch.arange(longest, device=tokens.device)
    depth = (rows.drafted >= 0).sum(1)
    committed = (rows.positions - depth + 1)[:, None]
    in_prompt = place < torch.minimum(state.table.prompt_lengths[rows.slots][:, None], committed)
    in_output = (place < committed) & ~in_prompt
    zeros = torch.zeros(len(tokens), vocab_size, dtype=torch.float32, device=tokens.device)
    prompt = zeros.scatter_add(1, tokens, in_prompt.float())
    output = zeros.scatter_add(1, tokens, in_output.float())
    drafted = rows.drafted.clamp(min=0)
    return prompt, output.scatter_add(1, drafted, (rows.drafted >= 0).float())


def _penalties(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    prompt, output = _counts(rows, state, logits.shape[1])
    repetition = state.column("repetition", rows.slots)[:, None]
    seen = (prompt + output) > 0
    punished = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, punished, logits)
    logits = logits - state.column("frequency", rows.slots)[:, None] * output
    return logits - state.column("presence", rows.slots)[:, None] * (output > 0)


def _temperature(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    return logits / state.column("temperature", rows.slots)[:, None]


def _min_p(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    """Keep what has at least min_p times the probability of the likeliest."""
    floor = torch.log(state.column("min_p", rows.slots).double()).float()  # -inf where min_p is 0
    return logits.masked_fill(logits < logits.amax(1, keepdim=True) + floor[:, None], NEVER)


def _top_k(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    """Keep what is at least as likely as the k-th; tokens tied with it stay."""
    counts = state.column("top_k", rows.slots)
    most = min(max(state.kinds[slot].top_k for slot in rows.slot_list), logits.shape[1])
    best = logits.topk(most, dim=1).values
    kth = best.gather(1, (counts - 1).clamp(0, most - 1)[:, None])
    return logits.masked_fill((logits < kth) & (counts > 0)[:, None], NEVER)


def _top_p(logits: Tensor, rows: Rows, state: SamplerState) -> Tensor:
    """Keep the likeliest tokens until their probabilities reach top_p; at least one; ties by lowest id."""
    limit = state.column("top_p", rows.slots)
    share = torch.softmax(logits, dim=1).double()
    if logits.device.type == "cpu":
        return torch.stack([_nucleus(*row) for row in zip(logits, share, limit.tolist())])
    return _nuclei(logits, share, limit)


def _nuclei(logits: Tensor, share: Tensor, limit: Tensor) -> Tensor:
    """All rows at once, [R, V]; limit is [R]."""
    order = logits.sort(dim=1, descending=True, stable=True).indices
    drop = _beyond(share.gather(1, order), limit[:, None])
    return logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), NEVER)


def _beyond(share: Tensor, limit: Tensor | float) -> Tensor:
    """Of probabilities in falling order, those that come after the limit was reached."""
    drop = share.cumsum(-1) - share >= limit
    drop[..., 0] = False
    return drop if isinstance(limit, float) else drop & (limit < 1.0)


def _nucleus(logits: Tensor, share: Tensor, limit: float) -> Tensor:
    """The same for one row [V] on a CPU, where sorting a vocabulary takes as long as a forward: sort the likeliest few
    first, and all only if those do not reach the limit."""
    if limit >= 1.0 or bool(share[0].isnan()):  # one NaN makes all shares NaN, and must stay seen
        return logits
    for count in (min(LIKELY, len(logits)), len(logits)):
        least = logits.topk(count).values[-1]
        ids = (logits >= least).nonzero()[:, 0]  # by id, whatever ties with the last
        ids = ids[logits[ids].sort(descending=True, stable=True).indices]
        drop = _beyond(share[ids], limit)
        if drop[-1] or len(ids) == len(logits):
            break
    kept = ids[~drop]
    return torch.full_like(logits, NEVER).index_copy(0, kept, logits[kept])


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


STAGES: tuple[tuple[Callable[[SamplingParams], bool], Stage], ...] = (
    (lambda p: bool(p.logits_processors), _functions),
    (lambda p: bool(p.logit_bias) or p.allowed_token_ids is not None, _bias),
    (lambda p: bool(p.bad_words), _bad_words),
    (lambda p: p.min_tokens > 0, _min_tokens),
    (_penalised, _penalties),
    (lambda p: not p.greedy, _temperature),  # 1 too: it changes nothing, and rounds of all temperatures are alike
    (lambda p: not p.greedy and p.min_p > 0, _min_p),
    (lambda p: not p.greedy and p.top_k > 0, _top_k),
    (lambda p: not p.greedy and p.top_p < 1.0, _top_p),
)

_ASKING_THE_HOST = (_functions,)
_BANNING = (_bad_words, _min_tokens)
