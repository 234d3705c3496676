"""An agent that is a program of its own: it knows the `openai` client, and nothing of what trains the policy.

    {"prompt": "Which primes lie between 20 and 30?", "answer": "23 29", "verifier": "examples.agent:Critical"}

It lets the policy answer, lets it check itself, and asks for the result. Each session has a key of its own; what the
policy says in it is learned from, with the reward that `run` returns. To run a program, start it here with
`OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment.
"""

from openai import AsyncOpenAI

from specactor.data.verifiers import get_verifier
from specactor.types import Problem

CHECK = "Check every step of that. What is wrong with it?"
RESULT = "Give the result alone, after a #."


class Critical:
    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": problem.prompt}]
            for follow_up in (CHECK, RESULT, ""):
                answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": follow_up}]
        return get_verifier("exact")(text, problem)
