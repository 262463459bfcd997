"""Core ML bundles of anec: convert, plan, validate, inspect; open, generate, chat, embed, redact. The program `anec` comes with the same
wheel.

The functions of the toolchain are in `anec.toolchain`. The rest is generated from the crate anec-bindings, documentation included:
help(anec.AnecModel).
"""

from . import toolchain
from .anec import *  # noqa: F403
from .anec import __all__ as _generated
from .toolchain import *  # noqa: F403

__all__ = [*_generated, *toolchain.__all__]
