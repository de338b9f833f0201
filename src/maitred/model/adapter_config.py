"""PEFT's adapter_config.json: which linears an adapter is for, of what ranks and scales.

Names are matched as PEFT 0.21 does (`get_pattern_key`, `check_target_module_exists`). Regular expressions come from the
folder's author, so those that could take for ever are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maitred.core.errors import CheckpointError

# What says nothing about the product of a linear, or is read below. All else must be absent, null, false or empty.
_KNOWN = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_rslora", "velora_config",
})  # fmt: skip
# Those that leave the model's own weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) do not.
_INITIAL = ("gaussian", "eva", "orthogonal", "mica")
_LONGEST_PATTERN, _MOST_PATTERNS, _MOST_REPEATS = 512, 4096, 3


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of the file that are used."""

    rank_default: int
    alpha_default: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    target_modules: tuple[str, ...] | None  # None: a regular expression, which the tensors stand for
    exclude_modules: tuple[str, ...] | None
    layers: frozenset[int] | None  # None: all

    def rank(self, module: str) -> int:
        return int(_first_match(self.rank_pattern, module, self.rank_default))

    def scale(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.alpha_default), self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.use_rslora else rank))

    def unknown_targets(self, modules: Sequence[str]) -> list[str]:
        """Targets that are none of the modules."""
        return [t for t in self.target_modules or () if not any(_is_named(module, (t,)) for module in modules)]

    def targets(self, module: str) -> bool | None:
        """Return whether the adapter is for the module; None when only its tensors tell."""
        if self.target_modules is None or self.exclude_modules is None:
            return None
        layer = re.match(r".*?\.[^.]*\.(\d+)\.", module)
        in_layer = self.layers is None or (layer is not None and int(layer[1]) in self.layers)
        return in_layer and _is_named(module, self.target_modules) and not _is_named(module, self.exclude_modules)


def parse_config(path: Path, content: bytes, max_rank: int) -> AdapterConfig:
    """Parse the file. Raises CheckpointError naming a key that cannot be served, or has a value of the wrong type."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object; it holds a {type(config).__name__}")
    keys = _Keys(path, config)
    keys.refuse_strange()
    parsed = AdapterConfig(
        rank_default=keys.number("r", int),
        alpha_default=keys.number("lora_alpha", (int, float)),
        use_rslora=keys.flag("use_rslora"),
        rank_pattern=keys.pattern("rank_pattern", int),
        alpha_pattern=keys.pattern("alpha_pattern", (int, float)),
        target_modules=keys.names("target_modules"),
        exclude_modules=keys.names("exclude_modules"),
        layers=keys.layers(),
    )
    for rank in (parsed.rank_default, *(rank for _, rank in parsed.rank_pattern)):
        if not 1 <= rank <= max_rank:
            raise CheckpointError(f"{path}: rank {rank}; 1 to {max_rank} are served (--max-lora-rank)")
    return parsed


class _Keys:
    """The file's keys, each taken with its type checked."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config

    def refuse_strange(self) -> None:
        if self._config.get("peft_type") != "LORA":
            raise self._fault("peft_type", "only LORA is served")
        if not self._config.get("target_modules"):
            raise self._fault("target_modules", "it must name modules")
        if self._config.get("bias", "none") != "none":
            raise self._fault("bias", "adapters that change biases are not served; only none is")
        initial = self._config.get("init_lora_weights")
        if not (initial is None or isinstance(initial, bool) or initial in _INITIAL):
            raise self._fault(
                "init_lora_weights",
                "it changes the model's own weights; save the adapter with path_initial_model_for_weight_conversion",
            )
        for key, value in self._config.items():
            if key not in _KNOWN and value:
                raise self._fault(key, "adapters with that are not served")

    def number(self, key: str, kind: type | tuple[type, ...]) -> Any:
        return self._checked_number(key, self._config.get(key, 8), kind)  # PEFT's default of both

    def flag(self, key: str) -> bool:
        value = self._config.get(key) or False
        if not isinstance(value, bool):
            raise self._fault(key, "it must be true or false")
        return value

    def pattern(self, key: str, kind: type | tuple[type, ...]) -> tuple[tuple[re.Pattern[str], Any], ...]:
        patterns = self._config.get(key) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise self._fault(key, f"it must be an object of up to {_MOST_PATTERNS:,} patterns")
        return tuple(
            (self._compiled(key, name), self._checked_number(key, value, kind)) for name, value in patterns.items()
        )

    def names(self, key: str) -> tuple[str, ...] | None:
        value = self._config.get(key) or ()
        if isinstance(value, str):
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise self._fault(key, "it must be a list of names")
        return tuple(value)

    def layers(self) -> frozenset[int] | None:
        value = self._config.get("layers_to_transform")
        layers = [value] if isinstance(value, int) else value
        if layers is None or layers == []:
            return None
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self._fault("layers_to_transform", "it must be a number or a list of numbers")
        if (self._config.get("layers_pattern") or "layers") not in ("layers", ["layers"]):
            raise self._fault("layers_pattern", "only layers is served")
        return frozenset(layers)

    def _checked_number(self, key: str, value: Any, kind: type | tuple[type, ...]) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind) or not -1e30 < value < 1e30:  # type: ignore[operator]
            raise self._fault(key, "it must be a number")
        return value

    def _compiled(self, key: str, pattern: str) -> re.Pattern[str]:
        repeats = len(re.findall(r"[*+{]", pattern))
        if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)[*+{]", pattern):
            raise self._fault(key, f"the pattern {pattern[:80]!r} could take too long to match")
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError):
            raise self._fault(key, f"{pattern[:80]!r} is no regular expression") from None

    def _fault(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key} is {json.dumps(self._config.get(key))[:80]}; {why}")


def _first_match(patterns: Sequence[tuple[re.Pattern[str], Any]], module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _is_named(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)
