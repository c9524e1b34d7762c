"""A module of a user, with an environment."""


class Environment: ...
