"""A profile becomes a table: kernels by class, gaps, and the roofline of a program that
is read."""

import jax
import pytest

from scripts.bench.kernel_times import (
    Span,
    class_of,
    lines_of,
    spans_of,
    table_of,
)
from trainer.compiled.classes import (
    ATTENTION,
    COPIES,
    ELEMENTWISE,
    FP8,
    OTHER,
    PRODUCTS,
    PRODUCTS32,
    REDUCTIONS,
    TRANSPOSES,
    UPDATE,
)
from trainer.compiled.hlo import Program
from trainer.plan.targets import get_target

# Names as libraries and XLA give them.
NAMES = {
    "nvjet_sm90_qqhsh_mma_128x256x128_4_64x128x128_cgaM2_TNN": FP8,
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128": FP8,
    "nvjet_sm90_hshhsh_mma_192x192x64_2_96x96x64_TNN": PRODUCTS,
    "gemm_fusion_dot_general_13": PRODUCTS,
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16": PRODUCTS32,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_28": ATTENTION,
    "input_transpose_fusion_4": TRANSPOSES,
    "input_reduce_fusion_77": REDUCTIONS,
    "loop_multiply_fusion_2": ELEMENTWISE,
    "MemcpyD2D": COPIES,
    "__unknown": OTHER,
}


def test_a_kernel_is_told_by_its_name():
    assert {name: class_of(Span(name, "", 0, 1), {}) for name in NAMES} == NAMES


# A gradient's reduction and transpose, an FP8 product, and an update that is a
# transpose too.
TEXT = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%turn (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  ROOT %t = f32[1024,1024]{1,0} transpose(%p), dimensions={1,0}
}

%total (p.1: f32[1024,1024]) -> f32[1024] {
  %p.1 = f32[1024,1024]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[1024]{0} reduce(%p.1, %zero), dimensions={1}, to_apply=%add
}

ENTRY %main (x: f8e4m3fn[1024,1024], y: f32[1024,1024]) -> f32[1024,1024] {
  %x = f8e4m3fn[1024,1024]{1,0} parameter(0)
  %y = f32[1024,1024]{1,0} parameter(1)
  %dot.1 = f32[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="jit(f)/jvp()/dot"}
  %fusion.2 = f32[1024,1024]{1,0} fusion(%dot.1), kind=kInput, calls=%turn, metadata={op_name="jit(f)/transpose(jvp())/t"}
  %fusion.3 = f32[1024]{0} fusion(%fusion.2), kind=kInput, calls=%total, metadata={op_name="jit(f)/jvp()/reduce_sum"}
  ROOT %fusion.4 = f32[1024,1024]{1,0} fusion(%y), kind=kInput, calls=%turn, metadata={op_name="jit(f)/mul" deduplicated_name="fusion.2"}
}
"""


def test_a_table_counts_a_step_with_its_gaps_and_its_roofline():
    """Two steps of 10 us: a product of 4 us, 1 us of nothing, 2 us of a transpose that
    a reduction overlaps by 1 us."""
    spans = []
    for start in (0.0, 10_000.0):
        spans += [
            Span("nvjet_something", "dot.1", start, start + 4_000),
            # in a CUDA graph: the kernel's name alone
            Span("fusion_2", "", start + 5_000, start + 7_000),
            Span("fusion_3", "command_buffer_1", start + 6_000, start + 8_000),
            Span("fusion_4", "", start + 8_000, start + 10_000),
        ]
    target = get_target("h100")
    table = table_of(spans, Program(TEXT), 2, target)
    assert table["step_ms"] == pytest.approx(0.010)
    assert table["gaps_ms"] == pytest.approx(0.001)
    classes = table["classes"]
    assert {kind: (row["ms"], row["launches"]) for kind, row in classes.items()} == {
        FP8: (pytest.approx(0.004), 1),
        TRANSPOSES: (pytest.approx(0.002), 1),
        REDUCTIONS: (pytest.approx(0.002), 1),
        UPDATE: (pytest.approx(0.002), 1),
    }
    moved = 1e3 * 2 * 4 * 1024**2 / target.bandwidth
    assert (
        classes[TRANSPOSES]["roofline_ms"]
        == classes[UPDATE]["roofline_ms"]
        == pytest.approx(moved)
    )
    # The update's transpose runs the kernel of the gradient's.
    assert [(row["name"], row["ms"], row["launches"]) for row in table["kernels"]] == [
        ("dot.1", pytest.approx(0.004), 1),
        ("fusion.2", pytest.approx(0.004), 2),
        ("fusion.3", pytest.approx(0.002), 1),
    ]
    assert "| dot.1 | FP8 products | 0.00 | 1 | 0.01 |" in lines_of("case", table)


GPU_TRACE = """
planes {
  id: 1 name: "/device:GPU:0"
  lines { id: 1 name: "Stream #13(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 stats { metadata_id: 1 str_value: "dot.1" } }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 2000000 } }
  lines { id: 2 name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 7000000 } }
  event_metadata { key: 1 value { id: 1 name: "nvjet_sm90_qqhsh_mma" } }
  event_metadata { key: 2 value { id: 2 name: "fusion_2" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
planes { id: 2 name: "/host:CPU"
  lines { id: 1 name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "PjitFunction(step)" } }
}
"""


def test_the_profile_of_a_gpu_is_what_ran_on_its_streams(tmp_path):
    serialized = jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_TRACE)
    (tmp_path / "host.xplane.pb").write_bytes(serialized)
    assert [(span.name, span.op) for span in spans_of(tmp_path)] == [
        ("nvjet_sm90_qqhsh_mma", "dot.1"),
        ("fusion_2", ""),
    ]
    with pytest.raises(ValueError, match="wrote nothing"):
        spans_of(tmp_path / "elsewhere")
