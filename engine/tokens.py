"""Token ids of a session, as the trie and the aligner keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqkv.engine.arrays import to_numpy
from seqkv.engine.errors import ProbsError


def checked(token_ids: Any) -> NDArray[np.int32]:
    """Token ids as int32 [tokens], maybe none. ProbsError if they are not one sequence of integers in [0, 2**31)."""
    ids = to_numpy(token_ids, ProbsError)[0]
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ProbsError(f"token_ids: expected one sequence of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**31):
        raise ProbsError("token_ids: ids must be between 0 and 2**31 - 1")
    return ids.astype(np.int32)
