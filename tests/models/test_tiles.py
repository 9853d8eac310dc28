"""Packed weights kept in a file: used when they are the right ones, noticed when they are not, never in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.cli.models import describe
from paceline.kernels.cpu import tiles as tile_files
from paceline.kernels.cpu.native import NativeOps
from paceline.models import catalog, loader, tile_cache
from tests.fakes import tiny_model
from tests.models.gguf_files import write
from tests.models.running import CPU, run

IDS = list(range(2, 42))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tile_cache, "LEAST_BYTES", 1)
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path / "model.gguf", "llama", gguf.GGMLQuantizationType.Q4_1)
    return tmp_path / "model.gguf"


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights that had to be packed, as they come."""
    seen: list[Any] = []
    real = NativeOps.pack

    def pack(self: NativeOps, parts: Any, *rest: Any) -> Any:
        seen.append(parts)
        return real(self, parts, *rest)

    monkeypatch.setattr(NativeOps, "pack", pack)
    return seen


def logits(path: Path, quantization: str | None = None) -> bytes:
    found = loader.find(path, tokenizer=object())
    loaded = loader.build(found, torch.float32, CPU, "native", 128, quantization)
    assert loaded.unused == []
    return bytes(run(loaded, IDS, [25, 15])[0].numpy().tobytes())


def kept(home: Path) -> list[Path]:
    return sorted((home / "tiles").glob("*.tiles"))


def test_a_second_load_packs_nothing_and_gives_the_same_bits(home: Path, model: Path, packed: list[Any]) -> None:
    first, count = logits(model), len(packed)
    assert count == 1 + 4 * 2 + 1 and len(kept(home)) == 1
    before = kept(home)[0].stat()
    assert logits(model) == first and len(packed) == count
    assert kept(home)[0].stat().st_ino == before.st_ino, "nothing was written again"
    assert not list((home / "tiles").glob(".*")), "nothing half written is left"


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_folder_keeps_one_file_for_each_way_of_packing(
    quantization: str | None, home: Path, tmp_path: Path, packed: list[Any]
) -> None:
    tiny_model().save_pretrained(tmp_path / "folder")
    plain, count = logits(tmp_path / "folder"), len(packed)
    other = logits(tmp_path / "folder", quantization)
    assert (other == plain) == (quantization is None)
    assert len(kept(home)) == (1 if quantization is None else 2)
    done = len(packed)
    assert done == count * len(kept(home))
    assert logits(tmp_path / "folder", quantization) == other and logits(tmp_path / "folder") == plain
    assert len(packed) == done


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lose_the_data(path: Path) -> None:
    """As after a power cut: the length is right, the blocks were never written."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(len(data) - 4096))


def flip_in_the_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def another_magic(path: Path) -> None:
    path.write_bytes(b"SOMEFILE" + path.read_bytes()[8:])


def hold_less(path: Path) -> None:
    """Sound by its checksums, and with half of the bytes that the kernels would look for."""
    data = path.read_bytes()
    start = tile_files._START
    _, length, _ = start.unpack(data[: start.size])
    said = json.loads(data[start.size : start.size + length])
    body = np.frombuffer(data[-(-(start.size + length) // 4096) * 4096 :], np.uint8)
    segments = [segment for _, listed in said["weights"].values() for segment in listed]
    for segment in segments:
        segment[3] //= 2
    said["sums"] = [tile_files.zlib.crc32(body[at : at + size]) for _, _, at, size in segments]
    header = json.dumps(said).encode()
    begin = start.pack(tile_files.MAGIC, len(header), zlib.crc32(header)) + header
    path.write_bytes(begin + bytes(-len(begin) % 4096) + body.tobytes())


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip_a_bit(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[-1234] ^= 4  # in the midst of a weight
    file.write_bytes(body)


DAMAGE = [cut, grow, empty, lose_the_data, flip_in_the_header, another_magic, hold_less, flip_a_bit]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_noticed_and_written_again(damage: Any, home: Path, model: Path, packed: list[Any]) -> None:
    first, count = logits(model), len(packed)
    good = kept(home)[0].read_bytes()
    damage(kept(home)[0])
    assert logits(model) == first and len(packed) == 2 * count
    assert kept(home)[0].read_bytes() == good
    assert logits(model) == first and len(packed) == 2 * count


def test_another_layout_library_or_model_is_written_again(
    home: Path, model: Path, packed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, count = logits(model), len(packed)
    monkeypatch.setattr(tile_files, "FORMAT", tile_files.FORMAT + 1)
    assert logits(model) == first and len(packed) == 2 * count
    monkeypatch.setattr(tile_files, "_library_digest", lambda: "another build")
    assert logits(model) == first and len(packed) == 3 * count
    os.utime(model, ns=(1, 1))
    assert logits(model) == first and len(packed) == 4 * count
    assert len(kept(home)) == 1, "each took the place of the one before"


@pytest.mark.parametrize("hindrance", ["a file", "a folder in the way", "no room", "a write that fails", "no home"])
def test_where_nothing_can_be_written_weights_are_packed_as_ever(
    hindrance: str, home: Path, model: Path, packed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if hindrance == "a file":
        home.write_text("not a folder")
    elif hindrance == "a folder in the way":
        logits(model)
        become_a_folder(kept(home)[0])
        kept(home)[0].with_name(f"{kept(home)[0].name}.checked").unlink()
        packed.clear()
    elif hindrance == "no home":
        monkeypatch.delenv("PACELINE_HOME")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "")
        monkeypatch.setattr(Path, "home", lambda: Path("~nobody at all").expanduser())
    elif hindrance == "no room":
        usage = shutil._ntuple_diskusage(100, 90, 10)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    else:

        def full(self: Any, file: Any) -> None:
            file.write(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tile_files.Tiles, "_write", full)
    first, count = logits(model), len(packed)
    assert count and logits(model) == first and len(packed) == 2 * count
    assert not [file for file in home.rglob("*") if file.is_file()]


def test_two_processes_that_write_at_once_leave_one_good_file(home: Path, model: Path, packed: list[Any]) -> None:
    code = (
        "import sys, torch; from pathlib import Path; from paceline.models import loader, tile_cache;"
        "tile_cache.LEAST_BYTES = 1\n"
        "for _ in range(20):\n"
        "    [file.unlink(missing_ok=True) for file in Path(sys.argv[2]).rglob('*.tiles')]\n"
        "    found = loader.find(Path(sys.argv[1]), object())\n"
        "    loader.build(found, torch.float32, torch.device('cpu'), 'native', 128)"
    )
    command = [sys.executable, "-c", code, str(model), str(home)]
    first = logits(model)
    with subprocess.Popen(command, stderr=subprocess.PIPE) as other:
        while other.poll() is None:
            assert logits(model) == first
            for file in kept(home):
                file.unlink(missing_ok=True)
        assert other.stderr is not None and other.stderr.read() == b"" and other.returncode == 0
    logits(model)
    packed.clear()
    assert logits(model) == first and not packed and len(kept(home)) == 1


def test_small_models_are_not_kept(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_HOME", str(home))
    logits(model)
    assert not home.exists()


def test_a_model_of_the_cache_takes_its_tiles_along_when_it_is_removed(home: Path, model: Path) -> None:
    folder = home / "models" / catalog.DEFAULT_MODEL
    folder.mkdir(parents=True)
    shutil.copy(model, folder / "model.gguf")
    logits(folder / "model.gguf")
    assert len(list(folder.glob("*.tiles"))) == 1 and not kept(home)
    assert catalog.remove(catalog.DEFAULT_MODEL)
    assert not list(home.rglob("*.tiles"))


def test_paceline_models_says_what_the_tiles_of_other_models_take(home: Path, model: Path) -> None:
    assert not [line for line in describe() if "tiles" in line]
    logits(model)
    (told,) = [line for line in describe() if "tiles" in line]
    assert f"{kept(home)[0].stat().st_size / 1e6:.1f} MB" in told


def test_of_models_elsewhere_the_ones_used_last_stay(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, packed: list[Any]
) -> None:
    others = [model.with_name(f"{name}.gguf") for name in "abc"]
    for number, other in enumerate(others):
        shutil.copy(model, other)
        if number == 2:
            size = kept(home)[0].stat().st_size
            monkeypatch.setattr(tile_cache, "MOST_BYTES", 2.5 * size)
            for age, file in enumerate(kept(home)):  # b was used longest ago, until it is used again
                os.utime(file, (time.time() - 100 + 10 * (1 - age), time.time() - 100 + 10 * (1 - age)))
            logits(others[1])
            (home / "tiles" / ".cut.tiles.part").write_bytes(b"half")
            os.utime(home / "tiles" / ".cut.tiles.part", (1, 1))
        logits(other)
    packed.clear()
    logits(others[1]), logits(others[2])
    assert not packed and len(kept(home)) == 2
    assert not list((home / "tiles").glob(".*"))
    logits(others[0])
    assert packed


def test_the_header_says_what_the_tiles_are_of(home: Path, model: Path) -> None:
    logits(model)
    data = kept(home)[0].read_bytes()
    _, length, _ = tile_files._START.unpack(data[: tile_files._START.size])
    said = json.loads(data[tile_files._START.size : tile_files._START.size + length])
    assert said["of"][2][0][0][:2] == [str(model), model.stat().st_size]
