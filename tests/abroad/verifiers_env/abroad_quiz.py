"""One environment of each kind that verifiers has, chosen by `kind`."""

import verifiers as vf
from datasets import Dataset

FACTS = {"Ulm": "21", "Bonn": "18"}


def length(completion, **kwargs) -> float:
    return float(len(completion))


def is_known(completion, answer, **kwargs) -> float:
    return float(answer in str(completion))


def weather(city: str) -> str:
    """Return the weather.

    Args:
        city: Name of a city.
    """
    return f"{FACTS[city]} degrees in {city}"


class Chat(vf.MultiTurnEnv):
    """Two turns; the user of the second is the environment."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Are you sure?"}]


def load_environment(kind: str = "single", size: int = 4):
    rows = [
        {"question": f"What is the weather in {city}?", "answer": FACTS[city], "info": {"n": n}}
        for n, city in enumerate(["Ulm", "Bonn"] * (size // 2))
    ]
    common = {
        "dataset": Dataset.from_list(rows),
        "eval_dataset": Dataset.from_list(rows[:2]),
        "rubric": vf.Rubric(funcs=[is_known, length], weights=[1.0, 0.125]),
    }
    if kind == "tool":
        return vf.ToolEnv(tools=[weather], max_turns=3, **common)
    if kind == "chat":
        return Chat(max_turns=2, **common)
    if kind == "group":
        single = vf.SingleTurnEnv(**common)
        return vf.EnvGroup(envs=[single, Chat(max_turns=2, **common)], env_names=["one", "two"])
    if kind == "gym":
        from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv

        return ReasoningGymEnv("leg_counting", num_train_examples=size, num_eval_examples=2)
    return vf.SingleTurnEnv(**common)
