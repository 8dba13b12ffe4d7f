"""The frontier as a picture: a panel for each domain, a curve for each codec, both axes logarithmic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench.frontier_tables import FREE, LOSSLESS, OURS, Point

_LEAST = 1e-5  # nats: where codecs that lose less are drawn
_OURS = {OURS: "o-", FREE: "o--", LOSSLESS: "*"}  # in black; others in colours


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """points of one codec and setting are averaged over the texts of a domain. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    shown = [p for p in points if not p.ours or p.codec in _OURS]
    domains = list(dict.fromkeys(p.domain for p in shown))
    others = list(dict.fromkeys(p.codec for p in shown if not p.ours))
    styles = {codec: (_OURS[codec], "black") for codec in _OURS if any(p.codec == codec for p in shown)}
    styles |= {codec: ("sD^vPXphd<"[i % 10] + "-", f"C{i % 10}") for i, codec in enumerate(others)}
    columns = min(5, len(domains))
    rows = -(-len(domains) // columns)
    size = (3.6 * columns + 2.4, 3.4 * rows + 0.9)
    figure, axes = pyplot.subplots(*(rows, columns), figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(domains) :]:
        axis.set_visible(False)
    for axis, domain in zip(axes.flat, domains, strict=False):
        for codec, (style, colour) in styles.items():
            curve = _curve([p for p in shown if (p.domain, p.codec) == (domain, codec)])
            axis.plot(
                [bits for bits, _ in curve],
                [max(kl, _LEAST) for _, kl in curve],
                style,
                color=colour,
                markersize=6 if codec == LOSSLESS else 4,
                linewidth=2 if codec == OURS else 1,
                label=codec,
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(domain, fontsize=10)
        axis.grid(which="major", alpha=0.3)
        axis.tick_params(labelsize=8)
    figure.supxlabel("bits per value of the cache, all side information counted")
    figure.supylabel("KL, nats a token")
    figure.suptitle(title)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(bits, kl) by setting, means over texts: of the rate, and of the loss's logarithm; rates increasing."""
    settings = dict.fromkeys(p.setting for p in points)
    groups = [[p for p in points if p.setting == setting] for setting in settings]
    return sorted(
        (
            statistics.fmean(p.bits_per_value for p in group),
            statistics.geometric_mean(max(p.kl, _LEAST) for p in group),
        )
        for group in groups
    )
