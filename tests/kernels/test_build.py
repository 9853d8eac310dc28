"""Building the library: with AddressSanitizer nothing strays out of bounds; without a compiler life goes on.

The instrumented library is compiled without optimisation, which takes seconds where -O3 takes minutes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.tags import parse_tag, sys_tags

from paceline.errors import OptionError
from paceline.kernels import select
from paceline.kernels.cpu import build, library, native

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
OPENED = """
import ctypes, sys
from paceline.kernels.cpu import library, native

loaded = ctypes.CDLL(sys.argv[1])
for name, (result, arguments) in library._SIGNATURES.items():
    getattr(loaded, name).restype, getattr(loaded, name).argtypes = result, arguments
native.library = lambda: loaded
"""
EVERYTHING = """
import torch
from paceline.kernels.cpu.native import NativeOps
from paceline.drafters.tree import Proposal, paths
from paceline.models.batch import Work
from tests.kernels.networks import SHAPES, table_of
from tests.kernels.tiny import CPU, Table, load, packed, random_tree, tokens
import numpy as np

ops = NativeOps()
for path in (b"portable", b"avx2", b"avx512", b"amx"):
    if not loaded.paceline_select(path):
        continue
    for threads, sizes in ((1, (17,)), (2, (1, 16, 17))):
        loaded.paceline_threads(threads)
        for outputs in sizes:
            kinds = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
            parts = [packed(kind, outputs, 256) for kind in kinds]
            odd = torch.randn(outputs, 33)
            for stack in [[part] for part in parts] + [parts, [odd], [odd.bfloat16()], [odd.half()]]:
                weight = ops.pack(stack, torch.float32, CPU)
                for rows in (0, 1, 5, 9, 70):
                    bias = torch.randn(weight.shape[0])
                    ops.linear(torch.randn(rows, weight.shape[1]), weight, bias)
                ops.embed(weight, torch.arange(weight.shape[0]))
    few = torch.randn(17)
    loaded.paceline_exp(few.data_ptr(), 17, few.data_ptr())
    rng = np.random.default_rng(0)
    for name in ("llama_64", "llama_128", "llama_odd", "mistral_window", "gpt2", "opt_350m", "Q5_1", "K_mixed"):
        table = Table(load(name), num_slots=2, block_size=5)
        table.begin(0, tokens(40, 0))
        table.begin(1, tokens(80, 1))
        table.run([Work(0, 0, 39), Work(1, 0, 79)], taps=(0, 1, -1, 2))
        parents = random_tree(rng, 13)
        proposal = Proposal.of_trees([(tokens(13, 5), parents)], CPU, "random")
        final = table.run([Work(0, 39, 1, 13)], (proposal.tokens, paths(proposal.parents))).final
        table.loaded.model.logits(final)
        table.loaded.model.logits(final[:0])
        last = table.cache.layers[0][0].shape[0] - 1
        table.loaded.model.ops.keep(table.cache.layers, torch.tensor([last, 0]), torch.tensor([0, last]))
    for name in SHAPES:
        table = table_of(name, "native", longest=150, num_slots=2)
        table.begin(0, tokens(150, 0))
        table.run([Work(0, 0, 149)], taps=(0, -1))
        table.run([Work(0, 149, 1)])
        last = table.cache.layers[0][0].shape[0] - 1
        table.loaded.model.ops.keep(table.cache.layers, torch.tensor([last, 0]), torch.tensor([0, last]))
print("finished", flush=True)
x = torch.zeros(64)
loaded.paceline_exp(x.data_ptr(), 65, x.data_ptr())
"""


def sanitizer() -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc to build with")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("gcc comes without libasan here")
    return str(Path(found).resolve())


def run_instrumented(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """With the library built for the sanitizer, no path left out."""
    runtime = sanitizer()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        target = build.build(tmp_path / "_native.so", ["-fsanitize=address", "-O0"])
    assert target is not None and not told.getvalue(), told.getvalue()
    path = tmp_path / "script.py"
    path.write_text(OPENED + script)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "ignore", str(path), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)


def test_no_path_leaves_its_memory_and_the_sanitizer_would_see_it(tmp_path: Path) -> None:
    """What is found ends the process: all before "finished" is clean, and the overflow planted after it is not."""
    done = run_instrumented(EVERYTHING, tmp_path)
    assert done.stdout.strip() == "finished", done.stderr[:3000]
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr and "paceline_exp" in done.stderr


# ---- without a compiler, without a library


def test_without_a_compiler_nothing_is_built_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build(tmp_path / "none.so") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not build.X86, reason="the flags are those of x86")
def test_a_compiler_that_does_not_know_an_instruction_set_leaves_its_path_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.which("g++")
    if real is None:
        pytest.skip("there is no g++ to build with")
    fake = tmp_path / "g++"
    fake.write_text(f'#!/bin/sh\ncase "$*" in *-mavx512*) echo what is that >&2; exit 1;; esac\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    target = build.build(tmp_path / "some.so", ["-O0"])
    assert target is not None
    told = capsys.readouterr().err
    assert all(f"path_{name} is left out: what is that" in told for name in ("avx512", "amx"))
    opened, whole = library.ctypes.CDLL(str(target)), library.library()
    assert whole is not None
    before = whole.paceline_path()
    names = [name for name in (b"portable", b"avx2") if whole.paceline_select(name)]
    whole.paceline_select(before)
    paths = (b"portable", b"avx2", b"avx512", b"amx")
    assert [name for name in paths if opened.paceline_select(name)] == names


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho this compiler is out of order >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert build.build(tmp_path / "none.so") is None
    assert "out of order" in capsys.readouterr().err
    assert not (tmp_path / "none.so").exists()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The wheel's build hook, on a tree whose compiler is not run."""
    interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    interface.BuildHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    made = runpy.run_path(str(ROOT / "hatch_build.py"))["NativeKernels"]()
    made.root = str(ROOT)
    return made


def test_a_wheel_fits_every_python_of_its_system_and_processor(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize("standard", data)
    assert data["artifacts"] == ["paceline/kernels/cpu/_native.so"] and data["pure_python"] is False
    assert data["tag"].startswith("py3-none-") and parse_tag(data["tag"]) & set(sys_tags())
    if sys.platform == "linux" and build.X86:
        assert data["tag"] == "py3-none-linux_x86_64"


@pytest.mark.parametrize("compiler, reason", [(None, "there is no C++ compiler"), ("c++", "the C++ compiler failed")])
def test_an_installation_without_kernels_says_so_and_goes_on(
    compiler: str | None, reason: str, hook: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", ""))
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    data: dict[str, Any] = {"artifacts": []}
    hook.initialize("standard", data)
    assert data == {"artifacts": []}, "a wheel for any machine"
    assert f"the native kernels are left out, because {reason};" in capsys.readouterr().err


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose library was not built."""
    kept = library.library()
    monkeypatch.setattr(library, "NAME", "_missing.so")
    for function in (library.library, library.say_missing):
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in (library.library, library.say_missing):
        function.cache_clear()
    assert (library.library() is None) == (kept is None)


@pytest.mark.usefixtures("unbuilt")
def test_auto_falls_back_to_torch_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        names = [select("auto", CPU, torch.float32).name for _ in range(3)]
    assert names == ["torch"] * 3
    assert [record.message for record in caplog.records if "native" in record.message] == [
        "the slower torch kernels are used, because paceline's native kernels were not built: was there a C++ compiler "
        "when paceline was installed?"
    ]


def test_a_library_that_numbers_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One left over from another version would compute nonsense: its operations or structs are others."""
    for name, value in (
        ("OPERATIONS", (*library.OPERATIONS[1:], library.OPERATIONS[0])),
        ("KINDS", library.KINDS[:-1]),
        ("ACTIVATIONS", ("tanh", *library.ACTIVATIONS)),
        ("TOGETHER", 8),
        ("BatchStruct", library.Program),
    ):
        with monkeypatch.context() as changed, caplog.at_level(logging.WARNING, logger="paceline"):
            changed.setattr(library, name, value)
            assert library.library.__wrapped__() is None, name
            library.say_missing.__wrapped__()
    assert len(caplog.records) == 5 and all("another version" in record.message for record in caplog.records)
    assert library.library.__wrapped__() is not None


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.parametrize("asked", [("native", None), ("auto", "int8"), ("native", "int4")])
def test_native_kernels_that_were_asked_for_and_are_missing_are_an_error_and_no_others_are_spoken_of(
    asked: tuple[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    kernels, quantization = asked
    with caplog.at_level(logging.WARNING, logger="paceline"), pytest.raises(OptionError, match="were not built"):
        select(kernels, CPU, torch.float32, quantization)
    assert not caplog.records


def test_auto_takes_native_on_a_cpu_whatever_the_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert select("auto", CPU, dtype).name == "native"
    assert select("auto", torch.device("meta"), torch.float32).name == "torch"
    with pytest.raises(OptionError, match="float32"):
        native.NativeOps().pack([torch.zeros(2, 2)], torch.bfloat16, CPU)
