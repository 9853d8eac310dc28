"""One result whatever runs it: instruction sets, thread counts, threads of Python, forked processes."""

from __future__ import annotations

import _thread
import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline import LLM, NGram, SamplingParams
from paceline.kernels.cpu import library as native_library
from paceline.kernels.cpu.library import SOURCES, library
from paceline.kernels.cpu.native import NativeOps
from paceline.models.batch import Work
from paceline.sampling import noise
from paceline.sampling.noise import Keys
from tests.fakes import tiny_model
from tests.kernels.tiny import ALL, CPU, Table, load, packed, paths_built, same_bits, tokens

THREADS = (1, 2, 3)
DENSE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def products(kind: str, counts: Sequence[int] = range(1, 10)) -> list[Tensor]:
    """So many rows by weights of 17, 97 and more outputs: 16 blocks and where possible 9 and 1; floats: odd columns."""
    ops, results = NativeOps(), []
    shapes = ((17, 512), (97, 512), (33, 288), (16, 32)) if kind in SOURCES else ((17, 77), (97, 45))
    for outputs, columns in shapes:
        if kind in SOURCES and (not kind.endswith("_K") or columns % 256 == 0):
            part: Any = packed(kind, outputs, columns)
        elif kind not in SOURCES:
            values = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(3))
            part = values.to(DENSE[kind])
        else:
            continue
        weight = ops.pack([part], torch.float32, CPU)
        x = torch.randn(113, part.shape[1], generator=torch.Generator().manual_seed(4))[: max(counts)]
        results += [ops.linear(x[:rows], weight) for rows in counts]
        results.append(ops.linear(x, weight, torch.arange(float(outputs))))
    return results


def forward(name: str) -> Tensor:
    """Two chunks of one prompt beside others, few rows and many, and the head: states and logits."""
    loaded = load(name)
    table = Table(loaded)
    for slot, count in enumerate((60, 21, 90)):
        table.begin(slot, tokens(count, slot + 1))
    first = table.run([Work(0, 0, 37), Work(1, 0, 20)]).final
    states = torch.cat([first, table.run([Work(0, 37, 23), Work(2, 0, 90), Work(1, 20, 1)]).final])
    return torch.cat([states, loaded.model.logits(states)], dim=1)


def test_the_fastest_path_is_taken_and_an_unknown_one_is_not() -> None:
    found = library()
    assert found is not None
    assert found.paceline_path().decode() == paths_built()[-1]
    assert found.paceline_select(b"abacus") == 0
    assert found.paceline_path().decode() == paths_built()[-1]


@pytest.mark.parametrize("path", ["avx2", "avx512", "amx"])
@pytest.mark.parametrize("kind", [*SOURCES, *DENSE])
def test_products_have_the_portable_path_s_bits(kind: str, path: str, select: Callable[[str], None]) -> None:
    select("portable")
    wanted = products(kind)
    select(path)
    assert all(same_bits(left, right) for left, right in zip(products(kind), wanted, strict=True))
    assert all(result.abs().max() > 0 and result.isfinite().all() for result in wanted)


@pytest.mark.parametrize("path", ["avx512", "amx"])
@pytest.mark.parametrize("kind", [*SOURCES, *DENSE])
def test_products_of_many_rows_have_the_portable_path_s_bits(
    kind: str, path: str, select: Callable[[str], None], threads: Callable[[int], None]
) -> None:
    many = (63, 64, 65, 79, 80, 113)  # whole panels of sixteen rows, and some left over
    select("portable")
    wanted = products(kind, many)
    select(path)
    for count in (1, 2):
        threads(count)
        assert all(same_bits(left, right) for left, right in zip(products(kind, many), wanted, strict=True))
    alone = products(kind, (1,))
    assert all(same_bits(alone[2 * i], wanted[(len(many) + 1) * i + 5][:1]) for i in range(len(alone) // 2))


@pytest.mark.parametrize("path", ["avx2", "avx512", "amx"])
@pytest.mark.parametrize("name", ALL)
def test_forwards_have_the_portable_path_s_bits(name: str, path: str, select: Callable[[str], None]) -> None:
    select("portable")
    wanted = forward(name)
    select(path)
    assert same_bits(forward(name), wanted)
    assert wanted.isfinite().all() and wanted.std() > 0.05


@pytest.mark.parametrize("path", ["avx2", "avx512", "amx"])
def test_exponentials_and_quants_have_the_portable_path_s_bits(path: str, select: Callable[[str], None]) -> None:
    found = library()
    assert found is not None
    x = np.random.default_rng(0).uniform(-100, 100, 4096).astype(np.float32)
    x[:6] = 0.0, -0.0, 1e-40, 1e38, -1e38, 88.0

    def results() -> list[bytes]:
        out, quants = np.empty_like(x), np.empty(4096, np.int8)
        scales, sums, halves = np.empty(128, np.float32), np.empty(128, np.float32), np.empty(256, np.int32)
        found.paceline_exp(x.ctypes.data, len(x), out.ctypes.data)
        told = (quants, scales, sums, halves)
        found.paceline_quantise(x.ctypes.data, len(x), *(part.ctypes.data for part in told))
        return [part.tobytes() for part in (out, *told)]

    select("portable")
    wanted = results()
    select(path)
    assert results() == wanted


@pytest.mark.parametrize("path", ["portable", "avx2", "avx512", "amx"])
def test_gumbel_noise_has_the_bits_of_the_tensor_operations(
    path: str, select: Callable[[str], None], threads: Callable[[int], None]
) -> None:
    select(path)
    keys = Keys(torch.tensor([3, 1 << 62, -5]), torch.tensor([0, 1, 2]))
    positions = torch.tensor([0, 7, 100_000])
    for vocabulary in (1, 97, 4096, 4097, 9001):
        wanted = noise._gumbel(keys, positions, noise.SAMPLE, vocabulary)
        for count in (1, 2):
            threads(count)
            assert same_bits(noise.gumbel(keys, positions, noise.SAMPLE, vocabulary), wanted)


@pytest.mark.parametrize("name", ["llama", "llama_64", "gpt2", "bfloat16", "float16", "Q4_1", "K_mixed"])
def test_results_do_not_depend_on_the_number_of_threads(name: str, threads: Callable[[int], None]) -> None:
    results, linears = [], []
    for count in THREADS:
        threads(count)
        results.append(forward(name))
        linears.append([*products("Q6_K"), *products("F16")])
    assert all(same_bits(result, results[0]) for result in results)
    assert all(same_bits(left, right) for other in linears for left, right in zip(other, linears[0]))


def generated(llm: LLM, seed: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.7, seed=seed, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([tokens(20, seed + n) for n in range(3)], params)
    return [output.outputs[0].token_ids for output in outputs]


def test_two_engines_in_two_threads_give_what_they_give_alone(threads: Callable[[int], None]) -> None:
    threads(2)

    def engines() -> list[LLM]:
        options: dict[str, Any] = {"kernels": "native", "max_model_len": 128}
        return [LLM(tiny_model(seed=0), **options), LLM(tiny_model(layers=3, seed=1), NGram(4, 1, 3), **options)]

    alone = [generated(llm, seed) for seed, llm in enumerate(engines())]
    found: dict[int, list[list[list[int]]]] = {0: [], 1: []}
    both = engines()

    def work(number: int) -> None:
        for _ in range(3):
            found[number].append(generated(both[number], number))

    workers = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert found == {0: [alone[0]] * 3, 1: [alone[1]] * 3}


FORK = """
import os, sys, threading
import torch
from paceline.kernels.cpu.native import NativeOps

ops = NativeOps("Q4_1")
ops.library.paceline_threads(2)
weight = ops.pack([torch.randn(499, 512)], torch.float32, torch.device("cpu"))
x = torch.randn(72, 512)
wanted = ops.linear(x, weight).numpy().tobytes()
stop = threading.Event()

def busy():
    while not stop.is_set():
        ops.linear(x, weight)

worker = threading.Thread(target=busy)
if sys.argv[1] == "busy":
    worker.start()
for attempt in range(8):
    child = os.fork()
    if child == 0:
        same = all(ops.linear(x, weight).numpy().tobytes() == wanted for _ in range(20))
        os._exit(0 if same and ops.library.paceline_num_threads() > 1 else 3)
    if os.waitpid(child, 0)[1]:
        os._exit(4)
stop.set()
if sys.argv[1] == "busy":
    worker.join()
same = ops.linear(x, weight).numpy().tobytes() == wanted
print("forked" if same else "parent changed")
"""


@pytest.mark.parametrize("parent", ["idle", "busy"])
def test_a_forked_child_computes_with_threads_of_its_own(parent: str, tmp_path: Path) -> None:
    """Also when another thread of the parent is inside a call, lock held, at the moment of the fork."""
    script = tmp_path / "forks.py"
    script.write_text(FORK)
    done = subprocess.run([sys.executable, script, parent], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "forked"), done.stderr[-2000:]


def came_around(call: Callable[[], Any], most: int) -> bool:
    """Whether another Python thread ran during one of `most` calls, if threads give way of their own accord only.

    Between the calls nothing lets go of the lock, so a thread that runs at all runs during a call. How soon the system
    lets it run is its affair: the calls are repeated until it did.
    """
    ran = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        _thread.start_new_thread(ran.set, ())  # Thread.start would wait for it, and so let it run
        for _ in range(most):
            call()
            if ran.is_set():
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        ran.wait()


def test_other_python_threads_run_during_a_call() -> None:
    found = library()
    assert found is not None
    x = torch.zeros(1 << 22)
    arguments = (x.data_ptr(), x.numel(), x.data_ptr())
    holding = ctypes.PyDLL(str(Path(native_library.__file__).with_name(native_library.NAME)))
    holding.paceline_exp.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    assert not came_around(lambda: holding.paceline_exp(*arguments), 5), "the control holds the lock, so none may run"
    assert came_around(lambda: found.paceline_exp(*arguments), 100_000)
