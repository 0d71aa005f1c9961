"""jaxpipe: train any Flax model as a pipeline over several GPUs under a memory budget.

The public names are listed in ``__init__.pyi``; each is imported when it is first used.
"""

import lazy_loader

from jaxpipe._version import __version__ as __version__


__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
