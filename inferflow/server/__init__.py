"""The HTTP surface: OpenAI's routes over one model (the extra ``serve``).

`app` puts the routes together, `run` serves them, `guard` stands before all of them. A request's way: `body` (JSON, and its
fields one by one), `completions` or `chat` (with `sampling`, to token ids), `answer` (admits, sends in one of the `shapes`).
"""
