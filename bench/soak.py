"""Threads and processes that code different caches at the same time, for long.

    python bench/soak.py [--minutes 10] [--threads 8] [--processes 4] [--out bench/results/soak.json]

Caches of every tier are coded alone first, in one thread. Then 8 threads of this process and 4 other processes encode
and decode them, in any order: every stream and every decoded cache must be the same, byte for byte. The processes are
made in turn by a fork from this one, by a fork server, anew ("spawn"), and by a fork again. Every few seconds one more
is forked, codes each cache once, and ends.

Forks happen while threads code, if NumPy's OpenBLAS has no threads, as here unless OPENBLAS_NUM_THREADS says otherwise.
If it has, a fork while another thread is within a product of matrices may stop that thread, and the child, for ever; so
then the threads wait with their next cache for each fork.

A watchdog fails the run if a thread or a process does nothing for a minute (--stall), and shows where all of them are.
Memory (resident, Linux) is looked at twice a second. No process may take more than --growth MB (10^6 bytes) above the
most that it took in the first quarter of the run, nor more and more over the second half, by --slope MB a minute.
Numba must not have started threads of its own.

The caches are those of the tests' models, small, so that as much as possible happens. Exits with 1 if anything was
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is loaded

import numba
import numpy as np
import xxhash

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from bench.results_of import finished  # noqa: E402
from bench.store_soak import digest_of  # noqa: E402
from seqkv import engine  # noqa: E402
from seqkv.engine import KVCache, Profile, TokenProbs  # noqa: E402
from tests.conftest import LinearModel, calibrated  # noqa: E402
from tests.sessions import CausalModel  # noqa: E402

METHODS = ("fork", "forkserver", "spawn")
MB = 1e6
LOOK = 0.5  # seconds between two looks at memory
WARM = 0.25  # of a run, before memory has to stay what it is
BRIEF = 5.0  # seconds between two brief processes
TO_START = 60  # seconds that a process which is not forked may take to begin
LEAST = 3  # caches that a worker codes, however slow the machine is

Result = tuple[bytes, int]
"""A stream, and a digest of what it decodes to."""


@dataclass
class Case:
    """A cache and how it is coded."""

    kv: KVCache
    probs: TokenProbs
    options: dict[str, Any] = field(default_factory=dict)
    of_decoder: tuple[str, ...] = ()  # options that a decoder needs too

    def result(self) -> Result:
        stream = engine.encode(self.kv, self.probs, **self.options)
        if self.options.get("tier") == "tokens":
            return stream, xxhash.xxh3_64_intdigest(engine.token_ids(stream).tobytes())
        given = {name: self.options[name] for name in self.of_decoder}
        return stream, digest_of(engine.decode(stream, **given))


def cases(profile: Profile) -> dict[str, Case]:
    """Different caches for each way to code; the same in every process. What they share, a profile and a reference,
    all threads of a process share."""
    model, wide = CausalModel(), LinearModel(layers=2, heads=4, key=64, value=64)
    known = model.tokens(0, 1100)
    behind = engine.Reference(_encoded(model, known, profile), profile)
    out: dict[str, Case] = {}
    for seed, tokens in enumerate((130, 300, 700)):
        ids = model.tokens(seed, tokens)
        kv, probs, attention = model.session(ids)
        half = KVCache(kv.keys, kv.values, rope=kv.rope, dtype="bfloat16", exact=True)
        edited = np.concatenate([ids[: 10 + seed], known[40 * seed :]])
        other, other_probs, other_attention = model.session(edited)
        out |= {
            f"near {tokens}": Case(kv, probs, {"profile": profile, "importance": attention}, ("profile",)),
            f"near, no profile, {tokens}": Case(kv, probs),
            f"lossless {tokens}": Case(half, probs, {"tier": "lossless", "profile": profile}, ("profile",)),
            f"lossless, no profile, {tokens}": Case(half, probs, {"tier": "lossless"}),
            f"delta {tokens}": Case(
                other,
                other_probs,
                {"profile": profile, "importance": other_attention, "reference": behind},
                ("profile", "reference"),
            ),
            f"tokens {tokens}": Case(kv, probs, {"tier": "tokens"}),
        }
    ids = wide.tokenize(wide.text(9, 300))
    out["near, wide"] = Case(wide.cache(ids)[0], wide.probs(ids))  # products that BLAS has threads for
    return out


def _encoded(model: CausalModel, ids: Any, profile: Profile) -> bytes:
    kv, probs, attention = model.session(ids)
    return engine.encode(kv, probs, profile=profile, importance=attention)


def wrong(case: Case, alone: Result) -> str | None:
    """What is not as it was alone."""
    try:
        stream, digest = case.result()
    except Exception as error:  # whatever it is, it was none when the cache was coded alone
        return f"{type(error).__name__}: {error}"
    if stream != alone[0]:
        return f"another stream, of {len(stream)} bytes instead of {len(alone[0])}"
    return None if digest == alone[1] else "another cache was decoded"


@dataclass
class Board:
    """What workers say, in memory that all processes share: when they were last alive, and how much they have done; and
    what they are told: until when they go on, in `until[0]`, or 0 as long as not all have begun."""

    alive: Any
    done: Any
    until: Any
    folder: Path

    @classmethod
    def of(cls, workers: int, folder: Path) -> Board:
        context = multiprocessing.get_context("spawn")
        return cls(context.RawArray("d", workers), context.RawArray("q", workers), context.RawArray("d", 1), folder)

    @property
    def open(self) -> bool:
        """Whether workers go on."""
        return self.until[0] == 0 or time.monotonic() < self.until[0]

    def start(self, me: int, allowed: float = 0) -> None:
        """A worker begins, and may take some seconds to be alive."""
        self.alive[me] = time.monotonic() + allowed

    def note(self, me: int) -> None:
        self.alive[me] = time.monotonic()
        self.done[me] += 1

    def complain(self, what: str) -> None:
        with open(self.folder / f"wrong-{os.getpid()}", "a") as file:
            file.write(what.replace("\n", " ") + "\n")

    def complaints(self) -> list[str]:
        return [line for path in self.folder.glob("wrong-*") for line in path.read_text().splitlines()]


def work(todo: dict[str, Case], alone: dict[str, Result], me: int, board: Board, turn: Any = None) -> None:
    """Code caches in any order, LEAST of them at least, each in a turn if one has to be taken."""
    rng = np.random.default_rng(me)
    names = list(todo)
    while board.open or board.done[me] < LEAST:
        name = names[rng.integers(len(names))]
        with turn or contextlib.nullcontext():
            found = wrong(todo[name], alone[name])
        if found:
            board.complain(f"worker {me}: {name}: {found}")
        board.note(me)


def process(todo: dict[str, Case] | None, alone: dict[str, Result], me: int, board: Board) -> None:
    """`work` in a process; todo: None if it has to be made there."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    work(todo or cases(Profile.load(board.folder / "profile.safetensors")), alone, me, board)
    _check_layer(board)


def brief(todo: dict[str, Case], alone: dict[str, Result], me: int, board: Board) -> None:
    """Code each cache once."""
    for name, case in todo.items():
        found = wrong(case, alone[name])
        if found:
            board.complain(f"a forked process: {name}: {found}")
        board.note(me)


def layer() -> str | None:
    """Numba's threading layer, if one was started in this process."""
    try:
        return numba.threading_layer()
    except ValueError:  # none was
        return None


def _check_layer(board: Board) -> None:
    if layer() is not None:
        board.complain(f"Numba's threading layer {layer()!r} was started")


class Turns:
    """Of threads that code. Nobody has one while this process forks, if that is not safe."""

    def __init__(self, threads: int) -> None:
        self.wait = os.environ["OPENBLAS_NUM_THREADS"] != "1"
        self.threads, self.free, self.open = threads, threading.Semaphore(threads), threading.Event()
        self.open.set()

    def __enter__(self) -> None:
        self.open.wait()
        self.free.acquire()

    def __exit__(self, *error: object) -> None:
        self.free.release()

    def start(self, process: Any) -> None:
        taken = self.threads if self.wait else 0
        if self.wait:
            self.open.clear()
        for _ in range(taken):
            self.free.acquire()
        process.start()
        for _ in range(taken):
            self.free.release()
        self.open.set()


class Memory:
    """Resident bytes of processes, by name, as time goes."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[float, float]]] = {}

    def look(self, pids: dict[str, int], now: float) -> None:
        for name, pid in pids.items():
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):  # it has ended
                continue
            if pages == 0:  # it has ended, and nobody has asked how
                continue
            self.samples.setdefault(name, []).append((now, pages * os.sysconf("SC_PAGESIZE") / MB))

    def figures(self, warm: float, end: float) -> dict[str, dict[str, float]]:
        """MB of each process: the most until it is warm, the most after that, the difference, and the slope of the
        second half, a minute. (Threads that happen to code large caches together take more than they do a moment later:
        only the most compares with the most.)"""
        out = {}
        for name, samples in self.samples.items():
            before, after = ([mb for at, mb in samples if (at >= warm) == late] for late in (False, True))
            half = np.array([s for s in samples if s[0] >= end / 2])
            if not before or len(after) < 2 or len(half) < 2:
                continue
            slope = np.polyfit(half[:, 0], half[:, 1], 1)[0] * 60
            first, most = max(before), max(after)
            figures = {"warm": first, "most": most, "growth": most - first, "slope": float(slope)}
            out[name] = {what: round(mb, 2) for what, mb in figures.items()}
        return out


class Soak:
    """A run, in an empty folder."""

    def __init__(self, folder: Path, seconds: float, threads: int, processes: int, stall: float) -> None:
        calibrated(CausalModel()).save(folder / "profile.safetensors")
        self.todo = cases(Profile.load(folder / "profile.safetensors"))
        self.alone = {name: case.result() for name, case in self.todo.items()}
        self.board, self.memory, self.turns = Board.of(threads + processes + 1, folder), Memory(), Turns(threads)
        self.stall, self.seconds, self.begun = stall, seconds, 0.0
        self.threads = [self._thread(i) for i in range(threads)]
        self.processes = [self._process(i, METHODS[i % len(METHODS)]) for i in range(processes)]
        self.forked: list[Any] = []
        self.next_fork = 0.0

    @property
    def workers(self) -> list[Any]:
        """Threads, processes, and the one that was forked last, as the board has them."""
        return [*self.threads, *self.processes, *self.forked[-1:]]

    def run(self) -> list[str]:
        """Watches until all is done. Returns who does nothing any more."""
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # inherited by what is forked
        for i, one in enumerate(self.threads):
            self.board.start(i)
            one.start()
        for i, one in enumerate(self.processes):
            self.board.start(len(self.threads) + i, TO_START)
            self.turns.start(one)
        self.begun = time.monotonic()  # of all, however slow the machine is
        self.board.until[0] = self.begun + self.seconds
        while self.board.open or any(one.is_alive() for one in self.workers):
            faulthandler.dump_traceback_later(3 * self.stall + TO_START, exit=True)  # if this thread itself hangs
            now = time.monotonic()
            pids = {"this one": os.getpid(), **{one.name: one.pid for one in self.processes}}
            self.memory.look(pids, now - self.begun)
            if self.board.open or not self.forked:
                self._fork(now)
            named = zip(self.workers, self.board.alive, strict=False)
            stuck = [one.name for one, alive in named if one.is_alive() and now - alive > self.stall]
            if stuck:
                _show_stacks(self.workers[len(self.threads) :])
                return stuck
            time.sleep(LOOK)
        return []

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        for one in self.workers[len(self.threads) :]:
            one.kill()
            one.join()

    def results(self, stuck: list[str], growth: float, slope: float) -> dict[str, Any]:
        board, done = self.board, list(self.board.done)
        _check_layer(board)
        wrong = [f"{name} did nothing for {self.stall} s" for name in stuck] + board.complaints()
        if not stuck:
            ended = [*self.processes, *self.forked]
            wrong += [f"{one.name} ended with {one.exitcode}" for one in ended if one.exitcode]
            wrong += [f"{one.name} coded nothing" for one, count in zip(self.workers, done, strict=False) if not count]
        figures = self.memory.figures(WARM * self.seconds, self.seconds)
        if not stuck:
            seen = {"this one", *(one.name for one in self.processes)}
            wrong += [f"the memory of {name} was not seen" for name in sorted(seen - figures.keys())]
        wrong += [f"{name} grew by {f['growth']} MB" for name, f in figures.items() if f["growth"] > growth]
        wrong += [f"{name} grows by {f['slope']} MB a minute" for name, f in figures.items() if f["slope"] > slope]
        first, last = len(self.threads), len(self.threads) + len(self.processes)
        return {
            "seconds": round(time.monotonic() - self.begun, 1),
            "cases": list(self.todo),
            "threads of BLAS": os.environ["OPENBLAS_NUM_THREADS"],
            "forked while threads code": not self.turns.wait,
            "coded by threads": done[:first],
            "coded by processes": dict(zip((one.name for one in self.processes), done[first:last], strict=True)),
            "coded by others that were forked": done[last],
            "others that were forked": len(self.forked),
            "MB": figures,
            "wrong": wrong,
        }

    def _thread(self, me: int) -> threading.Thread:
        arguments = self.todo, self.alone, me, self.board, self.turns
        return threading.Thread(target=work, args=arguments, name=f"thread {me}", daemon=True)

    def _process(self, i: int, method: str) -> Any:
        arguments = self.todo if method == "fork" else None, self.alone, len(self.threads) + i, self.board
        context = multiprocessing.get_context(method)
        return context.Process(target=process, args=arguments, name=f"process {i}, {method}", daemon=True)

    def _fork(self, now: float) -> None:
        """Another process that codes each cache once, if it is time."""
        if now < self.next_fork or (self.forked and self.forked[-1].is_alive()):
            return
        me, self.next_fork = len(self.threads) + len(self.processes), now + BRIEF
        self.board.start(me)
        arguments = self.todo, self.alone, me, self.board
        name = f"forked process {len(self.forked)}"
        context = multiprocessing.get_context("fork")
        self.forked.append(context.Process(target=brief, args=arguments, name=name, daemon=True))
        self.turns.start(self.forked[-1])


def _show_stacks(others: list[Any]) -> None:
    print("stacks of this process:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    for one in others:
        if one.is_alive():
            print(f"stacks of process {one.pid}:", file=sys.stderr, flush=True)
            os.kill(one.pid, signal.SIGUSR1)
            time.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--stall", type=float, default=60, help="seconds that a thread or a process may do nothing")
    parser.add_argument("--growth", type=float, default=48, help="MB that a process may grow by once it is warm")
    parser.add_argument("--slope", type=float, default=4, help="MB a minute that it may grow by in the second half")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seqkv-") as folder:
        soak = Soak(Path(folder), 60 * options.minutes, options.threads, options.processes, options.stall)
        try:
            results = soak.results(soak.run(), options.growth, options.slope)
        finally:
            soak.end()
    return finished(results, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
