"""Other APIs than OpenAI's completions and chat completions: each translates its requests to a chat, and the chat's answer back."""
