"""Hooks of mkdocs: pages that are made when the site is built, and links out of docs/.

The documents are Markdown that reads well on a forge, so their links are paths in the
repository. Documents outside of docs/ become pages, and so does every file that a
document links to: the site has no link that needs the repository.
"""

import ast
import json
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.docs.keys import command_page, key_pages
from trainer import HOMES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#\s]+)(?P<heading>#[^)\s]+)?\)")
OUTSIDE = {  # documents of the repository's root: their pages
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CHANGELOG.md": "changelog.md",
}
NOTEBOOKS = {
    f"examples/{name}.ipynb": f"notebooks/{name}.md"
    for name in ("train_and_look", "scalify_your_model", "adapt_weights")
}
API = {  # modules of the reference, and their files
    "scalify_core": "scalify_core/__init__.py",
    "scalify_core.functional": "scalify_core/ops/functional/__init__.py",
    "scalify_core.optim": "scalify_core/optim/__init__.py",
    "scalify_core.weights": "scalify_core/optim/weights.py",
    "scalify_core.tree": "scalify_core/array/tree.py",
    "scalify_core.static": "scalify_core/static.py",
    "trainer": "trainer/__init__.py",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "sh", ".sh": "sh"}


def on_config(config: "MkDocsConfig") -> None:
    """Give headings the anchors that forges give them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    pages = {page: (ROOT / path).read_text() for path, page in OUTSIDE.items()}
    texts = [
        *pages.values(),
        *(file.content_string for file in files.documentation_pages()),
    ]
    for path in linked_files(texts):
        pages[page_of(path)] = source_page(path)
    pages |= {page: notebook_page(path) for path, page in NOTEBOOKS.items()}
    pages |= key_pages() | api_pages()
    pages["reference/commands.md"] = command_page()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: "Page", **_: Any) -> str:
    """Turn links between files of the repository to links between pages."""
    return with_links(markdown, page.file.src_uri)


def anchor(text: str, separator: str = "-") -> str:
    """Return the anchor of a heading, as forges make it."""
    return re.sub(r"[^\w -]", "", text.lower()).replace(" ", separator)


def page_of(path: str) -> str:
    """Return the page of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return (OUTSIDE | NOTEBOOKS).get(path, f"source/{path}.md")


def file_of(page: str) -> str:
    """Return the file of the repository that a page was made of."""
    for path, name in (OUTSIDE | NOTEBOOKS).items():
        if page == name:
            return path
    return f"docs/{page}"


def notebook_page(path: str) -> str:
    """Return the page of a notebook: its text, code and outputs."""
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            shown = "".join(data.get("text/html", data["text/plain"]))
            if "text/html" not in data:
                shown = f"```text\n{shown.rstrip()}\n```"
            parts.append(shown)
    return "\n\n".join([*parts, f"The notebook is `{path}` of the repository."])


def with_links(markdown: str, page: str) -> str:
    """Return a document with its links between files as links between pages.

    A link that leads nowhere stays, and mkdocs complains of it.
    """
    folder = posixpath.dirname(file_of(page))

    def replaced(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["path"]))
        if not (ROOT / path).is_file():
            return match[0]
        target = posixpath.relpath(page_of(path), posixpath.dirname(page) or ".")
        text = match["text"]
        if text.endswith(".md"):  # the forge's reader wants the file's name
            text = title_of(path)
        return f"[{text}]({target}{match['heading'] or ''})"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def title_of(path: str) -> str:
    """Return the first heading of a document, or its name if it has none."""
    heading = re.search(r"^# (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    return heading[1] if heading else path


def linked_files(texts: Iterable[str]) -> list[str]:
    """Return the files of the repository, no documents, that documents link to."""
    paths = set()
    for text in texts:
        for match in LINK.finditer(text):
            path = posixpath.normpath(match["path"].removeprefix("../"))
            inside = path.startswith("docs/") or (ROOT / "docs" / path).exists()
            if (
                not inside
                and path not in (OUTSIDE | NOTEBOOKS)
                and (ROOT / path).is_file()
            ):
                paths.add(path)
    return sorted(paths)


def source_page(path: str) -> str:
    """Return the Markdown of a page that shows a file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text()
    return f"# {path}\n\n````{language}\n{text}````\n"


def api_pages() -> dict[str, str]:
    """Return the Markdown of the pages of the API, filled in by mkdocstrings."""
    options = "{show_root_heading: true, show_root_toc_entry: true}"
    pages = {}
    for module, file in API.items():
        is_package = file.endswith("/__init__.py")
        name = file.removesuffix("/__init__.py" if is_package else ".py")
        text = f"# {module}\n\n::: {name.replace('/', '.')}\n"
        text += "    options: {members: false}\n\n"
        homes = HOMES if module == "trainer" else public_homes(file)
        for public, home in sorted(homes.items(), key=lambda item: item[0].lower()):
            text += f"::: {home}.{public}\n    options: {options}\n\n"
        pages[api_page(module)] = text
    return pages


def api_page(module: str) -> str:
    """Return the page of a module of the API."""
    return f"reference/{module.rpartition('.')[2]}.md"


def public_homes(file: str) -> dict[str, str]:
    """Return the modules that define the public names of a module, no modules.

    They are named in full, since a function may be called as the module that it is in.
    The module is not imported: that would take JAX.
    """
    body = ast.parse((ROOT / file).read_text()).body
    module = file.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    homes, public = {}, None
    for node in body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            homes[node.name] = module
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = ast.literal_eval(node.value)
    if public is None:
        local = (name for name, home in homes.items() if home == module)
        public = [name for name in local if not name.startswith("_")]
    modules = {name.rpartition(".")[2] for name in API}
    return {name: homes[name] for name in public if name not in modules}
