"""What PTX is turned into."""

import pytest
import torch
from virtual_gpu.ptx import run

from tritonamp.testing.virtual_gpu.driver import resources
from tritonamp.testing.virtual_gpu.parser import ParseError, parse

pytestmark = pytest.mark.compiled

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.file 1 "/some/where/source.py"
.extern .shared .align 16 .b8 dynamic[];
.global .align 1 .b8 text[3] = {104, 105, 0};
.visible .entry kernel( // a comment
 .param .u64 .ptr .global .align 16 p0, .param .b32 p1, .param .align 8 .b8 p2[24] ) .reqntid 128, 1, 1
{
"""


def test_declarations() -> None:
    p = parse(HEAD + ".reg .pred %p<3>; .reg .b64 %rd<9>; ret; }")
    assert (p.name, p.target, p.threads) == ("kernel", "sm_90a", 128)
    assert p.params == [("p0", "u64", 8), ("p1", "b32", 4), ("p2", "b8", 24)]
    assert (p.symbols["dynamic"].space, p.symbols["dynamic"].size) == ("shared", 0)
    assert p.symbols["text"].value == b"hi\0"


def test_operands() -> None:
    p = parse(
        HEAD
        + """.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .loc 1 7 3, function_name $L, inlined_at 1 20 9
        $L: @!%p1 ld.global.v2.b32 {%r1, _}, [%rd2+-8]; /* two
        lines */ setp.lt.s32 %p1|%p2, %r1, -1; mov.b64 %rd1, text; mov.u32 %r2, %tid.x; bra $L; }"""
    )
    load, compare, address, special, branch = p.code
    assert (load.root, load.guard, load.negate, load.pc) == ("ld", "%p1", True, p.labels["$L"])
    assert load.args == [("vec", [("reg", "%r1"), ("sink",)]), ("addr", ("reg", "%rd2"), -8)]
    assert load.loc == "source.py:7:3 inlined at source.py:20:9"
    assert compare.args == [("pair", ("reg", "%p1"), ("reg", "%p2")), ("reg", "%r1"), ("imm", "-1")]
    assert compare.line == load.line + 1
    assert address.args[1] == ("sym", "text") and special.args[1] == ("special", "%tid.x")
    assert branch.args == [("sym", "$L")]
    assert p.registers == {"%p1": 1, "%r1": 32, "%rd2": 64, "%p2": 1, "%rd1": 64, "%r2": 32}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (".version 8.0", "no .entry"),
        (HEAD + ".maxreg 7; }", "unknown directive"),
        (HEAD + "mov.b32 %r1, [%r1 2]; }", "cannot parse address"),
        (HEAD + "*; }", "cannot parse"),
        (HEAD.replace("{104, 105, 0}", "{p0, 1}") + "ret; }", "initial value of text"),
    ],
)
def test_errors(text: str, match: str) -> None:
    with pytest.raises(ParseError, match=match):
        parse(text)


def test_inline_assembly_keeps_its_first_line() -> None:
    """LLVM adds one to the source line for each line of inline assembly."""
    p = parse(
        HEAD
        + """.reg .b32 %r<9>; .loc 1 5 1
        // begin inline asm
        mov.u32 %r1, 0;
        .loc 1 6 1
        mov.u32 %r2, 0;
        // end inline asm
        .loc 1 9 1
        ret; }"""
    )
    assert [i.loc for i in p.code] == ["source.py:5:1", "source.py:5:1", "source.py:9:1"]


def test_constant_arrays() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    run(".const .align 4 .b32 table[4] = {3, 1, 4, 0x10}; ld.const.b32 %o0, [table+12];", [], [out])
    assert out.tolist() == [16] * 32


def test_resources_of_what_is_not_there() -> None:
    with pytest.raises(Exception, match=r"cuobjdump"):
        resources("kernel", b"no cubin")
