"""The time model: figures computed by hand from a program of a few lines."""

import pytest

from trainer.compiled.arithmetic import lane_clocks
from trainer.compiled.classes import (
    COLLECTIVES,
    ELEMENTWISE,
    FP8,
    GAPS,
    PRODUCTS,
    REDUCTIONS,
    TRANSPOSES,
    UPDATE,
)
from trainer.compiled.hlo import Program
from trainer.compiled.operations import Gemm
from trainer.plan.figures import Hardware
from trainer.plan.targets import get_target
from trainer.plan.times import (
    BOTH_ORDERS,
    GAP_US,
    RATES,
    exposed_seconds,
    fill,
    kernel_predictions,
    predicted,
)

H100 = get_target("h100")
AIM = Hardware(H100, 1, 1, 0.75)

# Forward: an FP8 product, a tanh of its result, a sum of rows; and an update of
# integers, as a hash is.
TEXT = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%bend (p: f32[4096,4096]) -> f32[4096,4096] {
  %p = f32[4096,4096]{1,0} parameter(0)
  %two = f32[] constant(2)
  %twos = f32[4096,4096]{1,0} broadcast(%two), dimensions={}
  %double = f32[4096,4096]{1,0} multiply(%p, %twos), metadata={op_name="one"}
  %twos.2 = f32[4096,4096]{1,0} broadcast(%two), dimensions={}
  %double.2 = f32[4096,4096]{1,0} multiply(%p, %twos.2), metadata={op_name="the other"}
  %tanh = f32[4096,4096]{1,0} tanh(%double)
  %tanh.2 = f32[4096,4096]{1,0} tanh(%double.2)
  ROOT %both = f32[4096,4096]{1,0} add(%tanh, %tanh.2)
}

%total (p.1: f32[4096,4096]) -> f32[4096] {
  %p.1 = f32[4096,4096]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[4096]{0} reduce(%p.1, %zero), dimensions={1}, to_apply=%add
}

%scramble (p.2: u32[4096,4096]) -> u32[4096,4096] {
  %p.2 = u32[4096,4096]{1,0} parameter(0)
HASH
  ROOT %last = u32[4096,4096]{1,0} multiply(%h40, %h40)
}

ENTRY %main (x: f8e4m3fn[4096,4096], y: u32[4096,4096]) -> u32[4096,4096] {
  %x = f8e4m3fn[4096,4096]{1,0} parameter(0)
  %y = u32[4096,4096]{1,0} parameter(1)
  %dot.1 = f32[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jvp()/d"}
  %fusion.2 = f32[4096,4096]{1,0} fusion(%dot.1), kind=kLoop, calls=%bend, metadata={op_name="jvp()/tanh"}
  %fusion.3 = f32[4096]{0} fusion(%fusion.2), kind=kInput, calls=%total, metadata={op_name="jvp()/sum"}
  ROOT %fusion.4 = u32[4096,4096]{1,0} fusion(%y), kind=kLoop, calls=%scramble, metadata={op_name="jit(f)/hash"}
}
""".replace(
    "HASH",
    "\n".join(
        f"  %h{i} = u32[4096,4096]{{1,0}} add(%{'p.2' if i == 0 else f'h{i - 1}'},"
        " %p.2)"
        for i in range(41)
    ),
)


def test_each_kernel_takes_the_longest_of_its_work_and_a_fixed_time():
    actual, elements = predicted(Program(TEXT), AIM), 4096 * 4096
    lanes, us = 132 * 128 * 1.98e9, 1e-6
    tiles = 1024 / (8 * 132)  # 32 x 32 tiles in eight rounds
    product = 2 * 4096**3 / 1978.9e12 / RATES[FP8].flops / tiles
    assert actual["predicted", FP8] == pytest.approx(product + RATES[FP8].fixed_us * us)
    # its 26 clocks an element take less
    bend = 2 * 4 * elements / 3.35e12 / RATES[ELEMENTWISE].bytes
    assert bend > 26 * elements / lanes / RATES[ELEMENTWISE].lanes
    assert actual["predicted", ELEMENTWISE] == pytest.approx(
        bend + RATES[ELEMENTWISE].fixed_us * us
    )
    total = 4 * (elements + 4096) / 3.35e12 / RATES[REDUCTIONS].bytes
    assert actual["predicted", REDUCTIONS] == pytest.approx(
        total + RATES[REDUCTIONS].fixed_us * us
    )
    # 42 operations of integers, at half the rate, take longer than reading and writing.
    scramble = 42 * 2 * elements / lanes / RATES[UPDATE].lanes
    assert scramble > 2 * 4 * elements / 3.35e12 / RATES[UPDATE].bytes
    assert actual["predicted", UPDATE] == pytest.approx(
        scramble + RATES[UPDATE].fixed_us * us
    )
    assert actual["predicted", GAPS] == pytest.approx(4 * GAP_US * us)
    assert {kind: n for (group, kind), n in actual.items() if group == "launches"} == {
        FP8: 1,
        ELEMENTWISE: 1,
        REDUCTIONS: 1,
        UPDATE: 1,
        GAPS: 4,
    }


def test_arithmetic_is_counted_once_for_each_element():
    program = Program(TEXT)
    clocks = {e.instruction.name: lane_clocks(program, e) for e in program.executed}
    # A tanh is 24, a product and a sum one, and what is computed twice is computed
    # once.
    assert clocks["fusion.2"] == 26 * 4096**2
    # A sum over an axis is one for each element and one of the pair that it is
    # described by.
    assert clocks["fusion.3"] == 4096**2 + 1
    assert clocks["fusion.4"] == 84 * 4096**2


GATHERED = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[4096,4096], y: f32[512]) -> f32[4096,4096] {
  %x = f32[4096,4096]{1,0} parameter(0)
  %y = f32[512]{0} parameter(1)
  %start.1 = (f32[512], f32[4096]) all-gather-start(%y), replica_groups=[1,8]<=[8], dimensions={0}
  %start.2 = (f32[512], f32[4096]) all-gather-start(%y), replica_groups=[1,8]<=[8], dimensions={0}
  %dot.1 = f32[4096,4096]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %done.1 = f32[4096]{0} all-gather-done(%start.1)
  %dot.2 = f32[4096,4096]{1,0} dot(%dot.1, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %done.2 = f32[4096]{0} all-gather-done(%start.2)
  %gather.3 = f32[4096]{0} all-gather(%y), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %dot.3 = f32[4096,4096]{1,0} dot(%dot.2, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def test_a_collective_is_hidden_by_the_kernels_up_to_its_end_each_of_them_once():
    program = Program(GATHERED)
    transfers = {"start.1": 3.0, "start.2": 2.0, "gather.3": 1.0}
    busy = {"dot.1": 1.0, "dot.2": 1.5, "dot.3": 9.0}
    exposed = exposed_seconds(program, transfers, busy)
    # the first product hides the first gather alone, though both have begun
    assert exposed == {"start.1": 2.0, "start.2": 0.5, "gather.3": 1.0}
    # 16 KB take less than a product does; what waits for nothing is in the sum
    figures = predicted(program, Hardware(H100, 8, 1, 0.75))
    transfer = 4096 * 4 * 7 / 8 / Hardware(H100, 8, 1, 0.75).link
    fixed = 3 * RATES[COLLECTIVES].fixed_us * 1e-6
    assert figures["hidden", COLLECTIVES] == pytest.approx(2 * transfer)
    assert figures["predicted", COLLECTIVES] == pytest.approx(transfer + fixed)


@pytest.mark.parametrize(
    ("sizes", "share"),
    [
        ((1, 8192, 3072, 768), 1536 / (12 * 132)),
        # its sum in three parts; in four they would be 144 tiles, two rounds
        ((1, 768, 768, 8192), 108 / 132),
        ((4, 128, 128, 64), 4 / 132),
    ],
)
def test_a_product_of_few_tiles_leaves_multiprocessors_without_work(sizes, share):
    gemm = Gemm(
        "cublas",
        "fp8",
        ("f8e4m3fn", "f8e4m3fn"),
        sizes,
        "",
        "dot",
        1,
        accumulates=False,
    )
    assert fill(gemm, H100) == pytest.approx(share)


# A matrix of bytes that is transposed, one that is written in both orders, and a product
# that is added to what its result held.
ORDERS = """HloModule m

%turn (p: f8e5m2[8192,4096]) -> f8e5m2[4096,8192] {
  %p = f8e5m2[8192,4096]{1,0} parameter(0)
  ROOT %t = f8e5m2[4096,8192]{1,0} transpose(%p), dimensions={1,0}
}

%both (p.1: f16[8192,4096]) -> (f8e5m2[4096,8192], f8e5m2[8192,4096]) {
  %p.1 = f16[8192,4096]{1,0} parameter(0)
  %c = f8e5m2[8192,4096]{1,0} convert(%p.1)
  %t.1 = f8e5m2[4096,8192]{1,0} transpose(%c), dimensions={1,0}
  ROOT %two = (f8e5m2[4096,8192]{1,0}, f8e5m2[8192,4096]{1,0}) tuple(%t.1, %c)
}

ENTRY %main (x: f16[8192,4096], h: f16[4096,8192], s: f32[4096,4096]) -> f32[4096,4096] {
  %x = f16[8192,4096]{1,0} parameter(0)
  %h = f16[4096,8192]{1,0} parameter(1)
  %s = f32[4096,4096]{1,0} parameter(2)
  %fusion.1 = (f8e5m2[4096,8192]{1,0}, f8e5m2[8192,4096]{1,0}) fusion(%x), kind=kInput, calls=%both, metadata={op_name="jvp()/both"}
  %rows = f8e5m2[8192,4096]{1,0} get-tuple-element(%fusion.1), index=1
  %fusion.2 = f8e5m2[4096,8192]{1,0} fusion(%rows), kind=kInput, calls=%turn, metadata={op_name="jvp()/turn"}
  ROOT %sum = f32[4096,4096]{1,0} custom-call(%h, %x, %s), custom_call_target="__cublas$lt$matmul", metadata={op_name="jvp()/d"}, backend_config={"gemm_backend_config":{"beta":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}
"""


def test_transposes_and_sums_take_what_a_profile_showed():
    program = Program(ORDERS)
    actual = {k.name: s for k, s in kernel_predictions(program, H100)}
    elements, rate = 8192 * 4096, RATES[TRANSPOSES]
    both, one = 4 * elements / BOTH_ORDERS, 2 * elements / rate.bytes
    for name, moved in (("fusion.1", both), ("fusion.2", one)):
        assert actual[name] == pytest.approx(moved / 3.35e12 + rate.fixed_us * 1e-6)
    # Its result is read and written after the product.
    (gemm,) = program.gemms
    rate = RATES[PRODUCTS]
    product = 2 * 4096**2 * 8192 / 989.4e12 / rate.flops / fill(gemm, H100)
    moved = (2 * 2 * elements + 2 * 4 * 4096**2) / 3.35e12 / rate.bytes
    expected = product + moved + rate.fixed_us * 1e-6
    assert actual["sum"] == pytest.approx(expected, rel=1e-3)


LOOP = """HloModule m

%body (t: (s32[], f16[4096,4096])) -> (s32[], f16[4096,4096]) {
  %t = (s32[], f16[4096,4096]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f16[4096,4096]{1,0} get-tuple-element(%t), index=1
  %dot = f16[4096,4096]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", metadata={op_name="jvp()/d"}, backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  ROOT %out = (s32[], f16[4096,4096]) tuple(%i, %dot)
}

%goes_on (t.1: (s32[], f16[4096,4096])) -> pred[] {
  %t.1 = (s32[], f16[4096,4096]) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (t.2: (s32[], f16[4096,4096])) -> (s32[], f16[4096,4096]) {
  %t.2 = (s32[], f16[4096,4096]) parameter(0)
  ROOT %while = (s32[], f16[4096,4096]) while(%t.2), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_a_product_in_a_loop_takes_its_time_in_each_iteration():
    program = Program(LOOP)
    (gemm,) = program.gemms
    assert gemm.times == 3
    ((kernel, seconds),) = kernel_predictions(program, H100)
    rate = RATES[PRODUCTS]
    once = 2 * 4096**3 / 989.4e12 / rate.flops / fill(gemm, H100)
    assert kernel.times == 3
    assert seconds == pytest.approx(3 * (once + rate.fixed_us * 1e-6))
