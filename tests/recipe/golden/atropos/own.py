"""A module of a user, with an environment."""


class Environment:
    def reset(self, seed): ...

    def step(self, action): ...
