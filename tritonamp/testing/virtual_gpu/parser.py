"""PTX text to a :class:`Program`: a flat list of :class:`Instr` for one entry. Only syntax is handled here.

Operands are small tuples::

    ("reg", name)  ("imm", text)  ("sym", name)  ("special", name)  ("sink",)
    ("not", operand)  ("pair", a, b)  ("vec", [operands])  ("list", [operands])  ("addr", base, offset)
"""

import bisect
import re
from dataclasses import dataclass, field
from typing import Any

from .ptx_types import REGISTER_BITS

Operand = tuple[Any, ...]

_NUMBER = re.compile(
    r"[-+]?(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*([eE][-+]?\d+)?|\d+U?)$"
)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_ARRAY = re.compile(
    r"\.(?:visible |extern |weak |internal )*\s*\.?(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$.]+)\s*(\[(\d*)\])?(?:\s*=\s*\{?([^;]*?)\}?\s*)?;"
)
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid)\.[xyz]$|"
    r"%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo|"
    r"lanemask_\w\w|dynamic_smem_size|total_smem_size|(cluster|is_explicit_cluster)\w*(\.[xyz])?)$"
)
_INSTRUCTION = re.compile(r"(?:@(!?)([\w%$]+)\s+)?([\w.:]+)\s*(.*)$")
_ADDRESS = re.compile(r"\[\s*([^\s+\]]+?)\s*(?:\+\s*(-?\w+))?\s*(?:,.*)?\]$")


@dataclass(slots=True)
class Instr:
    """One instruction."""

    op: str  # the whole opcode, e.g. "ld.global.v4.b32"
    args: list[Operand]
    guard: str | None  # predicate register
    negate: bool
    line: int  # of the PTX text
    loc: str  # source location of the last .loc
    text: str
    pc: int
    root: str = ""  # the opcode without its modifiers

    def __post_init__(self) -> None:
        self.root = self.op.partition(".")[0]

    def where(self) -> str:
        """What error messages say about the place."""
        return f"PTX line {self.line}: {self.text}\n    at {self.loc}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """A declared array."""

    space: str  # shared, local, global or const
    align: int
    size: int  # bytes; 0 for one whose size the launch gives
    value: bytes  # initial value


@dataclass
class Program:
    """The body of one kernel."""

    name: str
    target: str
    threads: int = 0  # per block, 0 where the kernel does not require a number
    params: list[tuple[str, str, int]] = field(default_factory=list)  # name, type, bytes
    code: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> pc
    tables: dict[str, list[str]] = field(default_factory=dict)  # label -> labels to branch to
    registers: dict[str, int] = field(default_factory=dict)  # name -> bits, in order of first use
    symbols: dict[str, Symbol] = field(default_factory=dict)


class ParseError(ValueError):
    """The text is not PTX as LLVM writes it."""


class _Body:
    """Parses the statements of a function body; keeps track of scopes, lines and source locations."""

    def __init__(self, program: Program, text: str, start: int, newlines: list[int], files: dict[int, str]) -> None:
        self.program, self.text, self.pos, self.newlines, self.files = program, text, start, newlines, files
        # Per scope: a name, or the prefix of a range of names, -> (bits, suffix that makes it unique).
        self.scopes: list[dict[str, tuple[int, str]]] = [{}]
        self.loc, self.uid, self.label = "?", 0, ""
        self.asm_start: int | None = None  # pc where the current block of inline assembly starts
        self.known: dict[str, Operand] = {}  # operands of the outermost scope

    def run(self) -> None:
        """Parse up to the end of the function."""
        while True:
            while self.text[self.pos].isspace():
                self.pos += 1
            char = self.text[self.pos]
            if char == "{":
                self.scopes.append({})
                self.pos += 1
            elif char == "}":
                self.scopes.pop()
                self.pos += 1
                if not self.scopes:
                    return
            elif self.text.startswith((".loc\t", ".loc "), self.pos):
                self.location(self.until("\n"))
            elif m := _LABEL.match(self.text, self.pos):
                self.program.labels[m[1]] = len(self.program.code)
                self.pos, self.label = m.end(), m[1]
            elif char == ".":
                self.directive(self.until(";"))
            else:
                line = bisect.bisect(self.newlines, self.pos) + 1
                self.instruction(self.until(";"), line)

    def until(self, end: str) -> str:
        """The text up to ``end``, which is passed over."""
        start, self.pos = self.pos, self.text.index(end, self.pos) + 1
        return self.text[start : self.pos - 1].strip()

    def location(self, statement: str) -> None:
        """A ``.loc`` directive."""
        if self.asm_start not in (None, len(self.program.code)):
            return  # LLVM adds one to the source line per line of inline assembly: keep the first

        def name(file: str, line: str, column: str) -> str:
            return f"{self.files.get(int(file), f'file{file}')}:{line}:{column}"

        file, line, column = statement.split()[1:4]
        self.loc = name(file, line, column.rstrip(","))
        if m := re.search(r"inlined_at (\d+) (\d+) (\d+)", statement):
            self.loc += " inlined at " + name(*m.groups())

    def directive(self, statement: str) -> None:
        """Any other directive."""
        kind = statement[1:].split(None, 1)[0]
        if kind == "reg":
            self.declare(statement)
        elif kind == "asm":
            self.asm_start = len(self.program.code) if "begin" in statement else None
        elif kind == "branchtargets":
            self.program.tables[self.label] = [t.strip() for t in statement.split(None, 1)[1].split(",")]
        elif kind in ("local", "shared", "global", "const"):
            _declare_arrays(self.program, statement + ";")
        elif kind not in ("pragma", "param", "callprototype"):
            raise ParseError(f"unknown directive {statement}")

    def declare(self, statement: str) -> None:
        """A ``.reg`` directive."""
        m = re.match(r"\.reg\s+(?:\.v\d\s+)?\.(\w+)\s+(.*)", statement, re.DOTALL)
        if not m or m[1] not in REGISTER_BITS:
            return  # of a type that no supported instruction takes
        for name in m[2].split(","):
            self.uid += 1
            suffix = f"@{self.uid}" if self.scopes[1:] else ""
            self.scopes[-1][name.strip().split("<")[0]] = REGISTER_BITS[m[1]], suffix

    def instruction(self, statement: str, line: int) -> None:
        """An instruction."""
        statement = " ".join(statement.split())
        m = _INSTRUCTION.match(statement)
        if not m:
            raise ParseError(f"PTX line {line}: cannot parse {statement!r}")
        negate, guard, op, rest = m.groups()
        if guard:
            guard = self.operand(guard)[1]
        code, args = self.program.code, [self.operand(a) for a in _split(rest)]
        code.append(Instr(op, args, guard, negate == "!", line, self.loc, statement, len(code)))

    def register(self, name: str) -> Operand | None:
        """The register of that name in the innermost scope that has it."""
        prefix = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            for key in (name, prefix):
                if key in scope:
                    bits, suffix = scope[key]
                    self.program.registers.setdefault(name + suffix, bits)
                    return "reg", name + suffix
        return None

    def operand(self, text: str) -> Operand:
        """An operand, remembered where no inner scope can change its meaning."""
        text = text.strip()
        if self.scopes[1:]:
            return self.parse_operand(text)
        if text not in self.known:
            self.known[text] = self.parse_operand(text)
        return self.known[text]

    def parse_operand(self, text: str) -> Operand:  # noqa: PLR0911 (one for each kind of operand)
        """An operand, from its text."""
        if text[0] == "[":
            m = _ADDRESS.match(text)
            if not m:
                raise ParseError(f"cannot parse address {text}")
            return "addr", self.operand(m[1]), int(m[2] or "0", 0)
        if text[0] in "{(":
            return "vec" if text[0] == "{" else "list", [self.operand(a) for a in _split(text[1:-1])]
        if text[0] == "!":
            return "not", self.operand(text[1:])
        if text == "_":
            return ("sink",)
        if "|" in text:
            return ("pair", *map(self.operand, text.split("|")))
        if _NUMBER.match(text):
            return "imm", text
        if _SPECIAL.match(text):
            return "special", text
        return self.register(text) or ("sym", text)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    if not any(c in text for c in "[{("):
        return [a for a in text.split(",") if a.strip()]
    out, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth:
            out.append(text[start:i])
            start = i + 1
    return [a for a in [*out, text[start:]] if a.strip()]


def _declare_arrays(program: Program, text: str) -> None:
    for space, align, typ, name, brackets, count, init in _ARRAY.findall(text):
        size = REGISTER_BITS[typ] // 8
        n = int(count) if count else (0 if brackets else 1)
        try:
            words = [int(v, 0) % (1 << size * 8) for v in init.split(",") if v.strip()]
        except ValueError:
            raise ParseError(f"only integers are supported in the initial value of {name}") from None
        value = b"".join(w.to_bytes(size, "little") for w in words)
        program.symbols[name] = Symbol(space, int(align or size), n * size, value)


def parse(ptx: str) -> Program:
    """The first entry of a PTX module.

    Raises:
        ParseError: there is none, or it holds something that LLVM does not write.
    """
    ptx = re.sub(r"// (begin|end) inline asm", r".asm \1;", ptx)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), ptx, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
    target = re.search(r"\.target\s+(\w+)", text)
    if not entry or not target:
        raise ParseError("no .entry or no .target in this PTX")
    program = Program(name=entry[1], target=target[1])
    if m := re.search(r"\.(?:req|max)ntid\s+(\d+)", entry[3]):
        program.threads = int(m[1])
    for p in filter(str.strip, entry[2].split(",")):
        words = p.split()
        name, _, count = words[-1].partition("[")
        typ = next(w[1:] for w in words[1:] if w[1:] in REGISTER_BITS)
        program.params.append((name, typ, REGISTER_BITS[typ] // 8 * int(count.rstrip("]") or 1)))
    _declare_arrays(program, text[: entry.start()])
    files = {int(n): f.rsplit("/", 1)[-1] for n, f in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    newlines = [m.start() for m in re.finditer("\n", text)]
    _Body(program, text, entry.end(), newlines, files).run()
    return program
