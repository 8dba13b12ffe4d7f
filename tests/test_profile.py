from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from seqkv import engine
from seqkv.engine import Profile, ProfileError
from seqkv.engine import profile as profile_module

ARRAYS = ("table", "bias", "sink_bias", "exponent", "scale", "gains", "curve")


@pytest.fixture
def path(profile: Profile, tmp_path: Path) -> Path:
    profile.save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


def altered(path: Path, form: dict[str, Any] | None = None, without: str = "", **tensors: Any) -> Path:
    """The file with other entries and tensors, as a valid safetensors file. Names with a dot are given with "__"."""
    with safe_open(path, framework="numpy") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        entries = json.loads(file.metadata()["seqkv"])
    kept |= {name.replace("__", "."): np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    kept.pop(without, None)
    entries |= form or {}
    entries.pop(without, None)
    save_file(kept, path, metadata={"seqkv": json.dumps(entries)})
    return path


@pytest.mark.parametrize("predictor", ["all", "mean", "expectation"])
def test_a_profile_comes_back(predictor: str, profiles: Callable[[str], Profile], tmp_path: Path) -> None:
    profile = profiles(predictor)
    profile.save(tmp_path / "p")
    loaded = Profile.load(tmp_path / "p")
    assert loaded.fingerprint == profile.fingerprint
    for name in ("model", "shape", "predictor", "depth", "info"):
        assert getattr(loaded, name) == getattr(profile, name)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(profile, name))
        assert getattr(loaded, name).dtype == getattr(profile, name).dtype
    for name in ("weights", "inverse", "attention"):
        for one, other in zip(getattr(loaded, name), getattr(profile, name), strict=True):
            np.testing.assert_array_equal(one, other)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "p").read_bytes()


def test_a_loaded_profile_codes_the_same(path: Path, profile: Profile, sample: Callable[..., Any]) -> None:
    s = sample(40)
    stream = engine.encode(s.kv, s.probs, profile=profile)
    assert engine.encode(s.kv, s.probs, profile=Profile.load(path)) == stream
    assert engine.decode(stream, profile=Profile.load(path)).digest() == engine.decode(stream, profile=profile).digest()


def test_the_dtypes_are_what_the_docstring_says(profile: Profile) -> None:
    dtypes = {name: getattr(profile, name).dtype.name for name in ARRAYS}
    assert dtypes == {
        "table": "float16",
        "bias": "float32",
        "sink_bias": "float32",
        "scale": "int16",
        "gains": "int8",
        "exponent": "int8",
        "curve": "float64",
    }
    assert {a.dtype.name for a in profile.weights + profile.inverse} == {"float16"}
    assert {a.dtype.name for a in profile.attention} == {"float32"}


def test_saving_is_whole_or_not_at_all(path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [p.name for p in path.parent.iterdir()] == ["p.safetensors"]
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        profile.save(path)
    assert path.read_bytes() == before


def test_the_fingerprint_is_of_what_decoding_depends_on(profile: Profile) -> None:
    seen = {profile.fingerprint}
    for name in ("table", "bias", "sink_bias", "scale", "gains"):
        array = getattr(profile, name).copy()
        array.flat[-1] += 1
        seen.add(dataclasses.replace(profile, **{name: array}).fingerprint)
    for name in ("weights", "inverse"):
        arrays = [a.copy() for a in getattr(profile, name)]
        arrays[-1].flat[-1] += 1
        seen.add(dataclasses.replace(profile, **{name: tuple(arrays)}).fingerprint)
    assert len(seen) == 8
    # measured again, it still decodes what it encoded
    other = dataclasses.replace(
        profile, curve=profile.curve + 1, attention=tuple(2 * a for a in profile.attention), info={}
    )
    assert other.fingerprint == profile.fingerprint


def test_a_profile_is_frozen(profile: Profile) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.depth = 1  # type: ignore[misc]


@pytest.mark.parametrize("at", np.linspace(0, 1, 12, endpoint=False))
def test_a_truncated_file_is_refused(at: float, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(at * len(data))])
    with pytest.raises(ProfileError, match=r"p\.safetensors"):
        Profile.load(path)


def test_a_damaged_file_is_refused(path: Path) -> None:
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(data), 150).tolist() + list(range(0, 100, 3)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(damaged))
        try:
            loaded = Profile.load(path)
        except ProfileError:
            continue
        # what is only said about it (model, info) has no other protection than its form
        path.write_bytes(data)
        right = Profile.load(path)
        assert loaded.fingerprint == right.fingerprint
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(loaded, name), getattr(right, name), f"bit flipped at {place}")


@pytest.mark.parametrize("name", [*ARRAYS, "weights__0", "weights__5", "inverse__3", "attention__1"])
def test_a_changed_tensor_is_refused(name: str, path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        tensor = file.get_tensor(name.replace("__", ".")).copy()
    tensor.flat[tensor.size // 2] += 1
    with pytest.raises(ProfileError, match="damaged"):
        Profile.load(altered(path, **{name: tensor}))


@pytest.mark.parametrize(
    "name", [*ARRAYS, "weights.0", "inverse.5", "attention.2", "format", "model", "shape", "fingerprint", "info"]
)
def test_a_missing_part_is_refused(name: str, path: Path) -> None:
    with pytest.raises(ProfileError, match=r"p\.safetensors"):
        Profile.load(altered(path, without=name))


@pytest.mark.parametrize(
    "form",
    [
        {"format": 1},
        {"format": None},
        {"shape": []},
        {"shape": [[2, 8, 6]]},
        {"shape": [[2, 8]] * 3},
        {"shape": [[-2, -8, -6]] * 3},
        {"shape": [[2, 6, 8]] * 3},
        {"shape": "abc"},
        {"shape": None},
        {"predictor": "oracle"},
        {"predictor": "mean"},
        {"predictor": ["all"]},
        {"depth": -1},
        {"depth": 1},
        {"depth": 4},
        {"depth": "deep"},
        {"fingerprint": "0" * 32},
    ],
    ids=str,
)
def test_a_form_that_lies_is_refused(form: dict[str, Any], path: Path) -> None:
    with pytest.raises(ProfileError):
        Profile.load(altered(path, form))


@pytest.mark.parametrize(
    "tensors",
    [
        {"table": np.zeros(300, np.float16)},
        {"table": np.zeros((50, 7), np.float16)},
        {"bias": np.zeros(83, np.float32)},
        {"bias": np.full(84, np.nan, np.float32)},
        {"sink_bias": np.zeros((3, 84), np.float32)},
        {"scale": np.zeros((84, 1), np.int16)},
        {"gains": np.zeros((2, 3, 24), np.int8)},
        {"attention__0": np.zeros(28, np.float32)},
        {"attention__2": np.zeros((29, 1), np.float32)},
        {"curve": np.zeros((1, 2))},
        {"curve": np.zeros((0, 2))},
        {"curve": np.zeros((2, 3))},
        {"curve": np.zeros(4)},
        {"curve": np.array([[2.0, -1.0], [1.0, -2.0]])},
        {"weights__0": np.zeros((5, 16), np.float16)},
        {"weights__1": np.full((22, 12), np.inf, np.float16)},
        {"inverse__0": np.zeros((16, 15), np.float16)},
    ],
    ids=lambda t: f"{next(iter(t))} {next(iter(t.values())).shape}",
)
def test_tensors_that_do_not_fit_are_refused(tensors: dict[str, Any], path: Path, profile: Profile) -> None:
    with pytest.raises(ProfileError):
        Profile.load(altered(path, **tensors))
    whole = {name: tensor for name, tensor in tensors.items() if "__" not in name}
    if whole:  # with a fingerprint that is right
        with pytest.raises(ProfileError):
            dataclasses.replace(profile, **whole)


def test_tensors_of_another_dtype_are_refused(profile: Profile) -> None:
    for name in ("bias", "scale", "gains", "table"):
        with pytest.raises(ProfileError):
            dataclasses.replace(profile, **{name: getattr(profile, name).astype(np.float64)})


def test_what_is_no_profile_is_refused(path: Path, tmp_path: Path) -> None:
    for content in (b"", b"SQKV", b"\x80\x04}.", b"{}" * 100, bytes(64), b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match="not a seqkv profile"):
            Profile.load(path)
    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(ProfileError, match="not a seqkv profile"):
        Profile.load(path)
    for metadata in ("[]", "3", "nonsense", '"text"', "{}", "[" * 100_000):
        save_file({"x": np.zeros(3)}, path, metadata={"seqkv": metadata})
        with pytest.raises(ProfileError, match="not a seqkv profile"):
            Profile.load(path)
    with pytest.raises(ProfileError, match="no such file"):
        Profile.load(tmp_path / "nowhere")
    with pytest.raises(ProfileError):
        Profile.load(tmp_path)


def test_another_format_says_what_to_do(path: Path) -> None:
    with pytest.raises(ProfileError, match=f"format 99, this version reads {profile_module.FORMAT}; calibrate again"):
        Profile.load(altered(path, {"format": 99}))


def test_check_names_both_shapes(profile: Profile, sample: Callable[..., Any]) -> None:
    kv = sample(5).kv
    profile.check(kv)
    with pytest.raises(ProfileError, match=r"3 layers of .*\(2, 8, 6\).*3 layers of .*\(2, 6, 8\)"):
        profile.check(engine.KVCache(kv.values, kv.keys))


def test_a_token_table_that_the_predictor_does_not_use_is_refused(profile: Profile) -> None:
    """Its rank would be taken off matrices that have no rows for it."""
    weights = tuple(w[profile.table.shape[1] :] for w in profile.weights)
    options: dict[str, Any] = {"predictor": "layers", "weights": weights}
    assert dataclasses.replace(profile, table=profile.table[:, :0], **options).predictor == "layers"
    with pytest.raises(ProfileError, match="a token table of rank"):
        dataclasses.replace(profile, **options)
