"""Imported once, before programs are forked: the client's own imports, and the certificates that
the first client reads.
"""

import openai

openai.OpenAI(api_key="-", base_url="http://127.0.0.1").chat.completions  # noqa: B018
