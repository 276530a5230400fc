"""Errors that users meet. Each message names the parameter or flag, its value, the reason and a way out."""


class DobbError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(DobbError, ValueError):
    """A setting is invalid or two settings contradict each other."""


class BlockError(ConfigError):
    """A weight cannot be cut into the blocks that were asked for."""


class LayoutError(ConfigError):
    """Blocks cannot be aligned to the shards of a param/grad buffer."""


class CaptureError(DobbError, RuntimeError):
    """A refresh step saw no activations for a managed weight."""


class NonFiniteError(DobbError, ArithmeticError):
    """A gradient or momentum entry is NaN or infinite; nothing was updated."""


class UnsupportedError(DobbError, RuntimeError):
    """An option, version or environment that Dobb does not work with."""


class CheckpointError(DobbError, RuntimeError):
    """A checkpoint cannot be written, or not continued by this run; nothing was loaded into it."""
