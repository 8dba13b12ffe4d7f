from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, *found: dict[str, object]) -> subprocess.CompletedProcess[str]:
    files = []
    for i, one in enumerate(found):
        files.append(str(tmp_path / f"{i}.json"))
        Path(files[-1]).write_text(json.dumps(one))
    return subprocess.run([sys.executable, str(ROOT / "bench/paper_table.py"), *files], capture_output=True, text=True)


def archive(exact: bool = True) -> dict[str, object]:
    text = {"text": "a", "tokens": 512, "bits_per_token": 4.0, "cross_entropy_bits": 3.98, "fp16_ratio": 46080.0}
    return {"tier": "tokens", "archive": True, "texts": [text | {"exact": exact}]}


def test_rows(tmp_path: Path) -> None:
    near = {"kl": 0.01, "texts": [{"bits_per_value": 0.25, "kl": 0.0104}]}
    lines = run(tmp_path, archive(), near).stdout.splitlines()
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines}
    # 184,320 bits a token in fp16 of SmolLM2; 131,072 bytes a token of the 8B, 327,680 of the 70B
    assert rows["| tokens, archive: ids"][1:] == [
        *("4.00", "46,080", "8,640", "262,144", "49,152", "655,360", "122,880 |"),
    ]
    assert rows["| tokens, archive: with digests"][1] == "4.97"
    assert rows["| the paper's bound"][1:3] == ["3.3 to 4.3", "42,865 to 55,855"]
    assert rows["| near, `kl=0.01`"] == ["KL 0.010", "2,880.00", "64.0", "12.0", "-", "-", "-", "- |"]
    assert rows["| a"] == ["512", "4.000", "3.980", "+0.50%", "46,080 |"]


def test_refuses_what_is_not_exact(tmp_path: Path) -> None:
    done = run(tmp_path, archive(exact=False))
    assert done.returncode == 1 and "bit for bit" in done.stderr
