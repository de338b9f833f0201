"""Opening a model: a folder in Hugging Face layout, a GGUF file, a packaged model, or a hub id. No torch.

Weights are safetensors or GGUF only. Pickle files (`.bin`, `.pt`) can run code when loaded, so they are refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from maitred.core.errors import CheckpointError
from maitred.model.families import spec_from_config
from maitred.model.gguf_config import as_there, config_of, generation_config_of, hugging_face_names, shape_there
from maitred.model.gguf_file import GgufFile, gguf_in, gguf_name, is_gguf, open_gguf
from maitred.model.packaged import BUILTIN_FOLDER, BUILTIN_NAME, PACKAGED, default_model
from maitred.model.safetensors_file import RawTensor, SafetensorsFile, TensorFile
from maitred.model.weight_map import weight_map

if TYPE_CHECKING:
    from maitred.model.quantised import QuantisedLinear

ALLOW = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Second copies of the weights in other layouts, in subfolders or (Mistral) beside the first.
IGNORE = ("consolidated*", "original/*", "*/*.safetensors", "onnx/*", "*.bin", "*.pt", "*.pth")


def download(model: str, revision: str | None) -> Path:
    """Fetch safetensors, configs and tokenizer of hub id `model`; returns the snapshot's folder, named by commit.

    Raises CheckpointError: the package is missing, no such model or revision, access needed, or no network.
    """
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  an extra
    except ImportError:
        raise CheckpointError(
            f"there is no folder {model}, and a download from the hub needs huggingface_hub: "
            f"pip install 'maitred[hub]', or name a local folder"
        ) from None
    try:
        folder = snapshot_download(
            repo_id=model, revision=revision, allow_patterns=list(ALLOW), ignore_patterns=list(IGNORE)
        )
    except Exception as error:
        raise CheckpointError(_explain(error, model, revision)) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise CheckpointError(
            f"hub model {model} has no safetensors weights; pickle weights can run code when loaded and are refused: "
            f"convert them where you trust them, and name the new folder"
        )
    return Path(folder)


def _explain(error: Exception, model: str, revision: str | None) -> str:
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError):
        return f"hub model {model} is gated: accept its terms on its page, then log in (hf auth login) or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no folder {model} and no such public model on the hub; check the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"hub model {model} has no revision {revision!r}; name a branch, tag or commit of it"
    if isinstance(error, errors.HFValidationError):
        return f"{model!r} is neither a folder nor a hub id (owner/name)"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        cause = os.strerror(error.errno or 0)
        return f"hub model {model} could not be written: {cause}; make room, or name another disk's folder in HF_HOME"
    reason = str(error).strip().splitlines()
    return (
        f"there is no folder {model}, and the hub model could not be fetched ({type(error).__name__}: "
        f"{reason[0] if reason else 'no reason given'}); check the network, or name a local folder"
    )


__all__ = ["BUILTIN_FOLDER", "BUILTIN_NAME", "Checkpoint", "RawTensor", "open_checkpoint"]

INDEX_NAME = "model.safetensors.index.json"
QUANTISED = ("quantization_config", "compression_config")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_checkpoint(model: str | None, revision: str | None = None) -> Checkpoint:
    """Open `model`: a folder, a GGUF file (of a split one any part), a packaged model's name, a hub id (downloaded, or
    found in the Hugging Face cache), or None for `default_model()`.

    Weights are mapped, not read. Raises CheckpointError with the remedy when there is nothing usable.
    """
    model = default_model() if model is None else model
    path = local_path(model)
    if path is not None:
        if revision is not None:
            kind = "file" if path.is_file() else "folder"
            raise CheckpointError(f"revision {revision!r} is for hub ids; {model} is a {kind}")
        name = gguf_name(path) if path.is_file() else path.resolve().name
        return Checkpoint(path, model if model in PACKAGED else name)

    folder = download(model, revision)
    return Checkpoint(folder, model, revision=folder.name)


def check_model(model: str | None) -> None:
    """Raise CheckpointError, within milliseconds, for a packaged model that is not installed, and for a GGUF file that
    `open_checkpoint` would refuse."""
    path = PACKAGED[model].path() if model in PACKAGED else Path(model).expanduser() if model is not None else None
    if path is not None and (
        is_gguf(path) or (path.is_dir() and not any(path.glob("*.safetensors")) and gguf_in(path))
    ):
        open_checkpoint(model).close()


def folder_beside(checkpoint: Checkpoint, kind: str) -> Path | None:
    """The folder NAME-KIND next to the checkpoint's, where its draft model ("draft") or its head ("mtp") lies; next to
    a GGUF file also NAME-KIND.gguf."""
    own = checkpoint.path.resolve()
    name = name_beside(checkpoint, kind)
    folder, file = own.parent / name, own.parent / f"{name}.gguf"
    if checkpoint.gguf is not None and file.is_file():
        return file
    return folder if (folder / "config.json").is_file() else None


def name_beside(checkpoint: Checkpoint, kind: str) -> str:
    own = checkpoint.path.resolve()  # "." has no name
    return f"{own.name if checkpoint.gguf is None else gguf_name(own)}-{kind}"


class FileStamp(NamedTuple):
    name: str
    size_bytes: int
    modified_ns: int


class Checkpoint:
    """An open model: a folder's safetensors files, or a GGUF file's parts under Hugging Face names. Tensors are views
    of the mapped files; close it when they have been copied."""

    def __init__(self, path: Path, name: str, *, revision: str | None = None) -> None:
        self.path = path
        """The source that opens it again: a folder, or a GGUF file."""
        self.name = name
        """Name in /v1/models: the hub id, or that of the folder or the file."""
        self.revision = revision
        """The hub's commit; None for a folder or a file."""
        self.gguf: GgufFile | None = None
        """The file with the metadata of a GGUF model; `config` and `generation_config` are made of it."""
        self._files: tuple[TensorFile, ...]
        self._own_names: dict[str, str] = {}  # of tensors that the files call otherwise
        self._quantised: dict[str, QuantisedLinear] = {}
        if path.is_file():
            self._open_gguf(path)
            return
        self.config = read_config(path)
        self.generation_config = read_json_if_there(path / "generation_config.json")
        self._files = tuple(SafetensorsFile(file) for file in _weight_files(path))
        self._file_of = _locate_tensors(self._files)
        text = self.config.get("text_config") or {}
        found = [each.get(key) for each in (self.config, text) for key in QUANTISED]
        if quantised := next((each for each in found if each), None):
            self._open_quantised(quantised)

    def _open_quantised(self, quantised: dict[str, Any]) -> None:
        """Show the linears' weights under their names, in place of their parts."""
        from maitred.model.quantised import quantised_linears  # noqa: PLC0415  numpy, for these alone

        self.config = {key: value for key, value in self.config.items() if key not in QUANTISED}
        if text := self.config.get("text_config"):
            self.config["text_config"] = {key: value for key, value in text.items() if key not in QUANTISED}
        try:
            self._quantised, self._file_of = quantised_linears(quantised, self._file_of, self.path / "config.json")
        except BaseException:
            self.close()
            raise

    def _open_gguf(self, path: Path) -> None:
        files = self._files = open_gguf(path)
        try:
            self.gguf, located = files[0], _locate_tensors(files)
            self.config = config_of(files)
            self._own_names = hugging_face_names(files[0].metadata["general.architecture"], located)
            self._file_of = {name: located[own] for name, own in self._own_names.items()}
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def _check_tensors(self) -> None:
        """Raise CheckpointError, naming the GGUF file, where its metadata and its tensors are of different models."""
        try:
            sources = weight_map(spec_from_config(self.config), self._file_of)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {str(error).replace('config.json', 'the metadata')}") from None
        for source in sources:
            name = source.tensor
            if (shape := self.shape_of(name)) != source.shape:
                raise CheckpointError(
                    f"{self.file_of(name)}: tensor {self.own_name(name)} has shape {list(shape)}, the metadata asks "
                    f"for {list(source.shape)}; the file is damaged, download it again"
                )

    @property
    def folder(self) -> Path:
        """The folder that the files lie in."""
        return self.path if self.gguf is None else self.path.parent

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """Recommended sampling, and end tokens. Of a GGUF file, while it is open: its vocabulary is looked through."""
        return generation_config_of(self.gguf) if self.gguf is not None else {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(self._num_bytes_of(name) for name in self._file_of)

    @property
    def has_formats(self) -> bool:
        """Whether matrices have number formats of their own, as a GGUF file's and a quantised folder's."""
        return self.gguf is not None or bool(self._quantised)

    @property
    def expanded(self) -> str:
        """Types in which linears are held that no format of the library has as the file does, and what that costs."""
        found = [each for each in self._quantised.values() if each.expanded_bytes]
        if not found:
            return ""
        types = sorted({_DTYPES[each.dtype] for each in found})
        now, before = (
            sum(sizes) / 1e6 for sizes in zip(*((e.expanded_bytes, e.num_bytes) for e in found), strict=True)
        )
        return f"{len(found)} linears expanded to {', '.join(types)}: {now:,.1f} MB of {before:,.1f}"

    def _num_bytes_of(self, name: str) -> int:
        if name in self._quantised:
            return self._quantised[name].num_bytes
        return self._file_of[name].num_bytes_of(self.own_name(name))

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """Files that hold the weights."""
        return self._files

    def own_name(self, name: str) -> str:
        """A tensor's name in its file."""
        return self._own_names.get(name, name)

    @property
    def dtype(self) -> str:
        """float32, float16, bfloat16: what the config says, else what most bytes are stored in (of GGUF also "Q4_K").

        Raises CheckpointError when the config says what no weights are.
        """
        config = self.config.get("text_config") or self.config
        named = config.get("dtype") or config.get("torch_dtype") or self.config.get("torch_dtype")
        if named and named != "auto":
            name = str(named).removeprefix("torch.")
            if name not in _DTYPES.values():
                raise CheckpointError(
                    f"{self.folder / 'config.json'}: dtype is {named!r}; weights are one of "
                    f"{', '.join(_DTYPES.values())}; copy the file again"
                )
            return name
        counts: Counter[str] = Counter()
        for name in self._file_of:
            counts[self.dtype_of(name)] += self._num_bytes_of(name)
        most = counts.most_common(1)[0][0] if counts else "F32"
        return _DTYPES.get(most, most)

    @cached_property
    def identity(self) -> str:
        """An id of the weights as they lie here: sha256 over the files' names, sizes and times of change, their headers
        and samples of their bytes. Two fine-tunings of one model differ, and so does a file that was written again."""
        digest = hashlib.sha256(repr([tuple(stamp) for stamp in self.stamps]).encode())
        for file in self._files:
            digest.update(file.header_bytes)
            digest.update(file.sample(num_samples=64, sample_bytes=4096))
        return digest.hexdigest()

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        """Name, size and time of each weight file, as they were when it was opened."""
        return tuple(FileStamp(file.path.name, file.size_bytes, file.modified_ns) for file in self._files)

    def tensor_names(self) -> tuple[str, ...]:
        """Return the names in the order of their bytes, file after file."""
        return tuple(self._file_of)

    def tensor(self, name: str) -> RawTensor:
        if name in self._quantised:
            return self._quantised[name].tensor()
        raw = self._file_of[name].tensor(self.own_name(name))
        if self.gguf is None:
            return raw
        return as_there(raw, self.config, self.gguf.metadata["general.architecture"], name)

    def dtype_of(self, name: str) -> str:
        if name in self._quantised:
            return self._quantised[name].dtype
        return self._file_of[name].dtype_of(self.own_name(name))

    def order_of(self, name: str) -> str:
        """A name of the order in which a matrix's columns are stored; empty where they are in their own."""
        return self._quantised[name].order if name in self._quantised else ""

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name in self._quantised:
            return self._quantised[name].shape
        shape = self._file_of[name].shape_of(self.own_name(name))
        return shape if self.gguf is None else shape_there(name, shape)

    def file_of(self, name: str) -> Path:
        return self._file_of[name].path

    def tokenizer_file(self) -> Path:
        """Path of tokenizer.json, or of the GGUF file with the vocabulary; CheckpointError when there is none."""
        if self.gguf is not None:
            if not self.gguf.metadata.num_values("tokenizer.ggml.tokens"):
                raise CheckpointError(f"{self.gguf.path} holds no tokenizer; download a file that was made with one")
            return self.gguf.path
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} has no tokenizer.json; make one with transformers: "
                f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return path

    def check_unchanged(self) -> None:
        """Raise CheckpointError where a file changed meanwhile; call it after all weights are read."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        self._quantised.clear()
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def local_path(model: str) -> Path | None:
    """Return the folder or the GGUF file that `model` names, None for a hub id. Raises CheckpointError for another
    file, for a text that is surely a path and leads nowhere, and for a packaged model without its package.
    """
    if model in PACKAGED:  # also where a folder is called so: that is ./NAME
        return PACKAGED[model].path()
    path = Path(model).expanduser()
    if path.is_dir():
        has_weights = (path / INDEX_NAME).is_file() or any(path.glob("*.safetensors"))
        return path if has_weights else gguf_in(path) or path
    if is_gguf(path):
        return path
    if path.is_file():
        raise CheckpointError(
            f"{model} is a file, and no GGUF model; name one that is, or the folder that holds config.json and the "
            f"safetensors files"
        )
    explicit = model.startswith(("/", ".", "~", "\\")) or model.endswith(("/", "\\")) or "\\" in model
    inside = "/" in model and Path(model.split("/", maxsplit=1)[0]).is_dir()
    if explicit or inside or model.count("/") > 1 or model.endswith(".gguf"):
        kind = "file" if model.endswith(".gguf") else "folder"
        raise CheckpointError(f"there is no {kind} {model}; check the path (a hub id has the form owner/name)")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model!r} is neither a GGUF file nor a folder nor a hub id (owner/name)")
    return None


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{folder} is an adapter; serve its model with --lora NAME={folder}, or merge it")
        if (folder / "current").is_symlink():
            raise CheckpointError(f"{folder} is a shelf of versions; give {folder}/current, or {folder}/1 and so on")
        raise CheckpointError(f"{folder} has no config.json, so it is no model in Hugging Face layout; check the path")
    return _read_json(path)


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in `path`; empty where there is no such file. Raises CheckpointError."""
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; it holds a {type(value).__name__}")
    return value


def _weight_files(folder: Path) -> list[Path]:
    """The index's shards, else model.safetensors, else all safetensors files (but Mistral's second copy)."""
    if (folder / INDEX_NAME).is_file():
        shards = _read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{folder / INDEX_NAME} has no weight_map; download it again")
        paths = [folder / name for name in sorted(set(shards.values()))]
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in shards.values()):
            raise CheckpointError(f"{folder / INDEX_NAME} names files outside the folder; it is not to be trusted")
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(paths)} weight files ({', '.join(missing[:4])}); "
                f"download them again"
            )
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter")))
    return paths or _refuse_without_weights(folder)


def _refuse_without_weights(folder: Path) -> list[Path]:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise CheckpointError(
            f"{folder} has its weights only as pickle ({pickled[0]}), which can run code when loaded and is refused; "
            f"convert it where you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise CheckpointError(f"{folder} has no safetensors weights; download them, or check the path")


def _locate_tensors(files: Sequence[TensorFile]) -> dict[str, TensorFile]:
    located: dict[str, TensorFile] = {}
    for file in files:
        for name in file.tensor_names():
            if name in located:
                raise CheckpointError(
                    f"tensor {name} is in {located[name].path.name} and in {file.path.name}; remove the file that does "
                    f"not belong to the model"
                )
            located[name] = file
    return located
