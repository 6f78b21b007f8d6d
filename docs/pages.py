"""Pages of the site that are not files in docs/: mkdocs calls this as it builds the site (mkdocs.yml).

README.md, CONTRIBUTING.md and the like become pages, so that nothing is written twice. A page of the API is
made for each api/NAME.md that mkdocs.yml names: of a package, the names that it exports, each from the module
that defines it; of a module, all that is public. Nothing of fastmp is imported: its source is read.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = {"README.md": "index.md", "configs/README.md": "recipes.md"} | {
    f"{name}.md": f"{name.lower()}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")
}
BOOSTS = {  # of pages in the search; others have 1
    "api/": 0.1,
    **dict.fromkeys(("glossary", "reference/environment", "from-megatron"), 1.6),
    **dict.fromkeys(("studies/", "changelog", "contributing", "correctness"), 0.3),
    **dict.fromkeys(("index", "benchmarks", "security"), 0.5),
}
EXAMPLE = re.compile(r"^Example( \(.+\))?:\n((?:\n|    .*\n?)+)", re.MULTILINE)  # as tests/test_examples.py
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")  # of [text](file#part): the file, which has no scheme


class Examples(griffe.Extension):  # type: ignore[misc] # mkdocs.yml names it
    """Show the `Example:` blocks of docstrings as code, not as admonitions."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Write the blocks of `obj`'s docstring in the form that griffe takes for examples."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_as_code, obj.docstring.value)


def _as_code(example: re.Match[str]) -> str:
    reason, code = example.groups()
    if ">>>" not in code:
        code = f"    ```python\n{code.rstrip()}\n    ```\n"
    return f"Examples: Example{reason or ''}:\n{code}"


def exported(package: Path) -> dict[str, str]:
    """The names that a package exports and the modules in it that define them, in the order of its source.

    They are read from the table of `fastmp._lazy.exports`, or from the package's imports and own functions.
    """
    prefix = ".".join(package.relative_to(ROOT).parts)
    homes: dict[str, str] = {}
    for node in ast.parse((package / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{prefix}."):
            homes |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            homes[node.name] = prefix
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            table = node.value.args[1]
            assert isinstance(table, ast.Dict), f"{package}: exports() takes a dict display"
            for key, names in zip(table.keys, table.values):
                if key is not None:  # else a ** of submodules, which have pages of their own
                    module = f"{prefix}.{ast.literal_eval(key)}"
                    homes |= dict.fromkeys(ast.literal_eval(names).split(), module)
    for name, module in homes.items():
        directory = ROOT.joinpath(*module.split("."))
        if directory != package and directory.is_dir():
            homes[name] = exported(directory)[name]
    return {name: module for name, module in homes.items() if not name.isupper()}


def api_page(name: str) -> str:
    """The Markdown of the page of a package or module, for mkdocstrings to fill."""
    path = ROOT.joinpath(*name.split("."))
    if not path.is_dir():
        return f"# {name}\n\n::: {name}\n    options: {{show_root_heading: false}}\n"
    said = ast.get_docstring(ast.parse((path / "__init__.py").read_text()))
    blocks = [
        f'::: {module}.{member}\n    options: {{heading: "{name}.{member}", toc_label: "{member}"}}\n'
        for member, module in exported(path).items()
    ]
    return "\n".join([f"# {name}\n\n{said}\n", *blocks])


def in_nav(nav: Any) -> list[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [file for part in (nav.values() if isinstance(nav, dict) else nav) for file in in_nav(part)]


def linked(text: str, source: Path) -> dict[str, str]:
    """The relative links in a file's text, and where the site has what they name: a path from its root."""
    places = {}
    for link in set(LINK.findall(text)):
        target = (source.parent / link).resolve()
        if target.is_relative_to(DOCS):
            places[link] = target.relative_to(DOCS).as_posix()
        elif target.is_file() and target.is_relative_to(ROOT):
            outside = target.relative_to(ROOT).as_posix()
            places[link] = PAGES.get(outside, f"source/{outside}")
    return places


def source_of(uri: str) -> Path:
    """The file from which the page `uri` is made."""
    return next((ROOT / name for name, page in PAGES.items() if page == uri), DOCS / uri)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the files outside docs/ to which a page links."""
    add = {page: (ROOT / name).read_text() for name, page in PAGES.items()}
    sources = [source_of(uri) for uri in (*add, *(file.src_uri for file in files.documentation_pages()))]
    for source in sources:
        for place in linked(source.read_text(), source).values():
            if place.startswith("source/"):
                add[place] = (ROOT / place.removeprefix("source/")).read_text()
    for uri in in_nav(config.nav):
        if uri.startswith("api/"):
            add[uri] = api_page(uri.removeprefix("api/").removesuffix(".md"))
    for uri, content in add.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has what they name, and rank the page in the search."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    source = source_of(page.file.src_uri)
    if not source.exists():
        return markdown
    places = linked(markdown, source)
    here = posixpath.dirname(page.file.src_uri)
    return LINK.sub(
        lambda link: posixpath.relpath(places[link[0]], here) if link[0] in places else link[0], markdown
    )
