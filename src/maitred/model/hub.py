"""Download of a model from the Hugging Face hub; the only file that imports huggingface_hub.

Its cache, its progress bars and its environment (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE) apply as usual.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from maitred.core.errors import CheckpointError

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
