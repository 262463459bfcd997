"""Core ML bundles of anec: open, generate, chat, embed, redact. The program `anec` comes with the same wheel.

What is here is generated from the crate anec-bindings, documentation included: help(anec.AnecModel).
"""

from .anec import *  # noqa: F403
from .anec import __all__  # noqa: F401
