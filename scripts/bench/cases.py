"""Cases of `python -m scripts.bench cases=...`: a model in a precision or PyTorch."""

from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.text import nearest

CONFIGS = Path(__file__).resolve().parents[2] / "trainer" / "configs"
VOCAB = 50257
TORCH = "torch"
# The keys of a case with their valid values; None: a whole number.
CHOICES = {
    "remat": None,
    "scan": ("false", "true"),
    "deterministic": ("auto", "true", "false"),
    "logits": ("fp32", "compute"),
}
DEFAULTS = {
    "batch": "8",
    "remat": "none",
    "scan": "false",
    "deterministic": "auto",
    "logits": "fp32",
}


class Case(NamedTuple):
    """A way to take a step; for precision "torch" only model and batch matter."""

    model: str
    precision: str
    batch: int
    remat: str
    scan: bool
    deterministic: str
    logits: str

    @property
    def name(self) -> str:
        """The name of the case in printed tables."""
        extras = f" remat={self.remat}" * (self.remat != "none") + " scan" * self.scan
        extras += f" deterministic={self.deterministic}" * (
            self.deterministic != "auto"
        )
        extras += f" logits={self.logits}" * (self.logits != "fp32")
        return f"{self.model} {self.precision} B={self.batch}{extras}"


def parse_case(text: str) -> Case:
    """Return the case of `model:precision[:setting=value]`, or raise UserError."""
    model, _, rest = text.partition(":")
    precision, *parts = rest.split(":")
    if not precision:
        raise UserError(
            f"cases: {text!r} has no precision; expected model:precision, such as"
            " gpt2_124m:bf16"
        )
    read_group("model", model)
    if precision != TORCH:
        read_group("precision", precision)
    settings = dict(DEFAULTS)
    for part in parts:
        key, _, value = part.partition("=")
        if key not in settings:
            raise UserError(
                f"cases: unknown key {key!r} in {text!r};"
                f" {nearest(key, list(settings))}"
            )
        settings[key] = value
    batch = settings["batch"]
    if not batch.isdigit():
        raise UserError(
            f"cases: {text!r}: batch={batch}: expected a whole number of sequences"
        )
    for key, choices in CHOICES.items():
        value = settings[key]
        if choices is not None and value not in choices:
            raise UserError(
                f"cases: {text!r}: {key}={value}; {nearest(value, list(choices))}"
            )
    return Case(
        model,
        precision,
        int(batch),
        settings["remat"],
        settings["scan"] == "true",
        settings["deterministic"],
        settings["logits"],
    )


def read_group(group: str, name: str) -> dict[str, Any]:
    """Return a preset of `trainer/configs/` with its bases, without Hydra."""
    import yaml  # a dependency of Flax and Orbax

    known = [path.stem for path in sorted((CONFIGS / group).glob("*.yaml"))]
    if name not in known:
        raise UserError(f"cases: {group} {name!r} is not known; {nearest(name, known)}")
    tree: dict[str, Any] = {}
    preset: dict[str, Any] = yaml.safe_load(
        (CONFIGS / group / f"{name}.yaml").read_text()
    )
    for base in preset.pop("defaults"):  # such as /base/gpt2@_here_
        file = CONFIGS / f"{base.removesuffix('@_here_').lstrip('/')}.yaml"
        tree |= yaml.safe_load(file.read_text())
    return tree | preset
