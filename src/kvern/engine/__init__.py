"""The runner, the sampler, the step loop and the public LLM class."""
