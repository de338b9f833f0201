"""What `cpu_peers.py` measured: a line for each contender, and a table in Markdown for each model."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from peers.cells import MOVED

Rounds = list[dict[str, Any]]
Cell = Mapping[str, Mapping[str, Any]]  # by contender: {"weights", "ours", "rounds", maybe "failed"}
LOWER_IS_BETTER = ("start", "memory")
BY_WEIGHTS = ("decode-1",)  # cells in which contenders of the same kind of weights are compared
HTTP_FIGURES = ("whole", "offline", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "client_cpu")


def middle(rounds: Rounds, key: str = "value") -> float | None:
    """The median over the rounds that have the figure."""
    values = [figures[key] for figures in rounds if key in figures]
    return statistics.median(values) if values else None


def moved(rounds: Rounds) -> bool:
    """Whether memory changed its state within any of the rounds."""
    return any(max(r["streams"]) > (1 + MOVED) * min(r["streams"]) for r in rounds)


def described(cell: str, name: str, outcome: Mapping[str, Any]) -> str:
    """A contender's line while the run goes on."""
    rounds: Rounds = outcome["rounds"]
    if not rounds:
        return f"  {name:18} failed: {outcome.get('failed', 'not yet run')}"
    text = f"  {name:18} {middle(rounds):10,.2f}{'*' if moved(rounds) else ' '}"
    if (share := middle(rounds, "share")) is not None:
        text += f"  {share:.0%} of the floor"
    if (rest := middle(rounds, "rest_mb")) is not None:
        text += f"  = weights {middle(rounds, 'weights_mb'):,.0f} + KV {middle(rounds, 'kv_mb'):,.0f} + {rest:,.0f} MB"
    if (first := middle(rounds, "first_launch")) is not None:
        text += f"  after a first launch of {first:.2f}"
    if (used := middle(rounds, "used_mb")) is not None:
        text += f"  {used:,.0f} MB with its KV in use"
    streams = [stream for r in rounds for stream in r["streams"]]
    text += f"  (memory {min(streams):.0f}-{max(streams):.0f} GB/s)"
    if cell.startswith("http"):
        text += "".join(f"  {key} {value:.3f}" for key in HTTP_FIGURES if (value := middle(rounds, key)))
    return text


def ratios(name: str, cell: Cell) -> Iterable[str]:
    """The best of ours against the best peer, `ours / theirs` however the cell counts: above 1 is better."""
    kinds = sorted({outcome["weights"] for outcome in cell.values()}) if name in BY_WEIGHTS else [None]
    for kind in kinds:
        values = {
            contender: (value, bool(outcome["ours"]))
            for contender, outcome in cell.items()
            if kind in (None, outcome["weights"]) and (value := middle(outcome["rounds"])) is not None
        }
        ours = {contender: value for contender, (value, is_ours) in values.items() if is_ours}
        peers = {contender: value for contender, (value, is_ours) in values.items() if not is_ours}
        if ours and peers:
            pick = min if name in LOWER_IS_BETTER else max
            our_best, peer_best = pick(ours, key=ours.__getitem__), pick(peers, key=peers.__getitem__)
            ratio = ours[our_best] / peers[peer_best]
            yield f"{1 / ratio if name in LOWER_IS_BETTER else ratio:.2f}x {our_best} / {peer_best}"


def table(model: str, cells: Mapping[str, Cell]) -> str:
    """Cells down, contenders across; `*` where memory changed its state within a round."""
    names = list(dict.fromkeys(contender for cell in cells.values() for contender in cell))
    lines = [f"| {model} | " + " | ".join(names) + " | ratio |", "|---|" + "--:|" * len(names) + "---|"]
    for name, cell in cells.items():
        shown = [_shown(name, cell[contender]) if contender in cell else "-" for contender in names]
        lines.append(f"| {name} | " + " | ".join(shown) + " | " + "; ".join(ratios(name, cell)) + " |")
    return "\n".join(lines)


def _shown(name: str, outcome: Mapping[str, Any]) -> str:
    rounds: Rounds = outcome["rounds"]
    value = middle(rounds)
    if value is None:
        return "failed" if "failed" in outcome else "-"
    digits = 2 if name == "start" else 0 if value >= 100 else 1
    text = f"{value:,.{digits}f}" + ("*" if name not in LOWER_IS_BETTER and moved(rounds) else "")
    if (share := middle(rounds, "share")) is not None:
        text += f" ({share:.0%})"
    if (rest := middle(rounds, "rest_mb")) is not None:
        text += f" (weights + KV + {rest:,.0f})"
    return text
