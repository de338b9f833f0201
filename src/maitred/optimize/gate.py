"""The gate: rules over figures, judged at the bad end of their intervals, so that neither luck nor too few documents
let a worse model through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from maitred.core.errors import ConfigError, did_you_mean
from maitred.optimize.data import Corpus
from maitred.optimize.evaluate import Evaluation, Interval

MIN_DOCUMENTS = 20  # an interval of fewer documents, tasks or timings says nothing of those that were not drawn
FIGURES = {
    "max_kl": "kl",
    "max_perplexity_ratio": "perplexity_ratio",
    "max_flips": "flips",
    "max_task_drop": "task_drop",
    "min_acceptance": "acceptance",
    "min_gain": "gain",
}
"""Figure of each rule. A figure's parts, such as `acceptance, general`, must pass as well."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits by the name of their rule, of FIGURES."""

    limits: Mapping[str, float]
    named: frozenset[str] = frozenset()  # rules that the user's file names: what they are about must have been measured

    def check_enough(self, corpus: Corpus) -> None:
        """Raises ConfigError where no result could pass, before one is made."""
        counts = [("held-out documents", len(corpus.held_out), "--held-out or a longer --data")]
        if "max_task_drop" in self.limits and (corpus.tasks or "max_task_drop" in self.named):
            counts.append(("tasks", len(corpus.tasks), "--tasks"))
        for what, count, where in counts:
            if self.limits and count < MIN_DOCUMENTS:
                raise ConfigError(f"{count} {what} are too few to judge by; give {MIN_DOCUMENTS} or more with {where}")


DEFAULTS: dict[str, dict[str, float]] = {
    "quantize": {"max_kl": 0.2, "max_perplexity_ratio": 1.1, "max_flips": 0.25, "max_task_drop": 0.03},
    "prune": {"max_perplexity_ratio": 1.5, "max_task_drop": 0.05, "min_gain": 1.02},
    "distill": {"max_task_drop": 0.25, "min_gain": 1.1},
    "finetune": {"max_perplexity_ratio": 0.99, "max_task_drop": 0.03},
    "federate": {"max_perplexity_ratio": 0.99, "max_task_drop": 0.03},
    "train-draft": {"min_acceptance": 0.3},
}
"""By tool; `evaluate` has none of its own."""


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that a result broke."""

    rule: str
    limit: float
    figure: Interval | None
    words: str


def read_rules(tool: str, file: str | None) -> Rules:
    """The tool's rules, with those of the user's YAML in their place. Raises ConfigError with the key."""
    default = DEFAULTS.get(tool, {})
    if file is None:
        return Rules(default)
    given = _read(file)
    for name, limit in given.items():
        if name not in FIGURES:
            raise ConfigError(
                f"{file}: no rule {name!r}{did_you_mean(str(name), FIGURES)}; rules are {', '.join(FIGURES)}"
            )
        if limit is not None and (type(limit) not in (int, float) or not isfinite(limit)):
            raise ConfigError(f"{file}: {name} is {limit!r}; write a number, or null for no such rule")
    limits = {name: limit for name, limit in {**default, **given}.items() if limit is not None}
    return Rules(limits, frozenset(given) & limits.keys())


def _read(file: str) -> Mapping[str, Any]:
    try:
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; give a YAML file of rules") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is no valid YAML ({' '.join(str(error).split())})") from None
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"{file}: holds a {type(given).__name__}; write lines such as `max_kl: 0.05`")
    return given or {}


def judge(rules: Rules, evaluation: Evaluation) -> tuple[BrokenRule, ...]:
    """What breaks which rule; nothing if the result may pass."""
    failures = []
    for rule, limit in rules.limits.items():
        figures = {name: each for name, each in evaluation.figures.items() if name.split(",")[0] == FIGURES[rule]}
        if not figures and rule in rules.named:
            words = f"{rule}: {FIGURES[rule]} was not measured; it needs tasks, a parent or a draft"
            failures.append(BrokenRule(rule, limit, None, words))
        for name, figure in figures.items():
            if words := _broken(rule, limit, name, figure):
                failures.append(BrokenRule(rule, limit, figure, f"{rule} {limit:g}: {words}"))
    return tuple(failures)


def gate_fields(rules: Rules, failures: Sequence[BrokenRule]) -> dict[str, Any]:
    """Of the report."""
    return {"rules": dict(rules.limits), "failures": [asdict(failure) for failure in failures]}


def _broken(rule: str, limit: float, name: str, figure: Interval) -> str:
    if figure.drawn < MIN_DOCUMENTS:
        return f"{name} is {figure.value:.4g}, of {figure.drawn}; too few to judge by, {MIN_DOCUMENTS} are needed"
    is_most = rule.startswith("max_")
    bad = figure.high if is_most else figure.low
    if bad <= limit if is_most else bad >= limit:
        return ""
    return f"{name} is {figure.value:.4g}, and may be {bad:.4g} (95%, {figure.drawn} drawn)"
