"""Measures batches of tensor models on this machine, as they are served: joined, run, split; and the way to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from maitred.core.errors import CheckpointError, MaitredError
from maitred.core.objectives import percentile
from maitred.core.tensor_request import InferRequest, Tensor
from maitred.sim.tensor_profile import ModelTimes, ShapeTimes
from maitred.tensor.arrays import kept_specs, made_array, tensor_of
from maitred.tensor.batching import Batching, BatchRun, Rows, lengths_of, run_batch
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, DeclaredTensor, inputs_of
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.served_models import LoadedVersion

POINT_S, LEAST_RUNS, MOST_RUNS = 0.15, 7, 400  # of each shape and number of rows
WARM_RUNS = 2
LENGTHS = (16, 64, 256)  # of open dimensions, where the config has neither buckets nor a warm-up
QUANTILES = 100
MOST_AT_ONCE = 16
WORST_SHARING = 1.5  # more is two loops without a pause that fight for the interpreter, which no load is


def measured_times(
    loaded: LoadedVersion, point_s: float = POINT_S, most_at_once: int = 2, lengths: Sequence[int] = ()
) -> ModelTimes:
    """Measure a loaded version, at likely lengths unless `lengths`. Raises CheckpointError where it runs none."""
    batching = Batching(loaded.config)
    shapes: list[ShapeTimes] = []
    spread: list[float] = []
    problem = ""
    for length in lengths or lengths_to_try(loaded.config):
        try:
            shape, times = _shape_times(loaded, batching, length, point_s)
        except MaitredError as error:  # a length that the graph does not take
            problem = str(error)
            continue
        shapes.append(shape)
        spread += times
    if not shapes:
        raise CheckpointError(f"{loaded.name!r} cannot be measured: {problem}")
    at_once = _times_at_once(loaded, batching, shapes[-1], point_s, most_at_once)
    return ModelTimes(
        model=loaded.name, version=loaded.number, shapes=tuple(shapes), beside=at_once, spread=_quantiles(spread)
    )


def lengths_to_try(config: ANY_MESSAGE) -> tuple[int, ...]:
    """Length buckets, or those of the warm-up; 0 where no dimension is open."""
    if not any(WILDCARD in spec.dims for spec in inputs_of(config)):
        return (0,)
    warm = {max(given.dims, default=1) for each in config.model_warmup for given in each.inputs.values()}
    buckets = lengths_of(config).buckets
    return tuple(sorted({max(1, buckets[0] // 2), *buckets} if buckets else warm or LENGTHS))


def rows_to_try(most: int) -> tuple[int, ...]:
    """Powers of two, and the largest batch."""
    return tuple(sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {max(1, most)}))


def _shape_times(
    loaded: LoadedVersion, batching: Batching, length: int, point_s: float
) -> tuple[ShapeTimes, list[float]]:
    """Times by number of rows, and each time over the median of its number."""
    row, medians, spread = _row(loaded.config, batching, length), [], []
    sizes = rows_to_try(loaded.config.max_batch_size)
    for num_rows in sizes:
        times = _timed(loaded, 0, batching, [row] * num_rows, point_s)
        medians.append(median(times))
        spread += [each / medians[-1] for each in times]
    return ShapeTimes(length=length, rows=sizes, seconds=tuple(medians)), spread


def _row(config: ANY_MESSAGE, batching: Batching, length: int) -> Rows:
    request = InferRequest(request_id="", model=config.name, inputs=made_inputs(config, 1, length))
    return batching.rows(request)


def _timed(loaded: LoadedVersion, number: int, batching: Batching, batch: list[Rows], point_s: float) -> list[float]:
    """Raises what the batch raised."""
    instance, times = loaded.instances[number % len(loaded.instances)], list[float]()
    for _ in range(WARM_RUNS):
        _must_run(run_batch(instance, batching, batch))
    until = time.perf_counter() + point_s
    while len(times) < LEAST_RUNS or (time.perf_counter() < until and len(times) < MOST_RUNS):
        times.append(_must_run(run_batch(instance, batching, batch)))
    return times


def _must_run(run: BatchRun) -> float:
    for answer in run.answers:
        if isinstance(answer, MaitredError):
            raise answer
    return run.compute_us / 1e6


def _times_at_once(
    loaded: LoadedVersion, batching: Batching, shape: ShapeTimes, point_s: float, most: int
) -> tuple[tuple[int, float], ...]:
    """The largest batch beside others of its like."""
    batch = [_row(loaded.config, batching, shape.length)] * shape.rows[-1]
    numbers = [number for number in rows_to_try(max(most, len(loaded.instances))) if 1 < number <= MOST_AT_ONCE]
    found = [(1, 1.0)]
    for number in numbers:
        with ThreadPoolExecutor(number) as threads:
            runs = [threads.submit(_timed, loaded, i, batching, batch, point_s) for i in range(number)]
            together = [each for run in runs for each in run.result()]
        times_as_long = sum(together) / len(together) / shape.seconds[-1]
        found.append((number, min(max(1.0, times_as_long), WORST_SHARING * number)))
    return tuple(found)


def _quantiles(values: list[float]) -> tuple[float, ...]:
    """Return the quantiles without the very last: one stall of the machine would be in every hundredth batch."""
    values = sorted(values)
    return tuple(percentile(values, 100 * (i + 0.5) / QUANTILES) for i in range(QUANTILES))


def made_inputs(config: ANY_MESSAGE, num_rows: int, length: int) -> tuple[Tensor, ...]:
    """Numbers from 0 to 1, their open dimensions `length` long; whole ones may be places in a table."""
    specs: Sequence[DeclaredTensor] = [*inputs_of(config), *kept_specs(config)[0].values()]
    rows = (num_rows,) if config.max_batch_size > 0 else ()
    return tuple(
        tensor_of(spec.name, made_array(NUMPY_TYPES[spec.data_type], rows + _dims(spec, length), random=True), kind)
        for spec in specs
        for kind in (spec.data_type,)
    )


def _dims(spec: DeclaredTensor, length: int) -> tuple[int, ...]:
    return tuple(length if dim == WILDCARD else dim for dim in spec.dims)


def set_batching(config: ANY_MESSAGE, num_rows: int, delay_us: int = 0) -> None:
    """Batches of so many rows, or of fewer after the delay; the queue's policies stay as they are."""
    dynamic = config.dynamic_batching
    dynamic.ClearField("preferred_batch_size")
    dynamic.preferred_batch_size.append(num_rows)
    dynamic.max_queue_delay_microseconds = delay_us
    config.parameters.pop("queue_delay", None)
