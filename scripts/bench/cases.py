"""Cases of `python -m scripts.bench cases=...`: a model in a precision or PyTorch."""

from typing import NamedTuple

from trainer.assembly.build import build_mesh, build_model, build_task
from trainer.config.composition import compose_config
from trainer.errors import UserError
from trainer.models.family import Spec
from trainer.text import nearest
from trainer.workload import TrainTask

VOCAB = 50257
TORCH = "torch"
# The settings of a case beside its batch, and the trainer's keys for them.
KEYS = {
    "remat": "model.remat",
    "scan": "model.scan_layers",
    "deterministic": "deterministic",
    "logits": "model.loss_logits",
    "attention": "precision.attention",
}


class Case(NamedTuple):
    """A way to take a step.

    Attributes:
      model: a size of the trainer.
      precision: of the trainer, or "torch".
      batch: sequences.
      settings: of `KEYS`, as `key=value`; PyTorch ignores them.
    """

    model: str
    precision: str
    batch: int
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the case in printed tables."""
        return " ".join((self.model, self.precision, f"B={self.batch}", *self.settings))

    def overrides(self, context: int | None) -> list[str]:
        """Return the trainer's arguments; `context` None: the model's."""
        words = [f"model={self.model}", "train.batch_tokens=${model.context}"]
        if self.precision != TORCH:
            words.append(f"precision={self.precision}")
        for setting in self.settings:
            key, _, value = setting.partition("=")
            words.append(f"{KEYS[key]}={value}")
        if context is not None:
            words.append(f"model.context={context}")
        return words

    def spec(self, context: int | None) -> Spec:
        """Return the model; `context` None: its own."""
        return compose_config(self.overrides(context)).model.spec(VOCAB)


def parse_case(text: str) -> Case:
    """Return the case of `model:precision[:setting=value]`, or raise UserError."""
    model, _, rest = text.partition(":")
    precision, *settings = rest.split(":")
    if not precision:
        raise UserError(
            f"cases: {text!r} has no precision; expected model:precision, such as"
            " gpt2_124m:bf16"
        )
    batch = "8"
    others = []
    for setting in settings:
        key, _, value = setting.partition("=")
        if key == "batch":
            batch = value
        elif key in KEYS:
            others.append(setting)
        else:
            raise UserError(
                f"cases: unknown key {key!r} in {text!r};"
                f" {nearest(key, ['batch', *KEYS])}"
            )
    if not batch.isdigit():
        raise UserError(
            f"cases: {text!r}: batch={batch}: expected a whole number of sequences"
        )
    case = Case(model, precision, int(batch), tuple(others))
    try:
        compose_config(case.overrides(None))
    except UserError as error:
        raise UserError(f"cases: {text!r}: {error}") from None
    return case


def without_data(
    overrides: list[str], vocab: int = VOCAB, *, cached: bool = False
) -> TrainTask:
    """Return the task of a configuration on one device, but without data.

    `cached`: see `build_task`.
    """
    c = compose_config([*overrides, "parallel.data=1"])
    model = build_model(c.model, c.precision.policy, vocab)
    return build_task(c, model, build_mesh(c), None, cached=cached)
