"""Fit README.md, CHANGELOG.md, CONTRIBUTING.md and docstrings into the site: a hook for mkdocs, one for griffe."""

import re
from pathlib import Path
from typing import Any

import griffe


ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r'^--8<-- "(\w+\.md)"$', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put pages of the repository's root where a page includes them, with links that hold in ``docs/``."""
    return INCLUDE.sub(lambda match: relink((ROOT / match[1]).read_text()), markdown)


def relink(text: str) -> str:
    """Return text of the repository's root with links relative to ``docs/``.

    Example:
      >>> relink("[Docs](docs/tutorial.md), [Changelog](CHANGELOG.md)")
      '[Docs](tutorial.md), [Changelog](changelog.md)'
    """
    text = re.sub(r'(\]\(|src="|href=")docs/', r"\1", text)
    return re.sub(r"\]\((CHANGELOG|CONTRIBUTING)\.md", lambda match: match[0].lower(), text)


class Examples(griffe.Extension):
    """Show ``Example:`` in docstrings as code, as griffe does ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
