"""Hooks of mkdocs: pages that are made when the site is built, and links out of docs/.

The documents are Markdown that reads well on a forge, so their links are paths in the
repository. Documents outside of docs/ become pages, and so does every file that a
document links to: the site has no link that needs the repository.
"""

import ast
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.docs.keys import command_page, key_pages

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
    "CHANGELOG.md": "changelog.md",
}
API = {  # modules of the reference: what their pages are called
    "scalify_core": "reference/scalify_core.md",
    "scalify_core.functional": "reference/functional.md",
    "scalify_core.optim": "reference/optim.md",
    "scalify_core.weights": "reference/weights.md",
    "scalify_core.tree": "reference/tree.md",
    "scalify_core.static": "reference/static.md",
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
    return OUTSIDE.get(path, f"source/{path}.md")


def file_of(page: str) -> str:
    """Return the file of the repository that a page was made of."""
    for path, name in OUTSIDE.items():
        if page == name:
            return path
    return f"docs/{page}"


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
    found = set()
    for text in texts:
        for match in LINK.finditer(text):
            path = posixpath.normpath(match["path"].removeprefix("../"))
            inside = path.startswith("docs/") or (ROOT / "docs" / path).exists()
            if not inside and path not in OUTSIDE and (ROOT / path).is_file():
                found.add(path)
    return sorted(found)


def source_page(path: str) -> str:
    """Return the Markdown of a page that shows a file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text()
    return f"# {path}\n\n````{language}\n{text}````\n"


def api_pages() -> dict[str, str]:
    """Return the Markdown of the pages of the API, filled in by mkdocstrings."""
    names = public_names(ROOT / "scalify_core" / "__init__.py")
    modules = {module.rpartition(".")[2] for module in API}
    pages = {}
    for module, page in API.items():
        text = f"# {module}\n\n::: {module}\n"
        if module == "scalify_core":
            options = "{show_root_heading: true, show_root_toc_entry: true}"
            text += "    options: {members: false}\n\n" + "".join(
                f"::: {module}.{name}\n    options: {options}\n\n"
                for name in names
                if name not in modules
            )
        pages[page] = text
    return pages


def public_names(file: Path) -> list[str]:
    """Return the names in `__all__` of a module that is not imported."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise ValueError(f"{file}: no __all__")
