"""Programs around the decoder: a conversation, and a file of prompts."""
