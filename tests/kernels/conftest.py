"""All of these need the native kernels. Tests of instruction sets and threads choose their own."""

from collections.abc import Callable, Iterator

import pytest

from paceline.kernels.cpu.library import library
from tests.native import WHY


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    if library() is None:
        pytest.skip(WHY)


@pytest.fixture
def select() -> Iterator[Callable[[str], None]]:
    """Choose an instruction set for this test; the one before comes back."""
    found = library()
    assert found is not None
    before = found.paceline_path()

    def choose(name: str) -> None:
        if not found.paceline_select(name.encode()):
            pytest.skip(f"this processor has no {name}")
        assert found.paceline_path() == name.encode()

    yield choose
    found.paceline_select(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    found = library()
    assert found is not None

    def choose(count: int) -> None:
        found.paceline_threads(count)
        assert found.paceline_num_threads() == count

    yield choose
    found.paceline_threads(1)
