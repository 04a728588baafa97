"""What a case of `python -m scripts.bench cases=...` is: a model in a precision, or in
PyTorch, and how it steps.
"""

from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError
from trainer.text import nearest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
VOCAB = 50257
TORCH = "torch"
# The keys of a case, with what they may be beside a whole number, and what they are
# where nothing is said.
CHOICES = {
    "remat": None,
    "scan": ("false", "true"),
    "deterministic": ("auto", "true", "false"),
    "logits": ("fp32", "compute"),
}
UNSAID = {
    "batch": "8",
    "remat": "none",
    "scan": "false",
    "deterministic": "auto",
    "logits": "fp32",
}


class Case(NamedTuple):
    """One way to take a step; `precision` may be "torch", which has no use for what
    comes behind the batch.
    """

    model: str
    precision: str
    batch: int
    remat: str
    scan: bool
    deterministic: str
    logits: str

    @property
    def name(self) -> str:
        """The name of the case as it is printed."""
        extras = f" remat={self.remat}" * (self.remat != "none") + " scan" * self.scan
        extras += f" deterministic={self.deterministic}" * (
            self.deterministic != "auto"
        )
        extras += f" logits={self.logits}" * (self.logits != "fp32")
        return f"{self.model} {self.precision} B={self.batch}{extras}"


def parse_case(text: str) -> Case:
    """The case that `model:precision[:setting=value]` describes. UserError says what is
    valid.
    """
    model, _, rest = text.partition(":")
    precision, *settings = rest.split(":")
    if not precision:
        raise UserError(
            f"cases: {text!r} has no precision; expected model:precision, such as"
            " gpt2_124m:bf16"
        )
    read_group("model", model)
    if precision != TORCH:
        read_group("precision", precision)
    found = dict(UNSAID)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in found:
            raise UserError(
                f"cases: unknown key {key!r} in {text!r}; {nearest(key, list(found))}"
            )
        found[key] = value
    if not found["batch"].isdigit():
        raise UserError(
            f"cases: {text!r}: batch={found['batch']}: expected a whole number of"
            " sequences"
        )
    for key, choices in CHOICES.items():
        if choices is not None and found[key] not in choices:
            raise UserError(
                f"cases: {text!r}: {key}={found[key]};"
                f" {nearest(found[key], list(choices))}"
            )
    batch, scan = int(found["batch"]), found["scan"] == "true"
    return Case(
        model,
        precision,
        batch,
        found["remat"],
        scan,
        found["deterministic"],
        found["logits"],
    )


def read_group(group: str, name: str) -> dict[str, Any]:
    """A preset of `configs/`, on its base, without Hydra. UserError lists the
    presets.
    """
    import yaml  # which Flax and Orbax need too

    known = [path.stem for path in sorted((CONFIGS / group).glob("*.yaml"))]
    if name not in known:
        raise UserError(f"cases: {group} {name!r} is not known; {nearest(name, known)}")
    tree: dict[str, Any] = {}
    own: dict[str, Any] = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())
    for base in own.pop("defaults"):  # such as /base/gpt2@_here_
        tree |= yaml.safe_load(
            (CONFIGS / f"{base.removesuffix('@_here_').lstrip('/')}.yaml").read_text()
        )
    return tree | own
