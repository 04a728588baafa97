"""OLMo 2 as a `Family`."""

import dataclasses

from trainer.errors import UserError
from trainer.models.llama.family import make_family
from trainer.models.olmo2.spec import Olmo2Spec


def check_tensor(spec: Olmo2Spec, devices: int, multiple: int) -> None:
    """Raise UserError for several devices: a norm of queries needs all their heads."""
    if devices > 1:
        raise UserError(
            f"parallel.tensor={devices}: OLMo 2 normalizes queries and keys over all"
            " heads, so that heads cannot be split; set parallel.tensor=1, or"
            " parallel=fsdp to save memory"
        )


FAMILY = dataclasses.replace(make_family(Olmo2Spec), check_tensor=check_tensor)
