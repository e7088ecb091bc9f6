#!/usr/bin/env python3
"""Train a byte-level mixture-of-experts language model, its experts spread over ranks.

    train_moe_lm.py --ranks 4                          4 processes of this host, GPUs if it has 4
    torchrun --nproc-per-node 4 train_moe_lm.py        the same, started by torchrun
    train_moe_lm.py --ranks 4 --save-every 100         with checkpoints; go on with --resume, also
                                                       on another number of ranks
    train_moe_lm.py --verify                           1, 2 and 4 ranks against one process without
                                                       Crossdock
    train_moe_lm.py --check                            --ranks ranks against one process without
                                                       Crossdock
    train_moe_lm.py --check --tensor-parallel 2        two by two ranks: expert parallelism on all,
                                                       attention spread over each two
    train_moe_lm.py --demo                             one process without Crossdock and 4 ranks;
                                                       text, comparison, FOLDER/loss.png

Exit code 0; 1 after a failure or a disagreement, 2 after a usage error, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from crossdock.launch import RankFailed
from moe_lm import comparison, launch
from moe_lm.folders import make_folder
from moe_lm.options import MODEL, add_numbers, make_parser, read_settings
from moe_lm.settings import Settings
from moe_lm.trainer import train

_MORE = {  # option: help
    "tensor-parallel": "ranks that share attention, each some of the heads; 1 = none do",
    "combine-wire": "form in which experts' results come back, as of crossdock.torch.combine",
    "save-every": "steps between checkpoints; 0 = none",
    "sample-bytes": "of text to write at the end; 0 = none",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = read_settings(Settings, options)
    try:
        return _run(options, settings)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except RankFailed as error:
        print(f"{parser.prog}: a rank failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, settings: Settings) -> int:
    launched = "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ
    if options.verify or options.check or options.demo:
        if launched:
            raise ValueError(
                "--verify, --check and --demo start ranks of their own: not under torchrun"
            )
        if options.demo:
            return comparison.demo(settings, options.ranks)
        if options.check:
            return comparison.verify(settings, (options.ranks,))
        return comparison.verify(settings, (1, 2, 4))
    ranks = int(os.environ["WORLD_SIZE"]) if launched else options.ranks
    settings.check(ranks)
    device = launch.pick_device(settings.device, ranks)
    make_folder(settings.folder)
    if launched:
        launch.run_launched(device, train, settings)
    else:
        launch.run_ranks(ranks, device, train, settings)
    return 0


class _Called(argparse.Action):
    """A program that runs this one gives its own name, for help and mistakes."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.prog = values


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--called", action=_Called, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (4)")
    parser.add_argument(
        "--folder", type=Path, default=Path("moe-lm"), help="log, checkpoints, figure (moe-lm)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs if there is one for each rank (--demo: with 2 or more, it "
        "takes 2 ranks), else the CPU: one GPU serves --ranks 1 only",
    )
    parser.add_argument("--resume", action="store_true", help="from the folder's last checkpoint")
    parser.add_argument("--plain", action="store_true", help="without Crossdock, in one process")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="compare 1, 2 and 4 ranks")
    what.add_argument("--check", action="store_true", help="compare --ranks ranks")
    what.add_argument("--demo", action="store_true", help="compare, show and draw")
    add_numbers(parser, Settings, MODEL | _MORE)
    return parser


if __name__ == "__main__":
    sys.exit(main())
