"""joulelab: train, distil and profile models, and know what every stage cost in joules.

Importing this package is cheap on purpose: no numpy, no torch, no sensor is touched until something asks for it.
"""

__version__ = "0.1.0"
