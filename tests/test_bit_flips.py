"""Every bit of a golden stream of each kind, flipped: all of them are refused.

A stream with the expectation of tokens is in test_codec.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from seqkv import engine
from seqkv.engine import KVCache, Profile, RecomputeError, StreamError, TokenProbs, host, lossless
from seqkv.engine.container import Container
from tests import golden_streams as golden
from tests.conftest import LinearModel
from tests.golden_streams import GOLDEN
from tests.inline_pool import Inline

Decode = Callable[[bytes], KVCache]


@pytest.fixture(autouse=True)
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host, lossless):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return golden.profile()


def all_are_refused(stream: bytes, decode: Decode) -> None:
    decode(stream)  # as it is, it decodes
    for bit in range(8 * len(stream)):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            decode(bytes(flipped))
        except (StreamError, RecomputeError):
            continue
        pytest.fail(f"bit {bit} of {8 * len(stream)}")


@pytest.mark.parametrize("name", ["near", "lossless", "lossless_free", "tokens", "archive", "delta"])
def test_of_golden_streams(name: str, profile: Profile) -> None:
    """Together with those below they have every section that there is: test_golden.py."""
    one, options = GOLDEN[name], dict[str, Any]()
    if one.reference is not None:  # parsed once
        options["reference"] = engine.Reference(golden.stream(one.reference), profile)
    all_are_refused(golden.stream(name), lambda data: golden.decoded(one, data, profile, **options))


def test_of_the_near_tier_without_a_profile() -> None:
    model = LinearModel(layers=2, heads=1)
    ids = model.tokenize(model.text(3, 6))
    stream = engine.encode(model.cache(ids, rope=None)[0], TokenProbs.from_tokens(ids), step=2.0**-6)
    assert {kind for kind, _ in Container.parse(stream).sections} == {
        kind for kind, _ in Container.parse(golden.stream("free")).sections
    }
    all_are_refused(stream, engine.decode)


def test_of_a_reference(profile: Profile) -> None:
    stream = golden.stream("delta")
    decode: Decode = lambda data: engine.decode(stream, profile=profile, reference=data)  # noqa: E731
    all_are_refused(golden.stream("reference"), decode)
