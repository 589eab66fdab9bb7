"""The official clients of a replica, without retries; nor do they load certificates, which takes 50 ms, for plain HTTP."""

import anthropic
import openai


def openais(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=url + "/v1", api_key="none", max_retries=0, http_client=openai.DefaultAsyncHttpxClient(verify=False)
    )


def anthropics(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0, http_client=anthropic.DefaultAsyncHttpxClient(verify=False)
    )


def url_of(client: openai.AsyncOpenAI) -> str:
    """The address of the replica behind a client."""
    return str(client.base_url).removesuffix("/v1/")
