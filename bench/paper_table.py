"""The paper's table with measured numbers: bits a token by tier, beside its bound of 3.3 to 4.3.

    seqkv eval smollm2 --tier tokens --text FILES --json > tokens.json
    seqkv eval smollm2 --tier tokens --archive --text FILES --json > archive.json
    seqkv eval smollm2 --profile P --text FILES --json > near.json
    python bench/paper_table.py tokens.json archive.json near.json

Each file of `seqkv eval --json` is a row, in the order given. SmolLM2's ratios are measured. Those of the Llamas follow
by arithmetic, from the same bits a token and their own layers and heads: that is right for token ids, whose bits do not
depend on the size of the cache (a larger model predicts them better, and has another vocabulary), and says nothing of
the tiers that code the cache's numbers, so these have none.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 256  # tokens for which there is a digest of each layer, of which the stream keeps a byte
TURBOQUANT = 3.0  # bits a number, as the paper counts it: without its norms
PAPER = 3.3, 4.3  # bits a token, arXiv 2604.15356: Theorem 1 at a perplexity of 10 to 20


@dataclass(frozen=True)
class Model:
    """A model's cache: layers, key and value heads, width of a head."""

    name: str
    layers: int
    heads: int
    width: int

    @property
    def values(self) -> int:
        """Numbers that a token takes."""
        return 2 * self.layers * self.heads * self.width

    @property
    def digests(self) -> float:
        """Bits a token of the digests."""
        return 8 * (1 + self.layers) / CHUNK


MODELS = Model("SmolLM2-135M", 30, 3, 64), Model("Llama-3.1-8B", 32, 8, 128), Model("Llama-3.1-70B", 80, 8, 128)


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The rows of the table that a file of `seqkv eval --json` gives."""
    texts = found["texts"]
    if found.get("tier") != "tokens":
        bits = statistics.fmean(text["bits_per_value"] for text in texts) * MODELS[0].values
        if found.get("tier") == "lossless":
            return [_row("lossless", "none", bits, bits, MODELS[:1])]
        kl = statistics.fmean(text["kl"] for text in texts)
        return [_row(f"near, `kl={found['kl']}`", f"KL {kl:.3f}", bits, bits, MODELS[:1])]
    bits = statistics.fmean(text["bits_per_token"] for text in texts)
    if not all(text["exact"] for text in texts):
        raise SystemExit("a text of the tokens tier did not come back bit for bit")
    name = "tokens, archive" if found["archive"] else "tokens"
    return [
        _row(f"{name}: ids", "none", bits, bits, MODELS),
        _row(f"{name}: with digests", "none", bits, bits, MODELS, digests=True),
    ]


def cross_entropy(found: dict[str, Any]) -> list[str]:
    """A line for each text of an archive: what its ids take, and what the model's prediction of them holds."""
    return [
        f"| {text['text']} | {text['tokens']:,} | {text['bits_per_token']:.3f} | {text['cross_entropy_bits']:.3f} | "
        f"{text['bits_per_token'] / text['cross_entropy_bits'] - 1:+.2%} | {text['fp16_ratio']:,.0f} |"
        for text in found["texts"]
    ]


def _row(tier: str, loss: str, low: float, high: float, models: tuple[Model, ...], digests: bool = False) -> list[str]:
    """low, high: bits a token, equal if it is one number."""

    def span(one: float, other: float) -> str:
        texts = [f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in (one, other)]
        return texts[0] if texts[0] == texts[1] else " to ".join(texts)

    first, second = (bits + digests * models[0].digests for bits in (low, high))
    cells = [tier, loss, f"{first:,.2f}" if low == high else f"{first:.1f} to {second:.1f}"]
    for model in MODELS:
        for size in (16.0, TURBOQUANT):
            most, least = (size * model.values / (bits + digests * model.digests) for bits in (high, low))
            cells.append(span(most, least) if model in models else "-")
    return cells


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description="The paper's table, from files of seqkv eval --json.")
    parser.add_argument("files", nargs="+", type=Path)
    found = [json.loads(file.read_text()) for file in parser.parse_args().files]
    names = [f"{model.name}: x {other}" for model in MODELS for other in ("fp16", "TurboQuant 3 bit")]
    table = [["tier", "loss", "bits/token", *names], ["---"] * (3 + len(names))]
    table.append(_row("the paper's bound", "none", *PAPER, MODELS))
    for one in found:
        table += rows(one)
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    for one in found:
        if one.get("archive"):
            print("\n| text | tokens | bits/token | cross-entropy | over it | x fp16 |")
            print("| --- " * 6 + "|")
            print("\n".join(cross_entropy(one)))


if __name__ == "__main__":
    main()
