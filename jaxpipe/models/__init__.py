"""A Flax model, its loss and its optimizer, each as a traced program over named variables.

In: a Linen module, an NNX module or a function; a loss, an optax optimizer, a batch.
Out: variables by path, pure functions of them, the program of one micro-batch, the program of an update.
"""
