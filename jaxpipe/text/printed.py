"""Values that print as tables and lines of text, in terminals and notebooks.

Texts are shown as they are: names come from models and files, which may hold anything.
"""

import copy
import html
import io
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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


def html_table(table: Table) -> str:
    """Return a rich table as HTML; its cells are taken as plain text."""
    right = [' class="right"' if column.justify == "right" else "" for column in table.columns]
    head = _cells("th", right, [column.header for column in table.columns])
    rows = [_cells("td", right, row) for row in zip(*(column.cells for column in table.columns), strict=True)]
    title = f"<p><strong>{html_text(table.title)}</strong></p>" if table.title else ""
    caption = f'<p class="caption">{html_text(table.caption)}</p>' if table.caption else ""
    listed = "\n".join(rows)
    return (
        f'{title}<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{listed}\n</tbody></table></div>{caption}'
    )


def _cells(tag: str, attributes: Iterable[str], values: Iterable[object]) -> str:
    cells = (f"<{tag}{how}>{html_text(value)}</{tag}>" for how, value in zip(attributes, values, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def html_text(value: object) -> str:
    """Return a value as HTML that shows its text as it is."""
    return html.escape(printable(str(value))).replace("\n", "<br>")


class Printed(ABC):
    """A value whose text is as wide as the terminal, and which notebooks show as HTML.

    Without a terminal lines have ``$COLUMNS`` columns, or 80; there are no colors.

    Example:
      >>> class Stages(Printed):
      ...     def _printed(self):
      ...         table = PlainTable("stage", "modules")
      ...         table.add_row("0", "[red]conv")
      ...         return ["one stage", table]
      >>> print(Stages())
      one stage
      <BLANKLINE>
      stage  modules
      ────────────────
      0      [red]conv
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
        stream = io.StringIO()
        width = shutil.get_terminal_size().columns
        Console(file=stream, width=width, force_terminal=False).print(self.__rich__())
        return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        """Return the tables and paragraphs as HTML, for notebooks."""
        parts = self._printed()
        return "\n".join(f"<p>{html_text(x)}</p>" if isinstance(x, str) else html_table(x) for x in parts)
