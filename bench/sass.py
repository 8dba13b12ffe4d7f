"""The instructions of a compiled kernel (sm_90 cubin): where they come from in the source, their blocks and loops.

An instruction is 16 bytes, little-endian: bits 0 to 11 are the operation and the form of its operands (bits 0 to 8 the
operation alone), 12 to 15 the predicate that guards it. That and the targets of branches is all that is read here.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

BYTES = 16  # of an instruction
ALWAYS = 7  # the predicate that is always true

BRANCH, EXIT, RETURN, CALL = 0x147, 0x14D, 0x150, 0x144
INDIRECT_BRANCHES = {0x149, 0x14A, 0x14C}  # BRX, JMP, JMX: their targets are not in the instruction
NOP = 0x118


@dataclass(frozen=True)
class Instruction:
    address: int  # in its kernel
    code: int  # 128 bits
    line: int  # of the source; 0 if unknown

    @property
    def operation(self) -> int:
        return self.code & 0x1FF

    @property
    def unconditional(self) -> bool:
        """Whether neither the guard nor, of a branch, its own predicate can keep it from being executed."""
        guarded = self.code >> 12 & 15 != ALWAYS
        return not guarded and (self.operation != BRANCH or self.code >> 87 & 15 == ALWAYS)

    @property
    def for_divergent_warps(self) -> bool:
        """BRA.DIV: leads to the slow way of a warp operation, if lanes of the warp are elsewhere."""
        return self.operation == BRANCH and bool(self.code >> 91 & 1)

    @property
    def target(self) -> int:
        """Where a branch goes: a signed distance from the next instruction, in words of 4 bytes."""
        low, high = self.code >> 16 & 0xFF, self.code >> 34 & (1 << 48) - 1
        distance = high << 8 | low
        return self.address + BYTES + 4 * (distance - (distance >> 55 << 56))


@dataclass(eq=False)
class Block:
    """Instructions that are executed one after another; those that may follow."""

    instructions: list[Instruction]
    successors: list[Block] = field(default_factory=list, repr=False)


@dataclass(eq=False)
class Loop:
    """The blocks of a loop, those of loops in it too, and the smallest loop around it."""

    head: Block
    blocks: set[Block]
    parent: Loop | None = None

    @property
    def depth(self) -> int:
        return 1 if self.parent is None else 1 + self.parent.depth

    def reached(self, closed: set[Block]) -> set[Block]:
        """The blocks that a turn can come to without these."""
        found: set[Block] = set()
        waiting = [self.head]
        while waiting:
            block = waiting.pop()
            if block in self.blocks - closed - found:
                found.add(block)
                waiting += block.successors
        return found


class Code:
    """The code of one kernel."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks that can be reached, without the slow ways of divergent warps, in the order of a walk."""
        starts = {0}
        for at in self.instructions:
            if at.operation in INDIRECT_BRANCHES:
                raise ValueError(f"a branch with unknown targets at {at.address:#x} (line {at.line})")
            if at.operation == BRANCH:
                starts |= {at.target, at.address + BYTES}
            elif at.operation in (EXIT, RETURN):
                starts.add(at.address + BYTES)
        blocks: dict[int, Block] = {}
        for at in self.instructions:
            if at.address in starts:
                block = blocks[at.address] = Block([])
            block.instructions.append(at)
        for block in blocks.values():
            block.successors = [blocks[address] for address in _next(block.instructions[-1]) if address in blocks]
        return _reachable(blocks[0])

    @cached_property
    def predecessors(self) -> dict[Block, list[Block]]:
        before: dict[Block, list[Block]] = defaultdict(list)
        for block in self.blocks:
            for successor in block.successors:
                before[successor].append(block)
        return before

    @cached_property
    def dominators(self) -> dict[Block, set[Block]]:
        """For each block those that every way to it passes, itself too."""
        dominators = {block: set(self.blocks) for block in self.blocks}
        dominators[self.blocks[0]] = {self.blocks[0]}
        changed = True
        while changed:
            changed = False
            for block in self.blocks[1:]:
                new = set.intersection(*(dominators[other] for other in self.predecessors[block])) | {block}
                changed |= new != dominators[block]
                dominators[block] = new
        return dominators

    @cached_property
    def loops(self) -> list[Loop]:
        """Natural loops: what reaches a branch back to a block that all ways into the loop pass."""
        loops: dict[Block, Loop] = {}
        for block in self.blocks:
            for head in block.successors:
                if head in self.dominators[block]:
                    loop = loops.setdefault(head, Loop(head, {head}))
                    waiting = [block]
                    while waiting:
                        inside = waiting.pop()
                        if inside not in loop.blocks:
                            loop.blocks.add(inside)
                            waiting += self.predecessors[inside]
        found = sorted(loops.values(), key=lambda loop: len(loop.blocks))
        for at, loop in enumerate(found):
            loop.parent = next((outer for outer in found[at + 1 :] if loop.head in outer.blocks), None)
        return found

    def own_blocks(self, loop: Loop) -> list[Block]:
        """The blocks of a loop that are in no loop inside it."""
        inner = set().union(*(other.blocks for other in self.loops if other.parent is loop))
        return [block for block in self.blocks if block in loop.blocks - inner]


def read(cubin: bytes) -> dict[str, Code]:
    """The kernels of a cubin, by name."""
    sections = _sections(cubin)
    lines = _lines(sections)
    codes = {}
    for index, (name, content) in enumerate(sections):
        if name.startswith(".text."):
            instructions = []
            line = 0
            for address in range(0, len(content), BYTES):
                line = lines.get((index, address), line)
                code = int.from_bytes(content[address : address + BYTES], "little")
                instructions.append(Instruction(address, code, line))
            codes[name.removeprefix(".text.")] = Code(instructions)
    return codes


def _next(last: Instruction) -> list[int]:
    """The addresses that may follow the last instruction of a block."""
    follows = [last.address + BYTES]
    if last.operation in (EXIT, RETURN):
        return [] if last.unconditional else follows
    if last.operation != BRANCH or last.for_divergent_warps:
        return follows
    return [last.target] if last.unconditional else [*follows, last.target]


def _reachable(entry: Block) -> list[Block]:
    """Blocks in reverse postorder: each before those that follow it, but for branches back."""
    order: list[Block] = []
    seen = {entry}
    path = [(entry, iter(entry.successors))]
    while path:
        block, successors = path[-1]
        successor = next((other for other in successors if other not in seen), None)
        if successor is None:
            order.append(block)
            path.pop()
        else:
            seen.add(successor)
            path.append((successor, iter(successor.successors)))
    return order[::-1]


def _sections(cubin: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<3H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    names = headers[names_at][4]
    return [
        (cubin[names + name : cubin.index(b"\0", names + name)].decode(), b"" if kind == 8 else cubin[at : at + length])
        for name, kind, _, _, at, length in headers
    ]


def _lines(sections: list[tuple[str, bytes]]) -> dict[tuple[int, int], int]:
    """(section, address) -> line where that changes: DWARF 2's line programs, a sequence for each kernel."""
    by_name = dict(sections)
    program, symbols = by_name.get(".debug_line", b""), by_name.get(".symtab", b"")
    section_at = {}  # an address in the program is that of a symbol
    for at, info, _ in struct.iter_unpack("<QQq", by_name.get(".rela.debug_line", b"")):
        section_at[at] = struct.unpack_from("<H", symbols, 24 * (info >> 32) + 6)[0]
    lines: dict[tuple[int, int], int] = {}
    at = 0
    while at < len(program):
        unit_length, _, header_length = struct.unpack_from("<IHI", program, at)
        minimum, _, line_base, line_range, opcode_base = struct.unpack_from("<BBbBB", program, at + 10)
        arguments = program[at + 15 : at + 14 + opcode_base]
        end = at + 4 + unit_length
        at += 10 + header_length
        section, address, line = 0, 0, 1
        while at < end:
            opcode = program[at]
            at += 1
            if opcode >= opcode_base:
                address += (opcode - opcode_base) // line_range * minimum
                line += line_base + (opcode - opcode_base) % line_range
                lines[section, address] = line
            elif opcode == 0:
                length, at = _leb128(program, at)
                if program[at] == 1:  # end of sequence
                    section, address, line = 0, 0, 1
                elif program[at] == 2:  # set address
                    section, address = section_at[at + 1], struct.unpack_from("<Q", program, at + 1)[0]
                at += length
            elif opcode == 1:  # copy
                lines[section, address] = line
            elif opcode == 2:  # advance address
                step, at = _leb128(program, at)
                address += step * minimum
            elif opcode == 3:  # advance line
                step, at = _leb128(program, at, signed=True)
                line += step
            elif opcode == 8:  # add what the last special opcode would
                address += (255 - opcode_base) // line_range * minimum
            elif opcode == 9:  # advance address by a fixed word
                address += struct.unpack_from("<H", program, at)[0]
                at += 2
            else:
                for _ in range(arguments[opcode - 1]):
                    _, at = _leb128(program, at)
    return lines


def _leb128(data: bytes, at: int, signed: bool = False) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (value - (1 << shift) if signed and byte & 64 else value), at
