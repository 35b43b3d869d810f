"""Failures of a run that are the user's to see in one line, not as a stack of calls."""


class RunError(RuntimeError):
    """The run cannot go on; the text is one line that says why and what to do."""


class CheckpointError(RunError):
    """A checkpoint cannot be read."""
