"""What every room uses and what knows nothing of networks: errors, arguments, files, seeds, memory, figures."""

from biascope.support.bars import progress
from biascope.support.errors import BiascopeError as BiascopeError
from biascope.support.errors import CorruptError as CorruptError
from biascope.support.errors import InputError as InputError
from biascope.support.errors import UnsupportedError as UnsupportedError
from biascope.support.seeds import derive, generator

__all__ = ["derive", "generator", "progress"]
