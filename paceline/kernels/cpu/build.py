"""Compiles the native library: plain C++, no torch headers, a few seconds. Run by the package's own build.

    python paceline/kernels/cpu/build.py [--sanitize]

Each path is compiled for its own instruction set and chosen at run time; with `-ffp-contract=off` a multiply and an add
are one operation only where the source says so, so that all paths round alike. Without a compiler nothing is built and
nothing fails.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
COMMON = ["-std=c++20", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")), "-mprefer-vector-width=512"]
AMX = [*AVX512, "-mamx-tile", "-mamx-int8"]
OPTIMISE = {"native": "-O3", "pack": "-O3", "pool": "-O2", "suffix": "-O3", "path_portable": "-O2"}
PATHS = {"path_avx2": AVX2, "path_avx512": AVX512, "path_amx": AMX}  # empty where the flags are not given


def find_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def build(target: Path | None = None, extra: list[str] | None = None) -> Path | None:
    """The library's path, or None if there is no compiler or it failed (what it said goes to stderr)."""
    compiler = find_compiler()
    if compiler is None:
        return None
    target = target or HERE / "_native.so"
    options = [*COMMON, *(extra or [])]
    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str) -> subprocess.CompletedProcess[str]:
            command = [compiler, OPTIMISE.get(name, "-O3"), *options, "-c", str(HERE / "csrc" / f"{name}.cpp")]
            command += ["-o", str(Path(folder) / f"{name}.o")]
            for flags in ([PATHS[name]] if X86 and name in PATHS else []) + [[]]:
                result = subprocess.run([*command, *flags], capture_output=True, text=True)
                if result.returncode == 0:
                    break
                if flags:  # a compiler that does not know an instruction set leaves its path out
                    print(f"{name} is left out: {result.stderr[:500]}", file=sys.stderr)
            return result

        names = [*OPTIMISE, *PATHS]
        with ThreadPoolExecutor() as threads:
            results = list(threads.map(compiled, names))
        link = [compiler, "-shared", *options, *(str(Path(folder) / f"{name}.o") for name in names), "-o", str(target)]
        if all(result.returncode == 0 for result in results):
            results.append(subprocess.run(link, capture_output=True, text=True))
        for result in results:
            if result.returncode:
                print(result.stderr[:2000], file=sys.stderr)
                return None
    return target


if __name__ == "__main__":
    sanitize = ["-fsanitize=address", "-g"] if "--sanitize" in sys.argv else None
    built = build(extra=sanitize)
    print(built or "not built")
    sys.exit(0 if built else 1)
