"""Between text and token ids: tokenizers, chat templates, and text out of tokens as they come. No torch in here."""
