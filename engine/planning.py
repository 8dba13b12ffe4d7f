"""Which tier has a session ready first: sending bytes and decoding them, against running the model again.

Time to the first token is taken as sending, then decoding; no tier is given credit for doing both at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What a machine does. Measure them (`seqkv plan MODEL` does), or give what is known.

    link: bytes a second from where streams are kept to where they are decoded.
    prefill: tokens a second of the model, over the length in question.
    near, lossless: bytes a second of the cache that decoding gives back, in the cache's own dtype.
    """

    link: float
    prefill: float
    near: float
    lossless: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: a positive number is needed, not {value}")


@dataclass(frozen=True)
class Option:
    """A way to have a cache ready.

    tier: "raw" (the cache as it is), "near", "lossless" or "tokens".
    bytes: to send. loss: nats a token, 0 if the cache is the same bit for bit.
    send_s, ready_s: seconds of sending, and until the first token can be computed.
    """

    tier: str
    bytes: float
    loss: float
    send_s: float
    ready_s: float


@dataclass(frozen=True)
class Plan:
    """What `plan` found.

    options: those within the loss allowed, the fastest first.
    break_even: bytes a second of a link below which the tokens tier is the fastest, all else equal. 0 if it never is.
    """

    options: tuple[Option, ...]
    break_even: float

    @property
    def best(self) -> Option:
        """The fastest."""
        return self.options[0]


def plan(
    tokens: int,
    bits_per_token: float,
    rates: Rates,
    *,
    loss: float = 0.01,
    near_ratio: Sequence[tuple[float, float]] = ((0.01, 52.0),),
    lossless_ratio: float = 1.75,
    ids_bits: float = 12.0,
) -> Plan:
    """Order the tiers by the time until a session can go on.

    tokens: of the session.
    bits_per_token: of its cache in its own dtype: 8 * kv.nbytes / kv.tokens.
    loss: allowed, in nats a token; 0 allows only what is exact.
    near_ratio: (loss, how many times smaller) pairs of the near tier, measured. The smallest stream within `loss` is
        taken.
    lossless_ratio: how many times smaller. ids_bits: of the tokens tier, a token.

    ValueError for numbers that cannot be. The defaults are of SmolLM2-135M in 2 bytes a number.
    """
    if tokens < 1 or not bits_per_token > 0 or not lossless_ratio > 0 or not ids_bits > 0 or not loss >= 0:
        raise ValueError("tokens, bits and ratios must be positive, and loss not negative")
    size = tokens * bits_per_token / 8
    sizes = {"raw": (size, 0.0, 0.0), "lossless": (size / lossless_ratio, 0.0, size / rates.lossless)}
    allowed = [(ratio, nats) for nats, ratio in near_ratio if nats <= loss and ratio > 0]
    if allowed:
        ratio, nats = max(allowed)
        sizes["near"] = size / ratio, nats, size / rates.near
    ids = tokens * ids_bits / 8
    sizes["tokens"] = ids, 0.0, tokens / rates.prefill
    options = [Option(tier, n, nats, n / rates.link, n / rates.link + work) for tier, (n, nats, work) in sizes.items()]
    return Plan(tuple(sorted(options, key=lambda option: option.ready_s)), _break_even(sizes))


def _break_even(sizes: dict[str, tuple[float, float, float]]) -> float:
    """From (bytes, loss, seconds of work) of the tiers. Where n / link + work is the same for tokens and for the tier
    that needs the slowest link to be as fast."""
    ids, _, prefill = sizes["tokens"]
    links = [
        0.0 if n <= ids else math.inf if prefill <= work else (n - ids) / (prefill - work)
        for tier, (n, _, work) in sizes.items()
        if tier != "tokens"
    ]
    return min(links)
