"""Runtimes: what calls the programs of a pipeline's stages."""
