"""What is fuzzed: small streams, profiles and stores of every kind, and what reads each."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash

from seqkv import engine
from seqkv.engine import KVCache, Profile, SeqkvError, TokenProbs, host, layerwise, lossless
from seqkv.engine.container import Container
from seqkv.engine.layerwise import LayerDecoder
from seqkv.engine.records import Entry, Stream
from seqkv.engine.reference import stream_key
from seqkv.engine.store import SessionStore
from tests import fuzz_mutations as mutations
from tests.conftest import LinearModel, calibrated
from tests.fuzz_mutations import Part, assembled
from tests.inline_pool import Inline
from tests.sessions import CausalModel
from tests.test_tokens_tier import Toy

STEP = 2.0**-6


@dataclass(frozen=True)
class Target:
    """Something that reads bytes.

    seeds: right ones. read: bytes -> what must be the same if they were read as they were written, or a SeqkvError.
    mend: (random, seed, another target's seed) -> bytes of a hostile writer, who knows how checksums are made.
    """

    seeds: tuple[bytes, ...]
    read: Callable[[bytes], str]
    mend: Callable[[Random, bytes, bytes], bytes] | None = mutations.mended


def without_threads() -> None:
    """For the rest of the process."""
    for module in (host, lossless, layerwise):
        module.ThreadPoolExecutor = Inline  # type: ignore[attr-defined]


def targets(names: set[str] | None = None) -> dict[str, Target]:
    """All, or those whose name is or begins with one of these."""
    made = {}
    for name, make in _MAKERS.items():
        if names is None or any(name == n or name.startswith(n + "-") for n in names):
            made[name] = make()
    return made


def digest(kv: KVCache) -> str:
    """Of all that a cache says."""
    state = xxhash.xxh3_128(kv.positions.tobytes())
    for array in (*kv.keys, *kv.values):
        state.update(repr((kv.dtype, array.shape)).encode() + np.ascontiguousarray(array).tobytes())
    state.update(repr([rope and rope.to_dict() for rope in kv.rope]).encode())
    return state.hexdigest()


@functools.cache
def _model(layers: int = 2) -> CausalModel:
    return CausalModel(layers=layers, heads=1)


@functools.cache
def _profile(predictor: str = "all") -> Profile:
    return calibrated(_model(), predictor)


def _cache(tokens: int, **guise: Any) -> tuple[KVCache, TokenProbs]:
    model = _model()
    ids = model.tokens(3, tokens)
    return model.cache(ids, **guise)[0], model.probs(ids)


def _near(predictor: str | None, *sizes: int, **guise: Any) -> Target:
    profile = None if predictor is None else _profile(predictor)
    streams = []
    for tokens in sizes:
        kv, probs = _cache(tokens, **guise)
        streams.append(engine.encode(kv, probs, profile=profile, step=STEP))
    return Target(tuple(streams), lambda data: digest(engine.decode(data, profile=profile)))


def _places() -> Target:
    return _near("all", 9, positions=3 * np.arange(9) + 2, dtype="float16", rope=[None, *_model().rope[1:]])


def _parts() -> Target:
    """Into arrays of the caller, to their slots; of some layers."""
    target, profile = _near("all", 40), _profile("all")

    def read(data: bytes) -> str:
        keys, values = np.zeros((2, 1, 30, 8), np.float16), np.zeros((2, 1, 30, 6), np.float16)
        options: Any = {"profile": profile, "layers": slice(1, 2), "slots": np.arange(59, 19, -1)}
        engine.decode_into(data, [keys], [values], **options)
        return xxhash.xxh3_128_hexdigest(keys.tobytes() + values.tobytes())

    return Target(target.seeds, read)


def _layerwise() -> Target:
    target, profile = _near("all", 40), _profile("all")

    def read(data: bytes) -> str:
        decoder, state = LayerDecoder([data, target.seeds[0]], profile), xxhash.xxh3_128()
        for heads, key, value in profile.shape:
            keys, values = (np.zeros((1, heads, decoder.tokens, width), np.float32) for width in (key, value))
            decoder.into(keys, values)
            state.update(keys.tobytes() + values.tobytes())
        return state.hexdigest()

    return Target(target.seeds, read)


def _lossless(dtype: str, predictor: str | None) -> Target:
    profile = None if predictor is None else _profile(predictor)
    kv, probs = _cache(20, dtype=dtype)
    keys = [k.copy() for k in kv.keys]
    keys[1][0, 3, 2], keys[0][...], keys[1][0, 5] = np.nan, 0, 1e-7  # strange, plain, far below its channel's grid
    some = [KVCache(k, kv.values, dtype=dtype, rope=kv.rope, exact=True) for k in (kv.keys, keys)]
    streams = tuple(engine.encode(one, probs, tier="lossless", profile=profile) for one in some)
    return Target(streams, lambda data: digest(engine.decode(data, profile=profile)))


def _tokens(archive: bool, repair: bool) -> Target:
    toy = Toy()
    ids = toy.sample(270)
    kv = toy.recompute(ids)
    if repair:
        values = [v.copy() for v in kv.values]
        values[1][0, 260:, 0] *= np.float32(1 + 1e-6)
        kv = KVCache(kv.keys, values, rope=kv.rope)
    stream = engine.encode(kv, TokenProbs.from_tokens(ids), tier="tokens", model=toy, archive=archive, repair=repair)

    def read(data: bytes) -> str:
        read_by = Toy()
        ids = engine.token_ids(data, model=read_by)
        return digest(engine.decode(data, model=read_by)) + xxhash.xxh3_64_hexdigest(ids.tobytes())

    return Target((stream,), read)


@functools.cache
def _chain() -> tuple[bytes, bytes]:
    """A stream, and one that was coded against it."""
    model, profile = CausalModel(), _chain_profile()
    texts = model.tokens(0, 64), model.tokens(1, 8)
    known, new = model.session(texts[0]), model.session(np.concatenate([texts[1], texts[0][8:]]))
    behind = engine.encode(known[0], known[1], profile=profile, step=STEP / 4)
    stream = engine.encode(new[0], new[1], profile=profile, step=STEP / 4, reference=behind)
    assert engine.inspect(stream)["reference"] == stream_key(behind)  # at coarser steps it would not be worth it
    return behind, stream


@functools.cache
def _chain_profile() -> Profile:
    return calibrated(LinearModel())


def _delta() -> Target:
    (behind, stream), profile = _chain(), _chain_profile()
    return Target((stream,), lambda data: digest(engine.decode(data, profile=profile, reference=behind)))


def _reference() -> Target:
    """A reference that is altered; if its checksums are right, the stream that needs it names it."""
    (behind, stream), profile = _chain(), _chain_profile()
    parsed = Container.parse(stream)
    parts = [Part(k, i, bytes(parsed.section(k, i))) for k, i in parsed.sections]

    def read(data: bytes) -> str:
        try:
            there = Container.parse(data)
            for kind, index in there.sections:
                there.section(kind, index)
        except SeqkvError:
            return digest(engine.decode(stream, profile=profile, reference=data))
        header = json.dumps(parsed.header | {"reference": stream_key(data)}).encode()
        return digest(engine.decode(assembled(header, parts), profile=profile, reference=data))

    return Target((behind,), read)


def _inspect() -> Target:
    streams = [*_places().seeds, *_near(None, 6).seeds, *_lossless("float16", None).seeds, _chain()[1]]
    streams += _tokens(archive=True, repair=True).seeds

    def read(data: bytes) -> str:
        said = json.dumps(engine.inspect(data))
        return said

    return Target(tuple(streams), read)


def _profiles() -> Target:
    """A profile; and, if it loads, a stream of it."""
    names = [name for name in ("all", "layers")]
    folder = Path(tempfile.mkdtemp(prefix="seqkv-fuzz-", dir=_fast()))
    file = folder / "profile"
    seeds = []
    for name in names:
        _profile(name).save(file)
        seeds.append(file.read_bytes())
    parsed = Container.parse(_near("all", 9).seeds[0])
    parts = [Part(k, i, bytes(parsed.section(k, i))) for k, i in parsed.sections]

    def read(data: bytes) -> str:
        file.write_bytes(data)
        profile = Profile.load(file)
        header = json.dumps(parsed.header | {"profile": profile.fingerprint, "shape": profile.shape}).encode()
        with contextlib.suppress(SeqkvError):
            engine.decode(assembled(header, parts), profile=profile)
        return profile.fingerprint + profile._rest()

    return Target(tuple(seeds), read, _hostile_profile)


def _hostile_profile(rng: Random, data: bytes, other: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    form = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["seqkv"])
    tensors = dict(safetensors.numpy.load(data))
    for _ in range(rng.choice((1, 1, 2))):
        name, kind = rng.choice(sorted(tensors)), rng.randrange(6)
        array = tensors[name]
        if kind == 0:
            form = mutations.changed(rng, form)
        elif kind == 1 and array.ndim and array.size:
            tensors[name] = array[: rng.randrange(len(array) + 1)] if rng.randrange(2) else np.concatenate([array] * 2)
        elif kind == 2:
            tensors[name] = array.reshape(rng.choice(((-1,), (-1, 1), (1, -1))))
        elif kind == 3:
            tensors[name] = array.astype(rng.choice(("f2", "f4", "i1", "i8")))
        elif kind == 4:
            tensors[name] = np.full_like(array, rng.choice((0, 1, -1, 127, -128)))
        else:
            changed = mutations.raw(rng, array.tobytes()).ljust(array.nbytes, b"\0")[: array.nbytes]
            tensors[name] = np.frombuffer(changed, array.dtype).reshape(array.shape)
    with np.errstate(all="ignore"):
        form["fingerprint"], form["rest"] = _names(form, tensors)
    return safetensors.numpy.save(tensors, metadata={"seqkv": json.dumps(form)})


def _names(form: dict[str, Any], tensors: dict[str, Any]) -> tuple[str, str]:
    """Fingerprint and rest, as Profile makes them of whatever it is given."""
    try:
        layers, shape = len(form["shape"]), tuple((int(h), int(k), int(v)) for h, k, v in form["shape"])
        lists = {
            name: tuple(tensors[f"{name}.{i}"] for i in range(count) if f"{name}.{i}" in tensors)
            for name, count in (("weights", 2 * layers), ("inverse", 2 * layers), ("attention", layers))
        }
        like = SimpleNamespace(**tensors, **lists, shape=shape, predictor=form["predictor"], depth=int(form["depth"]))
        make: Any = Profile.fingerprint
        return make.func(like), Profile._rest(like)  # type: ignore[arg-type]
    except (LookupError, TypeError, ValueError, OverflowError):
        return "", ""


def _record() -> Target:
    kv, probs = _cache(20)
    stream, _ = Stream.split(engine.encode(kv, probs, profile=_profile(), step=STEP), probs, "0" * 32)

    def read(data: bytes) -> str:
        found = Stream.from_bytes(data, stream.key)
        return xxhash.xxh3_64_hexdigest(found.join({})) if data == stream.record else found.key

    return Target((stream.record,), read)


def _entry() -> Target:
    entry = Entry("name", "0" * 32, None, 20, 3000, None, 0, 0, 3000, 0, 1, 1.5, 2.5)
    return Target((entry.to_bytes(),), lambda data: repr(Entry.from_bytes(data)))


def _filled(path: str) -> dict[str, str]:
    """A store at a path, of two sessions that share a beginning and one without loss; and what they hold."""
    model = _model()
    first, last = model.tokens(0, 64), model.tokens(1, 8)
    with SessionStore(path, profile=_profile()) as store:
        for name, ids in (("one", first), ("two", np.concatenate([last, first[8:]]))):
            kv, probs, importance = model.session(ids)
            store.put(name, kv, probs, importance=importance)
        store.put("exact", *_cache(20), tier="lossless")
        return {entry.name: digest(store.get(entry.name)) for entry in store.list()}


def _read_store(path: str, expected: dict[str, str]) -> str:
    """All that is in a store; "" if nothing is wrong, though some may not be there."""
    wrong = []
    with SessionStore(path, profile=_profile(), timeout=0.5) as store:
        store.verify()
        for call in (store.list, store.stats, store.compact, lambda: store.longest_prefix(_model().tokens(0, 64))):
            with contextlib.suppress(SeqkvError):
                call()
        for name, known in expected.items():
            try:
                if digest(store.get(name)) != known:
                    wrong.append(name)
            except SeqkvError:
                pass
    return "".join(wrong)


def _in_memory() -> Target:
    """An object of a store in an object store; the bytes' first one says which."""
    import fsspec

    expected = _filled("memory://first")
    system = fsspec.filesystem("memory")
    objects = {name: system.cat(name) for name in sorted(system.find("/first"))}
    system.rm("/first", recursive=True)
    names = [name for name in objects if not name.endswith("state")]

    def read(data: bytes) -> str:
        number, data = (data or b"\0")[0] % len(names), data[1:]
        system.store.clear()
        system.pseudo_dirs[:] = [""]
        system.pipe({name.replace("/first", "/next"): held for name, held in objects.items()})
        system.pipe({names[number].replace("/first", "/next"): data})
        return _read_store("memory://next", expected)

    def mend(rng: Random, data: bytes, other: bytes) -> bytes:
        try:
            return data[:1] + mutations.mended(rng, data[1:], other)
        except SeqkvError:  # of a blob there is no other writer
            return data[:1] + mutations.raw(rng, data[1:])

    return Target(tuple(bytes((i,)) + objects[name] for i, name in enumerate(names)), read, mend)


def _in_folder() -> Target:
    """A file of a store in a folder; the bytes' first one says which."""
    folder = Path(tempfile.mkdtemp(prefix="seqkv-fuzz-", dir=_fast()))
    expected = _filled(str(folder / "first"))
    names = [p.relative_to(folder / "first") for p in sorted((folder / "first").rglob("*")) if p.is_file()]
    names = [name for name in names if name.name != "reserve"]
    (folder / "first" / "reserve").unlink(missing_ok=True)

    def read(data: bytes) -> str:
        number, data = (data or b"\0")[0] % len(names), data[1:]
        shutil.rmtree(folder / "next", ignore_errors=True)
        shutil.copytree(folder / "first", folder / "next")
        (folder / "next" / names[number]).write_bytes(data)
        return _read_store(str(folder / "next"), expected)

    seeds = tuple(bytes((i,)) + (folder / "first" / name).read_bytes() for i, name in enumerate(names))
    return Target(seeds, read, None)


def _session() -> Target:
    """A file of a CompressedCache. What comes of it is compared as it would be saved again."""
    import safetensors.torch
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from seqkv.adapters import session_file
    from seqkv.adapters.huggingface import CompressedCache, cache_kwarg

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).eval()
    cache = CompressedCache(model, window=16)
    cache.chunk = 16  # two in a stream, and some recent tokens
    with torch.no_grad():
        model(torch.arange(50)[None], **{cache_kwarg(model): cache})
    folder = Path(tempfile.mkdtemp(prefix="seqkv-fuzz-", dir=_fast()))
    cache.save_session(folder / "session")

    def read(data: bytes) -> str:
        (folder / "session").write_bytes(data)
        loaded = CompressedCache.load_session(folder / "session", model)
        loaded.save_session(folder / "again")
        return xxhash.xxh3_64_hexdigest((folder / "again").read_bytes())

    def mend(rng: Random, data: bytes, other: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        form = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["seqkv session"])
        tensors = dict(safetensors.numpy.load(data))
        del form["digest"]
        for _ in range(rng.choice((1, 1, 2))):
            name, kind = rng.choice(sorted(tensors)), rng.randrange(5)
            array = tensors[name]
            if kind < 2:
                form = mutations.changed(rng, form)
            elif kind == 2:
                changed = mutations.raw(rng, array.tobytes()).ljust(array.nbytes, b"\0")[: array.nbytes]
                tensors[name] = np.frombuffer(changed, array.dtype).reshape(array.shape)
            elif kind == 3:
                tensors[name] = array.reshape(-1)[: rng.randrange(array.size + 1)]
            elif len(tensors) > 1:
                del tensors[name]
        digest = session_file._digest(form, safetensors.torch.load(safetensors.numpy.save(tensors)))
        text = json.dumps(form | {"digest": digest})
        return safetensors.numpy.save(tensors, metadata={"seqkv session": text})

    return Target(((folder / "session").read_bytes(),), read, mend)


def _fast() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


_MAKERS: dict[str, Callable[[], Target]] = {
    "near": lambda: _near("all", 20, 260),
    "near-places": _places,
    "near-expectation": lambda: _near("expectation", 9),
    "near-layers": lambda: _near("layers", 9),
    "near-free": lambda: _near(None, 6, 260, dtype="bfloat16"),
    "near-parts": _parts,
    "near-layerwise": _layerwise,
    "near-delta": _delta,
    "near-reference": _reference,
    "lossless-bfloat16": lambda: _lossless("bfloat16", None),
    "lossless-float16": lambda: _lossless("float16", None),
    "lossless-float32": lambda: _lossless("float32", None),
    "lossless-profile-bfloat16": lambda: _lossless("bfloat16", "all"),
    "lossless-profile-float16": lambda: _lossless("float16", "all"),
    "lossless-profile-float32": lambda: _lossless("float32", "all"),
    "tokens": lambda: _tokens(archive=False, repair=False),
    "tokens-archive": lambda: _tokens(archive=True, repair=False),
    "tokens-repair": lambda: _tokens(archive=False, repair=True),
    "inspect": _inspect,
    "profile": _profiles,
    "record": _record,
    "entry": _entry,
    "store": _in_memory,
    "folder": _in_folder,
}
if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    _MAKERS["session"] = _session
