"""Rate control: from a requested loss to a quantiser step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import quantiser

FINEST, COARSEST = 16 * 64, -16 * 64  # step indices that are ever used


def step_for(curve: NDArray[np.float64], kl: float) -> int:
    """The step index at which a profile's curve has a KL of `kl` nats, along its last slope beyond its ends."""
    index, log_kl = curve[:, 0], curve[:, 1]
    return int(np.clip(round(_line(log_kl[::-1], index[::-1], np.log2(kl))), COARSEST, FINEST))


def kl_at(curve: NDArray[np.float64], index: int) -> float:
    """The KL in nats that a profile's curve has at a step index."""
    return float(2.0 ** _line(curve[:, 0], curve[:, 1], index))


def _line(x: NDArray[np.float64], y: NDArray[np.float64], at: float) -> float:
    """Piecewise linear through points of increasing x, prolonged at both ends."""
    i = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
    return float(y[i] + (at - x[i]) * (y[i + 1] - y[i]) / (x[i + 1] - x[i]))


def check(kl: float | None, step: float | None) -> None:
    """ValueError unless what is asked for makes sense."""
    for name, value in (("kl", kl), ("step", step)):
        if value is not None and not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, not {value}")
    if step is not None and not COARSEST < quantiser.step_index(step) < FINEST:
        raise ValueError(f"step {step} is out of range")
