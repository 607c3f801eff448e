"""Agent of smolagents, which calls the tool `final_answer` at its end."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: Name of the city.
    """
    return f"21 degrees in {city}"


def run(task, client):
    model = OpenAIServerModel("policy", api_base=str(client.base_url), api_key=client.api_key)
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3, verbosity_level=0)
    return float("21" in str(agent.run(task["prompt"][-1]["content"])))
