"""8-bit AdamW in one pass over memory, in place."""
