"""Hooks for mkdocs, whose pages are the documents of the project in place."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: Files that make up the pages, or that pages show or link to.
DOCUMENTS = ("*.md", "*.ipynb", "*.png", "LICENSE", "cluster_configs")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents to the pages, under the paths that they have in the project."""
    listed = subprocess.run(
        ["git", "ls-files", *DOCUMENTS],  # noqa: S607 - whichever git the developer has
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.is_relative_to(Path(config.docs_dir)):
            files.append(_file(name, path, config))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make links to a notebook lead to its page."""
    return markdown.replace(".ipynb)", ".md)")


def on_page_content(html: str, **_: Any) -> str:
    """Show the double colon before code in docstrings as a single colon."""
    return html.replace("::</p>", ":</p>")


def _file(name: str, path: Path, config: MkDocsConfig) -> File:
    if path.suffix != ".ipynb":
        return File.generated(config, name, abs_src_path=str(path))
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    content = "\n\n".join(_text(cell) for cell in cells)
    return File.generated(config, name.removesuffix("ipynb") + "md", content=content)


def _text(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook and its outputs as Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", [])})
        if "image/png" in data:
            image = re.sub(r"\s", "", data["image/png"])
            parts.append(f"![The output of this cell](data:image/png;base64,{image})")
        else:
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(data["text/plain"]))
            parts.append(f"```text\n{text.strip()}\n```")
    return "\n\n".join(parts)
