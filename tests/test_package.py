"""The house: what is exported, which way imports run, how light `import paceline` is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent

# A module may import from its own layer's row and from rows below it.
LAYERS = [
    ["cli"],
    ["server"],
    ["bench", "testing"],
    ["async_llm"],
    ["llm"],
    ["shared"],
    ["compat", "outputs", "pieces", "prompts", "requests", "templates"],
    ["engine"],
    ["drafters"],
    ["sampling"],
    ["models"],
    ["cache"],
    ["kernels"],
    ["params", "errors"],
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
ALONE = {"fastapi", "pydantic", "uvicorn", "gguf"}  # never needed by the core


def imports_of(path: Path) -> list[str]:
    """Modules a file imports when it runs: what stands under TYPE_CHECKING is for readers."""
    found = []
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "paceline" and len(parts) > 1 and parts[1] in RANK else None


def test_imports_run_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        own = layer_of(".".join(("paceline", *path.relative_to(ROOT).with_suffix("").parts)))
        if own is None or path.stem == "__main__":  # a program stands above everything
            continue
        for module in imports_of(path):
            other = layer_of(module)
            if other is not None and RANK[other] < RANK[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_every_module_has_its_place_in_the_order() -> None:
    places = {path.stem if path.suffix == ".py" else path.name for path in ROOT.iterdir()}
    assert places - {"__init__", "__main__", "__pycache__", "py.typed", "py"} <= set(RANK), (
        "name the new module in LAYERS"
    )


def test_the_core_needs_no_server_package() -> None:
    for path in ROOT.rglob("*.py"):
        if "server" not in path.parts:
            assert not {module.split(".")[0] for module in imports_of(path)} & ALONE, path


def test_triton_is_imported_only_by_kernels() -> None:
    for path in ROOT.rglob("*.py"):
        if "kernels" not in path.parts:
            assert "triton" not in {module.split(".")[0] for module in imports_of(path)}, path


def test_importing_paceline_is_light() -> None:
    code = (
        "import sys, paceline; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch','transformers','rich'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_exported_names_are_these() -> None:
    assert paceline.__all__ == [
        "LLM",
        "MTP",
        "AsyncLLM",
        "CompletionOutput",
        "DFlash",
        "DraftModel",
        "Eagle",
        "EarlyExit",
        "FirstOf",
        "Glide",
        "Hydra",
        "Lookahead",
        "MLPSpeculator",
        "Medusa",
        "NGram",
        "PacelineError",
        "Pard",
        "RequestOutput",
        "SamplingParams",
        "Suffix",
    ]
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(paceline, "NoSuchThing")


def test_no_test_imports_from_another() -> None:
    """What several tests need stands in a file of its own."""
    found = re.compile(r"^(?:from|import) tests[\w.]*\.test_", re.MULTILINE)
    folder = Path(__file__).parent
    assert [path.name for path in folder.rglob("*.py") if found.search(path.read_text(encoding="utf-8"))] == []
