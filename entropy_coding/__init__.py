"""How symbols become bytes: adaptive scale classes and an interleaved range coder. Knows nothing of models or files."""

from seqkv.entropy_coding.errors import CorruptGroup
from seqkv.entropy_coding.group import cost, decode_group, decode_groups, encode_group, encode_groups

__all__ = ["CorruptGroup", "cost", "decode_group", "decode_groups", "encode_group", "encode_groups"]
