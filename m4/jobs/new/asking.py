"""Questions on the terminal, with their defaults."""

from __future__ import annotations

from m4.settings import InputError


class Asking:
    """Asks what is ambiguous; with `yes` it takes the defaults and remembers them.

    Attributes:
        taken: a line for each default that was taken without a question.
    """

    def __init__(self, yes: bool) -> None:
        self._yes = yes
        self.taken: list[str] = []

    def number(self, question: str, default: int, most: int = 10**9) -> int:
        """A whole number from 1 to `most`."""
        answer = self._ask(question, str(default))
        if not (answer.isdecimal() and 1 <= int(answer) <= most):
            raise InputError(f"{question}: {answer!r}: must be a whole number from 1 to {most:,}")
        return int(answer)

    def whether(self, question: str) -> bool:
        """Yes, the default, or no."""
        answer = self._ask(question, "yes").casefold()
        if answer not in ("y", "yes", "n", "no"):
            raise InputError(f"{question}: {answer!r}: must be yes or no")
        return answer.startswith("y")

    def _ask(self, question: str, default: str) -> str:
        if self._yes:
            self.taken.append(f"{question}: {default}")
            return default
        try:
            return input(f"{question} [{default}]? ").strip() or default
        except EOFError as error:
            raise InputError(
                f"{question}? no answer on standard input; --yes takes the defaults"
            ) from error
