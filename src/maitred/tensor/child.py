"""The process of an engine with tensor models, `python -m maitred.tensor.child FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from maitred.config import NO_MODEL, EngineConfig
from maitred.engine.child import build_from_config, main
from maitred.engine.loop import Builder, LoadedEngine
from maitred.tensor.host import TensorHost
from maitred.tensor.lone import lone_engine

COMMAND = (sys.executable, "-P", "-m", "maitred.tensor.child")


def with_tensors(build: Builder) -> Builder:
    """A builder of engines that serve a repository too; `build` makes those with a language model."""

    def load(config: EngineConfig, names: tuple[str, ...], tell: Callable[[str], None]) -> LoadedEngine:
        host = TensorHost(config.tensors, config.share)
        index = host.models.index()
        ready = host.models.index(ready_only=True)
        source = config.tensors.model_repository or config.tensors.tfs_model_config
        tell(f"models  {len(ready)} of {len(index)} versions in {source}")
        for entry in index:
            if entry.reason:
                tell(f"        {entry.name}: {entry.reason}")
        loaded = lone_engine(config, tell) if config.model.model == NO_MODEL else build(config, names, tell)
        return replace(loaded, beside=host)

    return load


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], with_tensors(build_from_config)))
