"""What the compiled kernels could do at most on H100 and H200, without running them.

    python bench/static_model.py [--json] [--lines KERNEL]

A kernel is compiled for sm_90, and its instructions are read (bench/sass.py). What counts is how many a warp executes
in a *step*, which is 32 symbols of the coder or 32 values: those of the loop that does the work, and a share of the
loops around it. Where lanes take different ways the warp takes both, and both count. What is rarer counts as often as
it happens in the stream that stands for all here: class 26, 3 bits a symbol, all symbols plain. Streams of fewer bits
are faster. The text of a kernel says what is rare (SELDOM); how long a search is follows from the coder's tables.

An SM has 4 schedulers. Each issues an instruction of a warp in a cycle, and its units are busy with it for as long as
UNITS says; memory moves what a kernel must read and write, at the peak of the data sheet. The bound is that of the
busiest. It is no more than a bound: latency is not in it. To hide that takes enough warps, for which see occupancy, and
for the coder as many groups.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is measured without installing it

from bench import sass, workloads  # noqa: E402
from seqkv.cuda_kernels import build, coder, device, elementwise  # noqa: E402
from seqkv.entropy_coding import alphabet, tables  # noqa: E402
from tests.emulator.device import emulated_device  # noqa: E402

ARCHITECTURE = "sm_90"
WARP = 32
SCALE_CLASS, BITS = 26, 3.0  # of the stream that stands for all
AROUND = (25, 50, 400)  # steps that share a batch, a row and a segment: 50 coefficients, 8 rows

LOADS, STORES = {0x180, 0x181}, {0x185, 0x186}  # LD, LDG; ST, STG
LOAD_SHARED, FUSED_FLOAT64 = 0x184, {0x02B}

# Cycles for which an instruction of a warp keeps a unit of its scheduler busy. CUDA C++ Programming Guide, results per
# cycle and SM, compute capability 9.0: 64 for integers and float64, 128 for float32, 16 for population counts, sums of
# warps and conversions. Loads, stores and shuffles of 4 schedulers share one unit of 32 lanes a cycle.
UNITS = {"integer": 2.0, "multiply-add": 2.0, "float32": 1.0, "float64": 2.0, "special": 8.0, "memory": 4.0}
CONFLICTS = 3.5  # times as long for a load from shared memory: the most that 32 random words have in one of 32 banks


@dataclass(frozen=True)
class Chip:
    """H100 and H200, SXM. The clock is what they sustain under load; 1.98 GHz is the highest."""

    name: str
    bandwidth: float  # bytes/s
    multiprocessors: int = 132
    schedulers: int = 4
    clock: float = 1.755e9  # cycles/s


CHIPS = (Chip("H100", 3.35e12), Chip("H200", 4.8e12))


# ------------------------------------------------------------------------------------------------------------ occupancy

REGISTERS = 65536  # of an SM, given to a warp by 256
MOST_WARPS, MOST_BLOCKS = 64, 32
SHARED = 228 << 10  # bytes, given to a block by 128, and 1024 to the system


def occupancy(needs: build.Resources, threads: int) -> tuple[int, int]:
    """Blocks and warps that an SM of compute capability 9.0 holds at a time."""
    warps = -(-threads // WARP)
    registers_a_warp = -(-needs.registers * WARP // 256) * 256
    by_registers = REGISTERS // 4 // registers_a_warp * 4 // warps
    by_shared = SHARED // (-(-needs.shared // 128) * 128 + 1024)
    blocks = min(MOST_BLOCKS, MOST_WARPS // warps, by_registers, by_shared)
    return blocks, blocks * warps


# --------------------------------------------------------------------------------------------------------- instructions


def unit(instruction: sass.Instruction) -> str:
    """Of sm_90. What belongs to a warp and not to lanes, and control, is only issued: "issue"."""
    operation = instruction.operation
    if operation in (0x024, 0x025, 0x026, 0x027):  # IMAD; also moves and additions that are compiled to it
        return "multiply-add"
    if operation in (0x028, 0x029, 0x02A, 0x02B):  # DMUL, DADD, DSETP, DFMA
        return "float64"
    if operation < 0x020 or operation in (0x036, 0x046, 0x048):  # VIADD, VIADDMNMX, VIMNMX
        return "integer"
    if operation < 0x080:
        return "float32"
    if 0x100 <= operation < 0x118 or operation == 0x1C4:  # conversions, POPC, FLO, MUFU; REDUX
        return "special"
    if 0x180 <= operation < 0x1C0:
        return "memory"
    return "issue"


@dataclass(frozen=True)
class Steps:
    """How the steps of a kernel are found in its instructions.

    markers: operations of which the kernel executes one a step: of an unrolled loop they tell how many steps it does.
    around: steps that share one turn of each loop around it. inner: turns of a loop within a step. seldom: how many
    times a step what follows this text in the source, until its brace is closed, is executed.
    """

    markers: set[int]
    around: tuple[float, ...] = AROUND
    inner: float = 1
    seldom: Mapping[str, float] = field(default_factory=dict)


def executed(code: sass.Code, source: str, steps: Steps) -> Counter[sass.Instruction]:
    """How many times a step each instruction is executed."""
    regions = [(_braces(source, text), times) for text, times in steps.seldom.items()]
    frequencies = {loop: _frequencies(code, loop, regions, steps.markers) for loop in code.loops}
    counts: dict[sass.Loop, Counter[sass.Instruction]] = {}  # of a turn, without the loops within
    for loop in code.loops:
        own = {block: frequencies[loop][block] for block in code.own_blocks(loop)}
        counts[loop] = Counter({at: times for block, times in own.items() for at in block.instructions})

    def markers(loop: sass.Loop) -> float:
        return sum(times for at, times in counts[loop].items() if at.operation in steps.markers)

    work = max(code.loops, key=lambda loop: (bool(markers(loop)) * loop.depth, markers(loop), counts[loop].total()))
    found: Counter[sass.Instruction] = Counter()
    for loop in code.loops:
        if loop.parent is work:
            turns = steps.inner * frequencies[work][loop.head] / markers(work)
            found.update({at: times * turns for at, times in counts[loop].items()})
    outer: sass.Loop | None = work
    for shared in (markers(work), *steps.around):
        if outer is not None:
            found.update({at: times / shared for at, times in counts[outer].items()})
            outer = outer.parent
    return found


def _frequencies(
    code: sass.Code, loop: sass.Loop, regions: list[tuple[range, float]], markers: set[int]
) -> dict[sass.Block, float]:
    """How many times a turn each block of a loop is executed, or entered, where it is of a loop within.

    A block is of a seldom region if an instruction is, but for blocks that every way to a marker or to the next turn
    passes, where the compiler moves single instructions. What is reached through the region alone is as seldom.
    """
    seldom = {line for lines, _ in regions for line in lines}
    needed = {block for block in loop.blocks if loop.head in block.successors}
    needed |= {
        block
        for block in loop.blocks
        if any(at.operation in markers and at.line not in seldom for at in block.instructions)
    }
    passed = set().union(*(code.dominators[block] for block in needed))
    gates = [
        ({block for block in loop.blocks - passed if any(at.line in lines for at in block.instructions)}, times)
        for lines, times in regions
    ]
    frequencies = dict.fromkeys(loop.blocks, 0.0)
    for times in sorted({1.0, *(times for _, times in gates)}):
        rarer = set().union(*(gate for gate, gate_times in gates if gate_times < times))
        frequencies |= dict.fromkeys(loop.reached(rarer), times)
    return frequencies


def _braces(source: str, text: str) -> range:
    """The lines from a text to where the brace that it opens is closed."""
    start = source.index(text)
    depth, at = 0, source.index("{", start)
    while True:
        depth += (source[at] == "{") - (source[at] == "}")
        if not depth:
            return range(source.count("\n", 0, start) + 1, source.count("\n", 0, at) + 2)
        at += 1


def search_turns() -> float:
    """How often a decoder's search goes on in a step: the most of 32 lanes, in the mean, as slots are uniform."""
    ends = np.cumsum(tables.FREQUENCIES[SCALE_CLASS], dtype=np.int64)
    slots = np.arange(alphabet.TOTAL)
    buckets = tables.BUCKET_TOKENS.reshape(-1, 1 << tables.BUCKET_BITS)[SCALE_CLASS]
    length = np.searchsorted(ends, slots, side="right") - buckets[slots >> alphabet.PRECISION - tables.BUCKET_BITS]
    at_most = np.cumsum(np.bincount(length)) / alphabet.TOTAL
    return float((1 - at_most**WARP).sum())


# -------------------------------------------------------------------------------------------------------------- kernels

THREADS = coder.MOST_WARPS * WARP  # of a block of the coder's kernels, where there are many groups
ESCAPES = {"u32 escape(": 0, "if (escapes) {": 0, "u32 encode_raw(": 0, "int decode_raw(": 0}
SELDOM = ESCAPES | {"if (words.taken >= LANES) {": BITS / 16}  # of 32 words, and a word has 16 bits
STEPS = {  # of kernels that do something for every value
    "measure": Steps(LOADS, around=()),
    "classify": Steps(STORES, seldom=SELDOM),
    "encode": Steps(LOADS, seldom=SELDOM),
    "decode": Steps(STORES, inner=search_turns(), seldom=SELDOM),
    "accumulate": Steps(FUSED_FLOAT64, around=(workloads.K, elementwise.SLAB)),  # a step: 32 products
    "quantise": Steps(STORES, around=(elementwise.SLAB,)),
    "dequantise": Steps(STORES, around=(elementwise.SLAB,)),
    "energies": Steps(FUSED_FLOAT64, around=(workloads.TOKENS,)),  # the first of its loops over tokens
    "to_block": Steps(STORES, around=(8,)),
    "to_heads": Steps(STORES, around=(8,)),
    "finite": Steps(LOADS, around=(8,)),
}
BYTES = {"measure": 4, "classify": 4 + 2, "encode": 2 + BITS / 8, "decode": BITS / 8 + 4}  # of memory, a symbol


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel. source: its text, whose lines its code knows; bytes: of device memory, a value."""

    name: str
    threads: int
    symbol: str  # its name in the binary
    binary: build.Binary
    source: str = ""
    bytes: float = 0

    @property
    def needs(self) -> build.Resources:
        return self.binary.kernels[self.symbol]

    @functools.cached_property
    def code(self) -> sass.Code:
        return sass.read(self.binary.cubin)[self.symbol]

    @property
    def steps(self) -> Steps | None:
        return STEPS.get(self.name.split()[0])


@functools.cache
def kernels(architecture: str = ARCHITECTURE) -> tuple[Kernel, ...]:
    """All of them, compiled. Of Numba's kernels, those that the launchers launch."""
    found = []
    for file, defines in coder.DEFINES.items():
        source = (ROOT / "cuda_kernels" / file).read_text()
        binary = build.compile_file(file, defines, architecture)
        for name in sorted(binary.kernels):
            found.append(Kernel(name, THREADS, name, binary, source, BYTES.get(name, 0)))
    for name, (kernel, types, size) in launches().items():
        binary = build.compile_numba(kernel, types, architecture)
        (symbol,) = binary.kernels
        found.append(Kernel(name, device.THREADS, symbol, binary, bytes=size))
    return tuple(found)


@functools.cache
def launches() -> dict[str, tuple[Any, tuple[Any, ...], float]]:
    """Numba's kernels, the types of their arguments, and bytes of device memory a value, by the work for them."""
    found: dict[str, tuple[Any, tuple[Any, ...], float]] = {}
    with emulated_device() as cupy:
        for name, work in workloads.elementwise_work(cupy, workloads.TOKENS, 1).items():

            def launch(
                kernel: Any, _: int, *args: Any, name: str = name, size: float = work.bytes / work.values
            ) -> None:
                found[name] = kernel, tuple(map(kernel.typeof_pyval, args)), size

            with mock.patch.object(device, "launch", launch):
                work.run()
    return found


# --------------------------------------------------------------------------------------------------------------- bounds


@dataclass(frozen=True)
class Bound:
    """Values a second at most: by the instructions that are issued, by each unit, by memory."""

    issue: float
    units: dict[str, float]
    bandwidth: float

    @property
    def by(self) -> str:
        """What is the bound."""
        return min(self.all, key=self.all.__getitem__)

    @property
    def most(self) -> float:
        return self.all[self.by]

    @property
    def all(self) -> dict[str, float]:
        return {"issue": self.issue, **self.units, "bandwidth": self.bandwidth}


def bound(kernel: Kernel, chip: Chip) -> Bound:
    assert kernel.steps is not None
    cycles: Counter[str] = Counter()
    counts = executed(kernel.code, kernel.source, kernel.steps)
    for at, times in counts.items():
        conflicts = CONFLICTS if at.operation == LOAD_SHARED else 1
        cycles[unit(at)] += times * UNITS.get(unit(at), 0) * conflicts
    most = chip.multiprocessors * chip.schedulers * chip.clock * WARP
    units = {name: most / busy for name, busy in sorted(cycles.items()) if busy}
    return Bound(most / sum(counts.values()), units, chip.bandwidth / kernel.bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument("--lines", metavar="KERNEL", help="instructions a step of each line of a coder's kernel")
    options = parser.parse_args()
    compiled = kernels()
    if options.lines:
        (kernel,) = [kernel for kernel in compiled if kernel.name == options.lines]
        print_lines(kernel)
    elif options.json:
        print(json.dumps([figures(kernel) for kernel in compiled], indent=1))
    else:
        print_table([figures(kernel) for kernel in compiled])


def figures(kernel: Kernel) -> dict[str, Any]:
    blocks, warps = occupancy(kernel.needs, kernel.threads)
    needs = {"registers": kernel.needs.registers, "shared": kernel.needs.shared, "spills": kernel.needs.spills}
    row = {"kernel": kernel.name, "threads": kernel.threads, **needs, "blocks": blocks, "warps": warps}
    if kernel.steps:
        row["instructions"] = sum(executed(kernel.code, kernel.source, kernel.steps).values())
        row["bytes"] = kernel.bytes
        for chip in CHIPS:
            found = bound(kernel, chip)
            row[chip.name] = {name: most / 1e9 for name, most in found.all.items()} | {"bound": found.by}
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    chip = CHIPS[0]
    print(f"{build.compiler_versions()}, {ARCHITECTURE}; {chip.multiprocessors} SMs at {chip.clock / 1e9:.3f} GHz")
    print("Most billions of values a second (of accumulate: products), by what is issued, the busiest unit, loads and")
    print("stores with shuffles, and memory\n")
    lines = [["kernel", "registers", "shared", "blocks x warps", "instructions", "bytes", "issue", "unit", "loads"]]
    lines[0] += [f"{chip.name} memory" for chip in CHIPS] + [f"{chip.name} bound" for chip in CHIPS]
    for row in rows:
        line = [row["kernel"], str(row["registers"]), str(row["shared"])]
        line.append(f"{row['blocks']} x {row['warps'] // row['blocks']}")
        if "bytes" in row:
            chips = [row[chip.name] for chip in CHIPS]
            busiest = min(chips[0].keys() & UNITS.keys(), key=chips[0].__getitem__)
            line += [f"{row['instructions']:.1f}", f"{row['bytes']:.2f}", f"{chips[0]['issue']:,.0f}"]
            line += [f"{chips[0][busiest]:,.0f} {busiest}", f"{chips[0]['memory']:,.0f}"]
            line += [f"{most['bandwidth']:,.0f}" for most in chips] + [f"{most[most['bound']]:,.0f}" for most in chips]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    for first, *rest in lines:
        print(first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=False)))


def print_lines(kernel: Kernel) -> None:
    assert kernel.steps is not None
    by_line: Counter[int] = Counter()
    for at, times in executed(kernel.code, kernel.source, kernel.steps).items():
        by_line[at.line] += times
    text = kernel.source.splitlines()
    for line, times in sorted(by_line.items()):
        if times:
            print(f"{times:7.2f}  {line:4} {text[line - 1]}")


if __name__ == "__main__":
    main()
