"""Options of the examples' command lines, and the way settings become options."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

MODEL = {  # option: help
    "steps": "steps of the optimiser",
    "seed": "of parameters and data",
    "sequences": "per step, over all ranks",
    "context": "bytes per sequence",
    "hidden": "columns of a token",
    "heads": "of attention",
    "layers": "attention and experts each",
    "ffn": "columns inside an expert",
    "experts": "of each layer, over all ranks",
    "topk": "experts per token",
    "warmup": "steps in which the learning rate rises",
    "learning-rate": "the highest, of AdamW",
    "aux-loss-weight": "of the loss that keeps experts evenly used",
}

_Settings = TypeVar("_Settings")


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a program's docstring, with the options for the text."""
    head, _, rest = (doc or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=head, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="folder of .py files (the standard library)")
    return parser


def add_numbers(parser: argparse.ArgumentParser, settings: type, helps: Mapping[str, str]) -> None:
    """An option for each of ``helps``, of the type and default that ``settings`` has."""
    for name, text in helps.items():
        default = getattr(settings, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=f"{text} ({default})"
        )


def read_settings(settings: type[_Settings], options: argparse.Namespace) -> _Settings:
    """The values given for the fields of ``settings`` that are options."""
    given = {field.name for field in dataclasses.fields(settings)} & vars(options).keys()
    return settings(**{name: getattr(options, name) for name in given})


def check_model(settings: Any, ranks: int) -> None:
    """Raises ValueError, naming the option, if ``ranks`` ranks cannot share the batch and a model.

    Args:
        settings: with the fields of `MODEL`.
    """
    for name in ("steps", "sequences", "context", "hidden", "heads", "layers", "ffn", "experts"):
        check_positive(settings, name)
    if not 1 <= settings.topk <= settings.experts:
        raise ValueError(f"--topk {settings.topk}: expected 1 to {settings.experts}, the experts")
    if settings.hidden % (2 * settings.heads):
        raise ValueError(
            f"--hidden {settings.hidden}: expected a multiple of {2 * settings.heads}, twice the "
            "heads"
        )
    if settings.sequences % ranks:
        raise ValueError(
            f"--sequences {settings.sequences}: expected a multiple of {ranks}, the ranks"
        )


def check_positive(settings: Any, name: str) -> None:
    """Raises ValueError, naming the option, unless the field is at least 1."""
    value = getattr(settings, name)
    if value < 1:
        raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
