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


class Shop:
    """A class for TRL's environment_factory."""

    def reset(self, **columns): ...

    def price(self, item: str) -> int:
        """Look up a price."""
        return len(item)


class Vague:
    """Methods that a model can't read about, and a reward."""

    def reset(self, **columns): ...

    def get_reward(self) -> float:
        return 1.0

    def buy(self, item, count: int): ...


class Silent:
    """Nothing to call."""

    def reset(self, **columns): ...


class Stuck:
    """Nothing to start with."""

    def price(self, item: str) -> int:
        """Look up a price."""
        return len(item)


def reads(completions, environments):
    return [0.0 for _ in environments]
