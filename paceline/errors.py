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
