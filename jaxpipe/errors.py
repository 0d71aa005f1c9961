"""Errors a user can meet. Each message says what was asked, the rule, and what to do."""


class JaxpipeError(Exception):
    """Base of every error that jaxpipe raises on purpose."""


class TargetError(JaxpipeError, TypeError):
    """Something was decorated that is neither a Flax module class nor a function."""


class CodecError(JaxpipeError, ValueError):
    """An unknown codec name."""


class DifferentiationError(JaxpipeError, TypeError):
    """A derivative was asked for that a memory-encoded function does not have."""
