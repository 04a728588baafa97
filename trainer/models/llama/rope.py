"""Rotary positions: their scaling for a longer context, as a config.json has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError

ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary positions for a longer context.

    Slow rotations become slower, fast ones stay.

    Attributes:
      factor: divides the frequencies whose wavelength is longer than
          `original_context / low_freq_factor`.
      low_freq_factor: see `factor`.
      high_freq_factor: wavelengths shorter than `original_context / high_freq_factor`
        stay; between the two, the frequency is interpolated.
      original_context: tokens of the model's earlier context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

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


def rope_of(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the rotary positions.

    They are in `rope_theta` and `rope_scaling`, or both in `rope_parameters`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope_scaling={rope!r}: expected an object")
    settings = {**config, **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"rope_type={kind!r} is not supported; valid: 'default', 'llama3'"
        )
    partial = settings.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise UserError(f"partial_rotary_factor={partial} is not supported; valid: 1")
    theta = number(settings, "rope_theta", 10_000.0)
    if kind == "default":
        return theta, None
    fields: dict[str, Any] = {
        ours: number(rope, key) for key, ours in ROPE_SCALING.items()
    }
    fields["original_context"] = int(fields["original_context"])
    return theta, RopeScaling(**fields)


def rope_to_config(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    fields = {key: getattr(scaling, ours) for key, ours in ROPE_SCALING.items()}
    return {"rope_type": "llama3", **fields}


def whole_number(tree: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of a configuration, or raise UserError."""
    value = tree.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:  # a bool is an int, but not a number
        raise UserError(f"{key}={value!r}: expected a whole number, at least 1")
    return value


def number(tree: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number of a configuration, or raise UserError."""
    value = tree.get(key, default)
    if type(value) not in (int, float):
        raise UserError(f"{key}={value!r}: expected a number")
    return float(value)
