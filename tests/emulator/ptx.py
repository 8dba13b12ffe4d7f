"""Turns the PTX of NVRTC and of Numba into C++ for the emulator: what the kernels here need, an error for the rest.

A register is a C++ variable; an instruction becomes `set(destination, expression);`. What PTX leaves to the device, as
approximations and flushing to zero, is refused: host and device would differ.
"""

from __future__ import annotations

import re

from tests.emulator.host_cuda import Module

C_TYPES = {"f16": "_Float16", "f32": "float", "f64": "double", "pred": "bool"}
C_TYPES |= {f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)}
C_TYPES |= {f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)}

SPECIAL = {
    f"%{register}.{axis}": f"{variable}.{axis}"
    for register, variable in (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
    for axis in "xyz"
} | {
    "%laneid": "simt::current->lane",
    "WARP_SZ": "32u",
    "%lanemask_eq": "(1u << simt::current->lane)",
    "%lanemask_lt": "((1u << simt::current->lane) - 1u)",
    "%lanemask_le": "((2u << simt::current->lane) - 1u)",
    "%lanemask_gt": "(~((2u << simt::current->lane) - 1u))",
    "%lanemask_ge": "(~((1u << simt::current->lane) - 1u))",
}
FLOAT = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "fma": "std::fma({}, {}, {})",
    "min": "ptx::minimum({}, {})",
    "max": "ptx::maximum({}, {})",
    "abs": "std::fabs({})",
    "neg": "-{}",
    "sqrt": "std::sqrt({})",
    "rcp": "1 / {}",
    "copysign": "std::copysign({1}, {0})",
}
UNSIGNED = {  # the same bits whether operands are signed or not
    "add": "{} + {}",
    "sub": "{} - {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "not": "~{}",
    "neg": "0 - {}",
    "mul": "ptx::multiply({}, {})",
    "mad": "ptx::multiply({}, {}) + {}",
}
TYPED = {
    "div": "ptx::divide({}, {})",
    "rem": "ptx::remainder({}, {})",
    "min": "ptx::minimum({}, {})",
    "max": "ptx::maximum({}, {})",
    "abs": "({0} < 0 ? 0 - uint64_t({0}) : uint64_t({0}))",
}
PREDICATE = {"and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "!{}"}
COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
ROUNDED_TO_WHOLE = {"rni": "std::rint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
INEXACT = {"ftz", "approx", "full", "rz", "rm", "rp", "sat", "cc", "noftz"}
ATOMICS = ("add", "min", "max", "and", "or", "xor", "exch", "cas")
VOTES = {"ballot": "BALLOT", "any": "ANY", "all": "ALL", "uni": "UNIFORM"}
REDUCTIONS = {"add": "ADD", "min": "MIN", "max": "MAX", "and": "AND", "or": "OR", "xor": "XOR"}
SHUFFLES = {"up": "UP", "down": "DOWN", "bfly": "BUTTERFLY", "idx": "INDEX"}

_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)\s*((?:\.\w+\s+[\d, ]+\s*)*)\{(.*?)^\}", re.S | re.M)
_SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)(?:\[(\d*)\])?\s*;")
_CONSTANT = re.compile(r"\.(?:const|global)\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*(\{[^}]*\})")
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]")
_WAITING = re.compile(r"\b(bar|barrier|vote|shfl|match|redux)\.")


class UnknownPTX(NotImplementedError):
    """An instruction that the emulator does not know, or may not emulate as host and device could differ."""


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
            self.address[name] = f"(uint64_t)m_{_identifier(name)}"
            lines.append(f"alignas({alignment or 8}) static unsigned char m_{_identifier(name)}[{count}] = {values};")
        self.declarations = "\n".join(lines)


def _identifier(name: str) -> str:
    return name.replace("$", "_").replace("%", "r_")


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
            code.append(f"{_identifier(label[1])}:;")
            line += label[0].count("\n")
            statement = statement[label.end() :]
        if statement.startswith("."):
            variables += _declaration(statement, address)
        elif statement:
            try:
                code.append(f'#line {line} "kernel"\n{_Instruction(statement, address, line).cpp()}')
            except (UnknownPTX, KeyError) as error:
                raise UnknownPTX(f"{name}, line {line}: {statement} ({error})") from error
        line = line_after
    return "\n".join((f"void {name}({listed})\n{{", *variables, *code, "}"))


def _declaration(statement: str, address: dict[str, str]) -> list[str]:
    if local := _LOCAL.match(statement):
        address[local[2]] = f"(uint64_t)m_{_identifier(local[2])}"
        return [f"alignas({local[1]}) char m_{_identifier(local[2])}[{local[3]}];"]
    if register := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S):
        kind = "bool" if register[1] == "pred" else f"uint{register[1][1:]}_t"
        names: list[str] = []
        for name in register[2].split(","):
            counted = re.match(r"\s*(%\w+)<(\d+)>", name)
            names += [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name.strip()]
        return [f"{kind} {', '.join(_identifier(name) + ' = 0' for name in names)};"]
    return []  # .shared has been seen to, .pragma says nothing of what is computed


class _Instruction:
    def __init__(self, statement: str, address: dict[str, str], line: int) -> None:
        guard = re.match(r"@(!?%\w+)\s+", statement)
        self.guard = f"if ({self.value(guard[1], 'pred')}) " if guard else ""
        opcode, _, operands = statement[guard.end() if guard else 0 :].partition(" ")
        opcode, _, more = opcode.partition("\t")
        self.op, *self.modifiers = opcode.strip().replace("::", ".").split(".")
        self.operands = _OPERANDS.findall(f"{more} {operands}")
        self.type = self.modifiers[-1] if self.modifiers else ""
        self.address, self.line = address, line

    def cpp(self) -> str:
        if self.type in C_TYPES and self.type[0] == "f" and INEXACT & {*self.modifiers}:
            raise UnknownPTX("not IEEE 754 to the nearest")
        method = getattr(self, f"_{self.op}", None)
        return f"{self.guard}{{ {method() if method else self._arithmetic()} }}"

    # -- operands

    def value(self, operand: str, type: str) -> str:
        """An expression of the C++ type of a PTX type."""
        c_type = C_TYPES[type]
        if operand.startswith("!"):
            return f"!{self.value(operand[1:], type)}"
        if operand in SPECIAL:
            return f"({c_type})({SPECIAL[operand]})"
        if operand.startswith("%"):
            return f"get<{c_type}>({_identifier(operand)})"
        if real := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", operand):
            kind, suffix = ("float", "u") if real[1] == "f" else ("double", "ull")
            return f"__builtin_bit_cast({kind}, 0x{real[2]}{suffix})"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return f"({c_type}){int(operand.rstrip('U'), 0) % 2**64}ull"
        return f"({c_type})({self.address[operand]})"

    def values(self, *types: str) -> list[str]:
        """Of the operands after the destination, all of the instruction's type if none is given."""
        types = types or (self.type,) * (len(self.operands) - 1)
        return [self.value(operand, type) for operand, type in zip(self.operands[1:], types, strict=True)]

    def memory(self, operand: str) -> str:
        """A char* of an operand in brackets."""
        match = _ADDRESS.fullmatch(operand)
        if not match:
            raise UnknownPTX("address")
        base, offset = match[1], int(match[2] or 0)
        if "param" in self.modifiers:
            return f"{self.address[base]} + {offset}"
        if "shared" in self.modifiers:
            width = "u32" if re.match(r"%r\d", base) else "u64"
            return f"ptx::shared(declared_shared, {C_TYPES[width]}({self.value(base, width)} + {offset}))"
        return f"(char*)({self.value(base, 'u64')} + {offset})"

    def result(self, expression: str, type: str = "") -> str:
        """The destination gets an expression, made of the type if that is not the expression's own."""
        cast = f"static_cast<{C_TYPES[type]}>({expression})" if type else expression
        return f"set({_identifier(self.operands[0])}, {cast});"

    def vector(self, operand: str) -> list[str]:
        return [x.strip() for x in operand.strip("{}").split(",")]

    # -- arithmetic

    def _arithmetic(self) -> str:
        if self.type not in C_TYPES:
            raise UnknownPTX("instruction")
        if self.type == "pred":
            return self.result(PREDICATE[self.op].format(*self.values()))
        if self.type[0] == "f":
            return self.result(FLOAT[self.op].format(*self.values()), self.type)
        if "wide" in self.modifiers or "hi" in self.modifiers:
            return self._widening()
        if self.op in UNSIGNED:
            unsigned = f"u{self.type[1:]}"
            operands = self.values(*(unsigned,) * (len(self.operands) - 1))
            return self.result(UNSIGNED[self.op].format(*operands), unsigned)
        return self.result(TYPED[self.op].format(*self.values()), self.type)

    def _widening(self) -> str:
        if "hi" in self.modifiers:
            product, wide = "ptx::multiply_high({}, {})", self.type
        else:
            wide = f"{self.type[0]}{2 * int(self.type[1:])}"
            product = f"{C_TYPES[wide]}({{}}) * {C_TYPES[wide]}({{}})"
        factors = [self.value(operand, self.type) for operand in self.operands[1:3]]
        unsigned = f"u{wide[1:]}"
        added = f" + {self.value(self.operands[3], unsigned)}" if self.op == "mad" else ""
        return self.result(f"{C_TYPES[unsigned]}({product.format(*factors)}){added}", unsigned)

    def _shl(self) -> str:
        return self.result("ptx::shift_left({}, {})".format(*self.values(f"u{self.type[1:]}", "u32")))

    def _shr(self) -> str:
        return self.result("ptx::shift_right({}, {})".format(*self.values(self.type, "u32")))

    def _popc(self) -> str:
        return self.result("__builtin_popcountll({})".format(*self.values()))

    def _clz(self) -> str:
        return self.result(f"__clz{'ll' if self.type == 'b64' else ''}({self.values()[0]})")

    def _brev(self) -> str:
        return self.result("__brev({})".format(*self.values("b32")))

    def _bfi(self) -> str:
        return self.result("ptx::insert_field({}, {}, {}, {})".format(*self.values(self.type, self.type, "u32", "u32")))

    def _bfe(self) -> str:
        return self.result("ptx::extract_field({}, {}, {})".format(*self.values(self.type, "u32", "u32")))

    def _prmt(self) -> str:
        return self.result("__byte_perm({}, {}, {})".format(*self.values("u32", "u32", "u32")))

    def _shf(self) -> str:
        if "wrap" not in self.modifiers:
            raise UnknownPTX("clamped")
        return self.result(f"__funnelshift_{self.modifiers[0]}({', '.join(self.values('u32', 'u32', 'u32'))})")

    def _lop3(self) -> str:
        return self.result(f"ptx::logic({', '.join(self.values(*('u32',) * 4))})")

    # -- comparisons, moves, conversions

    def _setp(self) -> str:
        comparison = self.modifiers[0]
        x, y = (self.value(operand, self.type) for operand in self.operands[1:3])
        unordered = f"({x} != {x} || {y} != {y})"
        if comparison in ("num", "nan"):
            test = f"{'!' * (comparison == 'num')}{unordered}"
        elif self.type[0] != "f":
            test = f"({x} {COMPARISONS[comparison]} {y})"
        elif comparison in COMPARISONS:
            test = f"({x} {COMPARISONS[comparison]} {y} && !{unordered})"
        else:
            test = f"({x} {COMPARISONS[comparison.removesuffix('u')]} {y} || {unordered})"
        if len(self.operands) == 4:
            test = f"({PREDICATE[self.modifiers[1]].format(test, self.value(self.operands[3], 'pred'))})"
        first, _, second = self.operands[0].partition("|")
        other = f" {_identifier(second)} = !test;" if second else ""
        return f"const bool test = {test}; {_identifier(first)} = test;{other}"

    def _selp(self) -> str:
        x, y, choice = self.values(self.type, self.type, "pred")
        return self.result(f"{choice} ? {x} : {y}")

    def _mov(self) -> str:
        to, source = self.operands
        if "{" not in to + source:
            return self.result(self.value(source, self.type))
        parts = self.vector(to if "{" in to else source)
        width = int(self.type[1:]) // len(parts)
        if "{" in source:
            return self.result(
                " | ".join(
                    f"{C_TYPES[self.type]}({self.value(part, f'b{width}')}) << {width * i}"
                    for i, part in enumerate(parts)
                )
            )
        return f"const auto whole = {self.value(source, self.type)}; " + " ".join(
            f"set({_identifier(part)}, uint{width}_t(whole >> {width * i}));"
            for i, part in enumerate(parts)
            if part != "_"
        )

    def _cvt(self) -> str:
        to, source = self.modifiers[-2:]
        (x,) = self.values(source)
        rounding = next((ROUNDED_TO_WHOLE[m] for m in self.modifiers if m in ROUNDED_TO_WHOLE), None)
        if INEXACT & {*self.modifiers}:
            raise UnknownPTX("not rounded to the nearest")
        if source[0] == "f" and rounding:
            x = f"{rounding}({x})"
        if source[0] == "f" and to[0] != "f":
            return self.result(f"ptx::to_integer<{C_TYPES[to]}>({x})")
        return self.result(x, to)

    def _cvta(self) -> str:
        (x,) = self.values("u64")
        from_shared = "shared" in self.modifiers and "to" not in self.modifiers
        return self.result(f"(uint64_t)ptx::shared(declared_shared, {x})" if from_shared else x)

    # -- memory

    def _transfer(self, memory: str, registers: str, transfer: str) -> str:
        parts, c_type, width = self.vector(registers), C_TYPES[self.type], int(self.type[1:]) // 8
        aligned = f"ptx::check_aligned(memory, {width * len(parts)}, {self.line}); " if len(parts) > 1 else ""
        return f"char* const memory = {self.memory(memory)}; {aligned}" + " ".join(
            transfer.format(
                register=_identifier(part),
                value=self.value(part, self.type),
                place=f"ptx::at<{c_type}>(memory + {width * i})",
            )
            for i, part in enumerate(parts)
        )

    def _ld(self) -> str:
        return self._transfer(self.operands[1], self.operands[0], "set({register}, {place});")

    def _st(self) -> str:
        return self._transfer(self.operands[0], self.operands[1], "{place} = {value};")

    def _atom(self) -> str:
        _, memory, *values = self.operands
        name = next(op for op in ATOMICS if op in self.modifiers)
        function = "atomicCAS" if name == "cas" else f"atomic{name.capitalize()}"
        listed = ", ".join(self.value(value, self.type) for value in values)
        call = f"{function}(&ptx::at<{C_TYPES[self.type]}>({self.memory(memory)}), {listed})"
        return f"{call};" if self.operands[0] == "_" else self.result(call)

    def _red(self) -> str:
        self.operands.insert(0, "_")
        return self._atom()

    # -- threads

    def _warp(self, operation: str, value: str, mask: str) -> str:
        return f"simt::warp_operation(simt::{operation}, {self.value(mask, 'u32')}, {value}, 0, {self.line})"

    def _vote(self) -> str:
        _, choice, mask = self.operands
        return self.result(self._warp(VOTES[self.modifiers[1]], self.value(choice, "pred"), mask))

    def _redux(self) -> str:
        operation = self.modifiers[1]
        signed = "_SIGNED" if operation in ("min", "max") and self.type[0] == "s" else ""
        _, x, mask = self.operands
        return self.result(self._warp(REDUCTIONS[operation] + signed, self.value(x, "u32"), mask))

    def _match(self) -> str:
        _, x, mask = self.operands
        return self.result(self._warp("MATCH", self.value(x, self.type), mask))

    def _shfl(self) -> str:
        to, _, inside = self.operands[0].partition("|")
        arguments = ", ".join(self.value(operand, "b32") for operand in self.operands[1:])
        shuffle = f"ptx::shuffle(ptx::{SHUFFLES[self.modifiers[1]]}, {arguments}, inside, {self.line})"
        kept = f" {_identifier(inside)} = inside;" if inside else ""
        return f"bool inside; set({_identifier(to)}, {shuffle});{kept}"

    def _bar(self) -> str:
        if "warp" in self.modifiers:
            return self._warp("SYNC", "0", self.operands[0]) + ";"
        if "sync" in self.modifiers and self.operands == ["0"]:
            return f"simt::block_operation(simt::BLOCK_SYNC, false, {self.line});"
        raise UnknownPTX("barrier")

    _barrier = _bar

    def _membar(self) -> str:
        return "simt::fence();"

    _fence = _membar

    def _bra(self) -> str:
        return f"goto {_identifier(self.operands[0])};"

    def _ret(self) -> str:
        return "return;"

    _exit = _ret

    def _trap(self) -> str:
        return f'simt::fail("trap", {self.line});'
