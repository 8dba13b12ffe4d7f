"""Bridges from model libraries to `seqkv.engine`, one module a library.

Each module imports its library when it is imported itself; this package imports none of them.
"""
