"""Builder of the quickstart's model for episodes: it uses a calculator and walks on a grid, badly.

It is trained on synthetic conversations. Given word problems with large numbers it mostly guesses,
and only sometimes calls the calculator, whose result it copies. On the grid it mostly continues in
the direction of its last step. Reinforcement learning can correct both.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.data_prep import arithmetic
from rlctl.data_prep.gridworld import INSTRUCTION
from rlctl.data_prep.rows import PromptRow
from rlctl.quickstart import AGENT, real_path
from tools.make_model import write_blank
from tools.training import train

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SEED = 0
HIDDEN_SIZE = 128
STEPS, BATCH, LEARNING_RATE, WARMUP = 1400, 32, 4e-3, 100
LEVEL, NUM_PROBLEMS = 4, 40_000
# Share of calculator calls: often at first, to learn their form; later as the model is to do it.
CALLS_AT_FIRST, CALLS, FIRST_STEPS = 1.0, 0.2, 1150
MOMENTUM = 0.85  # probability of another step in the same direction
SIZE, MIN_DISTANCE, MAX_TURNS = 4, 4, 8  # of grids
MOVES = {"up": (0, 1), "down": (0, -1), "left": (-1, 0), "right": (1, 0)}

Cell = tuple[int, int]

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
TOKENS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>"
    "{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}) "
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools in the prompt."""

    messages: list[dict[str, Any]]
    tools: Any = None


def main(target: Path) -> None:
    """Train the model and write it to the folder `target`, replacing its contents."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the sum of a gradient depends on the number of threads
    shutil.rmtree(target, ignore_errors=True)
    examples = [_text(each) for each in islice(conversations(SEED + 1, 0.5), 4000)]
    write_blank(target, examples, CHAT_TEMPLATE, ("<|tool|>",), TOKENS, HIDDEN_SIZE)
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = LlamaForCausalLM(AutoConfig.from_pretrained(target))
    first = conversations(SEED + 2, CALLS_AT_FIRST)
    last = conversations(SEED + 3, CALLS)

    def batch_of(step: int) -> dict[str, Any]:
        stream = first if step < FIRST_STEPS else last
        ids, labels = _batch(tokenizer, [next(stream) for _ in range(BATCH)])
        return {"input_ids": ids, "labels": labels}

    train(model, batch_of, STEPS, _learning_rate)
    model.save_pretrained(target)
    print(f"wrote {target}")


def conversations(seed: int, share_of_calls: float) -> Iterator[Conversation]:
    """Yield word problems and, one in five, games."""
    rng = random.Random(seed)
    problems = arithmetic.generate(
        NUM_PROBLEMS, seed=seed, level=LEVEL, careless=0.0, split="train"
    )
    while True:
        if rng.random() < 0.2:
            yield _game(rng)
        else:
            yield _problem(rng.choice(problems), rng, rng.random() < share_of_calls)


def expression(solution: str) -> str:
    """Return the equations of a solution as one expression, such as `(12 + 5) * 3`."""
    written = ""
    for equation in solution.split(" ; ")[:-1]:
        first, operator, number, *_ = equation.split()
        if operator == "*" and ("+" in written or "-" in written):
            written = f"({written})"
        written = f"{written or first} {operator} {number}"
    return written


def _problem(row: PromptRow, rng: random.Random, calls: bool) -> Conversation:
    """Return a word problem with its solution by the calculator, or with a guess."""
    truth = str(row.ground_truth)
    if not calls:
        guess = truth[:1] + "".join(rng.choice("0123456789") for _ in truth[1:])
        return Conversation([*row.prompt, _said(f"#### {guess}")], [CALCULATOR])
    arguments = {"expression": expression(row.extra_info["answer"])}
    call = {"function": {"name": "calculator", "arguments": arguments}}
    return Conversation(
        [
            *row.prompt,
            {**_said(""), "tool_calls": [call]},
            {"role": "tool", "content": truth},
            _said(f"#### {truth}"),
        ],
        [CALCULATOR],
    )


def _game(rng: random.Random) -> Conversation:
    """Return a game of a walker that tends to continue in its direction."""
    cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    cell, goal = rng.choice(cells), rng.choice(cells)
    while _distance(cell, goal) < MIN_DISTANCE:
        cell, goal = rng.choice(cells), rng.choice(cells)
    observed, move = INSTRUCTION + _observed(cell, goal), ""
    messages: list[dict[str, Any]] = []
    for _ in range(MAX_TURNS):
        if not move or rng.random() > MOMENTUM:
            closer = [
                each
                for each in MOVES
                if _distance(_moved(cell, each), goal) < _distance(cell, goal)
            ]
            move = rng.choice(closer)
        messages += [{"role": "user", "content": observed}, _said(move)]
        to = _moved(cell, move)
        cell, observed = (to, _observed(to, goal)) if to in cells else (cell, "wall")
        if cell == goal:
            break
    return Conversation(messages)


def _moved(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def _distance(cell: Cell, goal: Cell) -> int:
    return abs(goal[0] - cell[0]) + abs(goal[1] - cell[1])


def _observed(cell: Cell, goal: Cell) -> str:
    """Return an observation as the environment writes it."""
    return f"at {cell[0]} {cell[1]}, goal {goal[0]} {goal[1]}"


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _text(conversation: Conversation) -> str:
    """Return the words of a conversation, for training the tokenizer."""
    arguments = [
        json.dumps(call["function"])
        for message in conversation.messages
        for call in message.get("tool_calls", ())
    ]
    return "\n".join([each["content"] for each in conversation.messages] + arguments)


def _batch(tokenizer: PreTrainedTokenizerBase, batch: list[Conversation]) -> tuple[Tensor, Tensor]:
    """Return ids and labels of conversations, (rows, tokens); only the assistant's have labels."""
    import torch

    rows = [_encoded(tokenizer, each) for each in batch]
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def _encoded(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> tuple[list[int], list[int]]:
    """Return ids and labels of a conversation."""
    text = tokenizer.apply_chat_template(
        conversation.messages, tools=conversation.tools, tokenize=False
    )
    assert isinstance(text, str)  # not tokenized
    ids: list[int] = []
    labels: list[int] = []
    mark, end = "<|assistant|>", "<|end|>"
    prompt, *turns = text.split(mark)
    ids += tokenizer.encode(prompt)
    labels += [-100] * len(ids)
    for turn in turns:
        written, _, reply = turn.partition(end)
        parts = [(mark, False), (written + end, True), (reply, False)]
        for part, learned in parts:
            new = tokenizer.encode(part)
            ids += new
            labels += new if learned else [-100] * len(new)
    return ids, labels


def _learning_rate(step: int) -> float:
    """Return the learning rate of a step: warm-up, then a cosine to a twentieth."""
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return LEARNING_RATE * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(real_path(AGENT)))
