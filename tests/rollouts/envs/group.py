import verifiers as vf


def load_environment():
    names = ["sums_single", "guess_multi"]
    return vf.EnvGroup(envs=[vf.load_environment(name) for name in names], env_names=names)
