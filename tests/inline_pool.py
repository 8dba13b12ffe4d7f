"""A pool that is none, for tests that decode many streams."""

from __future__ import annotations


class Inline:
    """A pool without threads: to start them takes longer than to refuse a stream."""

    def __init__(self, workers: int) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None: ...

    map = staticmethod(map)
