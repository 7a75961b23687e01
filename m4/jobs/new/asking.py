"""Questions on the terminal, with their defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
        answer = self._ask(
            question,
            str(default),
            f"a whole number from 1 to {most:,}",
            lambda answer: answer.isdecimal() and 1 <= int(answer) <= most,
        )
        return int(answer)

    def whether(self, question: str) -> bool:
        """Yes, the default, or no."""
        answers = ("y", "yes", "n", "no")
        answer = self._ask(question, "yes", "yes or no", lambda one: one.casefold() in answers)
        return answer.casefold().startswith("y")

    def _ask(
        self, question: str, default: str, allowed: str, is_allowed: Callable[[str], bool]
    ) -> str:
        """Asks until the answer is allowed."""
        if self._yes:
            self.taken.append(f"{question}: {default}")
            return default
        while True:
            try:
                answer = input(f"{question} [{default}]? ").strip() or default
            except EOFError as error:
                raise InputError(
                    f"{question}? no answer on standard input; --yes takes the defaults"
                ) from error
            if is_allowed(answer):
                return answer
            print(f"{answer!r}: must be {allowed}", file=sys.stderr)
