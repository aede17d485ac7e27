"""The two kinds of failure that a script reports in one or two lines instead of a traceback."""


class UserError(Exception):
    """Wrong input: the message names the flag, file or field and the remedy. Exit code 2, nothing written."""


class WorkError(Exception):
    """A failure while working, for instance a non-finite number. Exit code 1."""
