"""The errors a user can meet. Each carries one sentence: what was given, and what is allowed."""


class PacelineError(Exception):
    """Anything paceline refuses to do, said in one sentence."""


class OptionError(PacelineError, ValueError):
    """An option, sampling parameter or prompt that cannot be used as given."""


class CheckpointError(PacelineError):
    """A weight, config or tokenizer file that is missing, corrupt or not what it claims to be."""


class FetchError(PacelineError):
    """A model that no source could deliver."""


class VocabularyError(PacelineError):
    """A drafter whose vocabulary does not fit the target's."""


class EngineError(PacelineError):
    """An engine that cannot go on."""


def first_line(error: BaseException) -> str:
    """An error of another library in one line; where that only announces the next, in two joined."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
