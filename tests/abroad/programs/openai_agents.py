"""Agent of the OpenAI Agents SDK."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


async def run(task, client):
    return await answered(task, OpenAIChatCompletionsModel(model="policy", openai_client=client))


async def answered(task, model):
    agent = Agent(name="Guide", instructions="Help.", tools=[weather], model=model)
    result = await Runner.run(agent, task["prompt"][-1]["content"])
    return {"score": 1.0, "items": len(result.new_items)}
