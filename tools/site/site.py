"""What mkdocs cannot know of this repository: hooks of mkdocs.yml.

Pages in docs/ link to each other and to files beside docs/, as GitHub shows them. In the site every
file that a page links to is a page, too; the README is the first one. References of the C API and
of the Python packages are made of headers and docstrings. Where a page quotes a program
(```python from=FILE), the site names the program.
"""

from __future__ import annotations

import pathlib
import posixpath
import re

import c_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Where a file or folder of the repository is in the site, if not where the rules below say.
PLACES = {
    "README.md": "index.md",
    "docs/README.md": "documentation.md",
    "include/crossdock": "reference/c/index.md",
    "python/crossdock": "reference/python.md",
}
PYTHON = {
    "python": ("crossdock", "NumPy"),
    "launch": ("crossdock.launch", "Starting ranks"),
    "plot": ("crossdock.plot", "Pictures"),
    "torch": ("crossdock.torch", "PyTorch"),
    "torch_tp": ("crossdock.torch.tp", "PyTorch, tensor parallelism"),
    "jax": ("crossdock.jax", "JAX"),
    "jax_tp": ("crossdock.jax.tp", "JAX, tensor parallelism"),
    "deep_ep": ("crossdock.deep_ep", "DeepEP's interface"),
    "megatron": ("crossdock.compat.megatron", "Megatron-LM"),
    "torchtitan": ("crossdock.compat.torchtitan", "torchtitan"),
    "te_overlap": ("crossdock.compat.te_overlap", "TransformerEngine's userbuffers"),
    "te_jax": ("crossdock.compat.te_jax", "TransformerEngine's collective GEMM in JAX"),
}
LANGUAGES = {".h": "c", ".cuh": "cuda", ".cu": "cuda", ".cc": "c++", ".py": "python", ".sh": "sh"}

LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
INFO = re.compile(r"^( *```\w+) (\w+)=(\S+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

_origins: dict[str, str] = {}  # of each page of a file: its path in the repository


def place_of(path: str) -> str:
    """Where a file or folder of the repository is in the site."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    folder, name = posixpath.split(path)
    if folder == "include/crossdock" and name.endswith(".h"):
        return f"reference/c/{c_reference.page_of(name)}"
    return f"source/{path if path.endswith('.md') else path + '.md'}"


def targets_of(path: str, text: str) -> list[str]:
    """Files and folders of the repository that a page links to."""
    folder = posixpath.dirname(path)
    return [
        posixpath.normpath(posixpath.join(folder, link))
        for _, link, _, _ in LINK.findall(FENCED.sub("", text))
        if "://" not in link and not link.startswith("mailto:")
    ]


def files_in(path: str) -> list[str]:
    """The files of a folder, not of those below it; none of a file."""
    place = ROOT / path
    inside = sorted(place.iterdir()) if place.is_dir() else []
    return [f"{path}/{one.name}" for one in inside if one.suffix and one.is_file()]


def page_of_source(path: str) -> str:
    """A page that shows a file, or what is in a folder."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        names = [file.rpartition("/")[2] for file in files_in(path)]
        here = posixpath.basename(path)
        return head + "\n".join(f"- [{name}]({here}/{name}.md)" for name in names) + "\n"
    file = ROOT / path
    return f"{head}````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"


def _add(files: Files, config: MkDocsConfig, place: str, content: str, origin: str = "") -> None:
    if files.get_file_from_path(place) is None:
        files.append(File.generated(config, place, content=content))
        if origin:
            _origins[place] = origin


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files beside docs/, and the references."""
    pages = {
        f"docs/{file.src_uri}": file.content_string
        for file in files
        if file.src_uri.endswith(".md")
    }
    _origins.update({place_of(path): path for path in pages})
    readme = files.get_file_from_path("README.md")
    if readme is not None:
        files.remove(readme)
        _add(files, config, PLACES["docs/README.md"], readme.content_string, "docs/README.md")
    for place, content in c_reference.pages().items():
        _add(files, config, f"reference/c/{place}", content)
    for name, (package, title) in PYTHON.items():
        _add(files, config, f"reference/{name}.md", f"# {title}\n\n::: {package}\n")

    todo = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    for path, text in pages.items():
        todo += targets_of(path, text)
    seen: set[str] = set()
    while todo:
        path = todo.pop()
        # What is in docs/ is there already, and mkdocs says what is nowhere.
        if path in seen or path.startswith("docs/") or not (ROOT / path).exists():
            continue
        seen.add(path)
        if path.endswith(".md"):
            content = (ROOT / path).read_text()
            todo += targets_of(path, content)
        else:
            content = page_of_source(path)
            todo += files_in(path) if path not in PLACES else []
        _add(files, config, place_of(path), content, path if path.endswith(".md") else "")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files into links between pages; names programs over quotations."""
    here = page.file.src_uri
    origin = _origins.get(here)
    if origin is None:
        return markdown

    def between_pages(link: re.Match[str]) -> str:
        before, target, anchor, after = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        relative = posixpath.relpath(place_of(path), posixpath.dirname(here) or ".")
        return f"{before}{relative}{anchor or ''}{after}"

    parts, end = [], 0
    for block in FENCED.finditer(markdown):
        parts += [LINK.sub(between_pages, markdown[end : block.start()]), block[0]]
        end = block.end()
    parts.append(LINK.sub(between_pages, markdown[end:]))
    return INFO.sub(_titled, "".join(parts))


def _titled(info: re.Match[str]) -> str:
    """The start of a block with what it is quoted from; what tests alone read is left out."""
    return f'{info[1]} title="{info[3]}"' if info[2] == "from" else info[1]
