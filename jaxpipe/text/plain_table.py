"""Tables whose texts are shown as they are: names come from models and files, which may hold anything."""

import copy
import io
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text


def printable(text: str) -> str:
    r"""Escape all but line feeds that a terminal would obey or not show.

    Example:
      >>> printable("conv\x1b[31m")
      'conv\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class PlainTable(Table):
    """A table in which no text is markup, an emoji code, or a command to the terminal, on whatever console."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; see ``rich.table.Table.add_row``."""
        super().add_row(*(Text(printable(c)) if isinstance(c, str) else c for c in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = copy.copy(self)
        shown.title, shown.caption = (
            Text(printable(text), style) if isinstance(text, str) else text
            for text, style in ((self.title, "table.title"), (self.caption, "table.caption"))
        )
        return Table.__rich_console__(shown, console, options)


def table_text(table: Table, width: int = 120) -> str:
    """Return a table as lines of text of at most ``width`` columns, without colors.

    Example:
      >>> table = PlainTable("stage", "modules", box=None, pad_edge=False)
      >>> table.add_row("0", "[red]conv")
      >>> print(table_text(table))
      stage  modules
      0      [red]conv
    """
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).rstrip()
