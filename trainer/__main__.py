"""`python -m trainer [group=choice] [key=value] ...`: compose the configuration with Hydra, check it, train.

Exit codes: 0 done; 2 bad configuration or data; 3 diverged; 130 stopped by Ctrl-C, 143 by SIGTERM, both after a
checkpoint.
"""

import contextlib
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.allocator import keep_freed_memory
from trainer.config import Config, from_tree, nearest, validate
from trainer.errors import UserError

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


def load(tree: DictConfig) -> Config:
    """The checked configuration. Its run directory is the one Hydra made, a numbered one under --multirun."""
    plain = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("experiment", None)  # the name of a group choice without keys of its own
    config: Config = from_tree(Config, plain | {"run_dir": HydraConfig.get().runtime.output_dir})
    validate(config)
    if config.parallel.distributed and not any(o.startswith("run_dir=") for o in HydraConfig.get().overrides.task):
        raise UserError("parallel.distributed=true needs run_dir=DIRECTORY: every process writes to the same one")
    return config


def explain(error: Exception) -> str:
    """Hydra's and OmegaConf's messages in one line, with the nearest valid key where they name a wrong one."""
    text = " ".join(str(error).split("Config search path:")[0].split())
    wrong = re.search(r"Could not override '([^']+)'", text)
    return wrong_key(wrong.group(1)) if wrong else text


def wrong_key(key: str) -> str:
    """What is wrong with the dotted `key`: the first part that the schema does not have, and what it has there."""
    schema: Any = Config
    for depth, part in enumerate(key.split(".")):
        hints = (
            typing.get_type_hints(schema) if isinstance(schema, type) and schema.__module__ == Config.__module__ else {}
        )
        if part not in hints:
            parent = ".".join(key.split(".")[:depth])
            return (
                f"unknown key {key}; {nearest(part, list(hints))}"
                if hints
                else f"unknown key {key}: {parent} has no keys"
            )
        schema = hints[part]
    return f"{key} cannot be overridden like this"


def run_job(tree: DictConfig) -> int:
    """One run, its exit code. Imports what takes time only once the configuration is known to be good."""
    try:
        config = load(tree)
        keep_freed_memory()
        from trainer.build import run

        return run(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        with contextlib.suppress(OSError):  # something was started here, or another process was faster
            os.rmdir(HydraConfig.get().runtime.output_dir)


def main(argv: list[str]) -> int:
    """Run the job, or several under --multirun; the exit code is the first that is not zero."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us instead of being printed as tracebacks
    # resume is a group of keys; its common one has a short form.
    sys.argv = ["trainer"] + [re.sub(r"^(\+*)resume=", r"\1resume.source=", arg) for arg in argv]
    codes: list[int | None] = []

    def job(tree: DictConfig) -> None:
        codes.append(None)
        codes[-1] = run_job(tree)

    try:
        hydra.main(config_path=CONFIGS, config_name="config", version_base=None)(job)()
    except KeyboardInterrupt:
        print("error: interrupted before the first step; nothing was trained", file=sys.stderr)
        return 130
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        if codes and codes[-1] is None:
            raise  # from inside the job: not what is expected here
        print(f"error: cannot write to {error.filename}: {error.strerror}; choose another run_dir", file=sys.stderr)
        return 2
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
