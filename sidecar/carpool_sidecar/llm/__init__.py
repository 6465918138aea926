"""A language model served here: OpenVINO GenAI computes in its own process, behind OpenAI's API."""
