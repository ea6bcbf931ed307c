from tests.rpc.fixtures import client, llm, running, tiny_model

__all__ = ["client", "llm", "running", "tiny_model"]
