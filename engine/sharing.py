"""Encoding against a reference: chunks that are copied, chunks that are coded as deltas, and the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqkv.engine import delta, importance, near, quantiser
from seqkv.engine.cache import KVCache
from seqkv.engine.container import Section
from seqkv.engine.errors import CacheError
from seqkv.engine.form import DELTA, DELTA_MEANS, chunk_bounds, chunks
from seqkv.engine.host import blocks_of, own_sections, side_of
from seqkv.engine.known import Known
from seqkv.engine.modes import Calibrated
from seqkv.engine.probs import TokenProbs
from seqkv.engine.reference import NONE, Aligned, Reference

MOST_LOSS, MOST_LOSS_OF_A_TOKEN = 4.0, 6.0
"""How much more than the reference lost, in the Fisher metric, copying a chunk may lose, on average and of a token.

More means that the tokens are the same but not what they stand for (the placeholders of images, say). A token whose
keys and values are those of the reference loses up to 3.5 times the average, the same token in another context at least
8 times. The first token of all is looked at on average only: its numbers are so large that their rounding to bfloat16
may be more than quantisation lost."""

MOST_OF_ALONE = 1.25  # times the loss of a chunk alone, in the Fisher metric, that deltas may lose
STRANGE = 0.7  # a token is not aligned if more than this part of its residual's energy would be left


Blocks = Callable[[int], NDArray[np.float32]]  # of a chunk: block -> [tokens, channels]


@dataclass
class Shared:
    """What a session has in common with a reference, and its chunks coded with that."""

    kv: KVCache
    mode: Calibrated
    probs: TokenProbs
    classes: NDArray[np.uint8]
    known: Known
    step: int
    reference: Reference
    aligned: Aligned
    loss: near.Loss

    @classmethod
    def encode(
        cls,
        kv: KVCache,
        mode: Calibrated,
        probs: TokenProbs,
        classes: NDArray[np.uint8],
        step: int,
        reference: Reference,
    ) -> tuple[list[Section], near.Loss, Aligned | None, list[int]]:
        """The sections of all chunks, what was lost, for what the stream depends on the reference, and each chunk's
        step.

        classes [layers, tokens]: of importance. step: index.
        """
        known = Known(probs.token_ids, classes.copy())
        sinks = importance.sinks(kv.positions)
        aligned = Aligned.find(probs.token_ids, sinks, reference)
        shared = cls(kv, mode, probs, classes, known, step, reference, aligned, near.Loss.none())
        same_start = sinks == reference.sinks  # else equal bytes would not mean the same
        sections, copied = shared._copy(reference.shared_chunks(probs.token_ids, step) if same_start else 0)
        start = min(copied * near.CHUNK, kv.tokens)
        shared.aligned.index[:start] = NONE
        known.settle(shared.aligned, start)
        for chunk in range(copied, chunks(kv.tokens)):
            coded = shared._code(chunk)  # decides whether its tokens stay aligned
            sections += known.sections(chunk, shared.aligned) + coded
        steps = reference.form.steps[:copied] + [step] * (chunks(kv.tokens) - copied)
        return sections, shared.loss, shared.aligned if shared.aligned.any() else None, steps

    def _copy(self, count: int) -> tuple[list[Section], int]:
        """Sections of leading chunks that are the reference's, and how many these are."""
        sections: list[Section] = []
        for chunk in range(count):
            part = slice(*chunk_bounds(chunk, self.kv.tokens))
            lost, by_token = self._lost(part, self.reference.blocks(chunk))
            usual = self.reference.usual_loss(chunk)
            worst = by_token[1 if chunk == 0 else 0 :].max(initial=0.0)
            # written so that NaN fails
            if not (lost.fisher <= MOST_LOSS * usual * lost.tokens and worst <= MOST_LOSS_OF_A_TOKEN * usual):
                return sections, chunk
            self.loss += lost
            self.known.classes[:, part] = self.reference.known.classes[:, part]
            sections += self.reference.chunk_sections(chunk)
        return sections, count

    def _lost(self, part: slice, decoded: NDArray[np.float32]) -> tuple[near.Loss, NDArray[np.float64]]:
        """What is lost if some tokens are decoded to this; and in the Fisher metric of each of them, [tokens]."""
        model, values = self.mode.model(), blocks_of(self.kv, part)
        gain = near.gains(self.mode.gains, self.reference.known.classes[:, part])
        loss = near.Loss(0.0, np.zeros(2), np.zeros(2), part.stop - part.start)
        by_token = np.zeros(loss.tokens)
        for block in range(len(model.widths)):
            true = values(block)
            error = true - decoded[:, model.starts[block] : model.starts[block + 1]]
            weighted = (error @ model.forward[block]) * quantiser.gain_value(gain[block])[:, None]
            by_token += np.square(weighted, dtype=np.float64).sum(axis=1)
            loss.error[block % 2] += near.energy(error)
            loss.energy[block % 2] += near.energy(true - true.mean(axis=0))
        loss.fisher = float(by_token.sum())
        return loss, by_token

    def _code(self, chunk: int) -> list[Section]:
        """A chunk's coefficients, with the reference where that is worth it. Adds to the loss."""
        part = slice(*chunk_bounds(chunk, self.kv.tokens))
        values = functools.cache(blocks_of(self.kv, part))
        settled = self.known.classes[:, part].copy()
        self.known.classes[:, part] = self.classes[:, part]
        best, lost, decoded = self._alone(chunk, values)
        alone = lost.fisher
        self.known.classes[:, part] = settled
        if self.aligned.any(part):
            self._part_from_strangers(chunk, values, decoded)
        held = self.aligned.held(part)
        reference = self.reference.rows(self.aligned.index[part][held])
        for price in delta.PRICES if held.any() else ():
            coded = self._delta(chunk, values, held, reference, price)
            if coded is None:
                break
            if coded[1].fisher <= MOST_OF_ALONE * alone:
                if _bytes(coded[0]) < _bytes(best):
                    self.loss += coded[1]
                    return coded[0]
                break
        self.known.classes[:, part] = self.classes[:, part]
        self.aligned.index[part] = NONE
        self.loss += lost
        return best

    def _part_from_strangers(self, chunk: int, values: Blocks, decoded: NDArray[np.float32]) -> None:
        """Align no longer the tokens of a chunk of which the reference says little more than what is decoded already.

        decoded [tokens, coefs]: of the chunk coded alone.
        """
        model, side, part = self.mode.model(), self._side(chunk), slice(*chunk_bounds(chunk, self.kv.tokens))
        held = self.aligned.held(part)
        reference, expected = self.reference.rows(self.aligned.index[part][held]), near.from_tokens(model, side)
        own, other = np.zeros(len(held)), np.zeros(len(held))
        for block in range(len(model.widths)):
            true, here = values(block), slice(*model.starts[block : block + 2])
            residual = (true - near.predicted(model, block, side, expected, decoded)) @ model.forward[block]
            own += np.square(residual, dtype=np.float64).sum(axis=1)
            far = (true[held] - reference[:, here]) @ model.forward[block]
            other[held] += np.square(far, dtype=np.float64).sum(axis=1)
        strange = other > STRANGE * own
        self.aligned.index[part][strange] = NONE
        self.known.classes[:, part][:, strange] = self.classes[:, part][:, strange]

    def _side(self, chunk: int) -> near.Side:
        start, stop = chunk_bounds(chunk, self.kv.tokens)
        return side_of(self.mode, self.probs, self.known.classes, self.step, start, stop)

    def _alone(self, chunk: int, values: Blocks) -> tuple[list[Section], near.Loss, NDArray[np.float32]]:
        side, mode = self._side(chunk), self.mode
        coded = near.encode_chunk(mode.model(), side, values, mode.means)
        sections = own_sections(chunk, mode, mode.places, side, coded.symbols, coded.means)
        return sections, coded.loss, coded.decoded

    def _delta(
        self, chunk: int, values: Blocks, held: NDArray[np.bool_], reference: NDArray[np.float32], price: float
    ) -> tuple[list[Section], near.Loss] | None:
        """With the tokens `held` as reference [held tokens, coefs] has them; None if that is too far for symbols."""
        side, mode = self._side(chunk), self.mode
        try:
            coded, means = delta.encode_chunk(mode.model(), side, mode.places, values, held, reference, price)
        except CacheError:
            return None
        own = delta.part(side, ~held)
        sections = own_sections(chunk, mode, mode.places, own, coded.symbols[~held], coded.means)
        for kind, some, symbols, shift in (
            (DELTA, delta.part(side, held), coded.symbols[held], delta.SHIFT),
            (DELTA_MEANS, near.mean_side(side, 1), means, near.MEAN_SHIFT),
        ):
            data = near.encode_symbols(mode.places, mode.starts, some, symbols, shift)
            sections.append(Section(kind, chunk, data))
        return sections, coded.loss


def _bytes(sections: Iterable[Section]) -> int:
    return sum(memoryview(section.data).nbytes for section in sections)
