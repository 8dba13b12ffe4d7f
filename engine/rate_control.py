"""Rate control: from a requested loss to a quantiser step.

A profile's curve says what a step cost the texts of calibration, on average and a deviation more; single texts lose up
to a few times as much or as little. Whoever can run the model can have the loss of each cache measured instead.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import quantiser
from seqkv.engine.errors import CacheError

FINEST, COARSEST = 16 * 64, -16 * 64  # step indices that are ever used


def step_for(curve: NDArray[np.float64], kl: float) -> int:
    """The step index at which a profile's curve has a KL of `kl` nats, along its last slope beyond its ends."""
    index, log_kl = curve[:, 0], curve[:, 1]
    return int(np.clip(round(_line(log_kl[::-1], index[::-1], np.log2(kl))), COARSEST, FINEST))


def kl_at(curve: NDArray[np.float64], index: int) -> float:
    """The KL in nats that a profile's curve has at a step index."""
    return float(2.0 ** _line(curve[:, 0], curve[:, 1], index))


ESTIMATED = 1.65  # times the loss, where importance is estimated: five texts, 1.4 to 1.95, SmolLM2


def without_importance(curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """A profile's curve for caches whose importance is estimated; the profile measured it with what was observed."""
    return curve + np.array([0.0, np.log2(ESTIMATED)])


CLOSE, CLOSE_BITS = 1.25, 1.03  # a measured loss is fine from kl / CLOSE to kl, a rate from bits / CLOSE_BITS to bits
TRIES = 8
_BITS_AN_INDEX = 0.05  # octaves, about, that a rate grows by with the step's index


def search(curve: NDArray[np.float64], kl: float, attempt: Callable[[int], float]) -> int:
    """The coarsest step index tried at which the loss that `attempt(index)` measures, in nats, is at most `kl`.

    Begins where the curve says, and goes on along its slope, between what was too much and what was not once both are
    known, until the loss is close to kl. CacheError if TRIES steps were not enough to get below kl.
    """
    slope = float((curve[-1, 1] - curve[0, 1]) / (curve[-1, 0] - curve[0, 0]))  # octaves an index, negative
    index, last = _search(step_for(curve, kl), slope, kl, CLOSE, attempt)
    if index is None:
        raise CacheError(f"kl {kl} was not reached: {last:.3g} at the finest step tried. Ask for more, or code exactly")
    return index


def search_bits(curve: NDArray[np.float64], bits: float, attempt: Callable[[int], float]) -> int:
    """The finest step index tried at which the bits a value that `attempt(index)` takes are at most `bits`.

    CacheError if TRIES steps were not enough to get there.
    """
    # a rate falls with coarser steps as a loss does with finer ones
    index, last = _search(
        -step_for(curve, 0.01), -_BITS_AN_INDEX, bits, CLOSE_BITS, lambda coarseness: attempt(-coarseness)
    )
    if index is None:
        raise CacheError(f"{bits} bits a value were not reached: {last:.3g} at the coarsest step tried. Ask for more")
    return -index


def _search(
    index: int, slope: float, most: float, close: float, attempt: Callable[[int], float]
) -> tuple[int | None, float]:
    """The least index tried at which what `attempt` gives, falling by `slope` octaves an index, is at most `most`, if
    there is one; and what the last attempt gave."""
    aim = np.log2(most) - np.log2(close) / 2
    low, high = COARSEST, FINEST  # indices between which the one looked for lies; what they gave, where known
    gave: dict[int, float] = {}
    last, reached = np.nan, False
    for _ in range(TRIES):
        last = attempt(index)
        if not (np.isfinite(last) and last >= 0):
            raise CacheError(f"the measured loss is {last}: expected nats, 0 or more")
        gave[index] = float(np.log2(max(last, 1e-12)))
        if len(gave) > 1:  # what the last two say, within reason
            (one, a), (other, b) = list(gave.items())[-2:]
            slope = min(max((b - a) / (other - one), 4 * slope), slope / 4)
        low, high, reached = (low, index, True) if last <= most else (index, high, reached)
        if most / close <= last <= most or high - low <= 1:
            break
        guess = index + (aim - gave[index]) / slope
        if low in gave and high in gave:
            part = (gave[low] - aim) / max(gave[low] - gave[high], 1e-9)
            guess = low + (high - low) * min(max(part, 1 / 8), 7 / 8)  # so that both ends move
        index = int(np.clip(round(guess), low + 1, high - 1))
    return high if reached else None, last


def _line(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> float:
    """Piecewise linear through points of increasing x, prolonged at both ends."""
    i = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
    return float(y[i] + (at - x[i]) * (y[i + 1] - y[i]) / (x[i + 1] - x[i]))


def check(kl: float | None, step: float | None, bits: float | None = None) -> None:
    """ValueError unless what is asked for makes sense."""
    if step is not None and bits is not None:
        raise ValueError("give one of step and bits")
    for name, value in (("kl", kl), ("step", step), ("bits", bits)):
        if value is not None and not (isinstance(value, Real) and np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value!r}")
    if step is not None and not COARSEST < quantiser.step_index(step) < FINEST:
        bounds = f"{quantiser.step_size(FINEST):.3g} to {quantiser.step_size(COARSEST):.3g}"
        raise ValueError(f"step {step} is out of range: {bounds}")
