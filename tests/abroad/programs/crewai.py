"""Crew of one agent of CrewAI."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("weather")
def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"21 degrees in {city}"


def run(task, client):
    model = LLM(model="openai/policy", base_url=str(client.base_url), api_key=client.api_key)
    agent = Agent(
        role="guide", goal="Help.", backstory="Helpful.", tools=[weather], llm=model, max_iter=3
    )
    work = Task(description=task["prompt"][-1]["content"], expected_output="Text.", agent=agent)
    result = Crew(agents=[agent], tasks=[work]).kickoff()
    return {"score": 1.0, "length": len(str(result))}
