"""Programs around the decoder: a conversation, a file of prompts, a trace, patches."""
