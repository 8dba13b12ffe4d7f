from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from seqkv import engine  # noqa: E402
from seqkv.adapters import huggingface as hf  # noqa: E402
from tests import tiny_llama  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"


def test_the_examples_run(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama.save(tmp_path / "model")
    like = type(model)(layers=2, heads=2, key=8, value=8)  # caches of the same shape as the tiny model's
    texts = {f"kind {k}": [like.text(10 * k + seed, 120) for seed in range(4)] for k in range(4)}
    engine.calibrate(like, texts, predictor="layers").save(tmp_path / "profile.safetensors")
    monkeypatch.chdir(tmp_path)
    tiny, _ = hf.load_model(path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    for block in blocks:
        code = block.replace("path/to/model", path).replace("cache=cache", f"{hf.cache_kwarg(tiny)}=cache")
        exec(compile(code, str(PAGE), "exec"), names)
    cache = names["cache"]
    assert cache.past.stop > 300 and cache.get_seq_length() == names["answer"].shape[1] - 1
