"""Values that print as tables and lines of text."""

import io
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from jaxpipe.text.html_table import html_table, html_text
from jaxpipe.text.plain_table import PlainTable, printable


class Printed(ABC):
    """A value whose text is as wide as the terminal, and which notebooks show as HTML.

    Without a terminal lines have ``$COLUMNS`` columns, or 80.
    """

    @abstractmethod
    def _printed(self) -> Sequence[PlainTable | str]:
        """Return tables and paragraphs, one below the other."""

    def __rich__(self) -> RenderableType:
        shown: list[RenderableType] = []
        for before, part in itertools.pairwise(["", *self._printed()]):
            apart = bool(shown) and not (isinstance(before, str) and isinstance(part, str))
            shown += [*([Text("")] if apart else []), Text(printable(part)) if isinstance(part, str) else part]
        return Group(*shown)

    def __str__(self) -> str:
        return plain_text(self.__rich__(), shutil.get_terminal_size().columns)

    def _repr_html_(self) -> str:
        """Return the tables and paragraphs as HTML, for notebooks."""
        return html_parts(self._printed())


def html_parts(parts: Sequence[PlainTable | str]) -> str:
    """Return tables and paragraphs as HTML."""
    return "\n".join(f"<p>{html_text(part)}</p>" if isinstance(part, str) else html_table(part) for part in parts)


def plain_text(shown: RenderableType, width: int) -> str:
    """Return the text that rich would print, in lines of at most ``width`` columns, without colors.

    Example:
      >>> table = PlainTable("stage", "modules", box=None)
      >>> table.add_row("0", "[red]conv")
      >>> print(plain_text(table, 80))
      stage modules
      0     [red]conv
    """
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")
