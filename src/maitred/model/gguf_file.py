"""One GGUF file, mapped into memory: a header with metadata and the tensors' places, then the tensors' bytes.

Format: ggml/docs/gguf.md, versions 2 and 3, little-endian. The whole header is checked when the file is opened: each
length and count against the bytes that are left, before anything is read or allocated by it. Numpy is not needed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from maitred.core.errors import CheckpointError
from maitred.model.safetensors_file import Entry, Header, TensorFile

MAGIC = b"GGUF"
GGML_TYPES: dict[int, tuple[str, int, int]] = {  # number -> name, values of a block, bytes of a block
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
HELD_AS = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "Q4_0": "q4_0", "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q8_0": "q8_0",
    "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k",
    "Q3_K": "q6_k", "IQ4_NL": "q8_0", "MXFP4": "q8_0", "Q2_K": "q8_0", "IQ4_XS": "q8_0",
    "Q4_Z": "q4_z", "Q8_Z": "q8_z", "Q8_W": "q8_w", "F8_128": "fp8",
}  # fmt: skip
"""Type of a tensor that is computed here -> the number format in which the native executor holds it. The last four are
of quantised folders (`quantised`)."""
WIDENED = {
    "Q3_K": "the same values in", "IQ4_NL": "the same values in", "MXFP4": "the same values in",
    "Q2_K": "rounded to", "IQ4_XS": "rounded to",
}  # fmt: skip
"""Types held in more bits than the file's, and what becomes of the values: no format has the last two's scales."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_HEADER_BYTES = 100_000_000  # as a safetensors file's
_MAX_ENTRIES = 2**16  # keys, or tensors
_MAX_NAME = 255  # llama.cpp's have at most 63
_MAX_STRINGS = 2**21  # in all arrays together: eight times the largest vocabulary
_AGAIN = "the file is damaged, download it again"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class _Value(NamedTuple):
    """Place of a metadata value; `length` is None for one that is no array."""

    kind: int  # of the value, or of an array's values
    begin: int
    end: int
    length: int | None


class Metadata(Mapping[str, Any]):
    """A file's keys and values. Arrays become lists when they are asked for, new ones each time: a vocabulary of
    262,144 tokens takes 20 MB that only a tokenizer needs."""

    def __init__(self, path: Path, data: Any, places: dict[str, _Value]) -> None:
        self._path, self._data, self._places = path, data, places

    def __getitem__(self, key: str) -> Any:
        kind, begin, _, count = self._places[key]
        if kind != _STRING:
            values = struct.unpack_from(f"<{1 if count is None else count}{_NUMBERS[kind]}", self._data, begin)
            return values[0] if count is None else list(values)
        try:
            texts = [self._data[a:b].decode() for a, b in self._strings(begin, 1 if count is None else count)]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: key {key} holds text that is no UTF-8 ({error}); {_AGAIN}") from None
        return texts[0] if count is None else texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def num_values(self, key: str) -> int:
        """Values of an array that is there, without reading them; 1 of a scalar, 0 where the key is missing."""
        place = self._places.get(key)
        return 0 if place is None else 1 if place.length is None else place.length

    def raw(self, key: str) -> bytes:
        """The value as the file holds it: kind, for an array the kind and number of its values, and their bytes."""
        kind, begin, end, length = self._places[key]
        head = struct.pack("<I", kind) if length is None else struct.pack("<IIQ", _ARRAY, kind, length)
        return head + bytes(self._data[begin:end])

    def indexes(self, key: str, texts: Iterable[str]) -> list[int]:
        """Return the places of these texts in an array of texts, without decoding the others."""
        place = self._places.get(key)
        if place is None or place.kind != _STRING or place.length is None:
            return []
        encoded = (text.encode() for text in texts)
        found = (self._data.find(struct.pack("<Q", len(each)) + each, place.begin, place.end) for each in encoded)
        begins = {begin + 8 for begin in found if begin >= 0}
        places = self._strings(place.begin, place.length) if begins else ()
        return list(islice((i for i, (begin, _) in enumerate(places) if begin in begins), len(begins)))

    def _strings(self, place: int, count: int) -> Iterator[tuple[int, int]]:
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = place + 8
            place = begin + length_at(self._data, place)[0]
            yield begin, place


class GgufFile(TensorFile):
    """Raises CheckpointError naming file, key or tensor and remedy when it is no whole GGUF file."""

    metadata: Metadata

    def _read_header(self) -> Header:
        reader = _Reader(self.path, self._mapping, self.size_bytes)
        num_tensors, num_keys = reader.counts()
        self.metadata = Metadata(self.path, self._mapping, reader.places(num_keys))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            reader.refuse(f"key general.alignment is {str(alignment)[:20]!r}, no power of 2")
        entries = reader.entries(num_tensors, alignment)
        begin = min((entry.begin for entry in entries.values()), default=self.size_bytes)
        return Header(bytes(self._view[: reader.place]), begin, entries)


class _Reader:
    """Reads forward through a header, and never past its end."""

    def __init__(self, path: Path, data: Any, size_bytes: int) -> None:
        self.path, self.place, self._data, self._size = path, 0, data, size_bytes
        self._end, self._num_strings = min(size_bytes, _MAX_HEADER_BYTES), 0

    def refuse(self, what: str, remedy: str = _AGAIN) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}; {remedy}")

    def counts(self) -> tuple[int, int]:
        """Counts of tensors and of keys, once magic and version are right."""
        if self._size < 24 or (magic := self._data[:4]) != MAGIC:
            found = f"{self._size} bytes" if self._size < 24 else f"its first bytes are {magic!r}"
            self.refuse(f"no GGUF file, or cut short ({found})", "download it again, or name a model's file or folder")
        self.place = 4
        version = self._number("I", "the version")
        if version & 0xFFFF == 0:
            self.refuse("the file is big-endian", "convert it: python -m gguf.scripts.gguf_convert_endian FILE little")
        if version not in (2, 3):
            self.refuse(
                f"GGUF version {version} is not read, versions 2 and 3 are", "convert the model with today's llama.cpp"
            )
        num_tensors, num_keys = (self._number("Q", f"the number of {name}") for name in ("tensors", "keys"))
        for name, count in (("tensors", num_tensors), ("keys", num_keys)):
            if count > min(_MAX_ENTRIES, (self._end - self.place) // 13):
                self.refuse(
                    f"the header claims {count:,} {name}, and the file has {self._size:,} bytes: cut short or damaged",
                    "download it again",
                )
        return num_tensors, num_keys

    def places(self, count: int) -> dict[str, _Value]:
        """Place of each metadata value, its kind and length checked."""
        places: dict[str, _Value] = {}
        for number in range(count):
            key = self._name(f"key {number}")
            if key in places:
                self.refuse(f"key {key} stands there twice")
            kind, length = self._number("I", f"key {key}"), None
            if kind == _ARRAY:
                kind, length = self._number("I", f"key {key}"), self._number("Q", f"key {key}")
            begin = self.place
            self._skip(kind, 1 if length is None else length, f"key {key}")
            places[key] = _Value(kind, begin, self.place, length)
        return places

    def entries(self, count: int, alignment: int) -> dict[str, Entry]:
        """Place of each tensor, in the order of their bytes."""
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for number in range(count):
            name = self._name(f"the name of tensor {number}")
            if name in found:
                self.refuse(f"tensor {name} stands there twice")
            what = f"tensor {name}"
            if not 1 <= (num_dims := self._number("I", what)) <= 4:
                self.refuse(f"{what} has {num_dims:,} dimensions, 1 to 4 are read")
            shape = tuple(self._number("Q", what) for _ in range(num_dims))[::-1]
            kind, offset = self._number("I", what), self._number("Q", what)
            if kind not in GGML_TYPES:
                self.refuse(f"{what} is of GGML's type {kind}, which is not known", "choose another quantisation")
            dtype, values, num_bytes = GGML_TYPES[kind]
            if 0 in shape or shape[-1] % values:
                self.refuse(f"{what} ({dtype}) has shape {list(shape)}, its rows are no multiple of {values} values")
            if offset % alignment:
                self.refuse(f"{what} lies at offset {offset:,}, no multiple of {alignment}")
            found[name] = dtype, shape, offset, math.prod(shape) // values * num_bytes
        begin = -(-self.place // alignment) * alignment
        entries = {n: Entry(dtype, shape, begin + at, begin + at + num) for n, (dtype, shape, at, num) in found.items()}
        entries = dict(sorted(entries.items(), key=lambda item: item[1].begin))
        self._check_places(entries)
        return entries

    def _check_places(self, entries: dict[str, Entry]) -> None:
        before, end = "", 0
        for name, entry in entries.items():
            if entry.begin < end:
                self.refuse(f"tensors {before} and {name} overlap")
            before, end = name, entry.end
        if end > self._size:
            self.refuse(
                f"the file was cut short: {self._size:,} bytes of {end:,}, tensor {before} ends there",
                "download it again",
            )

    def _take(self, num_bytes: int, what: str) -> int:
        """Place of the next bytes, which are there."""
        begin, self.place = self.place, self.place + num_bytes
        if self.place > self._end:
            self._past_end(what, num_bytes, self._end - begin)
        return begin

    def _past_end(self, what: str, needed: int, left: int) -> NoReturn:
        if self._end < self._size:
            self.refuse(f"the header ends after {self._end:,} bytes at most, and {what} lies behind")
        self.refuse(f"{what} takes {needed:,} bytes, and {left:,} are left: cut short or damaged", "download it again")

    def _number(self, form: str, what: str) -> int:
        return int(struct.unpack_from(f"<{form}", self._data, self._take(struct.calcsize(f"<{form}"), what))[0])

    def _name(self, what: str) -> str:
        begin = self._take(self._number("Q", what), what)
        try:
            name = str(self._data[begin : self.place].decode())
        except UnicodeDecodeError:
            name = ""
        if not name.isprintable() or not 0 < len(name) <= _MAX_NAME:
            self.refuse(f"{what} is no printable UTF-8 of at most {_MAX_NAME} characters")
        return name

    def _skip(self, kind: int, count: int, what: str) -> None:
        if kind in _NUMBERS:
            self._take(count * struct.calcsize(f"<{_NUMBERS[kind]}"), what)
        elif kind == _STRING:
            self._skip_strings(count, what)
        else:
            self.refuse(f"{what} is of kind {kind}, and arrays of arrays are not read" if kind == _ARRAY
                        else f"{what} is of kind {kind}, which the format has not")  # fmt: skip

    def _skip_strings(self, count: int, what: str) -> None:
        self._num_strings += count
        if count > (self._end - self.place) // 8 or self._num_strings > _MAX_STRINGS:
            left = self._end - self.place
            self.refuse(
                f"{what} claims {count:,} texts, and {left:,} bytes are left: cut short or damaged", "download it again"
            )
        length_at, data, place = struct.Struct("<Q").unpack_from, self._data, self.place
        try:
            for _ in range(count):
                place += 8 + length_at(data, place)[0]
        except (struct.error, OverflowError):
            place = max(place, self._end + 1)
        self._take(place - self.place, what)


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF, by name or first bytes: Ollama's files have no suffix."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def gguf_name(path: Path) -> str:
    """The file's name without suffix and number of the part."""
    part = _SPLIT.fullmatch(path.name)
    return part[1] if part else path.name.removesuffix(".gguf")


def gguf_in(folder: Path) -> Path | None:
    """The one GGUF model in a folder, its first part where it is split; None where there is none.

    Raises CheckpointError that names them where there are several. Projectors of pictures (mmproj) do not count.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        if "mmproj" not in path.name.lower():
            found.setdefault(gguf_name(path), path)
    if len(found) > 1:
        names = [path.name for path in found.values()]
        more = ", ..." if len(names) > 4 else ""
        raise CheckpointError(f"{folder} holds {len(names)} GGUF models ({', '.join(names[:4])}{more}); name the file")
    return next(iter(found.values()), None)


def open_gguf(path: Path) -> tuple[GgufFile, ...]:
    """The file, or all parts of a split one; the first has the metadata. Raises CheckpointError as GgufFile does."""
    part = _SPLIT.fullmatch(path.name)
    count = int(part[3]) if part else 1
    paths = (
        [path] if part is None else [path.with_name(f"{part[1]}-{i + 1:05d}-of-{part[3]}.gguf") for i in range(count)]
    )
    missing = [each.name for each in paths if not each.is_file()]
    if missing or not paths:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts are missing ({', '.join(missing[:4])}); download them beside it"
        )
    with ExitStack() as opened:
        files = []
        for number, each in enumerate(paths):
            files.append(file := GgufFile(each))
            opened.callback(file.close)
            is_part = (file.metadata.get("split.no", 0), file.metadata.get("split.count", 0) or 1)
            if is_part != (number, count):
                raise CheckpointError(
                    f"{each}: by its name part {number + 1} of {count}, by its metadata part {is_part[0]} (from 0) of "
                    f"{is_part[1]}; give all parts the names that they were downloaded with"
                )
        opened.pop_all()
    return tuple(files)
