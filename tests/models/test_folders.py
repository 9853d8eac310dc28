"""Files of Hugging Face folders: good ones load, spoilt ones are refused in one sentence, no code of theirs is run."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline import drafters
from paceline.drafters.checkpoint import Checkpoint
from paceline.errors import CheckpointError
from paceline.models import loader
from tests.fakes import tiny_model
from tests.models.folders import assert_works, configure, load, refuse, rewrite


def test_a_good_folder_loads(folder: Path) -> None:
    assert_works(load(folder))


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "nowhere", "not found")
    (tmp_path / "notes.txt").write_text("hello")
    refuse(tmp_path / "notes.txt", "notes.txt", ".gguf")
    refuse(tmp_path, "config.json")


@pytest.fixture
def forbidden(folder: Path) -> Iterator[Path]:
    """A good folder that may not be entered by who runs the test, whoever that is: root may enter every one."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        closed = Path(shutil.copytree(folder, Path(name) / "closed"))
        closed.chmod(0)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)
        yield closed
        if was_root:
            os.seteuid(0)
        closed.chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="a system without such permissions")
def test_a_folder_that_may_not_be_read_is_refused_by_its_path(forbidden: Path) -> None:
    said = f"^{re.escape(str(forbidden))}(/inner)? cannot be read: Permission denied$"
    for path in (forbidden, forbidden / "inner"):
        for reader in (loader.find, drafters.make, Checkpoint):
            with pytest.raises(CheckpointError, match=said):
                reader(str(path))
    with pytest.raises(CheckpointError, match=said):
        loader.find(tiny_model(), tokenizer=str(forbidden))


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refuse(folder, "no weights", "model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"\xff" * 64 + data[64:], lambda data: b""]
)
def test_a_corrupt_safetensors_file_is_refused(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refuse(folder, "model.safetensors", "cannot be read")


def as_bin(folder: Path) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    return path


def test_a_bin_file_loads_and_a_truncated_one_is_refused(folder: Path) -> None:
    path = as_bin(folder)
    assert_works(load(folder))
    data = path.read_bytes()
    for cut in (len(data) // 2, 10, 0):
        path.write_bytes(data[:cut])
        refuse(folder, "pytorch_model.bin")


def test_a_bin_file_in_the_old_format_loads(folder: Path) -> None:
    path = as_bin(folder)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert_works(load(folder))


class Trap:
    """What an evil pickle does: run something while it is read."""

    def __reduce__(self) -> Any:
        return (Path.mkdir, (Path("trap-was-sprung"),))


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_bin_file_with_code_is_refused_and_the_code_not_run(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    path = as_bin(folder)
    if how == "torch":
        torch.save({"lm_head.weight": Trap()}, path)
    else:
        path.write_bytes(pickle.dumps({"lm_head.weight": Trap()}))
    refuse(folder, "pytorch_model.bin")
    assert not Path("trap-was-sprung").exists()
    torch.save({"lm_head.weight": Trap()}, folder / "proof.bin")
    torch.load(folder / "proof.bin", weights_only=False)
    assert Path("trap-was-sprung").exists(), "the trap works, where it is let"


def test_a_bin_file_of_something_else_is_refused(folder: Path) -> None:
    path = as_bin(folder)
    for other in ([1, 2], {"lm_head.weight": 5}, torch.zeros(3)):
        torch.save(other, path)
        refuse(folder, "pytorch_model.bin", "dictionary of tensors")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda state: state.pop("model.layers.1.mlp.down_proj.weight"))
    refuse(folder, "model.layers.1.mlp.down_proj.weight", "lacks")


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda state: state.update({"model.norm.weight": torch.zeros(31)}))
    refuse(folder, "model.norm.weight", "[31]", "[32]")


def test_a_tensor_nobody_needs_is_reported_and_the_model_works(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, lambda state: state.update({"model.extra.weight": torch.zeros(2)}))
    with caplog.at_level(logging.WARNING, "paceline"):
        llm = load(folder)
    assert [record.getMessage() for record in caplog.records if "model.extra.weight" in record.getMessage()]
    assert_works(llm)


def test_a_shard_the_index_names_but_nobody_has_is_refused(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    refuse(folder, "part-2.safetensors", "does not exist")
    for broken in ("{", "[]", "{}", '{"weight_map": 5}'):
        index.write_text(broken)
        refuse(folder, "index")


# Code that comes with a checkpoint.


def never_asked(*_: Any) -> str:
    raise AssertionError("a question was asked on standard input")


@pytest.fixture
def sprung(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code in it that leaves a mark when it is run."""
    monkeypatch.setattr("builtins.input", never_asked)
    code = "from pathlib import Path\nPath({!r}).touch()\nclass Own:\n    pass\n".format(str(folder / "was-run"))
    (folder / "own.py").write_text(code)
    return folder


def test_a_tokenizer_with_code_of_its_own_is_refused_without_asking_or_running_it(sprung: Path) -> None:
    configure(sprung, model_type="llama", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    values = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (sprung / "tokenizer_config.json").write_text(json.dumps(values))
    refuse(sprung, str(sprung), "code", "run only with", "trust_remote_code=True")
    assert not (sprung / "was-run").exists()


def test_a_known_model_whose_config_names_code_loads_without_it(sprung: Path) -> None:
    configure(sprung, auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert_works(load(sprung))
    assert not (sprung / "was-run").exists()


def test_transformers_is_never_left_to_ask_whether_code_may_run() -> None:
    calls = [
        line
        for path in Path(paceline.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if "from_pretrained(" in line and "def " not in line
    ]
    assert len(calls) >= 2 and all("trust_remote_code=" in call for call in calls)


def test_an_unknown_model_whose_config_names_code_is_refused_without_asking(sprung: Path) -> None:
    configure(sprung, model_type="own", auto_map={"AutoConfig": "own.Own"})
    refuse(sprung, "'own'", "llama")
    assert not (sprung / "was-run").exists()


# Shards outside the folder.


@pytest.mark.parametrize("how", ["absolute", "above", "above_inside", "drive", "backslash"])
def test_a_shard_outside_the_folder_is_refused(folder: Path, how: str) -> None:
    moved = folder.parent / "weights.safetensors"
    shutil.move(folder / "model.safetensors", moved)
    shard = {
        "absolute": str(moved),
        "above": "../weights.safetensors",
        "above_inside": "part/../../weights.safetensors",
        "drive": "C:\\weights.safetensors",
        "backslash": "..\\weights.safetensors",
    }[how]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    refuse(folder, "index.json", repr(shard), "inside the folder")


def test_a_shard_in_a_folder_below_loads(folder: Path) -> None:
    (folder / "part").mkdir()
    shutil.move(folder / "model.safetensors", folder / "part" / "1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part/1.safetensors"}}))
    assert_works(load(folder))


@pytest.mark.parametrize("shard", [5, None, ["part-1.safetensors"], "x" * 5000, ""], ids=lambda value: str(value)[:9])
def test_a_shard_that_is_no_file_name_is_refused(folder: Path, shard: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard, "b": "b"}}))
    refuse(folder)
