"""What fidelity.py found, as tables for a page and for the terminal, each figure that is far off with its cause."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

MEASURES, QUANTILES = ("ttft_s", "itl_s", "e2e_s"), ("p50", "p90", "p99")
SHARES = {quantile: int(quantile[1:]) / 100 for quantile in QUANTILES}
FIGURES = tuple(f"{measure}.{quantile}" for measure in MEASURES for quantile in QUANTILES)
KINDS = ("probe", "unseen", "speed")
Cell = dict[str, float]  # by kind, and "live_s"
Comparison = dict[tuple[float, str], dict[str, Cell]]  # of load and policy: by figure


def table(compared: Comparison) -> str:
    """Markdown: of each figure live, and below it the error of `probe`; what is over 10% stands in bold."""
    heads = [name.replace("_s.", " ").upper().replace("P", "p") for name in FIGURES]
    lines = [f"| load | policy | | {' | '.join(heads)} |", "|--:|---|---|" + "--:|" * len(heads)]
    for (load, policy), cells in compared.items():
        live = " | ".join(_milliseconds(cells[name]["live_s"]) for name in FIGURES)
        lines.append(f"| {load} | {policy} | live | {live} |")
        lines.append(f"| | | error | {' | '.join(_error(cells[name]['probe']) for name in FIGURES)} |")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _error(error: float) -> str:
    return f"**{error:+.0%}**" if abs(error) > 0.10 else f"{error:+.1%}"


def summary(compared: Comparison) -> str:
    lines = ["| | within 5% | within 10% | median | mean |", "|---|--:|--:|--:|--:|"]
    rows = {"`probe`": "probe", "`unseen`": "unseen", "`speed`": "speed"}
    rows |= {"live against live": "live", "seed against seed": "seeds"}
    for heading, kind in rows.items():
        errors = [abs(cell[kind]) for cells in compared.values() for cell in cells.values()]
        shares = [sum(error <= bound for error in errors) / len(errors) for bound in (0.05, 0.10)]
        lines.append(
            f"| {heading} | {shares[0]:.0%} | {shares[1]:.0%} | {statistics.median(errors):.1%} "
            f"| {statistics.fmean(errors):.1%} |"
        )
    return "\n".join(lines)


def explained(compared: Comparison) -> str:
    """Each figure that is more than 10% off, with what the script itself saw of its causes."""
    lines = []
    for (load, policy), cells in compared.items():
        for name in FIGURES:
            cell = cells[name]
            if abs(cell["probe"]) > 0.10:
                lines.append(
                    f"- {load} {policy}, {name.replace('_s.', ' ').upper().replace('P', 'p')}: {cell['probe']:+.0%} "
                    f"({cause(cell)}; rounds {cell['live']:.0%}, seeds {cell['seeds']:.0%}, rank {cell['rank']:.0%}, "
                    f"`speed` {cell['speed']:+.0%}, `unseen` {cell['unseen']:+.0%})"
                )
    return "\n".join(lines) if lines else "No figure is more than 10% off."


def cause(cell: Mapping[str, float]) -> str:
    """The first of the causes that docs/simulator.md goes through that is large enough, by what was measured."""
    off = abs(cell["probe"])
    if off <= cell["rank"]:
        return "few in the tail"
    if off <= 2 * max(cell["live"], cell["seeds"]):
        return "chance"
    if abs(cell["speed"]) < off / 2:
        return "the probe"
    return "the terms"


def print_comparison(compared: Comparison) -> None:
    print(f"{'load':>5} {'policy':9}{'':7}" + "".join(f"{name.replace('_s', ''):>11}" for name in FIGURES))
    for (load, policy), cells in compared.items():
        print(f"{load:5} {policy:9}{'live':7}" + "".join(f"{cells[n]['live_s'] * 1e3:>9.1f}ms" for n in FIGURES))
        for kind in KINDS:
            print(f"{'':15}{kind:7}" + "".join(f"{cells[n][kind]:>+11.1%}" for n in FIGURES))
        for kind in ("live", "seeds", "rank"):
            print(f"{'':15}{kind:7}" + "".join(f"{cells[n][kind]:>11.1%}" for n in FIGURES))
