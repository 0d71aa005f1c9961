"""Tables as HTML."""

import html
from collections.abc import Iterable

from rich.table import Table

from jaxpipe.text.plain_table import printable


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
