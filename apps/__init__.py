"""Programs around decoder and training: a conversation, files of prompts, a trace, patches."""
