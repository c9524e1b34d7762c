"""Environments as users write them."""

import random
from typing import Any


class Guess:
    def __init__(self, most: int = 9):
        self.most = most

    def reset(self, seed: int) -> str:
        self.number = random.randint(0, self.most)
        return f"Guess a number from 0 to {self.most}, not [{random.randint(0, self.most)}] again."

    def step(self, action: str) -> tuple[str, float, bool]:
        right = action.strip() == str(self.number)
        return ("higher" if action < str(self.number) else "lower"), float(right), right


DECK = random.sample(range(1000), 1000)


class Dealt(Guess):
    """Draw also when the file is read and when the game is created."""

    def __init__(self, most: int = 9):
        super().__init__(most)
        self.cards = random.sample(DECK, 3)

    def reset(self, seed: int) -> str:
        return f"{self.cards} {super().reset(seed)}"


class Answers:
    """Give what it was told to."""

    def __init__(self, step: Any = None, reset: Any = "start"):
        self.answers = step, reset

    def reset(self, seed: int) -> Any:
        return self.answers[1]

    def step(self, action: str) -> Any:
        answer = self.answers[0]
        return tuple(answer) if isinstance(answer, list) else answer


class NoStep:
    def reset(self, seed: int) -> str:
        return ""
