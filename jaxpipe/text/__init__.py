"""Texts for people and files from people: sizes, tables, values in errors, progress, checked JSON.

In: numbers, trees, tables, and JSON that is not trusted.
Out: text for terminals, HTML and messages, and dataclasses whose types were checked.
"""
