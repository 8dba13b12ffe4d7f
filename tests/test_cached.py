from __future__ import annotations

import re
import threading
from pathlib import Path

from seqkv.engine.cached import cached_property

ROOT = Path(__file__).parents[1]


class Slow:
    def __init__(self) -> None:
        self.go, self.begun, self.times = threading.Event(), threading.Event(), 0

    @cached_property
    def value(self) -> int:
        """What it is."""
        self.times += 1
        self.begun.set()
        self.go.wait()
        return 3


def test_it_is_computed_once_for_each() -> None:
    one, other = Slow(), Slow()
    one.go.set()
    other.go.set()
    assert (one.value, one.value, other.value) == (3, 3, 3) and one.times == other.times == 1
    assert Slow.value.__doc__ == "What it is." and vars(one)["value"] == 3


def test_nobody_waits_for_another_as_a_fork_would_for_ever() -> None:
    slow, other = Slow(), Slow()
    other.go.set()
    threads = [threading.Thread(target=lambda one=one: one.value, daemon=True) for one in (slow, other)]
    threads[0].start()
    slow.begun.wait()
    threads[1].start()
    threads[1].join(60)
    waits = threads[1].is_alive()
    slow.go.set()
    threads[0].join()
    assert not waits and slow.value == 3


def test_functools_has_no_place_in_what_may_be_forked() -> None:
    sources = [path for folder in ("engine", "entropy_coding", "adapters") for path in (ROOT / folder).glob("*.py")]
    assert [p.name for p in sources if re.search("functools.*cached_property", p.read_text())] == ["cached.py"]
