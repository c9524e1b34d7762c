"""Serve an OpenEnv environment: say the seed's number as often as it says."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Seen(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.number, self.left = seed or 0, 2
        return Seen(text=f"say {self.number}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.left -= 1
        return Seen(text=f"{self.left} left", reward=float(action.message == str(self.number)), done=self.left == 0)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Numbers, Say, Seen, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
