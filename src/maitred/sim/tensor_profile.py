"""Profile of tensor models: how long batches take, by model, version, shape and rows, as `maitred profile` measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from maitred.core.errors import ConfigError

FORMAT = 1


class ShapeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one length of the inputs' open dimensions; medians of joined, run and split batches."""

    length: int  # 0 where no dimension is open
    rows: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # as `rows`


class ModelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one version."""

    model: str
    version: int
    shapes: tuple[ShapeTimes, ...]  # by length
    beside: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """(batches at once, how many times as long each takes), ascending."""
    spread: tuple[float, ...] = (1.0,)
    """Quantiles of single times over their median, evenly spaced from the least to the largest."""

    def seconds(self, num_rows: int, length: int = 0) -> float:
        """Return the seconds of a batch that has the machine for itself; linear between measured ones."""
        lengths = [shape.length for shape in self.shapes]
        by_length = [_between(shape.rows, shape.seconds, num_rows) for shape in self.shapes]
        return _between(lengths, by_length, length)

    def times_as_long(self, num_at_once: int) -> float:
        """Beyond what was measured they share what there is."""
        numbers, times = [number for number, _ in self.beside], [each for _, each in self.beside]
        if num_at_once > numbers[-1]:
            return times[-1] * num_at_once / numbers[-1]
        return _between(numbers, times, num_at_once)


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time that the thread of the lanes spends, one thing after another (s)."""

    request_s: float = 0.0  # of each request, until it is in its lane and when its answer is told
    batch_s: float = 0.0  # of each batch, until it begins and when it has ended
    wake_s: float = 0.0  # that a batch takes longer, until threads have woken up; the keeper does something else then
    timer_s: float = 0.0  # to which its waits are rounded up; 1 ms where the kernel's epoll is asked in ms


class TensorProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile that `maitred profile --model-repository` writes, and `maitred simulate --tensor-profile` reads."""

    tensor_profile: int = FORMAT  # which form of this file
    machine: str
    host: HostTimes
    models: tuple[ModelTimes, ...]

    def times_of(self, model: str, version: int) -> ModelTimes:
        """Raises ConfigError."""
        for times in self.models:
            if (times.model, times.version) == (model, version):
                return times
        known = ", ".join(f"{times.model} {times.version}" for times in self.models)
        raise ConfigError(f"the profile has no times of {model} version {version}, only of {known}; profile it too")


def encode_tensor_profile(profile: TensorProfile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_tensor_profile(data: bytes, name: str) -> TensorProfile:
    """Raises ConfigError."""
    try:
        profile = msgspec.json.decode(data, type=TensorProfile)
        faults = [each.model for each in profile.models if not _is_whole(each)]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name}: {error}; make one with maitred profile --model-repository DIR -o FILE") from None
    if faults:
        raise ConfigError(f"{name}: the times of {faults[0]!r} lack a row or a shape; profile again")
    if profile.tensor_profile != FORMAT:
        raise ConfigError(f"{name}: form {profile.tensor_profile}, this maitred reads {FORMAT}; profile again")
    return profile


def _is_whole(times: ModelTimes) -> bool:
    shapes = times.shapes
    return bool(shapes and times.beside and times.spread) and all(
        shape.rows and len(shape.rows) == len(shape.seconds) for shape in shapes
    )


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear between two places; below the first its value, above the last in proportion to the place."""
    i = bisect_left(places, at)
    if i == 0 or (len(places) == 1 and not places[0]):
        return values[0]
    if i == len(places):
        return values[-1] * at / places[-1]
    low, high = places[i - 1], places[i]
    return values[i - 1] + (values[i] - values[i - 1]) * (at - low) / (high - low)
