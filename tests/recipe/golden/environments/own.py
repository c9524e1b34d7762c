"""A module of a user, with an environment."""


class Sums:
    """Ask no question."""

    def __init__(self, most: int = 3): ...

    def reset(self, seed: int) -> str:
        return ""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, str]]:
        return "", 0.0, True, {}


def price(item: str) -> int:
    """Look up a price."""
    return len(item)


def vague(item, place: str):
    return item
