"""What every refusal has in common."""

from __future__ import annotations

from paceline import PacelineError


def assert_sentence(error: BaseException, *named: str) -> None:
    """One line, not a traceback, that names what matters."""
    assert isinstance(error, PacelineError), repr(error)
    text = str(error)
    assert len(text) > 15 and "\n" not in text and "Traceback" not in text and "object at 0x" not in text, text
    for part in named:
        assert part in text, f"{part!r} is not in {text!r}"
