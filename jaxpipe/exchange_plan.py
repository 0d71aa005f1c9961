"""``ExchangePlan``: what an exchange between replicas sends and costs, and the table of several."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.text.checked_json import Amount
from jaxpipe.text.printed import PlainTable
from jaxpipe.text.units import bytes_text, seconds_text


@dataclass(frozen=True)
class ExchangePlan:
    """An exchange between replicas, as it would be on the network.

    Attributes:
      name: of the exchange.
      bytes: that a device hands to the collectives in a step, on average.
      seconds: by which a step is longer, on average.
    """

    name: str
    bytes: Amount
    seconds: Amount


def exchange_table(rows: Sequence[ExchangePlan]) -> PlainTable:
    """Return what exchanges between replicas cost in a step, and what they save beside the first of them."""
    table = PlainTable("exchange")
    table.add_numbers("sent in a step", "seconds", "saved", "fewer bytes")
    for row in rows:
        beside = ("", "") if row is rows[0] else _beside(rows[0], row)
        table.add_row(row.name, bytes_text(round(row.bytes)), seconds_text(row.seconds), *beside)
    return table


def _beside(first: ExchangePlan, row: ExchangePlan) -> tuple[str, str]:
    """Return the seconds that an exchange saves beside the first one, and how many times fewer bytes it sends."""
    saved, ratio = first.seconds - row.seconds, first.bytes / row.bytes if row.bytes else 0.0
    fewer = f"{ratio:,.0f} x" if ratio >= 1 else f"{ratio:.2g} x" if ratio else ""
    return f"-{seconds_text(-saved)}" if saved < 0 else seconds_text(saved), fewer
