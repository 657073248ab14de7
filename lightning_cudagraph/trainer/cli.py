"""The console command `lightning-cudagraph`: LightningCLI, with this project's defaults."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning_utilities.core.imports import RequirementCache

_CLI_REQUIREMENT = RequirementCache("jsonargparse[signatures]>=4.39")


def main(
    args: ArgsType = None,
    *,
    default_configs: Sequence[str | os.PathLike[str]] = (),
    import_root: str | os.PathLike[str] | None = None,
) -> None:
    """Run `lightning-cudagraph fit|validate|test|predict --config some.yaml`.

    Args:
        args: Arguments to parse; those of the command line by default.
        default_configs: YAML files read before the arguments, later files over earlier ones. The
            arguments, `--config` included, go over them.
        import_root: Folder put first on `sys.path`, so that a `class_path` in a YAML file may name
            a class in it. The current directory by default.

    Raises:
        ModuleNotFoundError: If `jsonargparse`, which LightningCLI needs, is missing or too old.
    """
    if not _CLI_REQUIREMENT:
        raise ModuleNotFoundError(
            f"The command line needs `{_CLI_REQUIREMENT.requirement}`. "
            f'Install it with: pip install "{_CLI_REQUIREMENT.requirement}"'
        )
    # A console script starts with its own folder first on the path, not with the user's project.
    sys.path.insert(0, os.path.abspath(import_root or os.getcwd()))
    default_config_files = [os.fspath(path) for path in default_configs]
    LightningCLI(
        args=args,
        seed_everything_default=1,
        # Runs without a logger share a folder, where the second finds the config.yaml of the first.
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            subcommand: {"default_config_files": default_config_files}
            for subcommand in LightningCLI.subcommands()
        },
    )


def run_example(script: str | os.PathLike[str]) -> None:
    """Run an example with its own config files as the defaults of the command line.

    `<root>/examples/<name>.py` gets `<root>/configs/<name>.yaml` and, where there is no CUDA GPU,
    `<root>/configs/<name>_cpu.yaml` over it.

    Args:
        script: Path of the example, its `__file__`.
    """
    path = Path(script).resolve()
    root = path.parent.parent
    default_configs = [root / "configs" / f"{path.stem}.yaml"]
    if not torch.cuda.is_available():
        default_configs.append(root / "configs" / f"{path.stem}_cpu.yaml")
    main(default_configs=default_configs, import_root=root)


if __name__ == "__main__":
    main()
