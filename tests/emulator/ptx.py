"""Turns the PTX of NVRTC and of Numba into C++ for the emulator: what the kernels here need, an error for the rest.

A register is a C++ variable; an instruction becomes `set(destination, expression);`. What PTX leaves to the device, as
approximations and flushing to zero, is refused: host and device would differ.
"""

from __future__ import annotations

import re

from tests.emulator.host_cuda import Module
from tests.emulator.ptx_instructions import Instruction, UnknownPTX, identifier

_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+\s+[\d, ]+\s*)*)\{(.*?)^\}", re.S | re.M)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_CONSTANT = re.compile(r"\.(?:const|global)\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*(\{[^}]*\})")
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_WAITING = re.compile(r"\b(bar|barrier|vote|shfl|redux)\.")


def module(ptx: str, only: str = "") -> Module:
    """The kernels of PTX text. only: a name for the one that it has."""
    # a .loc and a .file end with their line; all other statements with a semicolon
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", re.sub(r"//[^\n]*", "", ptx), flags=re.M)
    symbols, declared = _Symbols(text), {}
    functions = []
    for entry in _ENTRY.finditer(text):
        name = only or entry[1]
        bound = re.search(r"\.maxntid\s+(\d+)", entry[3])
        declared[name] = bound[1] if bound else "1024"
        functions.append(_function(name, entry, text, symbols))
    source = "\n".join(('#include "ptx.h"\nusing ptx::get, ptx::set;', symbols.declarations, *functions))
    return Module(ptx, source, declared, independent=not _WAITING.search(text))


class _Symbols:
    """Names of the module's memory, as C++ expressions of their address."""

    def __init__(self, text: str) -> None:
        self.address: dict[str, str] = {}
        size, dynamic = 0, []
        for alignment, bits, name, count in _SHARED.findall(text):
            if count == "" and f"{name}[]" in text:
                dynamic.append(name)
                continue
            size = -(-size // int(alignment or 4)) * int(alignment or 4)
            self.address[name] = f"{size}u"
            size += int(count or 1) * int(bits) // 8
        size = max(-(-size // 16) * 16, 16)
        self.address |= dict.fromkeys(dynamic, f"{size}u")
        lines = [f"alignas(16) __shared__ char declared_shared[{size}];"]
        for alignment, name, count, values in _CONSTANT.findall(text):
            self.address[name] = f"(uint64_t)m_{identifier(name)}"
            lines.append(f"alignas({alignment or 8}) static unsigned char m_{identifier(name)}[{count}] = {values};")
        self.declarations = "\n".join(lines)


def _function(name: str, entry: re.Match[str], text: str, symbols: _Symbols) -> str:
    parameters = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w(\d+)\s+(?:\.ptr[^,]*?\s)?([\w$]+)", entry[2])
    address = symbols.address | {p: f"(char*)&p{i}" for i, (_, p) in enumerate(parameters)}
    listed = ", ".join(f"ptx::Parameter<{int(bits) // 8}> p{i}" for i, (bits, _) in enumerate(parameters))
    variables, code = [], []
    line = text[: entry.start(4)].count("\n") + 1
    for raw in entry[4].split(";"):
        line += raw[: len(raw) - len(raw.lstrip("{} \t\n"))].count("\n")
        statement = raw.lstrip("{} \t\n")
        line_after = line + statement.count("\n")
        while label := re.match(r"([\w$]+):\s*", statement):
            code.append(f"{identifier(label[1])}:;")
            line += label[0].count("\n")
            statement = statement[label.end() :]
        if statement.startswith("."):
            variables += _declaration(statement, address)
        elif statement:
            try:
                code.append(f'#line {line} "kernel"\n{Instruction(statement, address, line).cpp()}')
            except (UnknownPTX, KeyError) as error:
                raise UnknownPTX(f"{name}, line {line}: {statement} ({error})") from error
        line = line_after
    return "\n".join((f"void {name}({listed})\n{{", *variables, *code, "}"))


def _declaration(statement: str, address: dict[str, str]) -> list[str]:
    if local := _LOCAL.match(statement):
        address[local[2]] = f"(uint64_t)m_{identifier(local[2])}"
        return [f"alignas({local[1]}) char m_{identifier(local[2])}[{local[3]}];"]
    if register := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S):
        kind = "bool" if register[1] == "pred" else f"uint{register[1][1:]}_t"
        names: list[str] = []
        for name in register[2].split(","):
            counted = re.match(r"\s*(%\w+)<(\d+)>", name)
            names += [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name.strip()]
        return [f"{kind} {', '.join(identifier(name) + ' = 0' for name in names)};"]
    return []  # .shared has been seen to, .pragma says nothing of what is computed
