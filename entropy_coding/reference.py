"""The definition of the coder, in plain Python: read this, run :mod:`seqkv.entropy_coding.group`.

A *group* is an integer matrix [tokens, coefs]; its coefficients are cut into consecutive *segments*. It is coded by
LANES = 32 interleaved range asymmetric-numeral-system coders (rANS, Duda, arXiv 1311.2540) that share one array of
16-bit words, so that a warp of a GPU decodes a group in lockstep, a lane a token.

Order: for segment, for row of 32 tokens, for coefficient of the segment, one *step*: all lanes of the row at once.
In a step the decoder
  1. takes each lane's scale class from its context, which knows everything coded in earlier steps;
  2. decodes each lane's token, and renormalises;
  3. decodes raw bits where a token asks for them, in two pieces: first the lowest 16 of every lane that has any, then
     the rest of those that have more; renormalises after each piece;
  4. updates the contexts.
Whenever several lanes need a word, they take them in lane order. Lanes beyond the last token are idle.

Invariants. Between codings every state x is in [2^16, 2^32). Coding a symbol of frequency f of 2^n and start s maps
    x -> (x // f) * 2^n + x % f + s,          undone by          x -> f * (x >> n) + (x mod 2^n) - s,
where x mod 2^n, in [s, s + f), tells the symbol. The encoder first moves the low word of x out if x >= f * 2^(32-n),
so that the result is below 2^32; the decoder moves a word in when x < 2^16. As n <= 16, one word is always enough, and
both agree on when. The encoder goes backwards through what the decoder goes forwards through, and leaves every state at
2^16 before the first symbol it codes: that is the state in which the decoder must end, with no word left.

Bytes of a group: the 32 states the decoder starts from, uint32, then its words, uint16, all little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from seqkv.entropy_coding import alphabet, contexts, tables
from seqkv.entropy_coding.errors import CorruptGroup

LANES = 32
WORD_BITS = 16
LOWEST_STATE = 1 << WORD_BITS
STATE_BYTES = 4 * LANES

Matrix = Sequence[Sequence[int]]


class Contexts:
    """The adaptive contexts of one group, the same on both sides."""

    def __init__(self, tokens: int, base: Sequence[int], offset: Matrix) -> None:
        self.base, self.offset = base, offset
        self.token_state = [0] * tokens
        self.coef_state = [0] * len(base)

    def start_segment(self, segment: int) -> None:
        self.segment = segment
        if segment > 0:
            self.token_state = [contexts.decayed(state, contexts.DECAY_SHIFT) for state in self.token_state]

    def scale_class(self, token: int, coef: int) -> int:
        units = int(self.base[coef]) + int(self.offset[token][self.segment])
        return contexts.scale_class(contexts.in_subunits(units) + self.token_state[token] + self.coef_state[coef])

    def update(self, row: range, coef: int, scores: list[int]) -> None:
        """After a step: the scores of the row's lanes."""
        for token, score in zip(row, scores, strict=True):
            self.token_state[token] = contexts.moved(self.token_state[token], score, contexts.TOKEN_RATE)
        self.coef_state[coef] = contexts.moved(self.coef_state[coef], sum(scores), contexts.COEF_RATE)


def steps(tokens: int, segment_starts: Sequence[int], context: Contexts) -> Iterator[tuple[range, int]]:
    """The steps of a group in coding order, as (row of tokens, coefficient)."""
    for segment in range(len(segment_starts) - 1):
        context.start_segment(segment)
        for first in range(0, tokens, LANES):
            for coef in range(segment_starts[segment], segment_starts[segment + 1]):
                yield range(first, min(first + LANES, tokens)), coef


def token_range(scale_class: int, symbol: int) -> tuple[int, int]:
    """Start and frequency of a token in a class."""
    entry = scale_class * tables.ROW + symbol
    return int(tables.STARTS[entry]), int(tables.STARTS[entry + 1] - tables.STARTS[entry])


def raw_pieces(symbol: int) -> Iterator[tuple[int, int]]:
    """(shift, bits) of the pieces of a token's raw bits."""
    bits = alphabet.raw_bits(symbol) if symbol >= alphabet.ESCAPE else 0
    for shift in range(0, bits, alphabet.RAW_PIECE):
        yield shift, min(alphabet.RAW_PIECE, bits - shift)


def encode_group(symbols: Matrix, base: Sequence[int], offset: Matrix, segment_starts: Sequence[int]) -> bytes:
    """Bytes of symbols [tokens, coefs]; base [coefs], offset [tokens, segments], segment_starts [segments + 1]."""
    context = Contexts(len(symbols), base, offset)
    coded: list[tuple[int, int, int, int]] = []  # in the decoder's order: lane, start, frequency, bits
    for row, coef in steps(len(symbols), segment_starts, context):
        codes, scores = [], []
        for lane, token in enumerate(row):
            value = int(symbols[token][coef])
            large = abs(value) > alphabet.LARGEST_PLAIN
            symbol = alphabet.escape_token(value) if large else alphabet.plain_token(value)
            codes.append((symbol, alphabet.escape_raw(symbol, value) if large else 0))
            scale_class = context.scale_class(token, coef)
            scores.append(int(tables.SCORES[scale_class, symbol]))
            coded.append((lane, *token_range(scale_class, symbol), alphabet.PRECISION))
        for piece in range(2):
            for lane, (symbol, raw) in enumerate(codes):
                for shift, bits in list(raw_pieces(symbol))[piece : piece + 1]:
                    coded.append((lane, raw >> shift & (1 << bits) - 1, 1, bits))
        context.update(row, coef, scores)

    states = [LOWEST_STATE] * LANES
    words: list[int] = []
    for lane, start, frequency, bits in reversed(coded):
        x = states[lane]
        if x >= frequency << (32 - bits):
            words.append(x & 0xFFFF)
            x >>= WORD_BITS
        states[lane] = (x // frequency << bits) + x % frequency + start
    return struct.pack(f"<{LANES}I{len(words)}H", *states, *reversed(words))


def decode_group(
    buffer: bytes, tokens: int, base: Sequence[int], offset: Matrix, segment_starts: Sequence[int]
) -> list[list[int]]:
    """Inverse of :func:`encode_group`; raises CorruptGroup if the buffer cannot be its result."""
    if len(buffer) < STATE_BYTES or len(buffer) % 2:
        raise CorruptGroup(f"a group is {STATE_BYTES} bytes of states and 2 bytes a word, not {len(buffer)} bytes")
    word_count = (len(buffer) - STATE_BYTES) // 2
    states = list(struct.unpack_from(f"<{LANES}I", buffer))
    words = iter(struct.unpack_from(f"<{word_count}H", buffer, STATE_BYTES))

    def renormalise(lane: int) -> None:
        if states[lane] < LOWEST_STATE:
            word = next(words, None)
            if word is None:
                raise CorruptGroup("the group ends before its last symbol")
            states[lane] = states[lane] << WORD_BITS | word

    def decode_token(lane: int, scale_class: int) -> int:
        slot = states[lane] % alphabet.TOTAL
        symbol = 0
        while sum(token_range(scale_class, symbol)) <= slot:
            symbol += 1
        start, frequency = token_range(scale_class, symbol)
        states[lane] = frequency * (states[lane] >> alphabet.PRECISION) + slot - start
        return symbol

    symbols = [[0] * len(base) for _ in range(tokens)]
    context = Contexts(tokens, base, offset)
    for row, coef in steps(tokens, segment_starts, context):
        classes = [context.scale_class(token, coef) for token in row]
        tokens_read = [decode_token(lane, scale_class) for lane, scale_class in enumerate(classes)]
        for lane in range(len(row)):
            renormalise(lane)
        raw = [0] * len(row)
        for piece in range(2):
            for lane, symbol in enumerate(tokens_read):
                for shift, bits in list(raw_pieces(symbol))[piece : piece + 1]:
                    raw[lane] |= states[lane] % (1 << bits) << shift
                    states[lane] >>= bits
                    renormalise(lane)
        for lane, token in enumerate(row):
            symbol = tokens_read[lane]
            large = symbol >= alphabet.ESCAPE
            value = alphabet.escape_value(symbol, raw[lane]) if large else alphabet.plain_value(symbol)
            if abs(value) > alphabet.LARGEST_VALUE:
                raise CorruptGroup(f"symbol {value} is beyond 32 bits")
            symbols[token][coef] = value
        context.update(row, coef, [int(tables.SCORES[c, s]) for c, s in zip(classes, tokens_read, strict=True)])
    if next(words, None) is not None or any(state != LOWEST_STATE for state in states):
        raise CorruptGroup("the group does not end where its last symbol does")
    return symbols
