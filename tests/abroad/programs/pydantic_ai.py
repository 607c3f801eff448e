"""Agent of Pydantic AI."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def run(task, client):
    model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, instructions="Help.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """Return the weather in a city."""
        return f"21 degrees in {city}"

    result = await agent.run(task["prompt"][-1]["content"])
    return {"score": 1.0, "items": len(result.all_messages())}
