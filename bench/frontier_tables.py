"""What the points of the frontier say: how much smaller at equal loss, and what each rung of the ladder brings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

OURS, FREE, NARROW = "seqkv", "seqkv, no profile", "seqkv, narrow profile"
LOSSLESS, RUNG = "seqkv, lossless", "seqkv, predictor {}"
"""Codecs of a point: with the default profile; with none; with one from fewer languages; the lossless tier; with the
profile of a rung of the ladder."""


@dataclass(frozen=True)
class Point:
    """One codec at one setting on one text. kl in nats a token, and as it was requested, if it was; delta_nll in nats
    a token; top1 a share. explained_keys, explained_values: of a rung of the ladder, the mean over layers of the share
    of the variance that it predicts (R2), of all tokens but the sinks."""

    domain: str
    text: str
    codec: str
    setting: str
    bytes: int
    bits_per_value: float
    kl: float
    delta_nll: float
    top1: float
    requested: float | None = None
    explained_keys: float | None = None
    explained_values: float | None = None

    @property
    def ours(self) -> bool:
        return self.codec.startswith(OURS)


@dataclass(frozen=True)
class Comparison:
    """On a domain, a peer takes `factor` times the bits of seqkv at the peer's loss; the geometric mean over texts.

    bound: "" if that is so; ">" if it takes more than that, as seqkv's coarsest setting loses less; "?" if seqkv has no
    setting that loses as little: then `factor` is that at seqkv's finest, and no statement at equal loss.
    """

    domain: str
    peer: str
    setting: str
    peer_bits: float
    peer_kl: float
    factor: float
    bound: str


def bits_at(points: Iterable[Point], kl: float) -> tuple[float, str]:
    """The rate at which a codec has this loss, between its settings on a line in the logarithms of both; and as in
    Comparison.bound: beyond its settings, the rate of the nearest, with what that means."""
    curve = sorted((max(p.kl, 1e-9), p.bits_per_value) for p in points)
    losses, rates = np.log([k for k, _ in curve]), np.log([bits for _, bits in curve])
    bound = "?" if np.log(kl) < losses[0] else ">" if np.log(kl) > losses[-1] else ""
    return float(np.exp(np.interp(np.log(kl), losses, rates))), bound


def compared(points: Sequence[Point], lossless: Sequence[str] = ()) -> list[Comparison]:
    """Every peer at every setting on every domain. lossless: codecs that are left out, as they lose nothing."""
    found: dict[tuple[str, str, str], list[tuple[Point, float, str]]] = {}
    for peer in points:
        own = [p for p in points if p.codec == OURS and p.text == peer.text]
        if peer.ours or peer.codec in lossless or not own:
            continue
        bits, bound = bits_at(own, max(peer.kl, 1e-9))
        key = (peer.domain, peer.codec, peer.setting)
        found.setdefault(key, []).append((peer, peer.bits_per_value / bits, bound))
    out = []
    for (domain, codec, setting), rows in found.items():
        bounds = {bound for _, _, bound in rows}
        out.append(
            Comparison(
                domain,
                codec,
                setting,
                statistics.fmean(p.bits_per_value for p, _, _ in rows),
                statistics.fmean(p.kl for p, _, _ in rows),
                statistics.geometric_mean(factor for _, factor, _ in rows),
                next((b for b in "?>" if b in bounds), ""),
            )
        )
    return out


def smaller_by(comparisons: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """A table: a row for each peer's setting, a column for each domain; by what factor seqkv is smaller at its loss."""
    domains = list(dict.fromkeys(c.domain for c in comparisons))
    rows = []
    for peer, setting in dict.fromkeys((c.peer, c.setting) for c in comparisons):
        some = {c.domain: c for c in comparisons if (c.peer, c.setting) == (peer, setting)}
        cells = [f"{some[d].bound}{some[d].factor:.1f}" if d in some else "" for d in domains]
        rows.append([f"{peer}, {setting}", f"{statistics.fmean(c.peer_bits for c in some.values()):.2f}", *cells])
    return ["at the loss of", "bits", *domains], rows


def ladder(points: Sequence[Point], kl: float) -> tuple[list[str], list[list[str]]]:
    """A table: for each rung what it explains, and its bits at `kl`, in the mean over texts. A rung that has no setting
    as fine or as coarse is marked as in Comparison.bound."""
    rows = []
    for codec in dict.fromkeys(p.codec for p in points if p.explained_keys is not None):
        some = [p for p in points if p.codec == codec]
        at = [bits_at([p for p in some if p.text == text], kl) for text in dict.fromkeys(p.text for p in some)]
        marks = {bound for _, bound in at} - {""}
        keys, values = (
            statistics.fmean(x for x in (getattr(p, name) for p in some) if x is not None)
            for name in ("explained_keys", "explained_values")
        )
        bits = statistics.fmean(bits for bits, _ in at)
        rows.append([codec, f"{keys:.3f}", f"{values:.3f}", f"{''.join(sorted(marks))}{bits:.3f}"])
    return ["rung", "R2 of keys", "R2 of values", f"bits/value at KL {kl:g}"], rows


def by_domain(points: Sequence[Point], codec: str, requested: float) -> tuple[list[str], list[list[str]]]:
    """A table: what a codec of ours makes of one request, on each domain."""
    some = [p for p in points if p.codec == codec and p.requested == requested]
    rows = []
    for domain in dict.fromkeys(p.domain for p in some):
        part = [p for p in some if p.domain == domain]
        bits, kl, nll, top1 = (
            statistics.fmean(getattr(p, name) for p in part) for name in ("bits_per_value", "kl", "delta_nll", "top1")
        )
        rows.append(
            [domain, f"{bits:.3f}", f"{kl:.4f}", f"{max(p.kl for p in part):.4f}", f"{nll:+.4f}", f"{top1:.1%}"]
        )
    return [f"{codec}, kl={requested:g}", "bits/value", "KL", "largest KL", "more NLL", "top-1"], rows
