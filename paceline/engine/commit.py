"""What a decision does to a sequence: tokens are appended until something ends it; and how that is undone."""

from __future__ import annotations

from paceline.engine.sequence import Sequence

NOTHING_LEFT = (
    "no token can be sampled at position {}: the sampling parameters rule out every token there, or the model produced "
    "NaN"
)


def append_tokens(sequence: Sequence, tokens: list[int]) -> list[int]:
    """Append until something ends the sequence; what comes after a stop was never there. Returns the tokens kept."""
    params, known, text, before = sequence.params, sequence.tokens, sequence.detokenizer, len(sequence.tokens)
    if before + len(tokens) < sequence.max_length and sequence.ends.isdisjoint(tokens) and not text.stops:
        known += tokens  # as nearly always: nothing can end it here
        for token in tokens if not text.silent else ():
            text.push(token)
        return tokens
    for token in tokens:
        if token < 0:
            sequence.finish_reason = "error"
            sequence.error = sequence.words.fault_after(sequence.output) or NOTHING_LEFT.format(len(known))
            break
        known.append(token)
        if token in sequence.ends:
            named = token in (params.stop_token_ids or ())
            sequence.finish_reason, sequence.stop_reason = "stop", token if named else None
            if params.include_stop_str_in_output:
                text.push(token, check_stops=False)
            break
        found = text.push(token, len(known) - sequence.prompt_length >= params.min_tokens)
        if found is not None or len(known) >= sequence.max_length:
            sequence.finish_reason, sequence.stop_reason = "length" if found is None else "stop", found
            break
    if sequence.finish_reason is not None:
        text.finish()
    return known[before:]


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
