"""Errors that a person caused and can mend: the command line prints an `error:` and a `hint:` line."""


class UserError(Exception):
    """Something the user asked for cannot be done; `hint` says what to do instead.

    `exit_code` is 1 for a thing that does not hold and 2 for a wrong request.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.exit_code = exit_code
