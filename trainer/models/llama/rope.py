"""Rotary positions: their scaling for a longer context, as a config.json has it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainer.errors import UserError
from trainer.models.config_values import number, whole_number

Kind = Literal["llama3", "linear", "yarn", "dynamic"]
# Kind -> config.json key -> field of `RopeScaling`.
KEYS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    },
}
# Keys without a default, in the kinds that have them.
REQUIRED_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
# YaRN keys that change the function and are not implemented here
YARN_UNSUPPORTED = ("mscale", "mscale_all_dim", "truncate")


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions for a longer context.

    Attributes:
      factor: the ratio of the longer context to the original one. Frequencies are
        divided by it: all of them (linear), or the low ones (llama3, yarn), with a
        linear ramp between divided and unchanged frequencies.
      low_freq_factor: llama3 divides frequencies whose wavelength is longer than
        `original_context / low_freq_factor`.
      high_freq_factor: llama3 keeps frequencies whose wavelength is shorter than
        `original_context / high_freq_factor`.
      original_context: the context before scaling in tokens, for llama3 and yarn.
      kind: llama3 (Grattafiori et al. 2024, arXiv 2407.21783), linear (Chen et al.
        2023, arXiv 2306.15595), yarn (Peng et al. 2023, arXiv 2309.00071) or dynamic,
        which changes nothing within the model's context and is kept so that an export
        writes it.
      beta_fast: yarn keeps pairs that turn more often than this in the original
        context.
      beta_slow: yarn divides pairs that turn less often than this.
      attention_factor: yarn's factor of cosines and sines; None: 0.1 ln(factor) + 1.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    kind: Kind = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        """Raise UserError for invalid factors."""
        if (
            self.factor <= 0
            or self.original_context < 1
            or not 0 < self.low_freq_factor < self.high_freq_factor
        ):
            raise UserError(
                f"rope_scaling: factor={self.factor},"
                f" low_freq_factor={self.low_freq_factor},"
                f" high_freq_factor={self.high_freq_factor},"
                f" original_context={self.original_context}: expected numbers above 0,"
                " and low_freq_factor below high_freq_factor, such as 8, 1, 4, 8192"
            )
        if (
            not 1e-3 <= self.beta_slow < self.beta_fast < 1e6
            or (self.attention_factor or 1) <= 0
        ):
            raise UserError(
                f"rope_scaling: beta_fast={self.beta_fast}, beta_slow={self.beta_slow},"
                f" attention_factor={self.attention_factor}: expected beta_slow"
                " below beta_fast, from 0.001 to 1e6, such as 32, 1, null"
            )

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor > 1:
            # sqrt(1/t) of the YaRN paper, which recommends it for Llama.
            return 0.1 * math.log(self.factor) + 1
        return 1.0


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the angle per position of each channel pair P, FP32 `[head_dim / 2]`.

    The fastest pair comes first.
    """
    # In FP64, and rounded once: position 100,000 multiplies the error of a frequency.
    frequency_P = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        # Pairs that turn often in the original context tell neighbors apart, and keep
        # their frequency. Slow pairs are stretched to the new context.
        share_P = unchanged_share(scaling, frequency_P, theta)
        scaled_P = (1 - share_P) * frequency_P / scaling.factor
        frequency_P = share_P * frequency_P + scaled_P
    return frequency_P.astype(np.float32)


def unchanged_share(
    scaling: RopeScaling, frequency_P: np.ndarray, theta: float
) -> np.ndarray:
    """Return the unchanged share of each frequency, 0 to 1, [P]."""
    match scaling.kind:
        case "linear":
            return np.zeros_like(frequency_P)
        case "dynamic":
            return np.ones_like(frequency_P)
        case "llama3":
            turns_P = scaling.original_context * frequency_P / (2 * math.pi)
            width = scaling.high_freq_factor - scaling.low_freq_factor
            return np.clip((turns_P - scaling.low_freq_factor) / width, 0, 1)
        case "yarn":
            return _unchanged_by_yarn(scaling, frequency_P, theta)


def _unchanged_by_yarn(
    s: RopeScaling, frequency_P: np.ndarray, theta: float
) -> np.ndarray:
    dim = 2 * len(frequency_P)

    def pair_index(rotations: float) -> float:
        """Return the fractional index of the pair that makes `rotations` rotations."""
        ratio = s.original_context / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(theta))

    # Rounded outwards, as transformers with `truncate`, its default.
    start = max(math.floor(pair_index(s.beta_fast)), 0)
    end = min(math.ceil(pair_index(s.beta_slow)), dim - 1)
    # As transformers, where a ramp of no width would divide by zero.
    width = end - start if end != start else 0.001
    return 1 - np.clip((np.arange(dim // 2) - start) / width, 0, 1)


def rope_of(
    config: Mapping[str, Any], default_theta: float = 10_000.0
) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary positions.

    They are in `rope_theta` and `rope_scaling`, or both in `rope_parameters`. A file
    without a base has `default_theta`.

    Raises:
      UserError: a setting is not supported, or `rope_scaling` and `rope_parameters`
        contradict each other (readers differ in which they use).
    """
    rope = rope_settings(config)
    # `type` is the key of files of earlier transformers.
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    # Others, such as longrope, change the function.
    if kind != "default" and kind not in KEYS:
        raise UserError(
            f"rope_type={kind!r} is not supported; valid: 'default',"
            f" {', '.join(map(repr, KEYS))}"
        )
    # The base may stand at the top level, or in the object of rotary settings.
    settings = {**config, **rope}
    partial = settings.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise UserError(f"partial_rotary_factor={partial} is not supported; valid: 1")
    theta = number(settings, "rope_theta", default_theta)
    # Readers differ in which of the two they take.
    if theta != config.get("rope_theta", theta):
        raise UserError(
            f"rope_theta={config['rope_theta']} and rope_theta={theta} beside rope_type"
            " contradict each other; leave one of them in"
        )
    if kind == "default":
        return theta, None
    if kind == "yarn":
        check_yarn(rope, theta)
    return theta, RopeScaling(kind=kind, **scaling_fields(kind, rope, config))


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of rotary settings in a config.json, empty if there is none.

    Raises:
      UserError: it is no object, each kind of layer has one, or two contradict each
        other.
    """
    # transformers 5 writes `rope_parameters`, version 4 `rope_scaling`.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling={rope!r}: expected an object")
    scaling = config.get("rope_scaling") or rope
    # Files with both keys may have rope_theta in rope_parameters alone.
    if scaling != rope and {"rope_theta": rope.get("rope_theta"), **scaling} != rope:
        raise UserError(
            f"rope_scaling={scaling!r} and rope_parameters={rope!r} contradict each"
            " other; leave one of them in"
        )
    # transformers 5 has an object for each kind of layer, where kinds differ.
    by_layer = [key for key, value in rope.items() if isinstance(value, dict)]
    if by_layer:
        raise UserError(
            f"rope_parameters of {by_layer[0]!r} alone are not supported; valid: one"
            " object for all layers"
        )
    # Like transformers, prefer the top-level original_max_position_embeddings.
    top_level = config.get("original_max_position_embeddings")
    if top_level is not None:
        rope = {**rope, "original_max_position_embeddings": top_level}
    return rope


def check_yarn(rope: Mapping[str, Any], theta: float) -> None:
    """Raise UserError for YaRN's settings that are not supported."""
    if theta <= 1:
        raise UserError(f"rope_theta={theta} of rope_type='yarn': expected more than 1")
    for key in YARN_UNSUPPORTED:
        # `truncate: true` is transformers' default, and supported. `is not True`,
        # because 1.0 == True.
        if rope.get(key) is not None and rope[key] is not True:
            raise UserError(
                f"{key}={rope[key]} of rope_type='yarn' is not supported; it changes"
                " what the model computes"
            )


def scaling_fields(
    kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of `RopeScaling` of a kind other than default."""
    # A factor that is null is the ratio of the contexts.
    if kind == "yarn" and rope.get("factor", 1) is None:
        context = whole_number(config, "max_position_embeddings")
        original = whole_number(rope, "original_max_position_embeddings", context)
        rope = {**rope, "factor": context / original}
    fields: dict[str, Any] = {}
    for key, name in KEYS[kind].items():
        if key in REQUIRED_KEYS or rope.get(key) is not None:
            fields[name] = number(rope, key, use=f", which rope_type={kind!r} needs")
    if "original_max_position_embeddings" in KEYS[kind]:
        # transformers' default is the model's context.
        if "original_context" not in fields:
            original = whole_number(config, "max_position_embeddings")
            fields["original_context"] = original
        # A number in the file may be 8192.0.
        fields["original_context"] = int(fields["original_context"])
    return fields


def rope_to_config(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    keys = KEYS[scaling.kind]
    values = {key: getattr(scaling, field_name) for key, field_name in keys.items()}
    return {"rope_type": scaling.kind, **values}
