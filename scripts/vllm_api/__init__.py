"""What vllm_api_tests runs vLLM's tests with: a pytest plugin, and the models that answer."""
