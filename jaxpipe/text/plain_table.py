"""Tables whose texts are shown as they are: names come from models and files, which may hold anything."""

import copy
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text


def printable(text: str) -> str:
    r"""Escape all but line feeds that a terminal would obey or not show.

    Example:
      >>> printable("conv\x1b[31m")
      'conv\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


class PlainTable(Table):
    """A table in which no text is markup, an emoji code, or a command to the terminal, on whatever console.

    Where a console is too narrow for all columns, those that do not fit follow below, beside the first one again.
    """

    def __init__(self, *headers: str, **options: Any):
        plain = {"box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False, "collapse_padding": True}
        super().__init__(**{**plain, **options})
        for header in headers:
            self.add_column(header, overflow="fold")

    def add_numbers(self, *headers: str) -> None:
        """Add columns of numbers, which are never broken into lines."""
        for header in headers:
            self.add_column(header, justify="right", no_wrap=True)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row; see ``rich.table.Table.add_row``."""
        super().add_row(*(Text(printable(c)) if isinstance(c, str) else c for c in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title, caption = self.title, self.caption
        if title:
            yield Text(f"{printable(str(title))}\n", "bold")
        first, *rest = self.columns
        shown: list[Column] = []
        for column in rest:
            wider = self._with_columns([first, *shown, column])
            if shown and Measurement.get(console, options.update(max_width=10_000), wider).minimum > options.max_width:
                yield from Table.__rich_console__(self._with_columns([first, *shown]), console, options)
                yield Text("")
                shown = []
            shown.append(column)
        yield from Table.__rich_console__(self._with_columns([first, *shown]), console, options)
        if caption:
            yield Text(f"\n{printable(str(caption))}")

    def _with_columns(self, columns: list[Column]) -> Table:
        part = copy.copy(self)
        part.title = part.caption = None
        part.columns = [
            replace(column, _index=k, min_width=max(map(cell_len, map(str, (column.header, *column.cells)))))
            if column.no_wrap
            else replace(column, _index=k)
            for k, column in enumerate(columns)
        ]
        return part
