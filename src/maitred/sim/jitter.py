"""Jitter: draws by which modelled times spread as measured ones do."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from maitred.core.cost_model import CostModel


class Jitter:
    """Draws by which modelled times become as unsteady as measured ones; a pure function of the seed and the calls."""

    def __init__(self, model: CostModel, rng: Random) -> None:
        self._bands = [(band.below_s, band.quantiles) for band in model.jitter]
        self._gaps = model.gap_jitter
        self._draw = rng.random

    def step_s(self, modelled_s: float) -> float:
        for below_s, quantiles in self._bands:
            if modelled_s < below_s:
                return modelled_s * drawn(quantiles, self._draw())
        return modelled_s

    def gap_s(self, modelled_s: float) -> float:
        return modelled_s * drawn(self._gaps, self._draw()) if self._gaps else modelled_s


def drawn(quantiles: Sequence[float], share: float) -> float:
    """The quantile at `share`, 0 to 1, between two of them linearly."""
    at = share * (len(quantiles) - 1)
    low = int(at)
    return quantiles[low] + (quantiles[min(low + 1, len(quantiles) - 1)] - quantiles[low]) * (at - low)
