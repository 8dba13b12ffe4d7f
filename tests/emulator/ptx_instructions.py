"""What each PTX instruction is in C++, see ptx.py."""

from __future__ import annotations

import re

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
ATOMICS = {"add": "atomicAdd", "max": "atomicMax"}
VOTES = {"ballot": "BALLOT", "any": "ANY", "all": "ALL"}
REDUCTIONS = {("add", "s32"): "ADD", ("add", "u32"): "ADD", ("max", "u32"): "MAX", ("or", "b32"): "OR"}
SHUFFLES = {"up": "UP", "bfly": "BUTTERFLY", "idx": "INDEX"}

_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]")


class UnknownPTX(NotImplementedError):
    """An instruction that the emulator does not know, or may not emulate as host and device could differ."""


def identifier(name: str) -> str:
    return name.replace("$", "_").replace("%", "r_")


class Instruction:
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
            return f"get<{c_type}>({identifier(operand)})"
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
        return f"set({identifier(self.operands[0])}, {cast});"

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
        if self.op == "mul" and "lo" not in self.modifiers:
            return self._product()
        if self.op in UNSIGNED:
            unsigned = f"u{self.type[1:]}"
            operands = self.values(*(unsigned,) * (len(self.operands) - 1))
            return self.result(UNSIGNED[self.op].format(*operands), unsigned)
        return self.result(TYPED[self.op].format(*self.values()), self.type)

    def _product(self) -> str:
        """Of integers, not the lower half of it."""
        if self.type == "u32" and "hi" in self.modifiers:
            return self.result("__umulhi({}, {})".format(*self.values()))
        if "wide" not in self.modifiers:
            raise UnknownPTX("product")
        wide = C_TYPES[f"{self.type[0]}{2 * int(self.type[1:])}"]
        x, y = self.values()
        return self.result(f"{wide}({x}) * {wide}({y})")

    def _shl(self) -> str:
        return self.result("ptx::shift_left({}, {})".format(*self.values(f"u{self.type[1:]}", "u32")))

    def _shr(self) -> str:
        return self.result("ptx::shift_right({}, {})".format(*self.values(self.type, "u32")))

    def _popc(self) -> str:
        return self.result("__popc({})".format(*self.values("b32")))

    def _clz(self) -> str:
        return self.result("__clz({})".format(*self.values("b32")))

    def _prmt(self) -> str:
        if self.type != "b32":  # has a mode
            raise UnknownPTX("permutation")
        return self.result(f"__byte_perm({', '.join(self.values('b32', 'b32', 'b32'))})")

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
        other = f" {identifier(second)} = !test;" if second else ""
        return f"const bool test = {test}; {identifier(first)} = test;{other}"

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
            f"set({identifier(part)}, uint{width}_t(whole >> {width * i}));"
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
        if "shared" in self.modifiers:
            raise UnknownPTX("a pointer to shared memory")
        return self.result(*self.values("u64"))

    # -- memory

    def _transfer(self, memory: str, registers: str, transfer: str) -> str:
        parts, c_type, width = self.vector(registers), C_TYPES[self.type], int(self.type[1:]) // 8
        aligned = f"ptx::check_aligned(memory, {width * len(parts)}, {self.line}); " if len(parts) > 1 else ""
        return f"char* const memory = {self.memory(memory)}; {aligned}" + " ".join(
            transfer.format(
                register=identifier(part),
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
        function = next(ATOMICS[op] for op in self.modifiers if op in ATOMICS)
        (x,) = (self.value(value, self.type) for value in values)
        return self.result(f"{function}(&ptx::at<{C_TYPES[self.type]}>({self.memory(memory)}), {x})")

    # -- threads

    def _warp(self, operation: str, value: str, mask: str) -> str:
        return f"simt::warp_operation(simt::{operation}, {self.value(mask, 'u32')}, {value}, 0, {self.line})"

    def _vote(self) -> str:
        _, choice, mask = self.operands
        return self.result(self._warp(VOTES[self.modifiers[1]], self.value(choice, "pred"), mask))

    def _redux(self) -> str:
        _, x, mask = self.operands
        return self.result(self._warp(REDUCTIONS[self.modifiers[1], self.type], self.value(x, "u32"), mask))

    def _shfl(self) -> str:
        to, _, inside = self.operands[0].partition("|")
        arguments = ", ".join(self.value(operand, "b32") for operand in self.operands[1:])
        shuffle = f"ptx::shuffle(ptx::{SHUFFLES[self.modifiers[1]]}, {arguments}, inside, {self.line})"
        kept = f" {identifier(inside)} = inside;" if inside else ""
        return f"bool inside; set({identifier(to)}, {shuffle});{kept}"

    def _bar(self) -> str:
        if "warp" in self.modifiers:
            return self._warp("SYNC", "0", self.operands[0]) + ";"
        if "sync" in self.modifiers and self.operands == ["0"]:
            return f"simt::block_barrier({self.line});"
        raise UnknownPTX("barrier")

    def _membar(self) -> str:
        return "simt::fence();"

    def _bra(self) -> str:
        return f"goto {identifier(self.operands[0])};"

    def _ret(self) -> str:
        return "return;"

    def _trap(self) -> str:
        return f'simt::fail("trap", {self.line});'
