"""The GGUF reader against the `gguf` package as an independent oracle, and against damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError
from paceline.kernels import blocks
from paceline.kernels.blocks import BLOCKS
from paceline.models import gguf as ours
from paceline.models.gguf import GGUFFile, GGUFTensor
from tests.models.gguf_files import SCALES

KINDS = gguf.GGMLQuantizationType


def random_blocks(kind: str, rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = BLOCKS[kind][1]
    blocks = rng.integers(0, 256, (rows * blocks_per_row, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = (rng.standard_normal(len(blocks)) * 0.1).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Any]], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "test")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_file(path: Path) -> Path:
    tensors = {
        "q": (random_blocks("Q4_1", 2, 1), KINDS.Q4_1),
        "f": (np.arange(3, dtype=np.float32), None),
    }
    return write(path, tensors, words=["a", "bc", "Ġé"], numbers=[1, 2, 3], note="x")


def header(*parts: bytes, version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def tensor_entry(name: str, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def test_block_table_matches_the_oracle() -> None:
    assert {kind.name: tuple(size) for kind, size in gguf.GGML_QUANT_SIZES.items()} == BLOCKS
    assert {int(kind): kind.name for kind in KINDS} == ours._KINDS


@pytest.mark.parametrize("kind", SCALES)
def test_random_blocks_decode_exactly(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CHUNK_ELEMENTS", 3000)  # several chunks and a short last one
    data = random_blocks(kind, 64, 3)
    file = GGUFFile(write(tmp_path / "a.gguf", {"w": (data, KINDS[kind])}))
    tensor = file.tensors["w"]
    want = gguf.quants.dequantize(data, KINDS[kind])
    assert tensor.kind == kind and tensor.shape == want.shape
    assert np.array_equal(tensor.raw, data)
    assert tensor.dequantize().numpy().tobytes() == want.tobytes()
    assert torch.equal(tensor.dequantize(torch.bfloat16), torch.from_numpy(want).to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_weights_decode_exactly(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((16, 96)).astype(np.float32)
    packed = gguf.quants.quantize(values, KINDS[kind])
    tensor = GGUFFile(write(tmp_path / "a.gguf", {"w": (packed, KINDS[kind])})).tensors["w"]
    want = gguf.quants.dequantize(packed, KINDS[kind]).astype(np.float32)
    assert tensor.shape == (16, 96)
    assert tensor.dequantize().numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "int16", "int32", "int64"])
def test_plain_numbers_and_shapes(tmp_path: Path, dtype: str) -> None:
    data = np.arange(-12, 12).astype(dtype)
    shapes = {"one": (24,), "two": (4, 6), "three": (2, 3, 4)}
    file = GGUFFile(write(tmp_path / "a.gguf", {name: (data.reshape(s), None) for name, s in shapes.items()}))
    for name, shape in shapes.items():
        tensor = file.tensors[name]
        assert tensor.shape == shape
        assert torch.equal(tensor.dequantize(torch.float64), torch.from_numpy(data.astype(np.float64)).reshape(shape))


def test_decoded_values_own_their_memory(tmp_path: Path) -> None:
    path = small_file(tmp_path / "a.gguf")
    before = path.read_bytes()
    tensor = GGUFFile(path).tensors["f"]
    assert not tensor.raw.flags.writeable
    tensor.dequantize().fill_(7)
    assert tensor.dequantize().tolist() == [0, 1, 2]
    assert path.read_bytes() == before


@pytest.mark.parametrize("order", [[3, 0, 2], np.array([1, 1]), torch.tensor([3, 2, 1, 0])])
def test_rows_gather_packed_blocks(tmp_path: Path, order: Any) -> None:
    cube = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    tensors = {
        "q": (random_blocks("Q4_K", 4, 2), KINDS.Q4_K),
        "bias": (np.arange(4, dtype=np.float32), None),
        "cube": (cube, None),
    }
    for tensor in GGUFFile(write(tmp_path / "a.gguf", tensors)).tensors.values():
        got = tensor.rows(order)
        assert got.kind == tensor.kind and got.shape == (len(order), *tensor.shape[1:])
        assert torch.equal(got.dequantize(), tensor.dequantize()[torch.as_tensor(order)])


def test_a_packed_vector_has_no_rows() -> None:
    tensor = GGUFTensor("Q8_0", (32,), random_blocks("Q8_0", 1, 1), "v")
    with pytest.raises(CheckpointError, match="no rows"):
        tensor.rows([0])


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
    scalars = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31)}
    scalars |= {"uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "né"}
    for name, value in scalars.items():
        getattr(writer, f"add_{name}")(name, value)
    arrays: dict[str, list[Any]] = {
        "ints": [1, -2, 3],
        "floats": [0.5, 1.5],
        "flags": [True, False],
        "words": ["", "é"],
    }
    for name, values in arrays.items():
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "a.gguf").metadata
    for name, value in scalars.items():
        assert metadata[name] == value and type(metadata[name]) is type(value)
    for name, values in arrays.items():
        assert list(metadata[name]) == values
    assert metadata["flags"].dtype == np.bool_


def test_nested_arrays_and_version_two(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2H", 2, 2, 5, 6)
    nested = text("n") + struct.pack("<IIQ", 9, 9, 2) + inner + inner
    (tmp_path / "a.gguf").write_bytes(header(nested, version=2, entries=1))
    assert [list(row) for row in GGUFFile(tmp_path / "a.gguf").metadata["n"]] == [[5, 6], [5, 6]]


def test_a_large_vocabulary(tmp_path: Path) -> None:
    words = [f"token{index}" for index in range(150_000)]
    packed = b"".join(map(text, words))
    entry = text("tokens") + struct.pack("<IIQ", 9, 8, len(words)) + packed
    (tmp_path / "a.gguf").write_bytes(header(entry, entries=1))
    assert GGUFFile(tmp_path / "a.gguf").metadata["tokens"] == words


def test_alignment_is_honoured(tmp_path: Path) -> None:
    tensors = {"a": (np.arange(3, dtype=np.float32), None), "b": (np.arange(5, dtype=np.float32), None)}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "test")
    writer.add_custom_alignment(128)
    for name, (data, _) in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "a.gguf")
    assert all(np.array_equal(file.tensors[name].dequantize().numpy(), data) for name, (data, _) in tensors.items())


def test_known_but_unreadable_type_is_listed_and_refused_on_use(tmp_path: Path) -> None:
    data = np.zeros((2, 98), dtype=np.uint8)
    tensor = GGUFFile(write(tmp_path / "a.gguf", {"w": (data, KINDS.IQ3_XXS)})).tensors["w"]
    assert (tensor.kind, tensor.shape) == ("IQ3_XXS", (2, 256))
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor 'w' is stored as IQ3_XXS"):
        tensor.dequantize()


HUGE = struct.pack("<Q", 2**60)
BAD = {
    "empty": (b"", "empty"),
    "magic": (b"PK\3\4" + bytes(40), "does not begin with"),
    "version 1": (header(version=1), "version 1"),
    "version 9": (header(version=9), "version 9"),
    "big endian": (header(version=3 << 24), "big-endian"),
    "header": (b"GGUF" + struct.pack("<I", 3), "ends inside the header"),
    "key length": (header(HUGE + b"abc", entries=1), "ends inside a metadata key"),
    "entry count": (header(entries=2**63), "ends inside a metadata key"),
    "key bytes": (header(text(b"\xff\xfe"), entries=1), "UTF-8"),
    "value type": (header(text("k") + struct.pack("<I", 77), entries=1), "value type 77"),
    "string": (header(text("k") + struct.pack("<I", 8) + HUGE, entries=1), "ends inside metadata 'k'"),
    "numbers": (header(text("k") + struct.pack("<II", 9, 12) + HUGE, entries=1), "ends inside metadata 'k'"),
    "strings": (header(text("k") + struct.pack("<II", 9, 8) + HUGE, entries=1), "cannot fit"),
    "arrays": (header(text("k") + struct.pack("<II", 9, 9) + HUGE, entries=1), "cannot fit"),
    "nesting": (header(text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 900, entries=1), "nests too deep"),
    "same key": (header((text("k") + struct.pack("<IB", 0, 1)) * 2, entries=2), "'k' appears twice"),
    "alignment": (header(text("general.alignment") + struct.pack("<II", 4, 0), entries=1), "general.alignment is 0"),
    "tensor count": (header(tensors=2**50), "ends inside a tensor name"),
    "type id": (header(tensor_entry("w", (32,), 5), tensors=1), "tensor 'w' has unknown type id 5"),
    "dimensions": (header(tensor_entry("w", (1,) * 5, 0), tensors=1), "5 dimensions"),
    "zero": (header(tensor_entry("w", (0, 2**63), 0), tensors=1), "cannot have shape"),
    "part block": (header(tensor_entry("w", (33, 2), 2), bytes(99), tensors=1), "cannot have shape"),
    "size": (header(tensor_entry("w", (2**63, 2**63), 0), bytes(99), tensors=1), "outside of the file"),
    "offset": (header(tensor_entry("w", (4,), 0, 2**62), bytes(99), tensors=1), "outside of the file"),
    "same tensor": (header(tensor_entry("w", (1,), 0) * 2, bytes(99), tensors=2), "'w' appears twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_damage_is_named_in_one_sentence(tmp_path: Path, case: str) -> None:
    data, reason = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=reason) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            GGUFFile(path)


def read_all(path: Path) -> bool:
    """Whether the file opens and decodes; anything but success or CheckpointError escapes and fails the test."""
    try:
        for tensor in GGUFFile(path).tensors.values():
            tensor.dequantize()
    except CheckpointError:
        return False
    return True


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    used = len(whole) - 20  # the last tensor's 12 bytes are padded to 32
    opened = []
    for length in range(len(whole)):
        path = tmp_path / "cut.gguf"
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:length])
        if read_all(path):
            opened.append(length)
    assert opened == list(range(used, len(whole)))


def test_flipped_bytes_never_escape_as_other_errors(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in range(len(whole)):
        for value in {0, 255, whole[at] ^ 1, whole[at] ^ 128, int(rng.integers(256))} - {whole[at]}:
            path = tmp_path / "flip.gguf"
            path.unlink(missing_ok=True)
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            refused += not read_all(path)
    assert refused > 100
