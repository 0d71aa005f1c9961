"""Texts of plans, whose lines are as long as the terminal is wide."""


def one_line(value: object) -> str:
    """Return the text of a value with all its lines joined."""
    return " ".join(str(value).split())
