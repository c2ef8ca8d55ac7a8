"""A model's output to what it means: reasoning, content and tool calls."""
