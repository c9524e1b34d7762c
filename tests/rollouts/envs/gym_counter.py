import verifiers as vf


class Counter:
    def reset(self, seed=0):
        self.left = seed % 3 + 1
        return f"{self.left} left"

    def step(self, action):
        self.left -= int(action == "down")
        return f"{self.left} left", float(self.left == 0), self.left == 0, {}


def load_environment():
    return vf.GymEnv(env_cls=Counter, num_train_episodes=4, max_episode_steps=5)
