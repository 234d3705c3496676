"""An agent that is a program: it knows the `openai` client alone, and finds address and key in its environment.

Usage: python openai_program.py PROMPT. It lets the policy answer, asks why, streamed, and prints the second answer.
"""

import json
import sys
from typing import Any

from openai import OpenAI

with OpenAI(max_retries=0, timeout=600) as client:
    completions: Any = client.chat.completions
    messages = [{"role": "user", "content": sys.argv[1]}]
    first = completions.create(model="policy", messages=messages, max_tokens=16).choices[0].message.content
    messages += [{"role": "assistant", "content": first or ""}, {"role": "user", "content": "why"}]
    stream = completions.create(model="policy", messages=messages, max_tokens=16, stream=True)
    print(json.dumps("".join([chunk.choices[0].delta.content or "" for chunk in stream])))
