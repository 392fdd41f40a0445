"""Reading weights: one `model.safetensors`, or the shards that `model.safetensors.index.json` names.

Names are those of the bare text model, whatever wrapper saved the file: `layers.0.input_layernorm.weight`,
`embed_tokens.weight`, `norm.weight`, `lm_head.weight`. Tensors come one at a time and own their memory, so that a
loader may convert and drop each before it reads the next; block-scaled FP8 is dequantised on the way.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model.block_scales import FP8, BlockScales, load_block_scales
from model.errors import ModelError
from model.fields import Fields, read_json

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_FLOATING_NAMES = ", ".join(_FLOATING)
_SCALES = "_scale_inv"
_SAMPLE_BYTES = 4096
_SEEDED_SAMPLES = 4

# A drafter with any of these computes something else than the specification's: it is refused, never half loaded.
_FOREIGN_DRAFT_TENSORS = {
    "lm_head": "a drafter uses the target's head",
    "embed_tokens": "a drafter uses the target's embedding",
    "d2t": "a drafter uses the target's whole vocabulary",
    "t2d": "a drafter uses the target's whole vocabulary",
    "mask_embedding": "a drafter's mask is a row of the target's embedding",
    "mask_hidden": "a drafter's mask is a row of the target's embedding",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, its name there, its shape and safetensors dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class WeightFiles:
    """The tensors of one model directory."""

    def __init__(
        self, directory: Path, files: tuple[Path, ...], stored: dict[str, StoredTensor], blocks: BlockScales | None
    ) -> None:
        self.directory = directory
        self._files = files
        self._stored = stored
        self._blocks = blocks
        self._asked: set[str] = set()

    @classmethod
    def open(cls, directory: Path) -> WeightFiles:
        """Reads the headers of all files. Raises ModelError for a missing, truncated or corrupt one."""
        files = _weight_files(directory)
        blocks = load_block_scales(directory)
        stored: dict[str, StoredTensor] = {}
        for file in files:
            with _opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not iterable
                    part = handle.get_slice(name)
                    public = _public(name)
                    if public in stored:
                        raise ModelError(f"{file}: tensor {name} is there twice, also as {stored[public].name}")
                    stored[public] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
        return cls(directory, files, stored, blocks)

    @classmethod
    def open_draft(cls, directory: Path) -> WeightFiles:
        """`open` for a drafter: also refuses, by name, tensors that no DFlash drafter of the specification has."""
        files = cls.open(directory)
        for public, where in files._stored.items():
            for part in public.split("."):
                if part in _FOREIGN_DRAFT_TENSORS:
                    raise ModelError(
                        f"{where.file}: tensor {where.name} is not supported: {_FOREIGN_DRAFT_TENSORS[part]}"
                    )
        return files

    @property
    def quantised(self) -> BlockScales | None:
        """The blocks of what is stored in FP8; None where nothing is."""
        return self._blocks if any(where.dtype == FP8 for where in self._stored.values()) else None

    def names(self) -> tuple[str, ...]:
        """All names, wrapper prefixes stripped, sorted."""
        return tuple(sorted(self._stored))

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor in its stored dtype (bfloat16, float16 or float32; float32 where it is stored in FP8), on the CPU,
        in memory of its own.

        A name without `.weight` also finds `name.weight` (both spellings of codebooks exist). Raises ModelError if it
        is missing, or has another shape than `shape`.
        """
        where = self.check(name, shape)
        tensor = torch.empty(shape, dtype=_FLOATING.get(where.dtype, torch.float32))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Copies the tensor, of the shape of `destination`, into it, converting as it goes. Raises ModelError.

        The file's pages are mapped only meanwhile, so that nothing is in memory twice.
        """
        where = self.check(name, tuple(destination.shape))
        with _opened(where.file) as handle:
            stored = handle.get_tensor(where.name)
            if where.dtype != FP8:
                destination.copy_(stored)
                return
            blocks, scales = self._scales_of(where)
            # the narrow form travels, and is widened where it is to lie
            stored = stored.to(destination.device)
        with _opened(scales.file) as handle:
            blocks.dequantise(stored, handle.get_tensor(scales.name).to(destination.device), destination)

    def check(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Where the tensor lies, if it is there and as `tensor` wants it; reads no data. Raises ModelError."""
        found = self._find(name)
        if found is None:
            raise ModelError(f"{self.directory}: tensor {name} of shape {list(shape)} is missing")
        where = self._stored[found]
        if where.shape != tuple(shape):
            raise ModelError(
                f"{where.file}: tensor {where.name} has shape {list(where.shape)}, but the config says {list(shape)}"
            )
        if where.dtype == FP8:
            self._scales_of(where)
        elif where.dtype not in _FLOATING:
            raise ModelError(
                f"{where.file}: tensor {where.name} is {where.dtype}, but must be one of {_FLOATING_NAMES}"
            )
        elif f"{found}{_SCALES}" in self._stored:
            raise ModelError(f"{where.file}: tensor {where.name} is {where.dtype}, but has scales: must be {FP8}")
        self._asked.add(found)
        return where

    def _scales_of(self, where: StoredTensor) -> tuple[BlockScales, StoredTensor]:
        """The scales of a block-scaled FP8 tensor, checked. Raises ModelError."""
        if self._blocks is None:
            raise ModelError(f"{where.file}: tensor {where.name} is {FP8}, but config.json has no quantization_config")
        if len(where.shape) < 2:
            raise ModelError(f"{where.file}: tensor {where.name} is {FP8} {list(where.shape)}, must have two axes")
        name = f"{_public(where.name)}{_SCALES}"
        shape = self._blocks.shape(where.shape)
        found = self._stored.get(name)
        if found is None:
            raise ModelError(f"{where.file}: tensor {where.name} is {FP8}, but {where.name}{_SCALES} is missing")
        if found.shape != shape or found.dtype not in _FLOATING:
            block = f"{self._blocks.rows} x {self._blocks.columns}"
            raise ModelError(
                f"{found.file}: tensor {found.name} is {found.dtype} {list(found.shape)}, but must be one of"
                f" {_FLOATING_NAMES} {list(shape)}, a scale for each {block} values"
            )
        self._asked.add(name)
        return self._blocks, found

    def unused(self) -> tuple[str, ...]:
        """Names that nobody has asked for so far, sorted: worth one log line after loading."""
        return tuple(sorted(self._stored.keys() - self._asked))

    def sha256(self, whole: bool = False) -> str:
        """Identifies the weights without reading all of them, unless `whole`; the two digests differ.

        Covers each file's size and header (names, dtypes, shapes, offsets) and seven places of every tensor
        (`sampled`), so that two trainings of one geometry differ, and so does what was edited in many tensors or in a
        large part of one, while 50 GB take a second or two; `whole`: all bytes, at the speed of the disk or of sha256
        (about 1.5 GB a second).
        """
        if whole:
            return self._sha256_of_all()
        digest = hashlib.sha256()
        for file in self._files:
            try:
                with file.open("rb") as stream:
                    (length,) = struct.unpack("<Q", stream.read(8))
                    header = stream.read(length)
                    digest.update(struct.pack("<QQ", file.stat().st_size, length))
                    digest.update(header)
                    for name, entry in sorted(json.loads(header).items()):
                        if name != "__metadata__":
                            begin, end = entry["data_offsets"]
                            for part in sampled(name, end - begin):
                                stream.seek(8 + length + begin + part.start)
                                digest.update(stream.read(part.stop - part.start))
            except (OSError, ValueError, struct.error) as error:
                raise ModelError(f"{file} cannot be read: {error}") from None
        return digest.hexdigest()

    def _sha256_of_all(self) -> str:
        digest = hashlib.sha256(b"all bytes of all files")
        for file in self._files:
            try:
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
            except OSError as error:
                raise ModelError(f"{file} cannot be read: {error}") from None
        return digest.hexdigest()

    def _find(self, name: str) -> str | None:
        return next((n for n in (name, f"{name}.weight") if n in self._stored), None)


def sampled(name: str, size: int) -> list[slice]:
    """Which bytes of a tensor of `size` bytes tell it from another one: its beginning, middle and end, and others that
    its name says, so that no two tensors are sampled alike. All of a small one."""
    last = size - _SAMPLE_BYTES
    if last <= (2 + _SEEDED_SAMPLES) * _SAMPLE_BYTES:
        return [slice(0, size)]
    seeds = [hashlib.sha256(f"{number}/{name}".encode()).digest() for number in range(_SEEDED_SAMPLES)]
    begins = {0, last // 2, last, *(int.from_bytes(seed[:8], "little") % last for seed in seeds)}
    return [slice(begin, begin + _SAMPLE_BYTES) for begin in sorted(begins)]


def _public(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _weight_files(directory: Path) -> tuple[Path, ...]:
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            raise ModelError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json")
        return (single,)
    fields = Fields(str(index), read_json(index))
    weight_map = fields.mapping("weight_map")
    if not weight_map:
        fields.fail("weight_map is missing or empty")
    names = {str(name) for name in weight_map.values()}
    for name in sorted(names):
        # A shard is a plain file beside the index: an index cannot make us read elsewhere.
        if Path(name).name != name:
            fields.fail(f"weight_map names the file {name!r}, but shards must lie beside the index")
        if not (directory / name).is_file():
            fields.fail(f"shard {name} is missing (weight_map names {len(names)} files)")
    return tuple(directory / name for name in sorted(names))


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except SafetensorError as error:
        raise ModelError(f"{file} is truncated or corrupt: {error}") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
