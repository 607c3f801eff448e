"""Agent in the style of smolagents or LangGraph: a loop of model and tools, in plain Python.

It knows nothing of rlctl. Given another client, it runs with any model:

    rlctl train grpo ... actor_rollout_ref.rollout.multi_turn.enable=true \
        actor_rollout_ref.rollout.agent.program=docs/examples/agents/tool_loop.py:run
"""

from __future__ import annotations

import ast
import json
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_STEPS = 6
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers and + - * /."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        raise ValueError("only numbers and + - * / are allowed")

    return str(value(ast.parse(expression, mode="eval").body))


async def run(task: dict[str, Any], client: AsyncOpenAI) -> float:
    """Solve the task; return 1 for the right answer after `####`, else 0."""
    messages: list[Any] = list(task["prompt"])
    for _ in range(MAX_STEPS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATE]
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            answer = (message.content or "").rpartition("####")[2].strip()
            return float(answer == str(task["ground_truth"]))
        for call in message.tool_calls:
            try:
                result = calculate(json.loads(call.function.arguments)["expression"])
            except Exception as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
