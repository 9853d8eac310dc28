"""What a decision does to a sequence: tokens are appended until something ends it; and how that is undone."""

from __future__ import annotations

from paceline.engine.sequence import Sequence

NOTHING_LEFT = (
    "no token can be sampled at position {}: the sampling parameters rule out every token there, or the model produced "
    "NaN"
)


def append_tokens(sequence: Sequence, tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """Append until something ends the sequence; what comes after a stop was never there. Returns the tokens kept."""
    kept: list[int] = []
    for token in tokens:
        if token < 0:
            sequence.finish_reason = "error"
            sequence.error = sequence.words.fault_after(sequence.output) or NOTHING_LEFT.format(len(sequence.tokens))
            break
        kept.append(token)
        sequence.tokens.append(token)
        _look_for_end(sequence, token, end_ids)
        if sequence.finish_reason is not None:
            break
    if sequence.finish_reason is not None:
        sequence.detokenizer.finish()
    return kept


def _look_for_end(sequence: Sequence, token: int, end_ids: frozenset[int]) -> None:
    params = sequence.params
    chosen = token in (params.stop_token_ids or ())
    if chosen or (token in end_ids and not params.ignore_eos):
        sequence.finish_reason, sequence.stop_reason = "stop", token if chosen else None
        if params.include_stop_str_in_output:
            sequence.detokenizer.push(token, check_stops=False)
        return
    found = sequence.detokenizer.push(token, check_stops=sequence.num_output >= params.min_tokens)
    if found is not None:
        sequence.finish_reason, sequence.stop_reason = "stop", found
    elif len(sequence.tokens) >= sequence.max_length:
        sequence.finish_reason = "length"


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
