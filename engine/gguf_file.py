"""Reads GGUF files: metadata as a dict, tensors dequantized to float32 one at a time.

The header is read here because the gguf library's reader builds numpy objects for each of the vocabulary's strings and
takes seconds; this takes a tenth of one, which every ingress pays. Quantization formats are the library's.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedray.engine.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

# The library dequantizes 16 rows at a time. Rows of 4096 elements hide numpy's overhead and keep its temporaries in the
# cache: twice as fast as a model's own rows of 576. Calls of 64 such rows bound the memory.
_ROW_ELEMENTS, _CALL_ROWS = 4096, 64


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # row-major, as torch has it: the reverse of the file's order
    ggml_type: int
    offset: int  # bytes from the start of the file


class GgufFile:
    """One GGUF file. Holds no open handle, so it can be kept and pickled.

    Attributes:
        metadata: key → int, float, bool, str, or a list of these.
        tensors: name → where it lies.
    """

    def __init__(self, path: Path):
        """Raises: ConfigError when the file can't be read, UnsupportedModel for a version or layout not known here."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read_header(data)
        except (OSError, ValueError, struct.error) as error:  # ValueError: an empty file, or text that isn't UTF-8
            raise ConfigError(f"{path} can't be read as GGUF, is it complete? ({error})") from error

    def _read_header(self, data: mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file: it starts with {data[:4]!r}")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", data, 4)
        if version not in (2, 3):
            raise UnsupportedModel(
                f"{self.path} has GGUF version {version}; versions 2 and 3 (little-endian) are known"
            )
        at = 24
        for _ in range(num_keys):
            key, at = _string(data, at)
            (kind,) = _U32.unpack_from(data, at)
            self.metadata[key], at = _value(data, at + 4, kind)
        if self.metadata.get("split.count", 1) > 1:
            raise UnsupportedModel(
                f"{self.path} is one part of a split GGUF; merge the parts with llama-gguf-split --merge"
            )
        infos = []
        for _ in range(num_tensors):
            name, at = _string(data, at)
            (num_dims,) = _U32.unpack_from(data, at)
            *dims, ggml_type, offset = struct.unpack_from(f"<{num_dims}QIQ", data, at + 4)
            at += 4 + 8 * num_dims + 12
            infos.append((name, tuple(reversed(dims)), ggml_type, offset))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-at // alignment) * alignment
        self.tensors = {name: GgufTensor(shape, kind, start + offset) for name, shape, kind, offset in infos}
        last = max(self.tensors.values(), key=lambda t: t.offset, default=None)
        if last is not None and last.offset >= len(data):
            raise ConfigError(f"{self.path} is cut short: {len(data)} bytes, its last tensor starts at {last.offset}")

    def num_bytes(self, name: str) -> int:
        """Size of one tensor in the file."""
        tensor = self.tensors[name]
        block, block_bytes = self._format(name)[1:]
        return math.prod(tensor.shape) // block * block_bytes

    def read(self, name: str, index: tuple[slice, ...] = ()) -> NDArray[np.float32]:
        """One tensor, dequantized.

        Args:
            index: what is wanted of each dimension, of which no other block is read; empty: all.

        Raises:
            UnsupportedModel: a quantization that gguf can't undo.
        """
        import numpy as np

        tensor = self.tensors[name]
        kind, block, block_bytes = self._format(name)
        num_blocks = math.prod(tensor.shape) // block
        if tensor.offset + num_blocks * block_bytes > self.path.stat().st_size:
            raise ConfigError(f"{self.path} is cut short: it ends within tensor {name}")
        raw: NDArray[np.uint8] = np.memmap(self.path, np.uint8, "r", tensor.offset, (num_blocks, block_bytes))
        if not index:
            return self._dequantize(name, raw, kind, block).reshape(tensor.shape)
        *rows, columns = index
        first, last = columns.start // block, -(-columns.stop // block)  # blocks lie along the last dimension
        part = raw.reshape(*tensor.shape[:-1], -1, block_bytes)[(*rows, slice(first, last))]
        weight = self._dequantize(name, part.reshape(-1, block_bytes), kind, block)
        weight = weight.reshape(*part.shape[:-2], -1)
        return weight[..., columns.start - first * block : columns.stop - first * block]

    def _dequantize(self, name: str, raw: NDArray[np.uint8], kind: Any, block: int) -> NDArray[np.float32]:
        """Blocks of a tensor [N, bytes] → [N, block]."""
        import numpy as np
        from gguf.quants import dequantize

        num_blocks = len(raw)
        out = np.empty((num_blocks, block), np.float32)
        row_blocks = _ROW_ELEMENTS // block
        whole = num_blocks // row_blocks * row_blocks  # blocks that fill such rows; what is left makes one short row
        bounds = [*range(0, whole, row_blocks * _CALL_ROWS), whole, num_blocks]
        try:
            for first, last in itertools.pairwise(bounds):
                if first < last:
                    width = min(row_blocks, last - first) * raw.shape[1]
                    out[first:last] = dequantize(raw[first:last].reshape(-1, width), kind).reshape(-1, block)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{self.path}: tensor {name} has type {kind.name}, which can't be read") from error
        return out

    def _format(self, name: str) -> tuple[Any, int, int]:
        """The tensor's type, and a block of it: elements, bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        number = self.tensors[name].ggml_type
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModel(f"{self.path}: tensor {name} has the unknown GGML type {number}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return kind, block, block_bytes


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    (size,) = _U64.unpack_from(data, at)
    end = at + 8 + size
    if end > len(data):
        raise ValueError("a string goes past the end of the file")
    return data[at + 8 : end].decode(), end


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """A metadata value, and where the next thing starts."""
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        (inner,) = _U32.unpack_from(data, at)
        (count,) = _U64.unpack_from(data, at + 4)
        at += 12
        if inner in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[inner]}")
            return list(layout.unpack_from(data, at)), at + layout.size
        items = []
        for _ in range(count):
            item, at = _value(data, at, inner)
            items.append(item)
        return items, at
    if kind not in _SCALARS:
        raise ValueError(f"metadata type {kind} is not known")
    layout = struct.Struct("<" + _SCALARS[kind])
    return layout.unpack_from(data, at)[0], at + layout.size
