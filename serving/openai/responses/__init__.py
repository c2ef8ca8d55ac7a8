"""The Responses API: answers made of items, kept for later turns, that may run in the background."""
