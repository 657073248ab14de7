"""The console command `lightning-cudagraph`: LightningCLI, with this project's defaults."""

from __future__ import annotations

import os
import sys

from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning_utilities.core.imports import RequirementCache

_CLI_REQUIREMENT = RequirementCache("jsonargparse[signatures]>=4.39")


def main(args: ArgsType = None) -> None:
    """Run `lightning-cudagraph fit|validate|test|predict --config some.yaml`.

    Args:
        args: arguments to parse; None for those of the command line.

    Raises:
        ModuleNotFoundError: if `jsonargparse`, which LightningCLI needs, is missing or too old.
    """
    if not _CLI_REQUIREMENT:
        raise ModuleNotFoundError(
            f"The command line needs `{_CLI_REQUIREMENT.requirement}`. "
            f'Install it with: pip install "{_CLI_REQUIREMENT.requirement}"'
        )
    # A console script has its own folder on `sys.path`, and not the user's project.
    sys.path.insert(0, os.getcwd())
    LightningCLI(
        args=args,
        seed_everything_default=1,
        # Runs without a logger share a folder, so the second finds the config.yaml of the first.
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
