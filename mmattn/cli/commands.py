"""The group of commands."""

from __future__ import annotations

import click

from .. import __version__
from ..dflash.demo import dflash_demo
from .demo import demo
from .info import info
from .niah import niah


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, package_name="mmattn")
def cli() -> None:
    """Attention for multimodal models: show it, check it, describe this machine."""


for command in (demo, niah, info, dflash_demo):
    cli.add_command(command)
