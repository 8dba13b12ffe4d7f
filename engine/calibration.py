"""Calibration: what the caches of one model have in common, measured once, kept in a Profile.

Texts are run through the model one at a time; what is kept of each is on disk (its cache) or small (sums). Then blocks
are fitted in the order of coding, each on what the decoder will have decoded of the blocks before (closed loop).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import codec, host, importance, mixture, near, prediction, quantiser, rate_control
from seqkv.engine.cache import KVCache, Rope
from seqkv.engine.cached import cached_property
from seqkv.engine.errors import CalibrationError
from seqkv.engine.layout import block_widths
from seqkv.engine.probs import TokenProbs
from seqkv.engine.profile import Profile

Progress = Callable[[float, str], None]


class Source(Protocol):
    """What calibration needs of a model; `adapters.source.ModelSource` is one."""

    context: int
    continuation: int
    layers: int
    rope: list[Rope | None]
    vocab: int
    bos: NDArray[np.int64]

    @property
    def fingerprint(self) -> str: ...

    def embedding(self) -> NDArray[np.float32]: ...

    def tokenize(self, text: str) -> NDArray[np.int64]: ...

    def prefill(self, ids: Any) -> tuple[KVCache, TokenProbs, NDArray[np.float32]]: ...

    def fisher(self, ids: Any, kv: KVCache) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]]: ...

    def logprobs(self, ids: Any, kv: KVCache) -> Any: ...

    def divergence(self, ids: Any, kv: KVCache, reference: Any) -> tuple[float, float]: ...


DAMPING = 0.1  # of a block's mean Fisher information is added to every direction: none is free
LEAST_FISHER = 1e-4  # of the mean over blocks is the least that any has: one that sampling missed is not free
RIDGE = 1e-3
CLIP = 0.9  # a token's gradient counts at most as much as this quantile of its text's
SERVED_KL = 0.005  # nats: blocks are fitted in the closed loop of the step that this asks for
FIRST_STEP = 0.0006  # a guess of that step
NEAR_BY = quantiser.STEPS_PER_OCTAVE // 2  # a guess that is further off is fitted again
DEPTH = 2
CHECKS = 5  # texts that the curve is measured on, and nothing else; twice as many where they are short
FISHER_TEXTS = 14  # twice as many where they are short
CURVE = (0.0032, 0.0011)  # steps that the curve is measured at


def calibrate(
    source: Source,
    pieces: Mapping[str, Sequence[str]] | None = None,
    *,
    predictor: str = "all",
    progress: Progress | None = None,
) -> Profile:
    """A profile of one model.

    source: the model, see `Source`.
    pieces: texts by kind; the default mixture (engine.mixture) if not given. Texts of the kind that will be
        compressed, in at least 20 different pieces and 20,000 tokens; a warning says if they are too few or too alike.
    predictor: a rung of the ladder, prediction.PREDICTORS.
    progress: called with the part done (0 to 1) and a message.

    SmolLM2-135M takes about 4 minutes on 2 cores; memory does not grow with the text, disk space in the temporary
    folder does (2 bytes a value of the caches). CalibrationError if there is too little text to begin with.
    """
    if predictor not in prediction.PREDICTORS:
        raise CalibrationError(f"predictor must be one of {', '.join(prediction.PREDICTORS)}, not {predictor!r}")
    if source.context < 2:
        raise CalibrationError(f"a context of {source.context} token is nothing but a sink: at least 2 are needed")
    report = progress or (lambda part, message: None)

    def stage(begin: float, message: str) -> Callable[[float], None]:
        return lambda part: report(begin + 0.11 * part, message)

    length = source.context + source.continuation
    texts = mixture.default_pieces() if pieces is None else pieces
    times = mixture.times(length)  # it is by tokens that a sample gets better
    fitted, checks = _split(mixture.cut(texts, source.tokenize, length, bos=source.bos), times * CHECKS)
    with tempfile.TemporaryDirectory(prefix="seqkv-") as folder:
        observed = _Observations(source, len(fitted), folder)
        for i, (kind, ids) in enumerate(fitted):
            report(0.55 * i / len(fitted), f"reading {kind}")
            observed.add(ids, sample=i < times * FISHER_TEXTS)
        index = quantiser.step_index(FIRST_STEP)
        for begin in (0.55, 0.78):  # the second time only if the first step was far off
            fitted_at = index
            profile = _fit(source, observed, predictor, index, stage(begin, "fitting"))
            curve = _curve(source, profile, checks, stage(begin + 0.11, "measuring the loss"))
            index = rate_control.step_for(curve, SERVED_KL)
            if abs(index - fitted_at) <= NEAR_BY:
                break
    report(1.0, "done")
    info = profile.info | {
        "fitted": [kind for kind, _ in fitted],
        "checked": [kind for kind, _ in checks],
        "context": source.context,
    }
    return dataclasses.replace(profile, curve=curve, info=info)


Sequences = list[tuple[str, NDArray[np.int64]]]


def _split(sequences: Sequences, most: int) -> tuple[Sequences, Sequences]:
    """Sequences to fit, and `most` or fewer to check with: first the last of each kind that has several."""
    if len(sequences) < 3:
        raise CalibrationError(f"{len(sequences)} sequences can be cut from the text; calibration needs at least 3")
    last = {kind: i for i, (kind, _) in enumerate(sequences)}
    several = [i for kind, i in last.items() if sum(k == kind for k, _ in sequences) > 1]
    others = [i for i in reversed(range(len(sequences))) if i not in several]
    held = set((several + others)[: min(most, max(1, len(sequences) // 4))])
    return [s for i, s in enumerate(sequences) if i not in held], [sequences[i] for i in sorted(held)]


class _Observations:
    """What is kept of the texts: caches on disk, tokens, importance classes, sums of Fisher information.

    Rows are tokens, those of all texts but their sinks first, then the sinks of all texts.
    """

    def __init__(self, source: Source, texts: int, folder: str) -> None:
        self.source, self.texts, self.folder = source, texts, folder
        self.sinks = min(importance.SINKS, source.context - 1)
        self.plain = texts * (source.context - self.sinks)
        self.rows = texts * source.context
        self.probs: list[TokenProbs] = []
        self.blocks: list[NDArray[np.float16]] = []
        self.shape: tuple[tuple[int, int, int], ...] = ()
        self.classes = np.empty((source.layers, self.rows), np.uint8)
        self.attention = np.empty((source.layers, self.rows), np.float32)
        self.energy = importance.EnergyTable(source.layers)
        self.samples = 0  # texts whose Fisher information is in the sums
        self.fisher: list[NDArray[np.float64]] = []

    def add(self, ids: NDArray[np.int64], sample: bool) -> None:
        """One text; sample: whether its Fisher information counts."""
        kv, probs, attention = self.source.prefill(ids)
        if not self.blocks:
            self._allocate(kv)
        rows = self.rows_of(len(self.probs))
        self.probs.append(probs)
        classes = importance.classes(attention)
        self.classes[:, rows] = classes
        self.attention[:, rows] = importance.relative(attention)
        values = host.blocks_of(kv, slice(None))
        for b, block in enumerate(self.blocks):
            block[rows] = np.clip(values(b), -65504, 65504)
        if sample:
            self._add_fisher(self.source.fisher(ids, kv), classes)

    def _allocate(self, kv: KVCache) -> None:
        self.shape = kv.shape
        for b, width in enumerate(block_widths(self.shape)):
            self.blocks.append(np.memmap(f"{self.folder}/{b}", np.float16, "w+", shape=(self.rows, width)))
            self.fisher.append(np.zeros((width, width)))

    def rows_of(self, text: int) -> NDArray[np.intp]:
        """Rows of the tokens of a text, in their order."""
        plain = self.source.context - self.sinks
        return np.concatenate([self.plain + text * self.sinks + np.arange(self.sinks), text * plain + np.arange(plain)])

    @cached_property
    def windows(self) -> tuple[NDArray[np.intp], int]:
        """The window of each row whose mean is coded, [rows], and how many there are."""
        window, each = np.empty(self.rows, np.intp), near.windows(self.source.context)
        for text in range(self.texts):
            window[self.rows_of(text)] = text * each + np.arange(self.source.context) // near.WINDOW
        return window, self.texts * each

    def _add_fisher(
        self, gradients: tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]], classes: NDArray[np.uint8]
    ) -> None:
        energy = np.empty((2, *classes.shape))
        for side, layers in enumerate(gradients):
            for layer, heads in enumerate(layers):
                g = heads.transpose(1, 0, 2).reshape(heads.shape[1], -1)
                norm = np.square(g).sum(axis=1, dtype=np.float64)
                energy[side, layer] = norm
                g, norm = g[self.sinks :], norm[self.sinks :]
                # few tokens hold most of the energy: unclipped, they alone would be the mean
                g = g * np.sqrt(np.minimum(1, np.quantile(norm, CLIP) / np.maximum(norm, 1e-30)))[:, None].astype("f4")
                self.fisher[2 * layer + side] += (g.T @ g) / len(g)
        self.energy.add(classes, energy)
        self.samples += 1


def _fit(
    source: Source, observed: _Observations, predictor: str, index: int, report: Callable[[float], None]
) -> Profile:
    """The profile but for its curve, fitted in the closed loop of the step with this index."""
    n, sinks, depth = observed.plain, observed.sinks, min(DEPTH, source.layers)
    table, regression = _token_table(source, observed, predictor)
    gain_table = quantiser.gain_index(observed.energy.gains())
    weights, bias, sink_bias, inverse, exponent, scale, attention, explained = ([] for _ in range(8))
    fisher = _usable(observed.fisher, observed.samples)
    for b, block in enumerate(observed.blocks):
        report(b / len(observed.blocks))
        layer, side = divmod(b, 2)
        y = block.astype(np.float32)
        out, w, constant = regression.predict(y, prediction.sources(b, predictor, depth))
        at_sinks = (y[n:] - out[n:]).reshape(observed.texts, sinks, -1).mean(axis=0)
        out[n:] += np.tile(at_sinks, (observed.texts, 1))
        gain = quantiser.gain_value(gain_table[side, layer][observed.classes[layer]])
        residual = y - out
        half, octaves = _halved(_transform(residual[:n], fisher[b]))
        back = half.astype(np.float32) * np.float32(2.0**octaves)
        z = residual @ np.linalg.inv(back.astype(np.float64)).astype(np.float32)
        regression.add(b, out + _decoded(z, gain, index, observed.windows if side else None) @ back)
        regression.forget(b - 2 * depth - 1)
        explained.append(1 - float(residual[:n].var(axis=0).sum() / max(y[:n].var(axis=0).sum(), 1e-30)))
        weights.append(w)
        bias.append(constant)
        sink_bias.append(np.pad(at_sinks, ((0, importance.SINKS - sinks), (0, 0))))
        inverse.append(half)
        exponent.append(octaves)
        scale.append(quantiser.scale_units((np.abs(z[:n]) * gain[:n, None]).mean(axis=0) / gain[:n].mean()))
        if side:
            attention.append(_attention_map(observed, layer))
    return Profile(
        model=source.fingerprint,
        shape=observed.shape,
        predictor=predictor,
        depth=depth,
        table=table,
        weights=tuple(weights),
        bias=np.concatenate(bias),
        sink_bias=np.concatenate(sink_bias, axis=1).astype(np.float32),
        inverse=tuple(inverse),
        exponent=np.array(exponent, np.int8),
        scale=np.concatenate(scale),
        gains=gain_table,
        attention=tuple(attention),
        curve=np.array([[0.0, 0.0], [1.0, -1.0]]),
        info={"explained": explained},
    )


def _decoded(
    z: NDArray[np.float32], gain: NDArray[np.float32], index: int, windows: tuple[NDArray[np.intp], int] | None
) -> NDArray[np.float32]:
    """What a decoder has of coefficients z [rows, coefs] at a step index. windows: of those whose means are coded."""
    symbols, steps = np.empty(z.shape, np.int32), (quantiser.step_size(index) / gain).astype(np.float32)
    quantiser.quantise(z, (1 / steps).astype(np.float32), symbols)
    out: NDArray[np.float32] = quantiser.dequantise(symbols, steps)
    if windows is not None:
        window, count = windows
        means = np.empty((count, z.shape[1]), np.int32)
        out += near.code_means(z - out, steps, window, near.mean_steps(index, count), means)[0][window]
    return out


class _Regression:
    """Ridge regression of blocks on features that accumulate; products of features are computed once."""

    def __init__(self, token: NDArray[np.float32], plain: int) -> None:
        self.plain = plain
        self.mean: dict[int, NDArray[np.float32]] = {}
        self.x: dict[int, NDArray[np.float32]] = {}
        self.products: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.add(_TOKEN, token)

    def add(self, name: int, x: NDArray[np.float32]) -> None:
        """A feature [rows, width], for the blocks that come."""
        self.mean[name] = x[: self.plain].mean(axis=0)
        self.x[name] = x - self.mean[name]

    def forget(self, block: int) -> None:
        """Free the features of a block and of those before it."""
        for name in [n for n in self.x if n != _TOKEN and n <= block]:
            del self.x[name], self.mean[name]
        self.products = {pair: p for pair, p in self.products.items() if set(pair) <= self.x.keys()}

    def predict(
        self, y: NDArray[np.float32], blocks: range
    ) -> tuple[NDArray[np.float32], NDArray[np.float16], NDArray[np.float32]]:
        """Prediction of y [rows, channels] from the token and these blocks, its weights and its constant."""
        names = [_TOKEN, *blocks]
        mean = y[: self.plain].mean(axis=0)
        gram = np.block([[self._product(a, b) for b in names] for a in names]).astype(np.float64)
        cross = np.concatenate([self.x[a][: self.plain].T @ (y[: self.plain] - mean) for a in names])
        if gram.size == 0:
            return np.tile(mean, (len(y), 1)), np.zeros((0, y.shape[1]), np.float16), mean
        diagonal = np.diag(gram)
        ridge = RIDGE * (diagonal + 1e-6 * diagonal.mean()) + 1e-9
        w = np.linalg.solve(gram + np.diag(ridge), cross.astype(np.float64)).astype(np.float16)
        used = w.astype(np.float32)
        parts = np.split(used, np.cumsum([self.x[a].shape[1] for a in names])[:-1])
        out = sum((self.x[a] @ p for a, p in zip(names, parts, strict=True)), mean)
        constant = mean - np.concatenate([self.mean[a] for a in names]) @ used
        return out, w, constant.astype(np.float32)

    def _product(self, a: int, b: int) -> NDArray[np.float32]:
        if (a, b) not in self.products:
            self.products[a, b] = self.x[a][: self.plain].T @ self.x[b][: self.plain]
            self.products[b, a] = self.products[a, b].T
        return self.products[a, b]


_TOKEN = -1  # the name of the token's feature, where blocks are known by their number


def _token_table(source: Source, observed: _Observations, predictor: str) -> tuple[NDArray[np.float16], _Regression]:
    """The token table, and a regression that holds its rows as the first feature."""
    used = prediction.uses_token(predictor)
    table = source.embedding().astype(np.float16) if used else np.zeros((0, 0), np.float16)
    token = None
    for text, probs in enumerate(observed.probs):
        rows, index = prediction.token_rows(table, probs, predictor)
        if token is None:
            token = np.empty((observed.rows, rows.shape[1]), np.float32)
        token[observed.rows_of(text)] = rows[index]
    assert token is not None
    return table, _Regression(token, observed.plain)


def _usable(sums: list[NDArray[np.float64]], texts: int) -> list[NDArray[np.float64]]:
    """Mean Fisher information of each block, damped: no direction is free, and no block."""
    traces = np.array([np.trace(f) / len(f) / texts for f in sums])
    least = np.mean(traces) * LEAST_FISHER
    out = []
    for f, trace in zip(sums, traces, strict=True):
        out.append(f / texts + max(DAMPING * trace, least, 1e-30) * np.eye(len(f)))
    return out


def _transform(residual: NDArray[np.float32], fisher: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse transform [channels, channels]: coefficients to values.

    Coefficients are the residual in the Fisher metric, KL = 1/2 e^T F e, rotated to its principal axes there
    (Karhunen-Loeve), so that one step for all is the best allocation of bits.
    """
    w, u = np.linalg.eigh(fisher)
    white = residual @ ((u * np.sqrt(w)) @ u.T).astype(np.float32)
    axes = np.linalg.eigh((white.T @ white / len(white)).astype(np.float64))[1][:, ::-1]
    return axes.T @ ((u / np.sqrt(w)) @ u.T)


def _halved(matrix: NDArray[np.float64]) -> tuple[NDArray[np.float16], int]:
    """A matrix as float16 and an exponent of two, which keeps its largest entry between 1/2 and 1."""
    octaves = int(np.ceil(np.log2(np.abs(matrix).max())))
    return (matrix * 2.0**-octaves).astype(np.float16), octaves


def _attention_map(observed: _Observations, layer: int) -> NDArray[np.float32]:
    """Regression of log2 attention received on a token's key and value."""
    some = slice(0, observed.plain, 3)
    x = np.concatenate([observed.blocks[2 * layer][some], observed.blocks[2 * layer + 1][some]], axis=1)
    x = np.concatenate([x.astype(np.float64), np.ones((len(x), 1))], axis=1)
    y = np.log2(np.maximum(observed.attention[layer, some], 2.0**-12))
    gram = x.T @ x
    return np.linalg.solve(gram + 1e-3 * np.diag(np.diag(gram) + 1e-9), x.T @ y).astype(np.float32)


def _curve(source: Source, profile: Profile, checks: Sequences, report: Callable[[float], None]) -> NDArray[np.float64]:
    """Step index and log2 KL on texts that were not fitted."""
    points: list[tuple[int, list[float]]] = [(quantiser.step_index(step), []) for step in CURVE]
    for i, (_, ids) in enumerate(checks):
        report(i / len(checks))
        kv, probs, attention = source.prefill(ids)
        reference = source.logprobs(ids, kv)
        for index, measured in points:
            stream = codec.encode(kv, probs, profile=profile, step=quantiser.step_size(index), importance=attention)
            kl, _ = source.divergence(ids, codec.decode(stream, profile=profile), reference)
            measured.append(np.log2(max(kl, 1e-12)))
    # a deviation above the mean: most texts are to lose less than is asked for, not half of them
    curve = np.array([[index, np.mean(measured) + np.std(measured)] for index, measured in points])
    # loss grows with about the square of the step: what few texts measure beyond that is noise
    slope = np.polyfit(curve[:, 0], curve[:, 1], 1)[0].clip(-4 / 16, -1 / 16)
    return np.stack([curve[:, 0], curve[:, 1].mean() + slope * (curve[:, 0] - curve[:, 0].mean())], axis=1)
