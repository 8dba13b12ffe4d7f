from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from seqkv import demo, engine
from seqkv.engine import KVCache, ProfileError
from seqkv.engine.mixture import default_pieces

POINTS = [
    demo.Point(text, codec, setting, 1000, bits, 16 / bits, kl, 0.9, *seconds)
    for text in ("one", "two")
    for codec, setting, bits, kl, seconds in (
        (demo.OURS, "kl=0.01", 0.3, 0.011, (0.5, 0.25)),
        (demo.OURS, "kl=0.1", 0.1, 0.09, (0.4, 0.2)),
        (demo.UNCALIBRATED, "kl=0.01", 2.0, 0.01, (0.6, 0.3)),
        (demo.PLAIN, "4 bits", 4.5, 0.008, ()),
    )
]


class Source:
    fingerprint = "f" * 32


class Profile:
    """Stands for an engine.Profile: what it saves is its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self, path: Path) -> None:
        path.write_text(self.name)

    @classmethod
    def load(cls, path: Path) -> Profile:
        if path.read_text() == "damaged":
            raise ProfileError("damaged")
        return cls(path.read_text())


def test_quantise_per_vector_is_as_near_as_its_bits_allow() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(3, 2, (2, 5, 48)).astype(np.float32) for _ in range(2)]  # 96 values a token: groups of 64, 32
    kv = KVCache(arrays[:1], arrays[1:])
    for bits in (2, 4, 8):
        back, size = demo.quantise_per_vector(kv, bits)
        assert size == 2 * (bits * 480 // 8 + 5 * 2 * 4)
        for before, after in zip(kv.keys + kv.values, back.keys + back.values, strict=True):
            groups = [g for row in before.transpose(1, 0, 2).reshape(5, 96) for g in np.split(row, [64])]
            others = [g for row in after.transpose(1, 0, 2).reshape(5, 96) for g in np.split(row, [64])]
            for group, other in zip(groups, others, strict=True):
                unit = np.ptp(group) / (2**bits - 1)
                assert np.abs(group - other).max() <= unit / 2 + 0.01  # the ends are kept as float16
                assert len(np.unique(other)) <= 2**bits


def test_profile_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def calibrate(source: Any, pieces: Any, *, progress: Any) -> Profile:
        assert pieces == default_pieces()
        made.append(f"profile {len(made)}")
        return Profile(made[-1])

    monkeypatch.setenv("SEQKV_CACHE", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(engine, "calibrate", calibrate)
    monkeypatch.setattr(engine, "Profile", Profile)

    def get(fresh: bool = False) -> str:
        return demo.cached_profile(Source(), fresh, lambda fraction, message: None).name  # type: ignore[attr-defined]

    assert [get(), get(), get(fresh=True), get()] == ["profile 0", "profile 0", "profile 1", "profile 1"]
    (file,) = (tmp_path / "deep" / "cache").iterdir()  # nothing temporary stays
    assert file.name.startswith(Source.fingerprint)
    file.write_text("damaged")
    assert get() == "profile 2"
    Source.fingerprint = "e" * 32
    assert get() == "profile 3"


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQKV_CACHE", raising=False)
    assert demo.cache_directory() == Path.home() / ".cache" / "seqkv"


def test_csv_holds_every_point(tmp_path: Path) -> None:
    demo.write_csv(POINTS, tmp_path / "rate.csv")
    with (tmp_path / "rate.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["codec"] for row in rows] == [point.codec for point in POINTS]
    assert [float(row["kl"]) for row in rows] == [point.kl for point in POINTS]
    assert rows[3]["encode_s"] == ""


def test_png_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert demo.write_png(POINTS, tmp_path / "rate.png")
    data = (tmp_path / "rate.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_show_names_every_codec(capsys: pytest.CaptureFixture[str]) -> None:
    demo.show(POINTS, 2.0)
    out = capsys.readouterr().out
    assert all(text in out for text in (demo.OURS, demo.UNCALIBRATED, demo.PLAIN, "4 bits", "0.0110", "one", "two"))
    assert "4.5 times as long as encoding, 9.0 as decoding" in out


def test_demo_texts_are_long_enough_and_not_calibrated_on() -> None:
    folder = Path(demo.__file__).parent / "demo_text"
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.txt"))]
    assert len(texts) >= 2
    known = "\n".join(piece for pieces in default_pieces().values() for piece in pieces)
    for text in texts:
        assert len(text) > 6000
        lines = [line for line in text.splitlines() if len(line) > 60]
        assert not any(line in known for line in lines)
