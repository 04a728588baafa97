"""A profile becomes a table: kernels by class, gaps, and the roofline of a program that
is read."""

import jax
import jax.numpy as jnp
import pytest

from scripts.bench.kernel_times import (
    Span,
    class_of,
    lines_of,
    profiled,
    spans_of,
    table_of,
)
from trainer.compiled.classes import (
    ATTENTION,
    CLASSES,
    COPIES,
    ELEMENTWISE,
    FP8,
    OTHER,
    PRODUCTS,
    PRODUCTS32,
    REDUCTIONS,
    TRANSPOSES,
    UPDATE,
    classes_of,
)
from trainer.compiled.hlo import Program
from trainer.plan.targets import get_target
from trainer.plan.times import RATES

# Names as libraries and XLA give them.
NAMES = [
    ("nvjet_sm90_qqhsh_mma_128x256x128_4_64x128x128_cgaM2_TNN", FP8),
    ("nvjet_qrtst_128x128_128x6_1x2_h_bz_coopA_TNT", FP8),
    (
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1",
        FP8,
    ),
    ("nvjet_sm90_hshhsh_mma_192x192x64_2_96x96x64_TNN", PRODUCTS),
    ("nvjet_tst_256x152_64x4_1x2_h_bz_coopB_NTN", PRODUCTS),
    ("gemm_fusion_dot_general_13", PRODUCTS),
    ("nvjet_sm90_sssts_128x64_32x6_1x2_h_bz_TNN", PRODUCTS32),
    ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16", PRODUCTS32),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", PRODUCTS),
    (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_28_64x128x128",
        ATTENTION,
    ),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, __half>", ATTENTION),
    ("void cudnn::fusion::matmul_dq<true, 64>(void const*, void*)", ATTENTION),
    ("input_transpose_fusion_4", TRANSPOSES),
    ("input_reduce_fusion_77", REDUCTIONS),
    ("loop_multiply_fusion_2", ELEMENTWISE),
    ("MemcpyD2D", COPIES),
    ("__unknown", OTHER),
]


def test_a_kernel_is_told_by_its_name():
    assert [(name, class_of(Span(name, "", 0, 1), {})) for name, _ in NAMES] == NAMES


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


def test_classes_are_those_of_the_program_and_what_is_in_no_gradient_is_the_update():
    actual = classes_of(Program(TEXT))
    assert actual == {
        "dot.1": FP8,
        "fusion.2": TRANSPOSES,
        "fusion.3": REDUCTIONS,
        "fusion.4": UPDATE,
    }


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
    product = (
        2e3 * 1024**3 / 1978.9e12 / RATES[FP8].flops / (64 / 132)
        + RATES[FP8].fixed_us / 1e3
    )
    assert classes[FP8]["predicted_ms"] == pytest.approx(product)
    # The update's transpose runs the kernel of the gradient's.
    assert [(row["name"], row["ms"], row["launches"]) for row in table["longest"]] == [
        ("dot.1", pytest.approx(0.004), 1),
        ("fusion.2", pytest.approx(0.004), 2),
        ("fusion.3", pytest.approx(0.002), 1),
    ]
    assert table["longest"][1]["predicted_ms"] == pytest.approx(
        classes[TRANSPOSES]["predicted_ms"] + classes[UPDATE]["predicted_ms"]
    )
    lines = lines_of("case", table)
    assert "| FP8 products | 0.00 | 40% | 1 | 0.00 | 0.01 |" in lines
    assert "| dot.1 | FP8 products | 0.00 | 1 | 0.01 |" in lines


def test_a_profile_of_a_cpu_is_read_to_its_end():
    """Instructions as they ran, a loop not counted beside what it holds."""

    @jax.jit
    def step(x):
        def body(x, _):
            return jnp.tanh(x @ x), None

        def loss(x):
            return jnp.sum(jax.lax.scan(body, x, length=4)[0])

        return x - 0.1 * jax.grad(loss)(x)

    x = jnp.eye(256) / 2
    compiled = step.lower(x).compile()
    jax.block_until_ready(compiled(x))

    def take(steps):
        for _ in range(steps):
            jax.block_until_ready(compiled(x))
        return 0.0

    table = profiled(take, 2, compiled.as_text(), jax.devices()[0])
    assert set(table["classes"]) <= set(CLASSES)
    # four forward, and as many or more backward
    assert table["classes"][PRODUCTS32]["launches"] >= 8
    assert table["classes"][UPDATE]["ms"] > 0
    assert all(row["roofline_ms"] is None for row in table["classes"].values())
    assert 0 <= table["gaps_ms"] < table["step_ms"]


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


def test_of_a_gpus_profile_what_ran_on_its_streams_counts_once(tmp_path):
    serialised = jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_TRACE)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "host.xplane.pb").write_bytes(serialised)
    actual = spans_of(tmp_path)
    assert [(span.name, span.op) for span in actual] == [
        ("nvjet_sm90_qqhsh_mma", "dot.1"),
        ("fusion_2", ""),
    ]
    table = table_of(actual, Program(TEXT), 1, None)
    assert {kind: row["ms"] for kind, row in table["classes"].items()} == {
        FP8: 0.004,
        TRANSPOSES: 0.002,
    }
    assert table["gaps_ms"] == pytest.approx(0.001)
    with pytest.raises(ValueError, match="wrote nothing"):
        spans_of(tmp_path / "elsewhere")
