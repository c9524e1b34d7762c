"""An environment class in TRL's interface: tools for prices, and a reward that counts calls. Tests add ``reset``."""

SHOP = """
import json

class Shop:
    def __init__(self, file):
        self.prices, self.calls = json.load(open(file)), 0

    def price(self, item: str) -> int:
        '''Look up a price.

        Args:
            item: Name of the item.
        '''
        self.calls += 1
        return self.prices[item]

    def multiply(self, a: int, b: int) -> int:
        '''Multiply two numbers.

        Args:
            a: First number.
            b: Second number.
        '''
        self.calls += 1
        return a * b

    def get_reward(self):
        return self.calls / 10
"""
