"""Every kernel compiled for each architecture, within its budget; and what the static model reads from the code.

python tests/test_cuda_build.py --write     # makes tests/budget.json anew from the kernels as they are
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from bench import sass, static_model  # noqa: E402
from seqkv.cuda_kernels import build  # noqa: E402
from seqkv.cuda_kernels.build import ARCHITECTURES, Resources  # noqa: E402

BUDGET = Path(__file__).with_name("budget.json")
REGENERATE = "if that is meant: python tests/test_cuda_build.py --write"


@functools.cache
def needs(architecture: str) -> dict[str, Resources]:
    return {kernel.name: kernel.needs for kernel in static_model.kernels(architecture)}


def beyond_budget(found: dict[str, Resources], budget: dict[str, dict[str, int]]) -> list[str]:
    """What a kernel needs more of than it may."""
    problems = [f"{name} is not in the budget" for name in found.keys() - budget.keys()]
    problems += [f"{name} is in the budget and not compiled" for name in budget.keys() - found.keys()]
    for name in found.keys() & budget.keys():
        for what, number in asdict(found[name]).items():
            if number > budget[name][what]:
                problems.append(f"{name}: {number} {what}, where the budget is {budget[name][what]}")
    return sorted(problems)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_stay_within_their_budget(architecture: str) -> None:
    """Registers of a thread, and bytes of spills, stack and static shared memory."""
    budget = json.loads(BUDGET.read_text())
    problems = beyond_budget(needs(architecture), budget[architecture])
    compilers = f"budget: {budget['compilers']}; here: {build.compiler_versions()}"
    assert not problems, "\n".join([architecture, *problems, compilers, REGENERATE])


def test_no_kernel_may_spill() -> None:
    budget = json.loads(BUDGET.read_text())
    assert not any(kernel["spills"] for architecture in ARCHITECTURES for kernel in budget[architecture].values())


def test_what_is_beyond_a_budget_is_named() -> None:
    fine = Resources(registers=32, spills=0, stack=0, shared=1024)
    budget = {"a": asdict(fine), "b": asdict(fine)}
    assert not beyond_budget({"a": fine, "b": replace(fine, registers=30)}, budget)
    found = {"a": replace(fine, spills=8, shared=1025), "c": fine}
    assert beyond_budget(found, budget) == [
        "a: 1025 shared, where the budget is 1024",
        "a: 8 spills, where the budget is 0",
        "b is in the budget and not compiled",
        "c is not in the budget",
    ]


def test_what_does_not_compile_is_an_error() -> None:
    with pytest.raises(build.BuildError, match='identifier "missing" is undefined'):
        build.compile_source('extern "C" __global__ void kernel(int* out) { *out = missing; }', (), "sm_90")
    with pytest.raises(build.BuildError, match="Parsing error"):
        build.assemble(".version 8.0\n.target sm_90\nnonsense", "sm_90")


# ----------------------------------------------------------------------------------------------------- the static model


def test_decoding_is_bounded_by_no_less_than_300_billion_symbols_a_second() -> None:
    """On an H200, of symbols of 3 bits, by the compiled instructions."""
    (decode,) = [kernel for kernel in static_model.kernels() if kernel.name == "decode"]
    bound = static_model.bound(decode, static_model.CHIPS[-1])
    assert static_model.CHIPS[-1].name == "H200" and bound.most >= 300e9, bound


LOOPS = """
__device__ __forceinline__ int rare(int x)
{
    for (int i = 0; i < 9; ++i) {
        x = __umulhi(x, x | i) ^ (x >> i);
    }
    return x;
}

extern "C" __global__ void kernel(const int* in, int* out, int rows, int columns)
{
    for (int row = 0; row < rows; ++row) {
        #pragma unroll UNROLL
        for (int column = 0; column < columns; ++column) {
            int value = in[column];
            if (__any_sync(0xffffffffu, value > 99)) {
                value = rare(value);
            }
            out[row * columns + column] = value;
        }
        __syncthreads();
    }
}
"""


def of_loops(unroll: int) -> sass.Code:
    return sass.read(build.compile_source(LOOPS, (("UNROLL", unroll),), "sm_90").cubin)["kernel"]


def test_loops_and_lines_are_read_from_the_code() -> None:
    code = of_loops(1)
    inner, outer = code.loops
    assert (inner.parent, outer.parent, inner.depth) == (outer, None, 2)
    assert inner.blocks < outer.blocks
    lines = {at.line: LOOPS.splitlines()[at.line - 1] for block in inner.blocks for at in block.instructions}
    assert any("in[column]" in line for line in lines.values()) and not any("syncthreads" in x for x in lines.values())
    stores = [at for at in code.instructions if at.operation in static_model.STORES]
    assert [lines[at.line].strip() for at in stores] == ["out[row * columns + column] = value;"]


def test_steps_are_counted_by_their_markers_and_seldom_code_by_how_often_it_is_executed() -> None:
    def count(unroll: int, seldom: float) -> float:
        steps = static_model.Steps(static_model.STORES, around=(1000,), seldom={"int rare(": seldom})
        return sum(static_model.executed(of_loops(unroll), LOOPS, steps).values())

    assert 8 < count(1, 0) < count(1, 0.5) < count(1, 1)
    assert count(1, 0.5) - count(1, 0) == pytest.approx(count(1, 1) - count(1, 0.5))
    assert 5 < count(4, 0) < 8  # load, compare, vote, branch and store, and a quarter of what the loop itself takes


def test_occupancy_is_what_runs_out_first() -> None:
    def blocks(registers: int, shared: int, threads: int) -> tuple[int, int]:
        return static_model.occupancy(Resources(registers, 0, 0, shared), threads)

    assert blocks(32, 0, 256) == (8, 64)  # places for warps
    assert blocks(16, 0, 32) == (32, 32)  # places for blocks
    assert blocks(64, 0, 256) == (4, 32)  # registers
    assert blocks(65, 0, 256) == (3, 24)  # in parts of 8 a thread
    assert blocks(32, 100 << 10, 256) == (2, 16)  # shared memory, and a kilobyte for each block
    assert blocks(32, 114 << 10, 256) == (1, 8)


def write_budget() -> None:
    def rounded(found: Resources) -> dict[str, int]:
        return asdict(replace(found, registers=-(-found.registers // 8) * 8))  # a warp is given registers by 256

    budget = {name: {k: rounded(v) for k, v in sorted(needs(name).items())} for name in ARCHITECTURES}
    BUDGET.write_text(json.dumps({"compilers": build.compiler_versions(), **budget}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write_budget()
