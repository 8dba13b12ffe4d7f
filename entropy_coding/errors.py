"""Errors of the entropy coder."""


class CorruptGroup(ValueError):
    """The bytes of a stream group are damaged, or belong to other contexts. Fetch or encode the group again."""
