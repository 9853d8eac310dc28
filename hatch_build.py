"""The package's build hook: compiles the native kernels and puts them into the wheel."""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path = Path(self.root) / "paceline" / "kernels" / "cpu" / "build.py"
        spec = importlib.util.spec_from_file_location("build_native", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.build() is None:
            reason = "there is no C++ compiler" if module.find_compiler() is None else "the C++ compiler failed"
            print(
                f"paceline: the native kernels are left out, because {reason}; on a CPU the slower torch kernels will "
                "be used until g++ or clang++ is there and paceline is installed again",
                file=sys.stderr,  # pip shows it with -v
            )
            return
        # The library is opened by ctypes: it wants a system and a processor, not one version of Python.
        build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
        build_data["pure_python"] = False
        build_data["artifacts"].append("paceline/kernels/cpu/_native.so")
