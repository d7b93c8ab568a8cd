"""The one exception that a user can cause and mend; the command line turns it into one line and exit code 2."""


class UserError(Exception):
    """What was expected, what was found and what to type next, in words for the person at the keyboard.

    ``told`` is set where another process of the same run says it.
    """

    told = False
