"""An environment: two sums, one after the other."""

import random


class TwoSums:
    def reset(self, seed):
        self.numbers = random.Random(seed).choices(range(10), k=4)
        return self.ask()

    def ask(self):
        return f"{self.numbers[0]}+{self.numbers[1]}="

    def step(self, action):
        right = action == f"<answer>{self.numbers.pop(0) + self.numbers.pop(0)}</answer>"
        return self.ask() if self.numbers else "", right / 2, not self.numbers, {"right": right}
