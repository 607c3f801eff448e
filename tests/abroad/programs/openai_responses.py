"""Agent of the OpenAI Agents SDK, by the Responses API: its default."""

from agents import OpenAIResponsesModel
from openai_agents import answered


async def run(task, client):
    return await answered(task, OpenAIResponsesModel(model="policy", openai_client=client))
