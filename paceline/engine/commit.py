"""What a decision does to a sequence: tokens are appended until something ends it; and how that is undone."""

from __future__ import annotations

from paceline.engine.sequence import Sequence

NOTHING_LEFT = (
    "no token can be sampled at position {}: the sampling parameters rule out every token there, or the model produced "
    "NaN"
)


def append_tokens(sequence: Sequence, tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """Append until something ends the sequence; what comes after a stop was never there. Returns the tokens kept."""
    params, known, push = sequence.params, sequence.tokens, sequence.detokenizer.push
    chosen, ending = params.stop_token_ids or (), () if params.ignore_eos else end_ids
    kept: list[int] = []
    for token in tokens:
        if token < 0:
            sequence.finish_reason = "error"
            sequence.error = sequence.words.fault_after(sequence.output) or NOTHING_LEFT.format(len(known))
            break
        kept.append(token)
        known.append(token)
        if token in chosen or token in ending:
            sequence.finish_reason, sequence.stop_reason = "stop", token if token in chosen else None
            if params.include_stop_str_in_output:
                push(token, check_stops=False)
            break
        found = push(token, len(known) - sequence.prompt_length >= params.min_tokens)
        if found is not None or len(known) >= sequence.max_length:
            sequence.finish_reason, sequence.stop_reason = "length" if found is None else "stop", found
            break
    if sequence.finish_reason is not None:
        sequence.detokenizer.finish()
    return kept


def take_back(sequence: Sequence) -> None:
    """Undo what no update has told: it will be decided again, and be the same. An abort stands."""
    if sequence.end_told:
        return
    aborted = sequence.finish_reason == "abort"
    told = sequence.num_told
    if sequence.num_output > told or sequence.finish_reason is not None:
        del sequence.tokens[sequence.prompt_length + told :]
        sequence.detokenizer.restart(sequence.output)
    del sequence.provenance[told:], sequence.logprobs[told:]
    sequence.stats.tokens = told
    sequence.finish_reason, sequence.stop_reason, sequence.error = "abort" if aborted else None, None, None
