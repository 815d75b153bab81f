"""The interpreter of PTX that kernels are checked with: what each instruction gives, and what it refuses."""

from __future__ import annotations

import struct

import numpy as np
import ptx
import pytest
from ptx.copies import Leaving
from ptx.memory import Shared

HEAD = """.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 out, .param .u64 .ptr .global .align 1 given)
{
    .reg .pred %p<8>;
    .reg .b16 %rs<8>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<8>;
    ld.param.b64 %rd0, [out];
    ld.param.b64 %rd1, [given];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd2, %r0, 4;
    add.s64 %rd3, %rd0, %rd2;
    add.s64 %rd4, %rd1, %rd2;
"""
STORE = "st.global.b32 [%rd3], {%r1};"
OUT, GIVEN = 1 << 20, 1 << 21


def run(body: str, threads: int = 32, given: object = None, shared: int = 1024, programs: int = 1) -> np.ndarray:
    """What the threads of the body store: a word each."""
    out = np.zeros(threads, np.uint32)
    words = np.arange(threads, dtype=np.uint32) if given is None else np.array(given, np.uint32)
    buffers = {OUT: out.view(np.uint8), GIVEN: words.view(np.uint8)}
    parameters = [address.to_bytes(8, "little") for address in (OUT, GIVEN)]
    ptx.run(HEAD + body + "\nret;\n}\n", programs, threads, shared, parameters, buffers)
    return out


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


NAN, CANONICAL = 0x7FC00001, 0x7FFFFFFF
ABOVE_ONE = bits(1 + 2.0**-12)

#: An instruction that writes %r1 from words in %r2 to %r4, and what it gives.
RESULTS = [
    ("prmt.b32 %r1, %r2, %r3, 0x7531;", (0x33221100, 0x77665544, 0), 0x77553311),
    ("prmt.b32 %r1, %r2, %r3, 0x98FE;", (0x000080FF, 0x7F800000, 0), 0xFFFF00FF),
    ("bfe.u32 %r1, %r2, 4, 8;", (0xABCDEF12, 0, 0), 0xF1),
    ("bfe.s32 %r1, %r2, 8, 4;", (0x00000F00, 0, 0), 0xFFFFFFFF),
    ("bfe.s32 %r1, %r2, 28, 8;", (0x80000000, 0, 0), 0xFFFFFFF8),
    ("bfi.b32 %r1, %r2, %r3, 8, 4;", (0xFA, 0xFFFFFFFF, 0), 0xFFFFFAFF),
    ("lop3.b32 %r1, %r2, %r3, %r4, 0xE8;", (0b1100, 0b1010, 0b0110), 0b1110),
    ("shf.l.wrap.b32 %r1, %r2, %r3, 36;", (0x80000000, 0x00000001, 0), 0x18),
    ("shf.r.clamp.b32 %r1, %r2, %r3, 36;", (1, 0x12345678, 0), 0x12345678),
    ("shl.b32 %r1, %r2, %r3;", (1, 32, 0), 0),
    ("shr.s32 %r1, %r2, %r3;", (0x80000000, 99, 0), 0xFFFFFFFF),
    ("mul.hi.s32 %r1, %r2, %r3;", (0xFFFFFFFF, 5, 0), 0xFFFFFFFF),
    ("mul.hi.u32 %r1, %r2, %r3;", (0xFFFFFFFF, 5, 0), 4),
    ("mad.lo.s32 %r1, %r2, %r3, %r4;", (0x80000001, 2, 7), 9),
    ("div.s32 %r1, %r2, %r3;", (0xFFFFFFF9, 2, 0), 0xFFFFFFFD),
    ("rem.s32 %r1, %r2, %r3;", (0xFFFFFFF9, 2, 0), 0xFFFFFFFF),
    ("min.s16x2 %r1, %r2, %r3;", (0x0001FFFF, 0xFFFE0001, 0), 0xFFFEFFFF),
    # One rounding, not two.
    ("fma.rn.f32 %r1, %r2, %r3, %r4;", (ABOVE_ONE, ABOVE_ONE, bits(-1 - 2.0**-11)), bits(2.0**-24)),
    # And what is far below the product decides a tie.
    ("fma.rn.f32 %r1, %r2, %r3, %r4;", (ABOVE_ONE, ABOVE_ONE, bits(2.0**-100)), bits(1 + 2.0**-11 + 2.0**-23)),
    ("fma.rn.f32 %r1, %r2, %r3, %r4;", (ABOVE_ONE, ABOVE_ONE, bits(-(2.0**-100))), bits(1 + 2.0**-11)),
    ("add.rn.f32 %r1, %r2, %r3;", (NAN, 0, 0), CANONICAL),
    ("mul.rn.f32 %r1, %r2, %r3;", (1, bits(0.5), 0), 0),
    ("mul.rn.f32 %r1, %r2, %r3;", (3, bits(0.5), 0), 2),
    ("min.f32 %r1, %r2, %r3;", (NAN, bits(3.0), 0), bits(3.0)),
    ("min.f32 %r1, %r2, %r3;", (0, 0x80000000, 0), 0x80000000),
    ("max.NaN.f32 %r1, %r2, %r3;", (NAN, bits(3.0), 0), CANONICAL),
    ("rcp.approx.ftz.f32 %r1, %r2;", (1, 0, 0), bits(float("inf"))),
    ("fma.rn.bf16x2 %r1, %r2, %r3, %r4;", (0x3F803F81, 0x3F803F81, 0x0000B380), 0x3F803F82),
    ("max.NaN.bf16x2 %r1, %r2, %r3;", (0x7FC13F80, 0x40004000, 0), 0x7FFF4000),
    ("cvt.rni.s32.f32 %r1, %r2;", (bits(2.5), 0, 0), 2),
    ("cvt.rzi.s32.f32 %r1, %r2;", (bits(3e9), 0, 0), 0x7FFFFFFF),
    ("cvt.rzi.s32.f32 %r1, %r2;", (NAN, 0, 0), 0),
    ("cvt.rn.f32.s32 %r1, %r2;", (16777217, 0, 0), bits(16777216.0)),
    ("cvt.rn.bf16x2.f32 %r1, %r2, %r3;", (bits(1.0), 0x3F808000, 0), 0x3F803F80),
    ("cvt.rn.bf16x2.f32 %r1, %r2, %r3;", (NAN, 0x3F818000, 0), 0x7FFF3F82),
    ("cvt.rn.f16x2.f32 %r1, %r2, %r3;", (bits(65520.0), bits(2.0**-24), 0), 0x7C000001),
    ("{ .reg .b32 t; not.b32 t, %r2; and.b32 %r1, t, %r3; }", (0xF0, 0xFF, 0), 0x0F),
    ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r1, {%rs2, %rs1};", (0x12345678, 0, 0), 0x56781234),
    ("setp.ne.f32 %p1, %r2, %r2; selp.b32 %r1, 1, 2, %p1;", (NAN, 0, 0), 2),
    ("setp.neu.f32 %p1, %r2, %r2; selp.b32 %r1, 1, 2, %p1;", (NAN, 0, 0), 1),
    ("setp.lt.s32 %p1, %r2, %r3; @!%p1 mov.u32 %r2, 7; mov.u32 %r1, %r2;", (1, 0xFFFFFFFF, 0), 7),
]


@pytest.mark.parametrize("text, given, expected", RESULTS)
def test_an_instruction_gives_what_the_manual_says(text: str, given: tuple[int, ...], expected: int) -> None:
    loads = "".join(f"mov.b32 %r{i + 2}, {word:#x};\n" for i, word in enumerate(given))
    found = run(loads + text + STORE, threads=32)
    assert [hex(word) for word in set(found.tolist())] == [hex(expected)]


def test_a_product_of_matrices_is_spread_over_a_warp_as_the_manual_says() -> None:
    """Row and column of each byte of a thread's registers, one by one."""
    random = np.random.default_rng(0)
    left, right = (random.integers(-128, 128, shape) for shape in ((16, 32), (32, 8)))
    words = np.zeros((32, 6, 4), np.int8)
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            words[lane, i // 4, i % 4] = left[row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)]
        for i in range(8):
            words[lane, 4 + i // 4, i % 4] = right[thread * 4 + (i & 3) + (16 if i >= 4 else 0), group]
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd5+{4 * i}];" for i in range(6))
    body = f"""mul.wide.u32 %rd5, %r0, 24; add.s64 %rd5, %rd1, %rd5; {loads}
        mov.u32 %r20, 5; mov.u32 %r21, 5; mov.u32 %r22, 5; mov.u32 %r23, 5;
        mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32
            {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r20, %r21, %r22, %r23}};"""
    expected = left @ right + 5
    for i in range(4):
        found = run(f"{body} mov.b32 %r1, %r{20 + i}; {STORE}", given=words.view(np.uint32).reshape(-1)).view(np.int32)
        rows = [lane // 4 + (8 if i >= 2 else 0) for lane in range(32)]
        assert found.tolist() == [expected[rows[lane], lane % 4 * 2 + (i & 1)] for lane in range(32)]


ROWS = """shl.b32 %r5, %r0, 4; mov.u32 %r6, global_smem; add.s32 %r5, %r6, %r5; shl.b32 %r7, %r0, 2;
    add.s32 %r8, %r7, 1; add.s32 %r9, %r7, 2; add.s32 %r10, %r7, 3; st.shared.v4.b32 [%r5], {%r7, %r8, %r9, %r10};"""


def test_matrices_are_loaded_a_row_to_four_threads() -> None:
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r11, %r12, %r13, %r14}, [%r5];"
    found = run(f"{ROWS} {load} mov.b32 %r1, %r13; {STORE}")
    assert found.tolist() == [4 * 16 + lane for lane in range(32)], "matrix 2 begins at the row of thread 16"


def test_threads_that_part_at_a_branch_meet_again() -> None:
    body = f"""and.b32 %r2, %r0, 1; setp.eq.b32 %p1, %r2, 0; mov.u32 %r1, 0;
        @%p1 bra $EVEN; add.s32 %r1, %r1, 100; bra.uni $JOIN;
        $EVEN: add.s32 %r1, %r1, 200;
        $JOIN: mov.u32 %r3, 0;
        $LOOP: add.s32 %r1, %r1, 1; add.s32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, %r0; @%p2 bra $LOOP;
        bar.sync 0; shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1; {STORE}"""
    own = [(200 if lane % 2 == 0 else 100) + max(lane, 1) for lane in range(32)]
    assert run(body).tolist() == [own[lane ^ 1] for lane in range(32)]


EXCHANGE = """shl.b32 %r5, %r0, 2; mov.u32 %r6, global_smem; add.s32 %r5, %r6, %r5; st.shared.b32 [%r5], {%r0}; @@
    xor.b32 %r7, %r0, 32; shl.b32 %r7, %r7, 2; add.s32 %r7, %r6, %r7; ld.shared.b32 %r1, [%r7];"""


def test_what_another_warp_wrote_is_read_behind_a_barrier() -> None:
    found = run(EXCHANGE.replace("@@", "bar.sync 0;") + STORE, threads=64)
    assert found.tolist() == [thread ^ 32 for thread in range(64)]


FAULTS = [
    (EXCHANGE.replace("@@", ""), "another has written since the last barrier"),
    (
        f"{EXCHANGE.replace('@@', 'bar.sync 0;')} st.shared.b32 [%r5], {{%r0}};",
        "another has read since the last barrier",
    ),
    ("mov.u32 %r6, global_smem; ld.shared.b32 %r1, [%r6];", "never written"),
    ("mov.u32 %r6, global_smem; st.shared.b32 [%r6+1024], {%r0};", "byte 1024 of 1024"),
    ("ld.global.b32 %r1, [%rd4+4];", "4 bytes at byte 256 of a buffer of 256"),
    ("ld.global.b32 %r1, [%rd4+-4];", "at byte -4"),
    ("ld.global.v2.b32 {%r1, %r2}, [%rd4];", "not a multiple of the 8 bytes"),
    ("sub.s64 %rd5, %rd0, %rd1; ld.global.b32 %r1, [%rd5];", "in no buffer"),
    ("st.global.b32 [%rd0], {%r0};", "different values to the same place"),
    ("cp.async.bulk.prefetch.L2.global [%rd1], 512;", "512 bytes at byte 0 of a buffer of 256"),
    ("setp.eq.b32 %p1, %r0, 3; @%p1 bra $THERE; bar.sync 1, 64; $THERE: mov.u32 %r1, 0;", "wait at barrier 1"),
    ("setp.eq.b32 %p1, %r0, 3; @%p1 bra $E; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r5]; $E: ", "of a warp"),
]


@pytest.mark.parametrize("body, reason", FAULTS)
def test_what_a_kernel_must_not_do_is_refused_with_its_line(body: str, reason: str) -> None:
    with pytest.raises(ptx.Fault, match=reason):
        run(body + STORE, threads=64)


#: Warp 1 waits for what warp 0 writes; %r6 is where a barrier lies, behind the words.
HANDED_ON = """mov.u32 %r6, global_smem; shr.u32 %r2, %r0, 5; setp.eq.b32 %p1, %r0, 0; setp.eq.b32 %p2, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r6+512], 1; bar.sync 0; mov.u32 %r1, 7; @%p2 bra $FIRST;
    waitLoop: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r6+512], 0; @!%p3 bra.uni waitLoop;
    shl.b32 %r5, %r0, 2; add.s32 %r5, %r6, %r5; ld.shared.b32 %r1, [%r5+-128]; bra.uni $JOIN;
    $FIRST: shl.b32 %r5, %r0, 2; add.s32 %r5, %r6, %r5; add.s32 %r3, %r0, 100; st.shared.b32 [%r5], {%r3};
    bar.sync 1, 32; @@ $JOIN: mov.u32 %r4, 0;"""


def test_threads_wait_until_others_have_arrived_at_a_barrier_in_shared_memory() -> None:
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r6+512];"
    found = run(HANDED_ON.replace("@@", arrive) + STORE, threads=64)
    assert found.tolist() == [7] * 32 + [100 + lane for lane in range(32)]
    with pytest.raises(ptx.Fault, match=r"that nothing will complete; program 0, line \d+: mbarrier.try_wait"):
        run(HANDED_ON.replace("@@", "") + STORE, threads=64)


CHOICE = """and.b32 %r2, %r0, @@; $TABLE: .branchtargets $A, $B, $C; brx.idx %r2, $TABLE;
    $A: mov.u32 %r1, 10; bra.uni $END; $B: mov.u32 %r1, 20; bra.uni $END;
    $C: mov.u32 %r1, 30; $END: bar.warp.sync -1;"""


def test_a_branch_with_many_targets_goes_to_each_threads_own() -> None:
    assert run(CHOICE.replace("@@", "1") + STORE).tolist() == [10, 20] * 16
    with pytest.raises(ptx.Fault, match="target 3 of 3"):
        run(CHOICE.replace("@@", "3") + STORE)


def test_bytes_that_a_copy_reads_are_not_written_before_it_was_waited_for() -> None:
    shared = Shared(64)
    leaving, index, warp = Leaving(shared), np.arange(16)[:, None], np.zeros(16, int)
    ones = np.ones((16, 1), np.uint8)
    shared.write_at(index, ones, warp)
    leaving.begin(3, index)
    leaving.commit(3)
    leaving.commit(3)
    for thread, pending in ((4, 0), (3, 2)):
        leaving.wait(thread, pending)
        with pytest.raises(ptx.Fault, match="byte 0 of shared memory is written before the copy that reads it"):
            shared.write_at(index, ones, warp)
    leaving.wait(3, 1)
    shared.write_at(index, ones, warp)


UNKNOWN = ["tanh.approx.f32 %r1, %r2;", "add.sat.s32 %r1, %r2, %r3;", "cvt.rn.satfinite.f16.f32 %rs1, %r1;"]


@pytest.mark.parametrize("text", UNKNOWN)
def test_what_is_not_known_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ptx.Unknown, match=rf"line 17: {text[:12]}"):
        run(text + STORE)
