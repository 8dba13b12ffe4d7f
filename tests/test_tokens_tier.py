"""The tokens tier with a model that is a few lines of NumPy: every way in which it may not give again what it gave."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from seqkv import engine
from seqkv.engine import (
    CacheError,
    KVCache,
    ProbsError,
    Rope,
    StreamError,
    container,
    id_coding,
    surprisal,
    tokens_tier,
)
from seqkv.engine.container import Container, Section
from seqkv.engine.errors import RecomputeError
from seqkv.engine.form import DIGESTS, REPAIR, TOKEN_IDS, Form
from seqkv.entropy_coding.intervals import Adaptive, Encoder

VOCAB, LAYERS = 300, 3


class Toy:
    """Predicts from the last two ids. `noise(step)` is added to the logits of a step in run number `runs`."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB) -> None:
        rng = np.random.default_rng(seed)
        self.fingerprint, self.tokenizer_fingerprint, self.vocab = f"toy {seed}", "words", vocab
        self.environment: dict[str, Any] = {"library": "1.0", "threads": 2}
        self.table = rng.standard_normal((2, vocab, vocab)).astype(np.float32) * 2
        self.rows = rng.standard_normal((2, LAYERS, vocab, 2, 8)).astype(np.float32)
        self.runs, self.change = 0, np.float32(0)
        self.noise: Callable[[int, int], float] = lambda run, step: 0.0

    def recompute(self, ids: NDArray[np.int64]) -> KVCache:
        keys, values = (np.cumsum(side[:, ids], 1).swapaxes(1, 2) for side in self.rows)
        values[1, 0, 260:, 0] += self.change
        return KVCache(keys, values, rope=Rope.from_theta(1e4, 8))

    def stepper(self) -> Callable[[int], NDArray[np.float32]]:
        self.runs += 1
        run, seen = self.runs, [0]

        def step(token: int) -> NDArray[np.float32]:
            seen.append(token)
            logits = self.table[0, seen[-1]] + self.table[1, seen[-2]]
            logits[7] += self.noise(run, len(seen) - 2)
            return logits

        return step

    def sample(self, count: int) -> NDArray[np.int64]:
        """Ids as it predicts them."""
        rng, step, ids = np.random.default_rng(1), self.stepper(), [5]
        while len(ids) < count:
            p = np.exp(step(ids[-1]).astype(np.float64))
            ids.append(int(rng.choice(self.vocab, p=p / p.sum())))
        return np.array(ids)


@pytest.fixture
def toy() -> Toy:
    return Toy()


def write(kv: KVCache, ids: NDArray[np.int64], **options: Any) -> bytes:
    return container.write(*tokens_tier.encode(kv, ids, **options))


def read(stream: bytes, model: Any, tokens: slice = slice(None), layers: slice = slice(None)) -> KVCache:
    parsed = Container.parse(stream)
    form = Form(parsed)
    return tokens_tier.decode(parsed, form, model, range(form.tokens)[tokens], range(len(form.shape))[layers])


def ids_of(stream: bytes, model: Any) -> NDArray[np.int64]:
    parsed = Container.parse(stream)
    return tokens_tier.read_ids(parsed, Form(parsed), model)


def altered(stream: bytes, kind: int | None = None, change: Callable[[bytes], bytes] = bytes, **header: Any) -> bytes:
    """The stream with other contents, and checksums that fit."""
    parsed = Container.parse(stream)
    sections = [(k, i, bytes(parsed.section(k, i))) for k, i in parsed.sections]
    new = [Section(k, i, change(data) if k == kind else data) for k, i, data in sections]
    return container.write(parsed.header | header, new)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 256, 700])
def test_gives_the_cache_again_bit_for_bit(toy: Toy, tokens: int, archive: bool, dtype: str) -> None:
    ids = toy.sample(tokens)
    kv = toy.recompute(ids)
    kv = KVCache(kv.keys, kv.values, rope=kv.rope, dtype=dtype)
    stream = write(kv, ids, model=toy, archive=archive)
    back = read(stream, toy)
    assert back.digest() == kv.digest() and back.rope == kv.rope
    np.testing.assert_array_equal(ids_of(stream, toy), ids)
    assert write(kv, ids, model=toy, archive=archive) == stream


def test_parts(toy: Toy) -> None:
    ids = toy.sample(300)
    kv = toy.recompute(ids)
    back = read(write(kv, ids), toy, slice(250, 280), slice(1, 3))
    assert (back.layers, back.tokens, back.positions[0]) == (2, 30, 250)
    np.testing.assert_array_equal(back.values[0], kv.values[1][:, 250:280])


def test_an_archive_costs_the_cross_entropy(toy: Toy) -> None:
    ids = toy.sample(2000)
    step, bits = toy.stepper(), np.log2(VOCAB)
    for last, token in itertools.pairwise(ids):
        logits = step(int(last)).astype(np.float64)
        bits += (np.log(np.exp(logits).sum()) - logits[token]) / np.log(2)
    coded = Container.parse(write(toy.recompute(ids), ids, model=toy, archive=True)).length(TOKEN_IDS)
    assert abs(8 * coded - bits) < 0.005 * bits
    packed = Container.parse(write(toy.recompute(ids), ids)).length(TOKEN_IDS)
    assert 8 * packed > 1.2 * bits


def test_chunks_that_a_second_run_does_not_repeat_are_coded_without_the_model(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = []
    token_at = surprisal.token_at
    monkeypatch.setattr(surprisal, "token_at", lambda *args: predicted.append(token_at(*args)) or predicted[-1])
    ids = toy.sample(1000)
    toy.noise = lambda run, step: run * (300 <= step < 310)  # in chunk 1 alone
    coded = Container.parse(write(toy.recompute(ids), ids, model=toy, archive=True)).section(TOKEN_IDS)
    chunks = list(id_coding.read(coded, 1000, VOCAB, toy))
    np.testing.assert_array_equal(np.concatenate([some for some, _ in chunks]), ids)
    np.testing.assert_array_equal([token for token, _, _ in predicted], np.concatenate([ids[1:256], ids[512:]]))
    toy.noise = lambda run, step: run
    coded = Container.parse(write(toy.recompute(ids), ids, model=toy, archive=True)).section(TOKEN_IDS)
    runs = toy.runs
    assert [doubtful for _, doubtful in id_coding.read(coded, 1000, VOCAB, toy)] == [False] * 4
    assert toy.runs == runs  # needs no prediction


def test_an_archive_takes_its_surprisal_and_a_byte(toy: Toy) -> None:
    for count in (1, 2, 40, 300, 1000):
        ids = toy.sample(1000)[:count]
        intervals = id_coding._intervals(ids, toy)[1:]
        bits = np.log2(intervals[:, 2] / intervals[:, 1]).sum() + np.log2(VOCAB)
        assert 8 * len(id_coding.at_surprisal(ids, toy)) < 1.001 * bits + 8


def test_other_predictions_are_refused(toy: Toy) -> None:
    ids = toy.sample(600)
    stream = write(toy.recompute(ids), ids, model=toy, archive=True)
    toy.noise, toy.environment = (lambda run, step: 0.1 * (step > 300)), {"library": "1.1", "threads": 2}
    with pytest.raises(RecomputeError, match=r"chunk 1: .*library was 1.0, is 1.1\.$"):
        ids_of(stream, toy)


def test_another_cache_is_refused_by_chunk_and_layer(toy: Toy) -> None:
    ids = toy.sample(600)
    kv = toy.recompute(ids)
    stream = write(kv, ids, model=toy)
    toy.change = np.float32(2**-14)
    with pytest.raises(RecomputeError, match=r"chunk 1, layer 1\. It was computed on the like of this"):
        read(stream, toy)
    with pytest.raises(RecomputeError, match=r"another cache of these tokens, in chunk 1, layer 1: .*repair=True"):
        write(kv, ids, model=toy)
    with pytest.raises(RecomputeError, match="does not say"):
        read(write(kv, ids), toy)


def test_a_difference_that_the_first_bytes_do_not_show_is_refused(toy: Toy) -> None:
    ids = toy.sample(20)
    stream = altered(write(toy.recompute(ids), ids), DIGESTS, lambda data: b"\0" * 16 + data[16:])
    with pytest.raises(RecomputeError, match="somewhere"):
        read(stream, toy)


@pytest.mark.parametrize("archive", [False, True])
def test_other_models_are_refused(toy: Toy, archive: bool) -> None:
    ids = toy.sample(50)
    stream = write(toy.recompute(ids), ids, model=toy, archive=archive)
    for name, message in (("fingerprint", "of model toy 0, not of x"), ("tokenizer_fingerprint", "tokenizer words")):
        other = Toy()
        setattr(other, name, "x")
        with pytest.raises(RecomputeError, match=message):
            read(stream, other)
    with pytest.raises(RecomputeError, match="give the model"):
        read(stream, None)
    small = Toy(0, 200)
    with pytest.raises(RecomputeError, match="vocabulary has 300 tokens, the model's 200"):
        read(stream, small)
    with pytest.raises(RecomputeError, match="chunk 0, layer 0"):  # without a fingerprint to tell, the digests do
        read(write(toy.recompute(ids), ids), Toy(1))


def test_ids_need_the_model_only_in_an_archive(toy: Toy) -> None:
    ids = toy.sample(50)
    kv = toy.recompute(ids)
    np.testing.assert_array_equal(ids_of(write(kv, ids, model=toy), None), ids)
    with pytest.raises(RecomputeError, match="give it"):
        ids_of(write(kv, ids, model=toy, archive=True), None)


def test_encode_refuses_what_it_cannot_keep(toy: Toy) -> None:
    ids = toy.sample(50)
    kv = toy.recompute(ids)
    with pytest.raises(CacheError, match="positions"):
        write(KVCache(kv.keys, kv.values, positions=np.arange(50) + 1), ids)
    with pytest.raises(ProbsError, match="token id 300"):
        write(kv, np.append(ids[1:], VOCAB), model=toy)
    with pytest.raises(ProbsError, match="token id"):
        write(kv, np.append(ids[1:], 1 << 23))
    with pytest.raises(ValueError, match="archive and repair"):
        write(kv, ids, archive=True)
    with pytest.raises(RecomputeError, match="has 2 layers"):
        write(KVCache(kv.keys[:2], kv.values[:2]), ids, model=toy)


@pytest.mark.parametrize("archive", [False, True])
def test_every_flipped_bit_is_refused(toy: Toy, archive: bool) -> None:
    ids = toy.sample(30)
    stream = write(toy.recompute(ids), ids, model=toy, archive=archive)
    for bit in range(8 * len(stream)):
        flipped = bytearray(stream)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StreamError):
            read(bytes(flipped), toy)
    for length in range(len(stream)):
        with pytest.raises(StreamError):
            read(stream[:length], toy)


def test_altered_streams_with_fitting_checksums_are_refused(toy: Toy) -> None:
    ids = toy.sample(600)
    packed, archive = (write(toy.recompute(ids), ids, model=toy, archive=a) for a in (False, True))
    for change in (lambda data: data[:20], lambda data: b"", lambda data: bytes((data[0] ^ 128,)) + data[1:]):
        with pytest.raises(StreamError):
            read(altered(packed, TOKEN_IDS, change), toy)
        with pytest.raises((StreamError, RecomputeError)):
            read(altered(archive, TOKEN_IDS, change), toy)
    for stream in (packed, archive):
        for change in (lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""):
            with pytest.raises(StreamError, match="digests"):
                read(altered(stream, DIGESTS, change), toy)
        for entry in ({"vocab": 0}, {"vocab": 1 << 40}, {"vocab": "a"}, {"vocab": True}, {"archive": 1}, {"model": []}):
            with pytest.raises(StreamError, match=r"the header's (vocab|model)"):
                read(altered(stream, **entry), toy)
        for entry in ({"tokens": 1 << 30}, {"layers": 1 << 16}, {"layers": 0}, {"steps": [0]}):
            with pytest.raises(StreamError, match="altered"):
                read(altered(stream, **entry), toy)


@pytest.mark.parametrize("named", [10, VOCAB])
def test_an_archive_of_a_smaller_vocabulary_than_the_models_is_refused(toy: Toy, named: int) -> None:
    """Ids that the model predicts would be learnt by a distribution that has no place for them."""
    ids = toy.sample(600)
    encoder, distribution, step = Encoder(), Adaptive(10), toy.stepper()
    encoder.put(*id_coding._REPEATED)
    encoder.put_adaptive(ids[:1], distribution)
    for last, token in itertools.pairwise(ids[:256].tolist()):
        encoder.put(*surprisal.interval(step(last), token))
    encoder.put(*id_coding._OTHER)
    hostile = encoder.finish() + bytes(range(200, 256))
    stream = altered(write(toy.recompute(ids), ids, model=toy, archive=True), TOKEN_IDS, lambda _: hostile, vocab=10)
    toy.vocab = named  # a model that predicts more than it says, too
    with pytest.raises(RecomputeError, match="vocabulary has 10"):
        read(stream, toy)


def test_logits_that_are_no_numbers_are_refused(toy: Toy) -> None:
    ids = toy.sample(20)
    toy.noise = lambda run, step: np.nan
    with pytest.raises(ProbsError, match="NaN"):
        write(toy.recompute(ids), ids, model=toy, archive=True)


def nudged(kv: KVCache, dtype: str, share: float) -> KVCache:
    """Some numbers the next ones of the dtype."""
    rng = np.random.default_rng(3)
    kv = KVCache(kv.keys, kv.values, rope=kv.rope, dtype=dtype)
    step = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    sides = [
        [array * (1 + step * (rng.random(array.shape) < share)).astype(array.dtype) for array in side]
        for side in (kv.keys, kv.values)
    ]
    return KVCache(*sides, rope=kv.rope, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("archive", [False, True])
def test_repair(toy: Toy, archive: bool, dtype: str) -> None:
    ids = toy.sample(600)
    kv = nudged(toy.recompute(ids), dtype, 0.02)
    with pytest.raises(RecomputeError, match="repair=True"):
        write(kv, ids, model=toy)
    stream = write(kv, ids, model=toy, archive=archive, repair=True)
    assert read(stream, toy).digest() == kv.digest()
    assert read(stream, toy, slice(300, 400), slice(1, 2)).keys[0].tobytes() == kv.keys[1][:, 300:400].tobytes()
    assert len(stream) < kv.nbytes / 20
    toy.change = np.float32(1)  # another arithmetic again
    with pytest.raises(RecomputeError, match="chunk 1, layer 1"):
        read(stream, toy)


def test_repair_of_what_needs_none_costs_nothing(toy: Toy) -> None:
    ids = toy.sample(300)
    kv = toy.recompute(ids)
    assert write(kv, ids, model=toy, repair=True) == write(kv, ids, model=toy)
    with pytest.raises(ValueError, match="need the model"):
        write(kv, ids, repair=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_repair_of_any_numbers(toy: Toy, dtype: str) -> None:
    """Signs, zeros of both signs, the largest and the smallest, in one chunk and one layer."""
    ids = toy.sample(300)
    kv = toy.recompute(ids)
    kv = KVCache(kv.keys, kv.values, rope=kv.rope, dtype=dtype)
    largest = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.3895314e38}[dtype]
    odd = np.array([0.0, -0.0, largest, -largest, 1e-38, -1e-38, 6e-8, -6e-8]).astype(kv.keys[1].dtype)
    kv.keys[1] = kv.keys[1].copy()
    kv.keys[1][0, 260:290] = odd
    kv = KVCache(kv.keys, kv.values, rope=kv.rope, dtype=dtype)
    stream = write(kv, ids, model=toy, repair=True)
    assert [place for place in Container.parse(stream).sections if place[0] == REPAIR] == [(REPAIR, 1)]
    assert read(stream, toy).digest() == kv.digest()


def test_altered_repairs_are_refused(toy: Toy) -> None:
    ids = toy.sample(100)
    stream = write(nudged(toy.recompute(ids), "float32", 0.1), ids, model=toy, repair=True)
    size = Container.parse(stream).length(REPAIR)
    for length in (0, 1, 2, 5, 20, size - 2):
        with pytest.raises(StreamError, match="chunk 0: repair: altered"):
            read(altered(stream, REPAIR, lambda data, length=length: data[:length]), toy)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, size, 50):
        with pytest.raises((StreamError, RecomputeError)):
            flip = lambda data, at=place: data[:at] + bytes((data[at] ^ 4,)) + data[at + 1 :]  # noqa: E731
            read(altered(stream, REPAIR, flip), toy)


def test_through_the_front_door(toy: Toy) -> None:
    ids = toy.sample(300)
    kv = nudged(toy.recompute(ids), "bfloat16", 0.01)
    probs = engine.TokenProbs.from_tokens(ids)
    stream = engine.encode(kv, probs, tier="tokens", model=toy, archive=True, repair=True)
    assert engine.decode(stream, model=toy).digest() == kv.digest()
    assert engine.decode(stream, model=toy, tokens=slice(5, 9), layers=slice(1)).shape == kv.shape[:1]
    np.testing.assert_array_equal(engine.token_ids(stream, model=toy), ids)
    with pytest.raises(RecomputeError, match="give the model"):
        engine.decode(stream)
    found = engine.inspect(stream)
    assert (found["tier"], found["tokens"], found["layers"]) == ("tokens", 300, LAYERS)
    assert {"token ids", "digests", "repair"} < set(found["bytes_by_part"])
    with pytest.raises(ValueError, match="tier"):
        engine.encode(kv, probs, model=toy)
