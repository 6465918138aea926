"""A language model served here: OpenVINO GenAI computes in a process of its own, behind OpenAI's API."""
