"""Residuals: what a backward pass saves of its forward pass, in which format; ``@memory_encoded`` and its report.

In: a graph, the inputs that are differentiated, the codecs that are allowed.
Out: a format for each stored tensor, a forward program that fills a stash and a backward program that reads it.
"""
