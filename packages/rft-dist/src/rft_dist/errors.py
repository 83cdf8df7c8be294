"""The errors of rft-dist: one family, each also the standard-library error that it refines."""


class DistError(Exception):
    """Base of every error that rft-dist raises on purpose."""


class ConfigurationError(DistError, ValueError):
    """A field of a configuration or of a layout has a value that cannot work."""


class EnvironmentVariableError(DistError, ValueError):
    """A launcher's variable is missing, not a number or out of range."""


class DeviceError(DistError, RuntimeError):
    """This process cannot have the device that it was told to use."""


class RendezvousError(DistError, ConnectionError):
    """The ranks could not meet: a taken port, or a host that does not answer."""


class GroupError(DistError, RuntimeError):
    """A process group is missing, of the wrong kind, or failed its self-test."""


class GatherError(DistError, ValueError):
    """Outputs or tensors do not fit the plan or the other ranks' tensors."""


class MetricError(DistError, ValueError):
    """The same metric was given with different kinds or bins, or a value is no metric."""


class RemoteError(DistError, RuntimeError):
    """Stands for another rank's exception that could not be pickled; the text is the original's."""


class CollectiveMismatchError(DistError, RuntimeError):
    """Ranks called different collectives, or one left while others still called."""


class RankUnresponsiveError(DistError, TimeoutError):
    """A rank died or did not come to a collective within the guard's time-out."""


class RankFailedError(DistError, RuntimeError):
    """A spawned rank ended without a result.

    Attributes:
        results: what the ranks that finished returned, by rank.
    """

    def __init__(self, message: str, results: dict[int, object] | None = None) -> None:
        super().__init__(message)
        self.results = results or {}


class RankTimeoutError(DistError, TimeoutError):
    """A spawned rank did not finish within its time-out and was killed.

    Attributes:
        results: what the ranks that finished returned, by rank.
    """

    def __init__(self, message: str, results: dict[int, object] | None = None) -> None:
        super().__init__(message)
        self.results = results or {}
