"""GPUs of this host as nvidia-smi sees them: it needs no package and no CUDA context."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess

_SECONDS = 20  # nvidia-smi without a persistence daemon wakes every GPU first
_FIELDS = "index,name,memory.total,compute_cap,mig.mode.current,driver_version"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi's query, which says "[N/A]" where a GPU does not tell."""

    index: int
    name: str
    memory: str
    compute_capability: str
    mig: str
    driver: str


def _smi(*arguments: str) -> str:
    """Standard output of nvidia-smi. OSError or RuntimeError, with a reason, if it fails."""
    run = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if run.returncode != 0:
        said = (run.stdout + run.stderr).strip().splitlines()
        raise RuntimeError(said[-1] if said else f"nvidia-smi ended with code {run.returncode}")
    return run.stdout


def find() -> tuple[list[Gpu], str]:
    """(GPUs, why there are none)."""
    if shutil.which("nvidia-smi") is None:
        return [], "nvidia-smi is not installed: no NVIDIA driver on this host"
    try:
        text = _smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader")
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_FIELDS.split(",")):
            gpus.append(Gpu(int(cells[0]), *cells[1:]))
    return gpus, "" if gpus else "nvidia-smi lists no GPU"


def usable_count(gpus: list[Gpu]) -> int:
    """How many of them CUDA shows to this process."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(gpus)
    names = [name.strip() for name in chosen.split(",")]
    # CUDA stops at the first entry that names no device.
    return names.index("-1") if "-1" in names else len(list(filter(None, names)))


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """{(row GPU, column GPU): cell} of a matrix that `nvidia-smi topo` prints.

    Its diagonal is left out. Columns that are no GPUs, and what follows the matrix, are left out.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    columns: list[int] = []
    cells = {}
    for line in plain.splitlines():
        words = line.split()
        if not words:
            continue
        if not columns:
            columns = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
            continue
        if re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, cell in zip(columns, words[1:]):
                if column != row:
                    cells[row, column] = cell
    return cells


def links() -> tuple[dict[tuple[int, int], str], str]:
    """(how GPU pairs are linked: NV18 = 18 NVLinks, PIX, SYS, ...; why that is not known)."""
    try:
        return parse_matrix(_smi("topo", "-m")), ""
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return {}, f"nvidia-smi topo: {error}"


def peer_access() -> tuple[dict[tuple[int, int], str], str]:
    """(whether GPU pairs may store into each other over NVLink: OK or why not; why unknown)."""
    try:
        return parse_matrix(_smi("topo", "-p2p", "n")), ""
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return {}, f"nvidia-smi topo: {error}"
