"""How many pages there are: by memory available, the container's limit, what others will need, and by what is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import LLM
from paceline.cache.slots import SPREAD
from paceline.engine import memory
from paceline.engine.memory import Room, Sizes, available_bytes, count_pages, size_cache
from paceline.engine.options import EngineOptions
from paceline.errors import OptionError
from paceline.kernels.ops import LayerSpec
from tests.fakes import tiny_model

CPU = torch.device("cpu")
GIB = 2**30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n"


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_is_what_is_available_not_what_is_free(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path, {})) == 8 * GIB


def test_a_container_of_the_newer_kind_takes_no_more_than_its_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"}
    root = system(tmp_path, {**files, "sys/fs/cgroup/memory.current": f"{3 * GIB}\n"})
    assert available_bytes(root) == GIB
    system(tmp_path, {"sys/fs/cgroup/memory.stat": f"anon 5\nactive_file {GIB // 2}\ninactive_file {GIB}\n"})
    assert available_bytes(root) == GIB + GIB // 2 + GIB, "cached files make room"
    system(tmp_path, {"sys/fs/cgroup/memory.current": f"{7 * GIB}\n"})
    assert available_bytes(root) == 0, "never less than nothing"
    system(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert available_bytes(root) == 8 * GIB


def test_of_groups_inside_groups_the_tightest_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        "sys/fs/cgroup/jobs/mine/memory.max": "max",
        "sys/fs/cgroup/jobs/mine/memory.current": "0",
        "sys/fs/cgroup/jobs/memory.max": str(3 * GIB),
        "sys/fs/cgroup/jobs/memory.current": str(GIB),
    }
    assert available_bytes(system(tmp_path, files)) == 2 * GIB


@pytest.mark.parametrize("path", ["/", "/docker/abc"])
def test_a_container_of_the_older_kind_takes_no_more_than_its_limit(path: str, tmp_path: Path) -> None:
    """Inside, the group's own files stand at the top, whatever path the host knows it by."""
    files = {
        "proc/self/cgroup": f"9:name=systemd:/\n4:cpu,memory:{path}\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0\n",
    }
    assert available_bytes(system(tmp_path, files)) == GIB + GIB // 4


def test_a_group_without_a_limit_says_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\nnonsense\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    assert available_bytes(system(tmp_path, files)) == 8 * GIB


def pages(page_bytes: int = 2**20, reserved: int = 0, length: int = 32, **options: Any) -> int:
    return count_pages(page_bytes, Room(CPU, length, 256, reserved), EngineOptions(block_size=16, **options))


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROOT", system(tmp_path, {}))


@pytest.mark.usefixtures("eight")
def test_pages_are_those_all_slots_could_fill_as_far_as_memory_goes() -> None:
    assert pages(max_num_seqs=5) == 15, "two pages each, and one for drafts"
    assert pages(max_num_seqs=10_000) == 4 * 1024, "on a CPU no more than 4 GiB"
    assert pages(max_num_seqs=10_000, gpu_memory_utilization=0.75) == 6 * 1024, "unless a share is given"
    assert pages(page_bytes=2**21, max_num_seqs=10_000) == 2 * 1024


@pytest.mark.usefixtures("eight")
def test_what_others_will_need_is_not_the_caches() -> None:
    assert pages(reserved=2 * GIB, max_num_seqs=10_000, gpu_memory_utilization=0.5) == 2 * 1024
    assert pages(reserved=GIB, max_num_seqs=10_000) == 4 * 1024, "the limit is the cache's alone"
    with pytest.raises(OptionError, match="the memory left holds 0 tokens of cache, fewer than max_model_len=32"):
        pages(reserved=8 * GIB)


@pytest.mark.usefixtures("eight")
def test_one_sequence_of_full_length_must_fit() -> None:
    assert pages(page_bytes=GIB, length=32) == 4
    with pytest.raises(OptionError, match="the memory left holds 64 tokens of cache, fewer than max_model_len=64"):
        pages(page_bytes=GIB, length=64)
    with pytest.raises(OptionError, match="num_pages=4 cannot hold one sequence of max_model_len=64; it needs 5 pages"):
        pages(length=64, num_pages=4)
    assert pages(length=64, num_pages=5) == 5


LOCAL, GLOBAL = (LayerSpec.kv(1, 2**13, torch.float32, window) for window in (64, None))  # a page of each: 1 MiB


def sizes(*target: LayerSpec, length: int = 1024, drafter: int = 0, **options: Any) -> Sizes:
    given = EngineOptions(block_size=16, **options)
    return size_cache(target, [GLOBAL] * drafter, 0, Room(CPU, length, 32, 0), given)


@pytest.mark.usefixtures("eight")
def test_windows_of_all_slots_come_first_and_the_rest_is_for_all_positions() -> None:
    seen = (64 + SPREAD) // 16 + 2
    assert sizes(LOCAL, GLOBAL, max_num_seqs=5) == (5 * 65, 64, 5 * seen + 3 * 2), "there is room for everything"
    many = sizes(LOCAL, GLOBAL, max_num_seqs=100)
    assert many == (4096 - many.num_windowed, 64, 100 * seen + 6)
    assert sizes(LOCAL, LOCAL, GLOBAL, max_num_seqs=100).num_pages == 4096 - 2 * many.num_windowed
    assert sizes(LOCAL, LOCAL, GLOBAL, drafter=1, max_num_seqs=100).num_pages == (4096 - 2 * many.num_windowed) // 2
    assert sizes(LOCAL, max_num_seqs=5) == (5 * 65, 64, 5 * seen + 6), "pages without layers cost nothing"


@pytest.mark.usefixtures("eight")
def test_with_little_memory_there_are_as_many_of_both_as_long_as_the_longest_fits() -> None:
    few = sizes(LOCAL, GLOBAL, max_num_seqs=1000)
    assert few == (2048, 64, 2048)
    wide = [LOCAL] * 63
    least = (64 + SPREAD) // 16 + 2 + 2
    assert sizes(*wide, GLOBAL, max_num_seqs=1000) == (4096 - 63 * 63, 64, 63)
    assert sizes(*wide, GLOBAL, length=3300, max_num_seqs=1000).num_windowed == (4096 - 208) // 63
    with pytest.raises(OptionError, match="fewer than max_model_len=60000"):
        sizes(*wide, GLOBAL, length=60_000)
    assert sizes(*wide, GLOBAL, length=53_000, max_num_seqs=1000) == (4096 - 63 * least, 64, least)


@pytest.mark.usefixtures("eight")
def test_pages_that_were_asked_for_bound_those_under_windows_too() -> None:
    assert sizes(LOCAL, GLOBAL, num_pages=70) == (70, 64, 70)
    assert sizes(LOCAL, GLOBAL, num_pages=400, max_num_seqs=2) == (400, 64, 2 * 10 + 6)
    assert sizes(LOCAL, GLOBAL, length=64, num_pages=5) == (5, None, 0), "nothing is ever out of sight"


def test_on_an_accelerator_its_share_less_what_is_taken_is_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which weights and others have taken 24: nine tenths of all are 72, so 48 are left."""
    reports = {"cuda:1": (56 * GIB, 80 * GIB)}
    monkeypatch.setattr(memory, "ask_device", lambda device: reports[str(device)])
    gpu = torch.device("cuda:1")

    def count(reserved: int = 0, **options: Any) -> int:
        given = EngineOptions(block_size=16, max_num_seqs=10**6, **options)
        return count_pages(2**20, Room(gpu, 32, 2048, reserved), given)

    assert count() == 48 * 1024
    assert count(gpu_memory_utilization=0.5) == 16 * 1024
    assert count(reserved=8 * GIB) == 40 * 1024
    with pytest.raises(OptionError, match="the memory left holds 0 tokens of cache"):
        count(gpu_memory_utilization=0.3)
    with pytest.raises(OptionError, match="takes 57344 MiB and 56320 MiB are left"):
        reports["cuda:1"] = (55 * GIB, 80 * GIB)
        memory.check_room(56 * GIB, gpu)


def test_rounds_at_work_have_room_of_their_own_on_an_accelerator() -> None:
    """By hand for Llama's 8B: 2048 rows of 8 states, 3 wide ones and a qkv; 64 sequences with 5 drafts each."""
    llm = LLM(tiny_model(), device="cpu", max_model_len=64, num_pages=5)
    assert memory.working_bytes(llm.engine.target, 256, 5) == 0, "a CPU's memory grows as needed"
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    config = replace(llm.config, vocab_size=128256, **sizes)
    model = SimpleNamespace(config=config)
    target: Any = SimpleNamespace(model=model, device=torch.device("cuda"), dtype=torch.bfloat16, max_num_seqs=64)
    rows = 2048 * (8 * 4096 + 3 * 14336 + 48 * 128) * 2
    logits = 4 * 4 * 128256
    assert memory.working_bytes(target, 2048, 5) == memory.CODE_BYTES + 2 * (rows + 64 * 6 * logits)
    assert memory.working_bytes(target, 2048, 0) == memory.CODE_BYTES + 2 * (rows + 64 * logits)
    assert memory.working_bytes(target, 2048, 63) == memory.CODE_BYTES + 2 * (rows + 2048 * logits), "no more than rows"


def test_a_system_that_does_not_tell_gets_a_sentence_and_num_pages_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    with pytest.raises(OptionError, match="does not say how much memory is available; give num_pages, 5 or more"):
        LLM(tiny_model(), max_model_len=64)
    assert LLM(tiny_model(), max_model_len=64, num_pages=5).generate([[1, 2]], max_tokens=1)
