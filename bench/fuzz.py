"""Are wrong bytes refused? Streams, profiles and stores, altered at random and by a writer who mends every checksum.

    python bench/fuzz.py [--minutes 120] [--streams N] [--seed 0] [--workers 1] [--targets near lossless ...]
        [--out bench/results/fuzz.json] [--findings FOLDER] [--resume]
    python bench/fuzz.py --atheris [--minutes 10] [--targets near-delta]     (needs `pip install atheris`)

What is read, and how it is altered: tests/fuzz_targets.py and tests/fuzz_mutations.py. Each worker is a process with
64 MB of address space more than it has when it begins a stream, what it freed before given back; a parent kills it if
one takes 20 seconds, and begins another if it dies. Outcomes, of each target:

    refused     a SeqkvError
    same        read, as it was before it was altered: what was altered is not looked at, or was put right again
    other       read as something else, checksums having been mended: what a hostile writer can do
    wrong       read as something else although nothing was mended
    error       another exception than a SeqkvError
    memory      more than 64 MB were asked for
    slow        more than a second of processor time
    crash       the process died
    hang        more than 20 seconds

The last six but `other` are findings, of which one input for each place in the code is kept. Stream i of a seed is the
same in every run. Exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import multiprocessing
import os
import re
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
import zlib
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from bench.results_of import machine  # noqa: E402

for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

LIMIT = 64 << 20  # bytes that reading a stream may take
LONGEST = 1 << 20  # bytes of a stream
SLOW, HANG = 1.0, 20.0  # seconds: of processor time, and until a worker is killed
FINDINGS = ("wrong", "error", "memory", "slow", "crash", "hang")
_NOW = struct.Struct("<QdI24s")  # number of the stream, when it was begun (0: none is), bytes, target; then the bytes
_ROOM = _NOW.size + (1 << 20)


class Fuzzer:
    """Makes and reads one stream after another."""

    def __init__(self, seed: int, names: set[str] | None) -> None:
        warnings.simplefilter("ignore")
        from seqkv.engine import SeqkvError
        from tests import fuzz_mutations, fuzz_targets

        fuzz_targets.without_threads()
        self.seed, self.refusal, self.raw = seed, SeqkvError, fuzz_mutations.raw
        self.targets = fuzz_targets.targets(names)
        self.expected = {name: [t.read(seed) for seed in t.seeds] for name, t in self.targets.items()}
        # slow ones less often
        self.names = [n for n in self.targets for _ in range({"store": 2, "folder": 1, "tokens": 8}.get(n[:6], 40))]

    def make(self, number: int) -> tuple[str, int, bool, bytes]:
        """Target, seed, whether checksums are mended, and the bytes."""
        rng = Random(f"{self.seed}/{number}")
        while True:  # a header may be doubled again and again; what is as long as that may take as much
            name = rng.choice(self.names)
            target = self.targets[name]
            seed, other = rng.randrange(len(target.seeds)), rng.choice(target.seeds)
            mended = target.mend is not None and rng.randrange(8) > 0
            make: Any = target.mend if mended else self.raw
            data = make(rng, target.seeds[seed], other)
            if len(data) <= LONGEST:
                return name, seed, mended, data

    def read(self, name: str, seed: int, mended: bool, data: bytes, limited: bool = True) -> tuple[str, str]:
        """Outcome, and of a finding where."""
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is held yet, and would be room beyond the limit
        began = time.process_time()
        try:
            if limited:
                resource.setrlimit(resource.RLIMIT_AS, (_held() + LIMIT, resource.RLIM_INFINITY))
            got = self.targets[name].read(data)
        except self.refusal:
            outcome, where = "refused", ""
        except MemoryError as error:
            outcome, where = "memory", _place(error)
        except Exception as error:
            outcome, where = "error", f"{type(error).__name__} {_place(error)}"
        else:
            same = got == self.expected[name][seed]
            outcome, where = "same" if same else "other" if mended else "wrong", name
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if time.process_time() - began > SLOW:
            return "slow", name
        return outcome, where if outcome in FINDINGS else ""


def _held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _place(error: BaseException) -> str:
    """The innermost line of this project's own code."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if re.search(r"(engine|entropy_coding)/", f.filename)
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "outside"


def work(connection: Connection, path: Path, options: argparse.Namespace, first: int, stride: int) -> None:
    """A worker: stream first, first + stride, ..."""
    with path.open("r+b") as file:
        now = mmap.mmap(file.fileno(), _ROOM)
    fuzzer = Fuzzer(options.seed, options.targets)
    connection.send(("ready", None))
    counts: Counter[tuple[str, str]] = Counter()
    number, said = first, time.monotonic()
    while True:
        name, seed, mended, data = fuzzer.make(number)
        kept = data[: _ROOM - _NOW.size]  # for the parent, should this process die
        now[_NOW.size : _NOW.size + len(kept)] = kept
        now[: _NOW.size] = _NOW.pack(number, time.monotonic(), len(kept), name.encode()[:24])
        outcome, where = fuzzer.read(name, seed, mended, data)
        now[: _NOW.size] = _NOW.pack(number, 0.0, 0, b"")
        counts[name, outcome] += 1
        if outcome in FINDINGS:
            connection.send(("found", (number, name, outcome, where, data)))
        number += stride
        if time.monotonic() - said > 1 or outcome in FINDINGS:
            connection.send(("counts", (dict(counts), number)))
            counts.clear()
            said = time.monotonic()


class Worker:
    """A worker process, what it says, and what it is at."""

    def __init__(self, options: argparse.Namespace, place: int, first: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.path = options.findings / f"now.{place}"
        self.path.write_bytes(bytes(_ROOM))
        self.connection, there = context.Pipe()
        self.next, self.place, self.ready = first, place, False
        arguments = (there, self.path, options, first, options.workers)
        self.process = context.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        there.close()

    def at(self) -> tuple[int, float, str, bytes]:
        """Number, when it was begun, target and bytes of the stream that is read."""
        data = self.path.read_bytes()
        number, began, size, name = _NOW.unpack_from(data)
        return number, began, name.rstrip(b"\0").decode(), data[_NOW.size : _NOW.size + size]

    def kill(self) -> None:
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class Log:
    """Counts and findings, and the summary."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.counts, self.findings = options, Counter[tuple[str, str]](), dict[str, dict[str, Any]]()
        self.before, self.next, self.began = 0.0, 0, time.monotonic()
        if options.resume and options.out.exists():
            known = json.loads(options.out.read_text())
            self.before, self.next = known["seconds"], known["next"]
            self.counts.update({(n, o): c for n, some in known["targets"].items() for o, c in some.items()})
            self.findings = known["findings"]

    @property
    def streams(self) -> int:
        return sum(self.counts.values())

    def found(self, number: int, name: str, outcome: str, where: str, data: bytes) -> None:
        key = f"{outcome}: {where or name}"
        known = self.findings.setdefault(key, {"count": 0, "target": name, "number": number})
        known["count"] += 1
        if known["count"] <= 2:
            file = f"{name}.{zlib.crc32(data):08x}"
            (self.options.findings / file).write_bytes(data)
            known.setdefault("inputs", []).append(file)
            print(f"\n{key}: stream {number}, {len(data)} bytes, {file}", flush=True)

    def write(self) -> None:
        seconds = self.before + time.monotonic() - self.began
        targets: dict[str, dict[str, int]] = {}
        for (name, outcome), count in sorted(self.counts.items()):
            targets.setdefault(name, {})[outcome] = count
        total = Counter({o: sum(c for (_, other), c in self.counts.items() if other == o) for _, o in self.counts})
        summary = {
            "seed": self.options.seed,
            "streams": self.streams,
            "seconds": round(seconds),
            "streams a second": round(self.streams / max(seconds, 1)),
            "workers": self.options.workers,
            "outcomes": dict(sorted(total.items())) | {o: total[o] for o in FINDINGS},
            "memory limit": LIMIT,
            "targets": targets,
            "findings": self.findings,
            "next": self.next,
            "machine": machine(),
        }
        part = self.options.out.with_name(self.options.out.name + ".part")
        part.write_text(json.dumps(summary, indent=2) + "\n")
        part.replace(self.options.out)


def fuzz(options: argparse.Namespace) -> Log:
    log = Log(options)
    workers = [Worker(options, i, log.next + i) for i in range(options.workers)]
    said, ends = time.monotonic(), time.monotonic() + 60 * options.minutes
    while time.monotonic() < ends and (options.streams is None or log.streams < options.streams):
        wait([w.connection for w in workers] + [w.process.sentinel for w in workers], timeout=1)
        for i, worker in enumerate(workers):
            try:
                while worker.connection.poll():
                    kind, what = worker.connection.recv()
                    worker.ready = True
                    if kind == "found":
                        log.found(*what)
                    elif kind == "counts":
                        log.counts.update(what[0])
                        worker.next = what[1]
            except EOFError:
                pass
            number, began, name, data = worker.at()
            late = bool(began) and time.monotonic() - began > HANG
            if late or not worker.process.is_alive():
                worker.kill()
                if not worker.ready:
                    raise SystemExit("a worker does not begin")
                if not name:
                    raise SystemExit(f"a worker died after stream {number}, while it made the next: the fuzzer fails")
                outcome = "hang" if late else "crash"
                log.counts[name, outcome] += 1
                log.found(number, name, outcome, f"{name}, signal {-(worker.process.exitcode or 0)}", data)
                workers[i] = Worker(options, worker.place, number + options.workers)
        log.next = min(w.next for w in workers)
        if time.monotonic() - said > 10:
            log.write()
            rate = log.streams / (log.before + time.monotonic() - log.began)
            print(f"\r{log.streams:,} streams, {rate:.0f}/s, {len(log.findings)} findings ", end="", flush=True)
            said = time.monotonic()
    for worker in workers:
        worker.kill()
        worker.path.unlink()
    log.write()
    return log


def guided(options: argparse.Namespace) -> None:
    """The same, led by the coverage of the Python code: atheris keeps what reaches new lines, and goes on from it."""
    import atheris

    sources = [path for folder in ("engine", "entropy_coding", "cuda_kernels") for path in (ROOT / folder).glob("*.py")]
    # Numba cannot compile what is instrumented
    compiled = [f"seqkv.{p.parent.name}.{p.stem}" for p in sources if "numba" in p.read_text()]
    with atheris.instrument_imports(include=["seqkv"], exclude=compiled):
        fuzzer = Fuzzer(options.seed, options.targets)
    names = list(fuzzer.targets)

    def one(data: bytes) -> None:
        if len(data) > 2:
            target = fuzzer.targets[names[data[0] % len(names)]]
            with contextlib.suppress(fuzzer.refusal):
                target.read(data[1:])

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        rng = Random(seed)
        at = data[0] % len(names) if data else rng.randrange(len(names))
        target = fuzzer.targets[names[at]]
        held = data[1:] if len(data) > 2 and rng.randrange(4) else rng.choice(target.seeds)
        try:
            if target.mend is not None and rng.randrange(4):
                return (bytes((at,)) + target.mend(rng, held, rng.choice(target.seeds)))[:longest]
        except Exception:  # what is held cannot be taken apart any more
            pass
        return (bytes((at,)) + fuzzer.raw(rng, held, rng.choice(target.seeds)))[:longest]

    corpus = options.findings / "corpus"
    corpus.mkdir(exist_ok=True)
    for at, target in enumerate(fuzzer.targets.values()):
        for i, seed in enumerate(target.seeds):
            (corpus / f"seed.{at}.{i}").write_bytes(bytes((at,)) + seed)
    arguments = [sys.argv[0], str(corpus), f"-max_total_time={round(60 * options.minutes)}", "-timeout=20"]
    arguments += [
        "-max_len=65536",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={options.findings}/",
        "-print_final_stats=1",
    ]
    atheris.Setup(arguments, one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--streams", type=int, help="how many at the most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--targets", nargs="+", help="names, or what they begin with: near, lossless, tokens, store, ..."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "fuzz.json")
    parser.add_argument("--findings", type=Path, default=Path("fuzz_findings"), help="where inputs are kept")
    parser.add_argument("--resume", action="store_true", help="go on from what --out says")
    parser.add_argument("--atheris", action="store_true", help="led by coverage")
    options = parser.parse_args()
    options.targets = set(options.targets) if options.targets else None
    options.findings.mkdir(parents=True, exist_ok=True)
    if options.atheris:
        guided(options)
        return
    log = fuzz(options)
    print(f"\n{log.streams:,} streams, {len(log.findings)} findings")
    sys.exit(bool(log.findings))


if __name__ == "__main__":
    main()
