from __future__ import annotations

import math
from typing import Any

import pytest

from seqkv.engine.planning import Plan, Rates, plan

BITS = 8.0 * 1000  # a cache of 1,000 bytes a token


def made(link: float = 1e6, prefill: float = 1e3, decode: float = 1e8, **options: Any) -> Plan:
    options = {"near_ratio": [(0.01, 50.0)], "lossless_ratio": 2.0, "ids_bits": 16.0} | options
    return plan(1000, BITS, Rates(link, prefill, decode, decode), **options)


def test_times_and_bytes() -> None:
    options = {o.tier: o for o in made().options}
    assert {tier: o.bytes for tier, o in options.items()} == {
        "raw": 1e6,
        "lossless": 5e5,
        "near": pytest.approx(2e4),
        "tokens": 2e3,
    }
    assert options["raw"].ready_s == options["raw"].send_s == 1.0
    assert options["lossless"].ready_s == pytest.approx(0.5 + 0.01)
    assert options["near"].ready_s == pytest.approx(0.02 + 0.01) and options["near"].loss == 0.01
    assert options["tokens"].ready_s == pytest.approx(0.002 + 1.0)
    assert [o.tier for o in made().options] == ["near", "lossless", "raw", "tokens"] and made().best.tier == "near"


def test_loss_allowed_decides_the_near_tier() -> None:
    ratios = [(0.001, 20.0), (0.01, 50.0), (0.05, 90.0)]
    assert {o.tier for o in made(loss=0.0, near_ratio=ratios).options} == {"raw", "lossless", "tokens"}
    near = next(o for o in made(loss=0.02, near_ratio=ratios).options if o.tier == "near")
    assert (near.loss, near.bytes) == (0.01, pytest.approx(2e4))


@pytest.mark.parametrize("options", [{}, {"loss": 0.0}, {"decode": 1e6}, {"decode": 5e5, "prefill": 2e3}])
def test_break_even_is_where_the_order_changes(options: dict[str, Any]) -> None:
    even = made(**options).break_even
    assert 0 < even < math.inf
    assert made(link=even * 0.99, **options).best.tier == "tokens"
    assert made(link=even * 1.01, **options).best.tier != "tokens"


def test_no_break_even() -> None:
    assert made(ids_bits=2e4).break_even == 0.0
    assert made(prefill=1e12).break_even < math.inf  # sending it as it is needs no work


def test_refuses_what_cannot_be() -> None:
    for name in ("link", "prefill", "decode"):
        for bad in (0, -1, math.nan, math.inf):
            with pytest.raises(ValueError, match="positive number"):
                made(**{name: bad})
    for options in ({"loss": -1}, {"loss": math.nan}, {"ids_bits": 0}, {"lossless_ratio": 0}):
        with pytest.raises(ValueError, match="must be positive"):
            made(**options)
    with pytest.raises(ValueError, match="must be positive"):
        plan(0, BITS, Rates(1, 1, 1, 1))
