"""`python -m trainer [group=choice] [key=value] ...`: compose the configuration with Hydra, check it, train.

Exit codes: 0 done; 2 bad configuration, data or disk; 3 diverged; 4 ended by the guard because nothing moved any more;
130 stopped by Ctrl-C, 143 by SIGTERM, both after a checkpoint.
"""

import contextlib
import os
import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer.allocator import keep_freed_memory
from trainer.composition import CONFIGS, checked, explain, long_forms
from trainer.config import Config
from trainer.errors import UserError, complain, leave


def load(tree: DictConfig) -> Config:
    """The checked configuration. Under --multirun the run directory is the numbered one that Hydra made in it."""
    config = checked(tree, **({"run_dir": HydraConfig.get().runtime.output_dir} if numbered() else {}))
    if config.parallel.distributed and not any(o.startswith("run_dir=") for o in HydraConfig.get().overrides.task):
        raise UserError("parallel.distributed=true needs run_dir=DIRECTORY: every process writes to the same one")
    return config


def numbered() -> bool:
    """Whether this is one of several jobs."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def run_job(tree: DictConfig) -> int:
    """One run, its exit code. Imports what takes time only once the configuration is known to be good."""
    try:
        config = load(tree)
        keep_freed_memory()
        from trainer.build.run import run

        return run(config)
    except UserError as error:
        complain(error)
        return error.exit_code
    finally:
        if numbered():
            with contextlib.suppress(OSError):  # something was started here, or another process was faster
                os.rmdir(HydraConfig.get().runtime.output_dir)


def main(argv: list[str]) -> int:
    """Run the job, or several under --multirun; the exit code is the first that is not zero."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us instead of being printed as tracebacks
    sys.argv = ["trainer", *long_forms(argv)]
    codes: list[int | None] = []

    def job(tree: DictConfig) -> None:
        codes.append(None)
        codes[-1] = run_job(tree)

    try:
        hydra.main(config_path=CONFIGS, config_name="config", version_base=None)(job)()
    except KeyboardInterrupt:
        complain("interrupted before the first step; nothing was trained")
        return 130
    except (HydraException, OmegaConfBaseException) as error:
        complain(explain(error, sys.argv[1:]))
        return 2
    except OSError as error:
        if codes and codes[-1] is None:
            raise  # from inside the job: not what is expected here
        complain(f"cannot write to {error.filename}: {error.strerror}; choose another run_dir")
        return 2
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
