"""What the virtual GPU raises."""


class SimError(RuntimeError):
    """Base class of what a kernel can do wrong."""


class MemoryFault(SimError):  # noqa: N818 (as the hardware calls it)
    """A kernel accessed memory out of bounds, or misaligned for the width of the access."""


class DeadlockError(SimError):
    """No resident block can make progress."""


class DivergenceError(SimError):
    """An instruction for whole warps was executed by part of one."""


class RaceError(SimError):
    """Two accesses conflict, and nothing orders them."""


class DeviceTrap(SimError):  # noqa: N818 (as the hardware calls it)
    """The kernel executed ``trap``, or an assertion of its failed."""


class LaunchError(SimError):
    """The launch is refused: too many threads, too large a cooperative grid."""
