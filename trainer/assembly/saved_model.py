"""The model of a saved run, for whoever samples from it or exports it."""

from collections.abc import Callable
from typing import NamedTuple

from trainer.data import Tokenizer
from trainer.models.family import LanguageModel, Spec
from trainer.models.functional import Params


class SavedModel(NamedTuple):
    """The model of a run as it was saved, with its parameters on the first device.

    Attributes:
      spec: of the model.
      bind: makes the model of parameters.
      params: in FP32.
      tokenizer: of the run's data.
    """

    spec: Spec
    bind: Callable[[Params], LanguageModel]
    params: Params
    tokenizer: Tokenizer
