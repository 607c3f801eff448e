"""Agent of LangGraph, with LangChain's client for OpenAI."""

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


async def run(task, client):
    model = ChatOpenAI(model="policy", base_url=str(client.base_url), api_key=client.api_key)
    agent = create_react_agent(model, [weather])
    result = await agent.ainvoke({"messages": task["prompt"]})
    return {"score": 1.0, "items": len(result["messages"])}
