"""Agent of AutoGen."""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


async def run(task, client):
    model = OpenAIChatCompletionClient(
        model="policy", base_url=str(client.base_url), api_key=client.api_key, model_info=INFO
    )
    agent = AssistantAgent("guide", model, tools=[weather], reflect_on_tool_use=True)
    result = await agent.run(task=task["prompt"][-1]["content"])
    await model.close()
    return {"score": 1.0, "items": len(result.messages)}
