"""The model of all tests of serving, with chat templates that have tools, or thinking: nothing is compiled again for them."""

import openai
import pytest

from jaxserve.text.tokenizer import Tokenizer
from tests import alphabet_model
from tests.serving.http_server import serving


class OtherTokenizer:
    """The shared LLM as a server takes it, with the tokenizer of another folder of the same vocabulary."""

    def __init__(self, llm, folder):
        self.tokenizer = Tokenizer.from_id(str(folder))
        self.engine, self.grammars = llm.engine, llm.grammars
        self.get_default_sampling_params = llm.get_default_sampling_params


@pytest.fixture(scope="session")
def tools_llm(shared_llm, tmp_path_factory):
    template = "{% if tools %}<tool_call>{% endif %}" + alphabet_model.CHAT_TEMPLATE
    return OtherTokenizer(shared_llm, alphabet_model.save(tmp_path_factory.mktemp("tools"), chat_template=template))


@pytest.fixture
def thinking(shared_llm, tmp_path_factory):
    """A server whose chat template knows <think>, which `opening` may be; </think> is a token, <think> is not."""
    template = alphabet_model.CHAT_TEMPLATE + "{# </think> #}"
    folder = alphabet_model.save(tmp_path_factory.mktemp("thinking"), chat_template=template, added_tokens=["</think>"])
    with serving(OtherTokenizer(shared_llm, folder)) as server:
        yield server
        server.wait_idle()


@pytest.fixture
def client(server):
    """The openai package's, of a test's server."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
