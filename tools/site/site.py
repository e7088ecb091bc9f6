"""Hooks of mkdocs.yml, for the things that mkdocs cannot know of this repository.

Files that pages link to are pages of the site, too (places.py). References of the C API and of the
Python packages are made of headers and docstrings. Where a page quotes a program
(```python from=FILE), the site names the program.
"""

from __future__ import annotations

import pathlib
import re

import c_reference
import check_site
import places
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PYTHON = {
    "python": ("crossdock", "NumPy"),
    "launch": ("crossdock.launch", "Starting ranks"),
    "plot": ("crossdock.plot", "Pictures"),
    "torch": ("crossdock.torch", "PyTorch"),
    "torch_tp": ("crossdock.torch.tp", "PyTorch, tensor parallelism"),
    "jax": ("crossdock.jax", "JAX"),
    "jax_tp": ("crossdock.jax.tp", "JAX, tensor parallelism"),
    "deep_ep": ("crossdock.deep_ep", "DeepEP's interface"),
    "vllm": ("crossdock.vllm", "vLLM"),
    "sglang": ("crossdock.sglang", "SGLang"),
    "megatron": ("crossdock.compat.megatron", "Megatron-LM"),
    "torchtitan": ("crossdock.compat.torchtitan", "torchtitan"),
    "te_overlap": ("crossdock.compat.te_overlap", "TransformerEngine's userbuffers"),
    "te_jax": ("crossdock.compat.te_jax", "TransformerEngine's collective GEMM in JAX"),
}

INFO = re.compile(r"^( *```\w+) (\w+)=(\S+)$", re.MULTILINE)

_origins: dict[str, str] = {}  # of each page of a file: its path in the repository
_titles: dict[str, str] = {}  # of each page, by that path


def _add(files: Files, config: MkDocsConfig, place: str, content: str) -> None:
    if files.get_file_from_path(place) is None:
        files.append(File.generated(config, place, content=content))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files beside docs/, and the references."""
    for name, content in c_reference.pages().items():
        _add(files, config, f"reference/c/{name}", content)
    for name, (package, title) in PYTHON.items():
        _add(files, config, f"reference/{name}.md", f"# {title}\n\n::: {package}\n")

    worker = pathlib.Path(__file__).with_name("iframe-worker.js").read_text()
    _add(files, config, check_site.WORKER, worker)

    inside = {
        f"docs/{file.src_uri}": file.content_string
        for file in files
        if file.src_uri.endswith(".md") and not file.src_uri.startswith("reference/")
    }
    files.remove(files.src_uris["README.md"])
    beside = places.pages_beside(inside)
    for path, content in (inside | beside).items():
        _add(files, config, places.place_of(path), content)
        if path.endswith(".md"):
            _origins[places.place_of(path)] = path
            _titles[path] = places.title_of(content)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files into links between pages; names programs over quotations."""
    origin = _origins.get(page.file.src_uri)
    if origin is None:
        return markdown
    return INFO.sub(_titled, places.between_pages(origin, markdown, _titles))


def _titled(info: re.Match[str]) -> str:
    """The start of a block with what it is quoted from; what tests alone read is left out."""
    return f'{info[1]} title="{info[3]}"' if info[2] == "from" else info[1]
