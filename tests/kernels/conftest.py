"""One thread for the native kernels too: the suite itself runs in parallel. Tests of more threads choose their own."""

from collections.abc import Iterator

import pytest

from paceline.kernels.cpu.library import library


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    found = library()
    if found is None:
        pytest.skip("the native kernels are not built here")
    before = found.paceline_num_threads()
    found.paceline_threads(1)
    yield
    found.paceline_threads(before)
