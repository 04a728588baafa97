"""`python -m trainer [group=choice] [key=value] ...`: compose the configuration with Hydra, check it, train.

Exit codes: 0 done; 2 bad configuration or data; 3 diverged; 130 stopped by Ctrl-C, 143 by SIGTERM, both after a
checkpoint.
"""

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.allocator import keep_freed_memory
from trainer.config import Config, from_tree, nearest, validate
from trainer.errors import UserError

CONFIGS = str(Path(__file__).resolve().parent.parent / "configs")


def load(tree: DictConfig) -> Config:
    """The checked configuration. Under --multirun the run directory is the numbered one that Hydra made in it."""
    plain = OmegaConf.to_container(tree, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("experiment", None)  # the name of a group choice without keys of its own
    if numbered():
        plain["run_dir"] = HydraConfig.get().runtime.output_dir
    config: Config = from_tree(Config, plain)
    validate(config)
    if config.parallel.distributed and not any(o.startswith("run_dir=") for o in HydraConfig.get().overrides.task):
        raise UserError("parallel.distributed=true needs run_dir=DIRECTORY: every process writes to the same one")
    return config


def numbered() -> bool:
    """Whether this is one of several jobs."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def explain(error: Exception, argv: list[str]) -> str:
    """Hydra's and OmegaConf's messages in one line, with the nearest valid key where they name a wrong one."""
    text = " ".join(str(error).split("Config search path:")[0].split())
    wrong = re.search(r"Could not override '([^']+)'", text)
    if not wrong:
        return text
    # The keys depend on the choices of groups.
    choices = [argument for argument in argv if re.fullmatch(r"\w+=\w+", argument) and is_group(argument)]
    with initialize_config_dir(CONFIGS, version_base=None):
        return wrong_key(wrong.group(1), OmegaConf.to_container(compose("config", choices)))


def is_group(argument: str) -> bool:
    """Whether `name=choice` chooses of a group."""
    return Path(CONFIGS, argument.split("=")[0]).is_dir()


def wrong_key(key: str, tree: Any) -> str:
    """What is wrong with the dotted `key`: the first part that `tree` does not have, and what it has there."""
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(tree, dict):
            return f"unknown key {key}: {'.'.join(parts[:depth])} has no keys"
        if part not in tree:
            return f"unknown key {key}; {nearest(part, list(tree))}"
        tree = tree[part]
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
        if numbered():
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
        print(f"error: {explain(error, sys.argv[1:])}", file=sys.stderr)
        return 2
    except OSError as error:
        if codes and codes[-1] is None:
            raise  # from inside the job: not what is expected here
        print(f"error: cannot write to {error.filename}: {error.strerror}; choose another run_dir", file=sys.stderr)
        return 2
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
