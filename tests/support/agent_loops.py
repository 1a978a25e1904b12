"""Three turns of agents with a real model: it chooses the calls, and each client runs its own loop.

``python agent_loops.py URL MODEL [CLIENT...]`` runs in an environment that has the clients, against any server of
these APIs, and prints a line of JSON per client: its version, the calls, what it said last, and whether that is right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
ASK = "Find the user Ada, then get her email address, and tell me the address."
RIGHT = "ada@example.org"
TASK = "List the files of this folder. Then print the text file among them with cat. Then you are done."
NOTES = "The meeting is on Tuesday.\n"
AGENT = """
agent:
  system_template: |
    You work at a terminal. Call the function bash with one command at a time, and read what it prints.
    When the task is done, call it with the command: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
  instance_template: "{{task}}"
  step_limit: 4
model:
  cost_tracking: ignore_errors
"""
SECONDS, MOST, TURNS = 280, 120, 6  # of a request, its tokens, and of a loop
calls: list[str] = []


def find_user(name: str) -> str:
    """Find the id of a user by name.

    Args:
        name: the user's name
    """
    calls.append(f"find_user {name}")
    return "user id: 42"


def get_email(user_id: str) -> str:
    """Get the email address of a user by id.

    Args:
        user_id: the user's id
    """
    calls.append(f"get_email {user_id}")
    return f"email: {RIGHT}"


TOOLS: dict[str, Callable[..., str]] = {"find_user": find_user, "get_email": get_email}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": (run.__doc__ or "").split("\n")[0],
        "parameters": {
            "type": "object",
            "properties": {argument: {"type": "string", "description": f"the user's {what}"}},
            "required": [argument],
        },
    }
    for (name, run), argument, what in zip(TOOLS.items(), ("name", "user_id"), ("name", "id"), strict=True)
]
WRAPPED: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]


def run_tool(name: str, arguments: str) -> str:
    try:
        return TOOLS[name](**json.loads(arguments or "{}"))
    except Exception as error:  # the model's own mistakes go back to it
        return repr(error)


def openai_chat(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0, timeout=SECONDS)
    return chat(client.chat.completions.create, lambda message: message, model=model)


def chat(complete: Callable[..., Any], kept: Callable[[Any], Any], **ask: Any) -> str:
    """Run the loop of a client that completes chats -> the last answer.

    Args:
        complete: asks for a completion.
        kept: converts an answer to the message that is sent back.
        ask: its other arguments.
    """
    messages: list[Any] = [{"role": "user", "content": ASK}]
    for _ in range(TURNS):
        answer = complete(messages=messages, tools=WRAPPED, max_tokens=MOST, temperature=0, **ask)
        message = answer.choices[0].message
        messages.append(kept(message))
        for call in message.tool_calls or ():
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return str(message.content)


def openai_responses(url: str, model: str) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0, timeout=SECONDS)
    items: list[Any] = [{"role": "user", "content": ASK}]
    tools: Any = [{"type": "function", **function} for function in FUNCTIONS]
    for _ in range(TURNS):
        ask: Any = {"tools": tools, "max_output_tokens": MOST, "temperature": 0}
        answer = client.responses.create(model=model, input=items, **ask)
        items += answer.output
        asked = [item for item in answer.output if item.type == "function_call"]
        for call in asked:
            result = run_tool(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not asked:
            break
    return answer.output_text


def anthropic_tool_runner(url: str, model: str) -> str:
    import anthropic
    from anthropic import beta_tool

    client = anthropic.Anthropic(base_url=url, max_retries=0, timeout=SECONDS)
    talk: Any = {"tools": [beta_tool(run) for run in TOOLS.values()], "messages": [{"role": "user", "content": ASK}]}
    for message in client.beta.messages.tool_runner(model=model, max_tokens=MOST, max_iterations=TURNS, **talk):
        said = "".join(block.text for block in message.content if block.type == "text")
    return said


def litellm_openai(url: str, model: str) -> str:
    return _litellm(f"openai/{model}", f"{url}/v1")


def litellm_anthropic(url: str, model: str) -> str:
    return _litellm(f"anthropic/{model}", url)


def _litellm(model: str, base: str) -> str:
    import litellm

    where = {"model": model, "api_base": base, "timeout": SECONDS, "num_retries": 0}
    return chat(litellm.completion, lambda message: message.model_dump(), **where)


def langchain(url: str, model: str) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", model=model, temperature=0, max_tokens=MOST, timeout=SECONDS)
    agent = create_agent(chat, list(TOOLS.values()))
    done = agent.invoke({"messages": [{"role": "user", "content": ASK}]}, {"recursion_limit": 2 * TURNS})
    return str(done["messages"][-1].content)


def pydantic_ai(url: str, model: str) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(model, provider=provider), tools=list(TOOLS.values()))
    settings: Any = {"temperature": 0, "max_tokens": MOST, "timeout": SECONDS}
    return str(agent.run_sync(ASK, model_settings=settings).output)


def mini_swe_agent(url: str, model: str) -> str:
    """Run the terminal agent ``mini`` on a folder with a file -> what its commands printed, if it says that it is done.

    Its own instructions are 1,100 tokens, which a model of 1.5B repeats; the ones here say the same in two lines.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "work")
        folder.mkdir()
        (folder / "notes.txt").write_text(NOTES, "utf-8")
        own, record = Path(name, "own.yaml"), Path(name, "record.json")
        own.write_text(AGENT, "utf-8")
        asked = {"api_base": f"{url}/v1", "max_tokens": MOST, "temperature": 0}
        configured = ["mini.yaml", str(own), *(f"model.model_kwargs.{key}={asked[key]}" for key in asked)]
        command: list[str | Path] = [
            Path(sys.executable).parent / "mini",
            "-m",
            f"openai/{model}",
            "-t",
            TASK,
            "-y",
            "--exit-immediately",
        ]
        command += ["-o", record, *(word for one in configured for word in ("-c", one))]
        quiet = os.environ | {"MSWEA_CONFIGURED": "true", "HOME": name, "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
        done = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if not record.exists():
            return done.stdout[-1000:] + done.stderr[-1000:]
        kept = json.loads(record.read_text("utf-8"))
    found = [kept["info"]["exit_status"]]
    for message in kept["messages"]:
        calls.extend(f"bash {action['command']}" for action in message.get("extra", {}).get("actions", ()))
        if message["role"] == "tool":
            found.append(json.loads(message["content"])["output"])
    return "\n".join(found)


CLIENTS: dict[Callable[[str, str], str], str] = {
    openai_chat: "openai", openai_responses: "openai", anthropic_tool_runner: "anthropic", litellm_openai: "litellm",
    litellm_anthropic: "litellm", langchain: "langchain", pydantic_ai: "pydantic-ai-slim",
    mini_swe_agent: "mini-swe-agent",
}  # fmt: skip


def main(url: str, model: str, *names: str) -> None:
    for client, package in CLIENTS.items():
        if names and client.__name__ not in names:
            continue
        calls.clear()
        began = time.monotonic()
        try:
            said = client(url, model)
        except Exception as error:  # one that fails is also a line of the table
            said = f"{type(error).__name__}: {error}"
        line: dict[str, Any] = {"client": client.__name__, "version": version(package), "calls": list(calls)}
        right = NOTES in said and "Submitted" in said if client is mini_swe_agent else RIGHT in said
        line |= {"said": said[:400], "right": right, "seconds": round(time.monotonic() - began)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
